"""Scripts whose loops are not the README's: enumerate, while, break, continue, filters, functions,
stopping, epochs of their own.

Longer than a file should be: one script after the other, each to be read by itself.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, TensorDataset

import paceline

from .base import Record, Script, loose, several
from .usual import Numbered, count_right, held_out, loss_of, network, one_epoch, points, tensors


def started(*, shuffle: bool = False) -> Any:
    """What all of these begin with."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.5)
    loader = DataLoader(points(), batch_size=8, shuffle=shuffle)
    return pace, *pace.prepare(model, optimizer, loader)


def enumerated(record: Record) -> None:
    """for step, batch in enumerate(loader), and a count of steps."""
    pace, model, optimizer, loader = started()
    for epoch in pace.epochs(3):
        for number, (inputs, targets) in enumerate(loader):
            with pace.step():
                optimizer.zero_grad()
                loss = loss_of(model(inputs), targets)
                loss.backward()
                optimizer.step()
                record.step(number=number + len(loader) * epoch)
                record.part(loss=loss)
    record.state(model, optimizer)


def while_next(record: Record) -> None:
    """A while loop with next() and StopIteration."""
    pace, model, optimizer, loader = started()
    for _ in pace.epochs(3):
        batches = iter(loader)
        while True:
            try:
                inputs, targets = next(batches)
            except StopIteration:
                break
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
    record.state(model, optimizer)


def while_epochs(record: Record) -> None:
    """A while loop counts epochs; pace.epochs is not used."""
    pace, model, optimizer, loader = started()
    epoch = 0
    while epoch < 3:
        one_epoch(pace, model, optimizer, loader)
        epoch += 1
    record.fact(epochs=epoch)
    record.state(model, optimizer)


def range_of_epochs(record: Record) -> None:
    """for epoch in range(3), without pace.epochs."""
    pace, model, optimizer, loader = started()
    for _ in range(3):
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def epochs_from_one(record: Record) -> None:
    """pace.epochs(range(1, n + 1))."""
    pace, model, optimizer, loader = started()
    for epoch in pace.epochs(range(1, 4)):
        one_epoch(pace, model, optimizer, loader)
        record.fact(epoch=epoch)
    record.state(model, optimizer)


def cycled_to_a_number(record: Record) -> None:
    """The loader is cycled by a generator until so many steps are done."""
    pace, model, optimizer, loader = started()

    def cycle() -> Iterator[Any]:
        while True:
            yield from loader

    for number, (inputs, targets) in enumerate(cycle()):
        with pace.step():
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()
        if number == 23:
            break
    record.state(model, optimizer)


def counted_by_updates(record: Record) -> None:
    """for batch in pace.updates(20, loader): two epochs and a half."""
    pace, model, optimizer, loader = started()
    for inputs, targets in pace.updates(20, loader):
        with pace.step():
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()
    record.state(model, optimizer)


def counted_by_none(record: Record) -> None:
    """for batch in pace.updates(None, loader), which has no end, and a break after 20."""
    pace, model, optimizer, loader = started()
    for number, (inputs, targets) in enumerate(pace.updates(None, loader), start=1):
        with pace.step():
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()
        if number == 20:
            break
    record.state(model, optimizer)


def by_number(record: Record) -> None:
    """for start in numbers, which pace.prepare(model, optimizer, range(0, 60, 4)) gave."""
    pace = paceline.connect()
    model, data = network(), tensors()
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.5)
    model, optimizer, numbers = pace.prepare(model, optimizer, range(0, 60, 4))
    for _ in pace.epochs(3):
        for start in numbers:
            inputs, targets = (one[start : start + 4] for one in data)
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
    record.state(model, optimizer)


def broken_off(record: Record) -> None:
    """break after five batches of each epoch."""
    pace, model, optimizer, loader = started()
    for _ in pace.epochs(3):
        for number, (inputs, targets) in enumerate(loader):
            if number == 5:
                break
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
        record.state(model)
    record.state(model, optimizer)


def broken_off_in_the_block(record: Record) -> None:
    """break inside the block, after the sixth step."""
    pace, model, optimizer, loader = started()
    for _ in pace.epochs(3):
        for number, (inputs, targets) in enumerate(loader):
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
                if number == 5:
                    break
    record.state(model, optimizer)


def islice(record: Record) -> None:
    """itertools.islice(loader, 5)."""
    pace, model, optimizer, loader = started()
    for _ in pace.epochs(3):
        for inputs, targets in itertools.islice(loader, 5):
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
    record.state(model, optimizer)


def zipped(record: Record) -> None:
    """zip(loader, another loader), the other one longer."""
    pace, model, optimizer, loader = started()
    others = DataLoader(points(80), batch_size=4)
    for _ in pace.epochs(3):
        for (inputs, targets), (more, _classes) in zip(loader, others, strict=False):
            with pace.step():
                optimizer.zero_grad()
                loss = loss_of(model(inputs), targets) + 0.01 * model(more).pow(2).mean()
                loss.backward()
                optimizer.step()
    record.state(model, optimizer)


