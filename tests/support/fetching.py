"""A loop whose samples name the process that made them: ``python fetching.py CASE FOLDER``.

It must not know how anything is run.
"""

import functools
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from loops import Numbered, Results, loss_of, make_model
from tiny import BATCH_SIZE, EPOCHS, grouped


class Signed(Numbered):
    """Samples with their index, the process that made them, and a unique number.

    The number makes each fetch different, so samples of workers are not compared.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_made = itertools.count()

    def __getitem__(self, index: int) -> Any:
        return (*super().__getitem__(index), os.getpid(), next(self._num_made))


def signed(pace: Any, steps_a_push: int = 1, **options: Any) -> Results:
    """Training that records which samples it got, and which process made them, per epoch."""
    model = make_model()
    optimizer = grouped(model.parameters(), 0.3)
    loader: Any = DataLoader(Signed(), BATCH_SIZE, **options)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    rows = []
    for epoch in pace.epochs(EPOCHS):
        for number, (inputs, targets, index, pid, _) in enumerate(loader):
            rows += [(epoch, int(i), int(p)) for i, p in zip(index, pid, strict=True)]
            with pace.step():
                loss_of(model(inputs), targets).backward()
                if (number + 1) % steps_a_push == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    return {"rows": torch.tensor(rows), "own": torch.tensor(os.getpid())}


CASES: dict[str, Callable[[Any], Results]] = {
    "two": functools.partial(signed, num_workers=2),
    "one at a time": functools.partial(signed, num_workers=1, prefetch_factor=1),
    "persistent": functools.partial(signed, num_workers=2, persistent_workers=True),
    "accumulating": functools.partial(signed, num_workers=2, steps_a_push=2),
}


def main() -> None:
    import paceline

    case, folder = sys.argv[1:]
    pace = paceline.connect()
    results = CASES[case](pace)
    torch.save(results, Path(folder) / f"{case}-{pace.worker}.pt")


if __name__ == "__main__":
    main()
