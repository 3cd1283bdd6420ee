"""Scripts that draw at random: dropout, augmentation, noise, mixtures, and where they seed.

By itself such a script is plain PyTorch, draw for draw. Several workers seed each mini-batch from
the run's seed, so they are compared with the inline engine.
"""

import random
from typing import Any

import numpy
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader

import paceline

from .base import Record, Script
from .usual import CLASSES, WIDTH, Numbered, loss_of, network, one_epoch, points


def dropout(record: Record) -> None:
    """Dropout."""
    pace = paceline.connect()
    model = network(nn.Dropout(0.3))
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def dropout_and_shuffling(record: Record) -> None:
    """Dropout with shuffle=True: the order and the masks come from one generator."""
    pace = paceline.connect()
    model = network(nn.Dropout(0.3))
    optimizer = SGD(model.parameters(), lr=0.3)
    loader = DataLoader(points(), batch_size=8, shuffle=True)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


class Augmented(Numbered):
    """Adds noise by torch, numpy and Python to what it gives."""

    def __getitem__(self, index: int) -> Any:
        noise = 0.1 * torch.randn(WIDTH, dtype=torch.float64)
        shift = 0.1 * numpy.random.rand() + 0.1 * random.random()
        return self.inputs[index] + noise + shift, self.targets[index], index


def augmenting(record: Record, **options: Any) -> None:
    """The loop of the README over augmented samples."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    loader: Any = DataLoader(Augmented(), batch_size=8, **options)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for _ in pace.epochs(3):
        for inputs, targets, numbers in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
                record.used(numbers)
    record.state(model, optimizer)


def augmentation(record: Record) -> None:
    """Random augmentation in the data set: torch, numpy and random."""
    augmenting(record)


def augmentation_by_a_loader_worker(record: Record) -> None:
    """The same in a loader worker."""
    augmenting(record, num_workers=1)


def noise_in_the_step(record: Record) -> None:
    """Noise is drawn in the step and added to the inputs."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs + 0.1 * torch.randn_like(inputs)), targets).backward()
                optimizer.step()
    record.state(model, optimizer)


def mixup(record: Record) -> None:
    """Mixup: samples of a batch are mixed by a random permutation."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                share = numpy.random.beta(0.5, 0.5)
                other = torch.randperm(len(inputs))
                wanted = nn.functional.one_hot(targets, CLASSES).to(inputs)
                mixed = share * inputs + (1 - share) * inputs[other]
                optimizer.zero_grad()
                loss_of(model(mixed), share * wanted + (1 - share) * wanted[other]).backward()
                optimizer.step()
    record.state(model, optimizer)


def seeded_before_connect(record: Record) -> None:
    """torch.manual_seed before connect, the network after it (the README's own order)."""
    torch.manual_seed(123)
    pace = paceline.connect()
    model = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, CLASSES)).double()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    record.fact(first=model[0].weight)
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def seeded_after_connect(record: Record) -> None:
    """torch.manual_seed after connect."""
    pace = paceline.connect()
    torch.manual_seed(123)
    model = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, CLASSES)).double()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    record.fact(first=model[0].weight)
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def unseeded(record: Record) -> None:
    """Nothing is seeded: all workers begin with the same network all the same."""
    pace = paceline.connect()
    model = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, CLASSES)).double()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    record.state(model)
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def shuffled_after_seeding(record: Record) -> None:
    """manual_seed before connect and shuffle=True: by itself the order is plain PyTorch's."""
    torch.manual_seed(5)
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    loader: Any = DataLoader(Numbered(), batch_size=8, shuffle=True)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for _ in pace.epochs(3):
        for inputs, targets, numbers in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
                record.used(numbers)
    record.state(model, optimizer)


def seeded_each_epoch(record: Record) -> None:
    """manual_seed at the beginning of every epoch, with shuffle=True."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    loader: Any = DataLoader(Numbered(), batch_size=8, shuffle=True)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for epoch in pace.epochs(3):
        torch.manual_seed(epoch)
        for inputs, targets, numbers in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
                record.used(numbers)
    record.state(model, optimizer)


SCRIPTS = (
    Script(dropout, is_exact=False),
    Script(dropout_and_shuffling, is_exact=False),
    Script(augmentation, is_exact=False),
    Script(augmentation_by_a_loader_worker, is_exact=False),
    Script(noise_in_the_step, is_exact=False),
    Script(mixup, is_exact=False),
    Script(seeded_before_connect),
    Script(seeded_after_connect),
    Script(unseeded, is_exact=False),
    Script(shuffled_after_seeding, shuffles=True),
    Script(seeded_each_epoch, shuffles=True),
)
