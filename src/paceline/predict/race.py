"""Protocols that race in virtual time, with real gradients, for a fixed amount of real computing.

    all contenders        the same virtual seconds   the training loss of their last fifth
    the better half       as much again              ...
    the last two          once more with other seeds: which is ahead how often

Every contender trains its own model at exactly the stale parameters that its protocol gives it
(simulation/training.py), so the cost of staleness and of smaller batches is measured, not assumed.
Its loss is the one that a live run would report, a mean over many pushes: the loss of one version
jumps from update to update. The budget counts this thread's computing time, not wall time: on a
busy machine a race takes longer, but compares as much. This module must not know where the
conditions come from, nor how the result is shown.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..conditions.world import Conditions
from ..core.ledger import Ledger
from ..core.stats import accuracy_among, accuracy_in
from ..errors import ConfigError
from ..events import Lease, Pushed, Ticket
from ..protocols import parse
from ..report.ranking import RACE_SEEDS, Standing
from ..simulation.engine import SimulatedRun
from ..simulation.model import first_samples
from ..simulation.training import TrainingWork
from ..workloads.base import Task

PROBE_SAMPLES = 1000
"""Test samples on which an accuracy is measured."""
LAST_SHARE = 0.2
"""Share of a contender's time; its loss is the mean over the pushes of this last part."""
FEWEST_SAMPLES = 1000
"""A mean over fewer samples can reach a target by luck."""
_DIVERGED, _FIRST_PUSHES = 100.0, 20
"""A protocol whose loss is this many times that of the first pushes has diverged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What all protocols train."""

    task: Task
    mini_batch_size: int
    lr: float | None
    seed: int


class _PushLoss(NamedTuple):
    """The loss that a push reported."""

    at_s: float
    loss: float
    num_samples: int


