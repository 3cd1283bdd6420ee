"""The program of each worker in a learning-rate range test: a task whose rate grows each update.

    rate of update v = lowest * (highest / lowest) ** (v / (updates - 1))

If an update takes several steps of a worker (local-sgd), all of them have its rate. Their number
differs at the end of an epoch, so the rate then follows the version, read before each step. The
main worker ends the run once the loss has grown to `_TOO_MUCH` times its least value or is not
finite: higher rates only diverge. This module must not know how many workers there are.
"""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from paceline.replica.rates import forget_first_rates
from paceline.replica.seeding import seed_all
from paceline.script.worker import Pace, current_pace
from paceline.trainer import make_loader
from paceline.workloads import load_task

_TOO_MUCH = 4.0
_KEPT = 0.8
"""Share of the running mean kept each update, so that one batch cannot end the run."""
_FIRST = 10
"""Updates before a grown loss may end the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LrRamp:
    """The rates, and the number of updates.

    Args:
        spec: a task, or a script's path.
        lowest, highest: learning rates, 0 < lowest < highest.
        updates: >= 2.
        batch_size: samples an update averages; None: the task's.
        init: the task's initialisation; None: its first.
        batch: ``global``, or ``per-worker`` if ``batch_size`` is one worker's mini-batch.
    """

    spec: str
    lowest: float
    highest: float
    updates: int
    batch_size: int | None = None
    init: str | None = None
    batch: str = "global"

    @property
    def is_script(self) -> bool:
        """Whether ``spec`` is a script's path."""
        return self.spec.endswith(".py")

    def rate(self, version: int) -> float:
        """Return the rate of the update of this version."""
        return self.lowest * self.factor(version)

    def factor(self, version: int) -> float:
        """Return the rate of the update of this version as a multiple of ``lowest``."""
        share = min(version, self.updates - 1) / (self.updates - 1)
        return float((self.highest / self.lowest) ** share)

    def write(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> "LrRamp":
        return cls(**json.loads(text))


def growing(pace: Pace, optimizer: Optimizer, factor: Callable[[int], float]) -> LambdaLR:
    """Return the scheduler of a range test, for `at_its_rate`.

    Args:
        factor: version -> the multiple of the optimizer's present rates.
    """
    is_local = pace.context.is_difference
    forget_first_rates(optimizer)
    return LambdaLR(optimizer, lambda step: factor(pace.version if is_local and step else step))


def at_its_rate(pace: Pace, scheduler: LRScheduler, step: Callable[[], Any]) -> Any:
    """Step the optimizer at the rate of its update and return the step's value.

    With local-sgd the scheduler steps first: after a step it is unknown which update is next.
    """
    is_local = pace.context.is_difference
    if is_local and pace.version:
        scheduler.step()
    value = step()
    if not is_local:
        scheduler.step()
    return value


class Diverging:
    """Detects that the losses of a run diverge."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0
        self._least = math.inf
        self._count = 0

    def add(self, loss: float) -> bool:
        """Add the loss of an update and return whether the run diverges."""
        self._sum = _KEPT * self._sum + (1.0 - _KEPT) * loss
        self._weight = _KEPT * self._weight + (1.0 - _KEPT)
        mean = self._sum / self._weight
        self._count += 1
        self._least = min(self._least, mean)
        is_far = not mean <= self._least + (_TOO_MUCH - 1.0) * abs(self._least)
        return not math.isfinite(loss) or (self._count > _FIRST and is_far)


def main() -> None:
    """Train at growing rates."""
    ramp = LrRamp.read(sys.argv[1])
    pace = current_pace()
    task = load_task(ramp.spec, pace.num_workers, ramp.init)
    seed_all(pace.seed)
    model = task.module().to(pace.device)
    optimizer = task.optimizer(model.parameters(), ramp.lowest)
    scheduler = growing(pace, optimizer, ramp.factor)
    loader = make_loader(task.splits().train, ramp.batch_size or task.batch_size, is_shuffled=True)
    model, optimizer, loader, scheduler = pace.prepare(
        model, optimizer, loader, scheduler, batch=ramp.batch
    )
    losses = Diverging()
    for inputs, targets in pace.updates(ramp.updates, loader):
        with pace.step():
            optimizer.zero_grad()
            loss = task.loss(model(inputs), targets)
            loss.backward()
            at_its_rate(pace, scheduler, optimizer.step)
        if losses.add(float(loss.detach())) and pace.is_main:
            pace.stop()


if __name__ == "__main__":
    main()
