"""A whole training run in virtual time: a task, simulated workers, the files of a live run.

    task + world -> craft, conditions -> engines/simulated.py -> trace -> summary, model, curve

The loss and the accuracy are true; only the seconds are virtual. It imports torch, which a
simulation of time alone does not need. This module must not know terminals.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from .checkpoint import save_model
from .config import RunSettings
from .engines.simulated import SimulatedRun
from .engines.training import TrainingCraft
from .ledger import Ledger
from .protocols import parse
from .records import Scalar
from .report.files import write_report
from .report.forecast import Forecast
from .report.summary import Summary
from .simulation import World, describe, open_trace
from .trace import Trace
from .workloads import load_task
from .workloads.base import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """What a run in virtual time left: what it learned, and what its timing was."""

    summary: Summary
    forecast: Forecast
    most_versions_kept: int
    """Old versions that were in memory at the same time, because somebody held them."""


class Watcher(Protocol):
    """Who is told how a rehearsal goes."""

    def progress(self, done: int) -> None:
        """So many updates are made."""

    def evaluated(self, epoch: int, at_s: float, metrics: Mapping[str, float]) -> None:
        """Means over the test data, ``at_s`` virtual seconds after the start."""


class Unwatched:
    """Says nothing."""

    def progress(self, done: int) -> None:
        return None

    def evaluated(self, epoch: int, at_s: float, metrics: Mapping[str, float]) -> None:
        return None


def rehearse(
    spec: "str | Task",
    settings: RunSettings,
    world: World,
    run_dir: Path,
    watcher: Watcher | None = None,
    evaluations: int = 1,
) -> Rehearsed:
    """Train a task in virtual time.

    Args:
        settings: of them, those that say what is trained: workers, protocol, batch sizes, lr,
            epochs, updates, seconds (virtual), target_accuracy, dropped, nonfinite, init, seed.
        run_dir: where the run's files go.
        evaluations: an epoch; they take no virtual time.

    Raises:
        ConfigError: something asked for does not exist or cannot work.
        WorkerError: a gradient is not finite.
    """
    start_s = time.perf_counter()
    protocol = parse(settings.protocol, settings.workers)
    task = load_task(spec, settings.workers, settings.init) if isinstance(spec, str) else spec
    batch_size = settings.batch_size or task.batch_size
    if settings.mini_batch_size is not None:
        batch_size = settings.mini_batch_size * protocol.num_pushes
    craft = TrainingCraft(
        task, protocol, batch_size=batch_size, lr=settings.lr, seed=settings.seed,
        nonfinite=settings.nonfinite,
    )  # fmt: skip
    conditions = world.conditions(settings.workers, craft.update_bytes)
    ledger = Ledger(craft.num_samples, batch_size, protocol.num_pushes, dropped=settings.dropped)
    trace = open_trace(run_dir)
    rehearsal = _Rehearsal(task, settings, craft, trace, watcher or Unwatched())
    try:
        trace.header(**_header(task, settings, craft, batch_size))
        run = SimulatedRun(
            protocol, ledger, conditions, craft=craft, trace=trace, hear_epoch=rehearsal.ended
        )
        every = max(1, craft.num_samples * protocol.num_pushes // (batch_size * evaluations))
        counts = run.run(settings.updates, partial(rehearsal.progress, run, every))
        rehearsal.stopped(run.coordinator.epoch, counts.times_s[-1])
        run.close()
    finally:
        trace.close()
    craft.load_newest()
    save_model(craft.model, run_dir / "model.safetensors")
    return Rehearsed(
        summary=write_report(run_dir),
        forecast=describe(protocol, conditions, counts, time.perf_counter() - start_s),
        most_versions_kept=craft.most_versions_kept,
    )


def _header(
    task: Task, settings: RunSettings, craft: TrainingCraft, batch_size: int
) -> dict[str, Scalar | list[Scalar]]:
    protocol = parse(settings.protocol, settings.workers)
    return {
        "task": task.name,
        "source": craft.splits.source,
        "protocol": settings.protocol,
        "workers": settings.workers,
        "engine": "simulated",
        "path": "virtual time",
        "batch_size": batch_size,
        "mini_batch_size": -(-batch_size // protocol.num_pushes),
        "pushes_per_update": protocol.num_pushes,
        "num_samples": craft.num_samples,
        "seed": settings.seed,
        "device": "cpu",
        "devices": ["virtual"],
        "learning_rates": [settings.lr or task.learning_rate],
        "num_parameters": craft.replica.layout.num_parameters,
        "update_bytes": craft.update_bytes,
        "epochs": settings.epochs or task.epochs,
    }


class _Rehearsal:
    """What happens between two epochs: evaluation, and whether to go on."""

    def __init__(
        self,
        task: Task,
        settings: RunSettings,
        craft: TrainingCraft,
        trace: Trace,
        watcher: Watcher,
    ) -> None:
        self.watcher = watcher
        self._epochs = settings.epochs or task.epochs
        self._settings = settings
        self._craft = craft
        self._trace = trace
        self._evaluated_version = -1
        self._num_evaluated = 0

    def progress(self, run: SimulatedRun, every: int, done: int) -> None:
        """So many updates are made; within an epoch it is evaluated ``every`` so many pushes."""
        self.watcher.progress(done)
        num_due = run.counts.pushes // every
        if num_due <= self._num_evaluated:
            return
        self._num_evaluated = num_due
        if done == self._evaluated_version:
            return  # the epoch's end
        accuracy = self._evaluate(run.coordinator.epoch, run.now_s).get("acc", 0.0)
        target = self._settings.target_accuracy
        if target is not None and accuracy >= target and not run.ending:
            run.stop(f"accuracy {accuracy:.4f} reached {target:g}")

    def stopped(self, epoch: int, at_s: float) -> None:
        """The run is over; within an epoch its end is evaluated, as in a live run."""
        if self._craft.store.version != self._evaluated_version:
            self._evaluate(epoch, at_s)

    def _evaluate(self, epoch: int, at_s: float) -> dict[str, float]:
        """The means of all metrics; empty where there is no test data."""
        totals = self._craft.evaluate()
        metrics = {name: value / count for name, (value, count) in totals.items() if count}
        self._evaluated_version = self._craft.store.version
        if totals:
            self._trace.evaluated(at_s, epoch, self._evaluated_version, totals)
            self.watcher.evaluated(epoch, at_s, metrics)
        return metrics

    def ended(self, epoch: int, at_s: float) -> bool:
        """An epoch ended; whether to go on."""
        metrics = self._evaluate(epoch, at_s)
        target, seconds = self._settings.target_accuracy, self._settings.seconds
        if target is not None and metrics.get("acc", 0.0) >= target:
            return False
        if seconds is not None and at_s >= seconds:
            return False
        return epoch + 1 < self._epochs
