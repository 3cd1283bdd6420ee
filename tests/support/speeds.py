"""Loops on a small convolutional network, computed in several ways: CASE FOLDER.

Results go to FOLDER/CASE-N.pt, with the strides that the parameters have at the end. It must not
know how anything is run.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from loops import Results, gather, loss_of
from tiny import EPOCHS

NUM_SAMPLES, BATCH_SIZE = 40, 12


def network() -> nn.Module:
    """(B, 2, 6, 6) -> logits (B, 3), in double precision so that ways can be told apart."""
    torch.manual_seed(11)
    layers = [nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(12, 3)]
    return nn.Sequential(*layers).double()


def loader(**options: Any) -> "DataLoader[Any]":
    """40 samples in batches of 12: the last one of an epoch has 4."""
    generator = torch.Generator().manual_seed(12)
    images = torch.randn(NUM_SAMPLES, 2, 6, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (NUM_SAMPLES,), generator=generator)
    return DataLoader(TensorDataset(images, labels), batch_size=BATCH_SIZE, **options)


def load(optimizer: torch.optim.Optimizer) -> None:
    """Momentum as from a checkpoint of another memory order: its last axis is the densest."""
    generator = torch.Generator().manual_seed(13)
    for group in optimizer.param_groups:
        for one in group["params"]:
            momentum = torch.randn(one.shape, generator=generator, dtype=one.dtype)
            optimizer.state[one]["momentum_buffer"] = momentum


def train(pace: Any, *, is_loaded: bool = False, thaws: bool = False, **options: Any) -> Results:
    """The loop, with loaded momentum or a first layer that joins in the second epoch."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if is_loaded:
        load(optimizer)
    first: Any = model.get_submodule("0")
    first.requires_grad_(not thaws)
    model, optimizer, batches = pace.prepare(model, optimizer, loader(), **options)
    for epoch in pace.epochs(EPOCHS):
        if epoch == 1:
            first.requires_grad_(True)
        for inputs, targets in batches:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
    weight = next(model.parameters())
    is_last = weight.is_contiguous(memory_format=torch.channels_last)
    return {**gather(model, optimizer), "channels last": torch.tensor(float(is_last))}


CASES: dict[str, Callable[[Any], Results]] = {
    "train": train,
    "loaded": functools.partial(train, is_loaded=True),
    "thawing": functools.partial(train, thaws=True),
}


def main() -> None:
    import paceline

    case, folder = sys.argv[1:]
    pace = paceline.connect()
    torch.save(CASES[case](pace), Path(folder) / f"{case}-{pace.worker}.pt")


if __name__ == "__main__":
    main()
