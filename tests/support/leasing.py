"""Loops that do not step exactly once per batch: ``python leasing.py CASE FOLDER``.

The plain loop is the same code with ``loops.Plain`` for ``pace``. Batches come in order.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loops import Results, gather, loss_of, make_loader, make_model
from tiny import EPOCHS, grouped

Loop = Callable[[Any, nn.Module, Any, Any], None]


def training(pace: Any, loop: Loop, epochs: int = EPOCHS) -> Results:
    """Train a model with this loop; return the results."""
    model = make_model()
    optimizer = grouped(model.parameters(), 0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    for _ in pace.epochs(epochs):
        loop(pace, model, optimizer, loader)
    return {**gather(model, optimizer), "version": torch.tensor(getattr(pace, "version", -1))}


def filtering(pace: Any, model: nn.Module, optimizer: Any, loader: Any) -> None:
    """Every third batch has no block; the one after it leaves its block by ``continue``."""
    for number, (inputs, targets) in enumerate(loader):
        if number % 3 == 1:
            continue
        with pace.step():
            if number % 3 == 2:
                continue
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()


def breaking(pace: Any, model: nn.Module, optimizer: Any, loader: Any) -> None:
    """Leave the loop after three batches."""
    for number, (inputs, targets) in enumerate(loader):
        if number == 3:
            break
        with pace.step():
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()


def stepping_twice(pace: Any, model: nn.Module, optimizer: Any, loader: Any) -> None:
    for inputs, targets in loader:
        with pace.step():
            for _ in range(2):
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()


def stepping_now_and_then_twice(pace: Any, model: nn.Module, optimizer: Any, loader: Any) -> None:
    for number, (inputs, targets) in enumerate(loader):
        with pace.step():
            for _ in range(2 if number % 3 == 1 else 1):
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()


def nesting(pace: Any, model: nn.Module, optimizer: Any, loader: Any) -> None:
    """The prepared loader is iterated inside its own loop, and without gradients after it."""
    for inputs, targets in loader:
        with pace.step():
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()
        assert sum(len(batch[0]) for batch in loader) == len(loader.dataset)
        next(iter(loader))
    with torch.no_grad():
        assert sum(len(batch[0]) for batch in loader) == len(loader.dataset)


def stepping_outside(pace: Any, model: nn.Module, optimizer: Any, loader: Any) -> None:
    """Accumulation whose step is after the block."""
    for number, (inputs, targets) in enumerate(loader):
        with pace.step():
            (loss_of(model(inputs), targets) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def caught(pace: Any, model: nn.Module, optimizer: Any, loader: Any) -> None:
    """An exception of the script leaves a block and is caught; the batch is skipped."""
    for number, (inputs, targets) in enumerate(loader):
        try:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                if number == 2:
                    raise ValueError("this one is not wanted")
                optimizer.step()
        except ValueError:
            optimizer.zero_grad()


def filtering_later(pace: Any, model: nn.Module, optimizer: Any, loader: Any) -> None:
    """In the first epoch every batch is stepped on; in the next ones the second is skipped."""
    optimizer.num_epochs = getattr(optimizer, "num_epochs", 0) + 1
    for number, (inputs, targets) in enumerate(loader):
        with pace.step():
            if optimizer.num_epochs > 1 and number == 1:
                continue
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()


def accumulating_nothing(pace: Any, model: nn.Module, optimizer: Any, loader: Any) -> None:
    """The gradient of the first of two accumulated batches is zero."""
    for number, (inputs, targets) in enumerate(loader):
        with pace.step():
            (loss_of(model(inputs), targets) * (number % 2)).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()


def caught_behind_the_loop(pace: Any, model: nn.Module, optimizer: Any, loader: Any) -> None:
    """An exception of the script leaves a block and the loop, and is caught after it."""
    try:
        for number, (inputs, targets) in enumerate(loader):
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                if number == 3:
                    raise ValueError("enough")
                optimizer.step()
    except ValueError:
        optimizer.zero_grad()


def accumulating_locally(pace: Any, model: nn.Module, optimizer: Any, loader: Any) -> None:
    for number, (inputs, targets) in enumerate(loader):
        with pace.step():
            (loss_of(model(inputs), targets) / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    optimizer.zero_grad()


def zipped(pace: Any, model: nn.Module, optimizer: Any, loader: Any) -> None:
    for (inputs, targets), (more, others) in zip(loader, loader, strict=True):
        with pace.step():
            optimizer.zero_grad()
            (loss_of(model(inputs), targets) + loss_of(model(more), others)).backward()
            optimizer.step()


def stepping_unevenly(pace: Any, model: nn.Module, optimizer: Any, loader: Any) -> None:
    """One of the workers steps twice on one batch."""
    for number, (inputs, targets) in enumerate(loader):
        with pace.step():
            for _ in range(2 if number == 1 and pace.worker == 1 else 1):
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()


def stepping_once_twice(pace: Any, model: nn.Module, optimizer: Any, loader: Any) -> None:
    """One batch of the epoch is stepped on twice."""
    for number, (inputs, targets) in enumerate(loader):
        with pace.step():
            for _ in range(2 if number == 1 else 1):
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()


def weighing(pace: Any) -> Results:
    """Each batch has a weight other than its number of samples."""
    model = make_model()
    optimizer = grouped(model.parameters(), 0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    for _ in pace.epochs(EPOCHS):
        for inputs, targets in loader:
            with pace.step() as step:
                optimizer.zero_grad()
                is_wanted = targets > 0
                (loss_of(model(inputs), targets, reduction="none") * is_wanted).sum().div(
                    max(1, int(is_wanted.sum()))
                ).backward()
                if step is not None:
                    step.weight = int(is_wanted.sum())
                optimizer.step()
    return gather(model, optimizer)


def looping_by_hand(pace: Any) -> Results:
    """``next`` on a restarted iterator, for a number of steps instead of epochs."""
    model = make_model()
    optimizer = grouped(model.parameters(), 0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    batches = iter(loader)
    for _ in range(9):
        try:
            inputs, targets = next(batches)
        except StopIteration:
            batches = iter(loader)
            inputs, targets = next(batches)
        with pace.step():
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()
    return gather(model, optimizer)


LOOPS: dict[str, Loop] = {
    "filtering": filtering,
    "breaking": breaking,
    "stepping twice": stepping_twice,
    "now and then": stepping_now_and_then_twice,
    "nesting": nesting,
    "outside": stepping_outside,
    "caught": caught,
    "filtering later": filtering_later,
    "accumulating nothing": accumulating_nothing,
    "caught behind": caught_behind_the_loop,
    "once twice": stepping_once_twice,
}
REFUSED: dict[str, Loop] = {"zipped": zipped, "unevenly": stepping_unevenly}
CASES: dict[str, Callable[[Any], Results]] = {
    **{name: functools.partial(training, loop=loop) for name, loop in LOOPS.items()},
    "weighing": weighing,
    "by hand": looping_by_hand,
}
OTHERS: dict[str, Callable[[Any], Results]] = {
    **{name: functools.partial(training, loop=loop) for name, loop in REFUSED.items()},
    "locally": functools.partial(training, loop=accumulating_locally),
}


def main() -> None:
    import paceline

    case, folder = sys.argv[1:]
    pace = paceline.connect()
    torch.save({**CASES, **OTHERS}[case](pace), Path(folder) / f"{case}-{pace.worker}.pt")


if __name__ == "__main__":
    main()