class _RacedWork(TrainingWork):
    """Remembers the loss of every push."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.push_losses: list[_PushLoss] = []

    def push(self, ticket: Ticket, leases: Sequence[Lease], at_s: float) -> Pushed:
        fact = super().push(ticket, leases, at_s)
        self.push_losses.append(_PushLoss(at_s, fact.loss, fact.num_samples))
        return fact


class Racer:
    """One protocol with one seed."""

    def __init__(self, protocol_text: str, training: Training, conditions: Conditions) -> None:
        protocol = parse(protocol_text, conditions.num_workers)
        batch_size = training.mini_batch_size * protocol.num_pushes
        self.work = _RacedWork(
            training.task, protocol, batch_size=batch_size, lr=training.lr, seed=training.seed,
            nonfinite="skip",
        )  # fmt: skip
        ledger = Ledger(self.work.num_samples, batch_size, protocol.num_pushes)
        self._run = SimulatedRun(protocol, ledger, conditions, work=self.work)
        self._task = training.task
        self._probe: tuple[Tensor, Tensor] | None = None
        self.standing = Standing(protocol=protocol_text, virtual_s=0.0, loss=math.nan, updates=0)

    @property
    def virtual_s(self) -> float:
        times_s = self._run.counts.times_s
        return times_s[-1] if times_s else 0.0

    def advance(self, until_s: float) -> None:
        """Train until the virtual time, to the end of the update under way."""
        while self.virtual_s < until_s:
            self._run.run(self._run.counts.updates + 1)
        standing = self.standing
        standing.virtual_s, standing.updates = self.virtual_s, self._run.counts.updates
        standing.loss = self.loss()

    def loss(self) -> float:
        """Mean training loss of the last fifth; inf: it diverged, or nothing was pushed in it."""
        last = self._last()
        finite = [push for push in last if math.isfinite(push.loss)]
        if 2 * len(finite) <= len(last):  # a few non-finite losses are skipped
            return math.inf
        value = _mean(finite)
        first = [push for push in self.work.push_losses[:_FIRST_PUSHES] if math.isfinite(push.loss)]
        return value if first and value <= _DIVERGED * abs(_mean(first)) else math.inf

    @property
    def is_judged(self) -> bool:
        """Whether its loss is a mean over enough samples to be compared with a target."""
        fewest = min(FEWEST_SAMPLES, self.work.num_samples)
        return sum(push.num_samples for push in self._last()) >= fewest

    def _last(self) -> list[_PushLoss]:
        """The pushes of the last fifth of its time."""
        losses, since_s = self.work.push_losses, (1.0 - LAST_SHARE) * self.virtual_s
        first = len(losses)
        while first and losses[first - 1].at_s >= since_s:
            first -= 1
        return losses[first:]

    def accuracy(self) -> float:
        """Accuracy of the newest version over the first test samples; 0.0 if no sample counts.

        Invariant: ``check_accuracy`` has passed the task.
        """
        if self._probe is None:
            self._probe = first_samples(self.work.splits.test, PROBE_SAMPLES)
        inputs, targets = self._probe
        result = accuracy_in(self._task.metrics(self._outputs(inputs), targets))
        assert result is not None
        right, count = result
        return right / count if count else 0.0

    def _outputs(self, inputs: Tensor) -> Tensor:
        """The outputs of the newest version, in evaluation mode."""
        self.work.load_newest()
        model = self.work.model
        was_training = model.training
        model.eval()
        with torch.no_grad():
            outputs: Tensor = model(inputs)
        model.train(was_training)
        return outputs


def check_accuracy(task: Task, instead: str) -> None:
    """Raise ConfigError, which says what to do ``instead``, unless the task has a test accuracy."""
    metrics, test = {}, task.splits().test
    if test is not None:
        inputs, targets = first_samples(test, 2)
        with torch.no_grad():
            metrics = task.metrics(task.module().eval()(inputs), targets)
    if accuracy_among(metrics) is None:
        raise ConfigError(f"{task.name} measures no test accuracy: {instead}")


def _mean(pushes: Sequence[_PushLoss]) -> float:
    """The mean loss over the samples."""
    return math.fsum(push.loss * push.num_samples for push in pushes) / sum(
        push.num_samples for push in pushes
    )


def race(
    protocols: Sequence[str],
    training: Training,
    conditions: Conditions,
    budget_s: float,
    say: Callable[[str], None] = lambda text: None,
) -> list[Standing]:
    """Let protocols race until two are left, and those two again with other seeds.

    Args:
        budget_s: about how many seconds of computing it may take.

    Returns:
        The best first; protocols that left the race later come before those that left earlier.
    """
    field = [Racer(text, training, conditions) for text in protocols]
    num_rounds = max(1, math.ceil(math.log2(len(field))) - 1)  # until two are left
    share_s = budget_s / (num_rounds + RACE_SEEDS)
    lap_s = _first_lap_s(field, share_s)
    until_s = lap_s
    out: list[Standing] = []
    for number in range(num_rounds):
        for racer in field:
            racer.advance(until_s)
        field.sort(key=lambda racer: racer.standing.loss)
        say(f"round {number + 1} of {num_rounds}: {field[0].standing.protocol} is ahead of "
            f"{len(field) - 1} after {until_s:.3g} virtual seconds")  # fmt: skip
        keep = max(2, math.ceil(len(field) / 2))
        out = [racer.standing for racer in field[keep:]] + out
        field = field[:keep]
        if len(field) <= 2:
            break
        until_s *= 2
    ranking = [racer.standing for racer in field] + out
    if len(field) == 2:
        _race_again(ranking, training, conditions, until_s, say)
    return ranked(ranking)


def ranked(standings: list[Standing]) -> list[Standing]:
    """Set each rank to its place in the list; return the same list."""
    for rank, standing in enumerate(standings, start=1):
        standing.rank = rank
    return standings


def count_wins(pair: Sequence[Standing], values: Sequence[Sequence[float]]) -> None:
    """Set how often each of the two was below the other, over the seeds that both ran with."""
    seeds = list(zip(*values, strict=False))
    pair[0].wins = sum(a < b for a, b in seeds)
    pair[1].wins = sum(b < a for a, b in seeds)


def _first_lap_s(field: Sequence[Racer], share_s: float) -> float:
    """Virtual seconds for which the field computes about ``share_s``, found by trying."""
    lap_s, start_s = 0.0, time.thread_time()
    while True:
        lap_s = max(racer.virtual_s for racer in field) * 1.5 if lap_s else _one_update_s(field)
        for racer in field:
            racer.advance(lap_s)
        if time.thread_time() - start_s >= share_s / 2.5:
            return lap_s


def _one_update_s(field: Sequence[Racer]) -> float:
    """Virtual seconds after which each has made an update."""
    for racer in field:
        racer.advance(1e-9)
    return max(racer.virtual_s for racer in field)


def _race_again(
    ranking: list[Standing],
    training: Training,
    conditions: Conditions,
    until_s: float,
    say: Callable[[str], None],
) -> None:
    """Run the first two with other seeds; put the one that is ahead more often first."""
    first, second = ranking[:2]
    losses = [[first.loss], [second.loss]]
    for extra in range(1, RACE_SEEDS):
        again = replace(training, seed=training.seed + extra)
        for standing, seed_losses in zip((first, second), losses, strict=True):
            contender = Racer(standing.protocol, again, conditions)
            contender.advance(until_s)
            seed_losses.append(contender.standing.loss)
        say(f"{first.protocol} against {second.protocol}, seed {again.seed}")
    count_wins((first, second), losses)
    first.loss, second.loss = (sum(seed_losses) / RACE_SEEDS for seed_losses in losses)
    if (second.wins, -second.loss) > (first.wins, -first.loss):
        ranking[0], ranking[1] = second, first