def two_loaders(record: Record) -> None:
    """zip(loader, loader_b), both prepared, the second one shorter."""
    pace, model, optimizer, loader = started()
    others = pace.prepare(DataLoader(points(40), batch_size=8))
    for _ in pace.epochs(3):
        for (inputs, targets), (more, classes) in zip(loader, others, strict=False):
            with pace.step():
                optimizer.zero_grad()
                loss = loss_of(model(inputs), targets) + 0.5 * loss_of(model(more), classes)
                loss.backward()
                optimizer.step()
    record.state(model, optimizer)


def two_loaders_by_hand(record: Record) -> None:
    """it = iter(loader_b) before the epochs, next(it), another one at its end; both shuffled."""
    pace, model, optimizer, loader = started(shuffle=True)
    others = pace.prepare(DataLoader(Numbered(24), batch_size=8))
    more = iter(others)
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            try:
                unlabelled, classes, numbers = next(more)
            except StopIteration:
                more = iter(others)
                unlabelled, classes, numbers = next(more)
            record.used(numbers)
            with pace.step():
                optimizer.zero_grad()
                loss = loss_of(model(inputs), targets) + 0.5 * loss_of(model(unlabelled), classes)
                loss.backward()
                optimizer.step()
    record.state(model, optimizer)


def early_stopping(record: Record) -> None:
    """The epochs are left when the evaluation is good enough."""
    pace, model, optimizer, loader = started()
    done = 0
    for epoch in pace.epochs(50):
        one_epoch(pace, model, optimizer, loader)
        done += 1
        right, count = pace.evaluate(count_right(model), DataLoader(held_out(), 5))["right"]
        if right / count > 0.3 and epoch == 2:
            break
    record.fact(done=done)
    record.state(model, optimizer)


def stopped(record: Record) -> None:
    """pace.stop() in the middle of the third epoch, and the loop goes on as it likes."""
    pace, model, optimizer, loader = started()
    for epoch in pace.epochs(50):
        for number, (inputs, targets) in enumerate(loader):
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
            if epoch == 2 and number == 2:
                pace.stop()
    record.state(model, optimizer)


def stopped_plainly(record: Record) -> None:
    """What ``stopped`` comes to."""
    pace, model, optimizer, loader = started()
    for epoch in range(3):
        for inputs, targets in itertools.islice(loader, 3 if epoch == 2 else 8):
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
    record.state(model, optimizer)


def stopped_between_epochs(record: Record) -> None:
    """pace.stop() after the third epoch."""
    pace, model, optimizer, loader = started()
    for epoch in pace.epochs(50):
        one_epoch(pace, model, optimizer, loader)
        if epoch == 2:
            pace.stop()
            break
    record.state(model, optimizer)


def skipped_before_the_block(record: Record) -> None:
    """continue before the block for every third batch."""
    pace, model, optimizer, loader = started()
    for _ in pace.epochs(3):
        for number, (inputs, targets) in enumerate(loader):
            if number % 3 == 1:
                continue
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
    record.state(model, optimizer)


def skipped_in_the_block(record: Record) -> None:
    """continue inside the block for every third batch, before its backward."""
    pace, model, optimizer, loader = started()
    for _ in pace.epochs(3):
        for number, (inputs, targets) in enumerate(loader):
            with pace.step():
                if number % 3 == 1:
                    continue
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
    record.state(model, optimizer)


def last_skipped(record: Record) -> None:
    """continue for the last two batches of every epoch: nothing is left to push."""
    pace, model, optimizer, loader = started()
    for _ in pace.epochs(3):
        for number, (inputs, targets) in enumerate(loader):
            if number >= 6:
                continue
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
    record.state(model, optimizer)


class Poisoned(Dataset[Any]):
    """Vectors of which those of one batch of eight are NaN."""

    def __init__(self) -> None:
        self.inputs, self.targets = tensors()
        self.inputs[16:24] = math.nan

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.targets[index]


