"""A loop without a loader, run by Paceline as a script and plainly by the tests.

    python numbered.py FOLDER UPDATES [UPDATES ...]      results go to FOLDER/result-N.pt

In float64, so that the order of sums does not matter. It draws from all three generators.
"""

import random
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from struck import has_stepped, wait_for_kills

Results = dict[str, Tensor]


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    layers = [nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)]
    model = nn.Sequential(*layers).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: nn.Module) -> Tensor:
    """The loss of a newly drawn batch."""
    inputs = torch.rand(4, 3, dtype=torch.float64) + random.random()
    targets = inputs.sum(1, keepdim=True) * numpy.random.rand()
    return nn.functional.mse_loss(model(inputs), targets)


def gather(model: nn.Module) -> Results:
    return {name: value.clone() for name, value in model.state_dict().items()}


def train(
    pace: Any, targets: Iterable[int], slow_s: float = 0.0, folder: Path | None = None
) -> Results:
    model, optimizer = pace.prepare(*make())
    for updates in targets:
        for number in pace.updates(updates):
            with pace.step():
                time.sleep(slow_s)
                if folder is not None:
                    wait_for_kills(folder, pace.version / updates)
                optimizer.zero_grad()
                loss_of(model).backward()
                optimizer.step()
            if folder is not None:
                has_stepped(folder, pace.worker)
            if folder is not None and number == 10:
                (folder / "is-there").touch()
        assert pace.version == updates or folder is not None
    return gather(model)


def twin(seed: int, updates: int, parts: int) -> Results:
    """The same in plain PyTorch: update v averages the numbers v K to v K + K - 1."""
    from paceline import step_seed

    model, optimizer = make()
    for version in range(updates):
        optimizer.zero_grad()
        for number in range(version * parts, (version + 1) * parts):
            drawn = step_seed(seed, 0, number)
            random.seed(drawn)
            torch.manual_seed(drawn)
            numpy.random.seed(drawn & 0xFFFFFFFF)
            (loss_of(model) / parts).backward()
        optimizer.step()
    return gather(model)


if __name__ == "__main__":
    import paceline

    folder, slow_s, *targets = sys.argv[1:]
    pace = paceline.connect()
    results = train(pace, map(int, targets), float(slow_s), Path(folder))
    torch.save(results, Path(folder) / f"result-{pace.worker}.pt")