def nan_skipped(record: Record) -> None:
    """A batch whose loss is NaN is left by continue."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.5)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(Poisoned(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss = loss_of(model(inputs), targets)
                if not loss.isfinite():
                    continue
                loss.backward()
                optimizer.step()
    record.state(model, optimizer)


def filtered(record: Record) -> None:
    """Samples of a class are filtered out of each batch; batches that are empty are skipped."""
    pace = paceline.connect()
    inputs, targets = tensors()
    order = targets.argsort()
    data = TensorDataset(inputs[order], targets[order])
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            chosen = targets != 1
            if not chosen.any():
                continue
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs[chosen]), targets[chosen]).backward()
                optimizer.step()
        record.state(model)
    record.state(model, optimizer)


def step_twice(record: Record) -> None:
    """optimizer.step() twice in a block: two updates of one batch."""
    pace, model, optimizer, loader = started()
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                for _ in range(2):
                    optimizer.zero_grad()
                    loss_of(model(inputs), targets).backward()
                    optimizer.step()
    record.state(model, optimizer)


def sharpness_aware(record: Record) -> None:
    """SAM: weights are moved up the gradient, a second gradient is taken, and they are put back."""
    pace, model, optimizer, loader = started()
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                moved = [
                    (one, one.detach().clone(), one.grad.clone()) for one in model.parameters()
                ]
                with torch.no_grad():
                    for parameter, _, gradient in moved:
                        parameter.add_(gradient, alpha=0.05)
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                with torch.no_grad():
                    for parameter, before, _ in moved:
                        parameter.copy_(before)
                optimizer.step()
    record.state(model, optimizer)


def without_a_block(record: Record) -> None:
    """The loop without ``with pace.step()``."""
    pace, model, optimizer, loader = started()
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()
    record.state(model, optimizer)


class Trainer:
    """A class of the user's own around everything."""

    def __init__(self, pace: Any, model: Any, optimizer: Any, loader: Any) -> None:
        self.pace, self.loader = pace, loader
        self.model, self.optimizer = model, optimizer
        self.losses: list[float] = []

    def step(self, batch: Any) -> None:
        with self.pace.step():
            self.optimizer.zero_grad()
            loss = loss_of(self.model(batch[0]), batch[1])
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())

    def fit(self, epochs: int) -> None:
        for _ in self.pace.epochs(epochs):
            for batch in self.loader:
                self.step(batch)


def trainer_class(record: Record) -> None:
    """A Trainer class, as frameworks have it."""
    trainer = Trainer(*started())
    trainer.fit(3)
    for loss in trainer.losses:
        record.part(loss=loss)
    record.state(trainer.model, trainer.optimizer)


def progress_bar(record: Record) -> None:
    """The loader is wrapped by a generator that shows progress (as tqdm does)."""
    pace, model, optimizer, loader = started()
    shown = []

    def bar(batches: Any) -> Iterator[Any]:
        for number, batch in enumerate(batches):
            yield batch
            shown.append(number / len(batches))

    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, bar(LengthOf(loader)))
    record.step(shown=shown)
    record.state(model, optimizer)


class LengthOf:
    """Iterates over something that has a length, and nothing else."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def exception_caught(record: Record) -> None:
    """An exception of the user's own leaves a block and is caught around it."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(Numbered(), batch_size=8))
    for _ in pace.epochs(3):
        for number, (inputs, targets, _) in enumerate(loader):
            try:
                with pace.step():
                    optimizer.zero_grad()
                    if number == 4:
                        raise ValueError("a bad batch")
                    loss_of(model(inputs), targets).backward()
                    optimizer.step()
            except ValueError:
                record.step(bad=number)
    record.state(model, optimizer)


def search(record: Record) -> None:
    """with pace.trial(): a model, a loop and an evaluation for each of three learning rates."""
    pace = paceline.connect()
    for rate in (0.4, 0.2, 0.1):
        with pace.trial(f"lr-{rate}"):
            model = network()
            optimizer = SGD(model.parameters(), lr=rate, momentum=0.5)
            loader = DataLoader(points(), batch_size=8, shuffle=True)
            model, optimizer, loader = pace.prepare(model, optimizer, loader)
            for _ in pace.epochs(3):
                one_epoch(pace, model, optimizer, loader)
            found = pace.evaluate(count_right(model), DataLoader(held_out(), batch_size=5))
        record.epoch(loss=found["loss"][0])
        record.state(model, optimizer)


TWICE = "twice|second time"

SCRIPTS = (
    Script(enumerated),
    Script(while_next),
    Script(while_epochs),
    Script(range_of_epochs),
    Script(epochs_from_one),
    Script(cycled_to_a_number, counts_itself=True),
    Script(counted_by_updates, counts_itself=True, uses_all=False),
    Script(counted_by_none, counts_itself=True, uses_all=False, epochs=2),
    Script(by_number, is_exact=False, num_samples=15),
    Script(broken_off, uses_all=False),
    Script(broken_off_in_the_block, uses_all=False),
    Script(islice, uses_all=False),
    Script(zipped, is_exact=False),
    Script(two_loaders, uses_all=False),
    Script(two_loaders_by_hand, shuffles=True),
    Script(early_stopping),
    Script(stopped, like=stopped_plainly, uses_all=False, epochs=2),
    Script(stopped_between_epochs),
    Script(skipped_before_the_block, uses_all=False),
    Script(skipped_in_the_block, uses_all=False),
    Script(last_skipped, uses_all=False),
    Script(nan_skipped, uses_all=False),
    Script(filtered, is_exact=False, uses_all=False),
    Script(step_twice, falls=False, refused=loose(TWICE)),
    Script(sharpness_aware, is_exact=False, refused=several("weights|gradient", is_sure=False)),
    Script(without_a_block, refused=several(r"pace\.step", is_sure=False)),
    Script(trainer_class),
    Script(progress_bar),
    Script(exception_caught, uses_all=False),
    Script(search, shuffles=True),
)
