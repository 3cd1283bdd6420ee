"""A whole training run in virtual time: a task, simulated workers, the files of a live run.

    task + world -> work, conditions -> simulation/engine.py -> trace -> summary, model, curve

Loss and accuracy are real; only the seconds are virtual. It imports torch, which a simulation of
time alone does not need. This module must not know terminals.
"""

import math
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ..checkpoints.state import save_model
from ..config import RunSettings
from ..core.ledger import Ledger
from ..core.stats import accuracy_among
from ..errors import ConfigError, Interrupted
from ..program import TaskProgram, written
from ..protocols import protocol_of
from ..protocols.base import SyncProtocol
from ..report.files import write_report
from ..report.forecast import Forecast
from ..report.summary import Summary
from ..simulation.engine import SimulatedRun
from ..simulation.training import TrainingWork
from ..trace import Trace
from ..trace.records import Scalar
from ..workloads import load_task
from ..workloads.base import Task
from .profiles import read_profile
from .race import check_accuracy
from .simulation import Watcher, World, describe, open_trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """The result of a run in virtual time: its summary and its timing."""

    summary: Summary
    forecast: Forecast
    most_versions_kept: int
    """The most old versions in memory at the same time, kept because a member still used them."""


class Unwatched:
    """A watcher that reports nothing."""

    def progress(self, done: int) -> None:
        return None

    def evaluated(self, epoch: int, at_s: float, metrics: Mapping[str, float]) -> None:
        return None


def refuse_target(spec: str, settings: RunSettings) -> None:
    """Raise ConfigError if a target accuracy is set and the task does not measure accuracy."""
    if settings.target_accuracy is not None:
        task = load_task(spec, settings.workers, settings.init)
        check_accuracy(task, "leave out --target-accuracy")


def rehearse(
    spec: "str | Task",
    settings: RunSettings,
    world: World,
    run_dir: Path,
    watcher: Watcher | None = None,
    evaluations: int = 1,
    *,
    is_batched: bool = False,
) -> Rehearsed:
    """Train a task in virtual time.

    Seven parameters: the last two belong to the computation and are no settings of a live run.

    Args:
        settings: used are workers, protocol, batch sizes, lr, epochs, updates, seconds (virtual),
            target_accuracy, dropped, nonfinite, init, seed.
        run_dir: folder for the run's files.
        evaluations: number per epoch. Those inside an epoch take no virtual time; the one at its
            end takes the pause of the profile. With more than one, one is at the start of the run.
        is_batched: whether gradients at equal parameters are computed in one call, equal within
            ``gradients.TOLERANCE``.

    Returns:
        The summary, the timing, and how many old versions were kept.

    Raises:
        ConfigError: a setting is invalid, or does not work in virtual time.
        WorkerError: a gradient is not finite.
        Interrupted: the user ended it after at least one update; trace and summary are written.
    """
    start_s = time.perf_counter()
    protocol = protocol_of(settings)
    task = load_task(spec, settings.workers, settings.init) if isinstance(spec, str) else spec
    batch_size = _batch_size(settings, task, protocol)
    work = TrainingWork(
        task, protocol, batch_size=batch_size, lr=settings.lr, seed=settings.seed,
        nonfinite=settings.nonfinite, is_batched=is_batched,
    )  # fmt: skip
    if world.like is not None:
        _check_profile(world.like, task, work, -(-batch_size // protocol.num_pushes))
    conditions = world.conditions(settings.workers, work.update_bytes)
    ledger = Ledger(work.num_samples, batch_size, protocol.num_pushes, dropped=settings.dropped)
    work.follow(ledger.every_epoch)
    with closing(open_trace(run_dir)) as trace:
        rounding: list[Scalar] = ["--batched"] if is_batched else []
        trace.header(**_header(spec, task, settings, work, batch_size, protocol), rounding=rounding)
        rehearsal = _Rehearsal(task, settings, work, trace, watcher or Unwatched())
        run = SimulatedRun(
            protocol, ledger, conditions, work=work, trace=trace, hear_epoch=rehearsal.ended
        )
        work.on_scaled = lambda ticket, scale: trace.scaled(run.now_s, ticket, scale)
        update_samples = batch_size * protocol.num_steps
        rehearsal.play(run, work.num_samples * protocol.num_pushes / update_samples, evaluations)
    work.load_newest()
    save_model(work.model, run_dir / "model.safetensors")
    return Rehearsed(
        summary=write_report(run_dir),
        forecast=describe(protocol, conditions, run.counts, time.perf_counter() - start_s),
        most_versions_kept=work.most_versions_kept,
    )


def _batch_size(settings: RunSettings, task: Task, protocol: SyncProtocol) -> int:
    """The samples of an update. ConfigError: a push would consist of several batches."""
    if (number := settings.accumulate or 1) > 1:
        raise ConfigError(
            f"accumulate {number}: virtual time computes a push at once; for the same updates "
            f"use a --batch-size {number} times as large"
        )
    if settings.mini_batch_size is not None:
        return settings.mini_batch_size * protocol.num_pushes
    return settings.batch_size or task.batch_size


def _check_profile(like: Path, task: Task, work: TrainingWork, mini_batch_size: int) -> None:
    """Raise ConfigError unless the times were measured with this model and mini-batch size."""
    num_parameters = sum(parameter.numel() for parameter in work.model.parameters())
    read_profile(like).check(task.name, num_parameters, mini_batch_size, "--like")


def _header(
    spec: "str | Task",
    task: Task,
    settings: RunSettings,
    work: TrainingWork,
    batch_size: int,
    protocol: SyncProtocol,
) -> dict[str, Scalar | list[Scalar]]:
    return {
        "task": task.name,
        "source": work.splits.source,
        "protocol": str(protocol),
        "staleness": str(protocol.staleness),
        "outer": str(protocol.outer),
        "workers": settings.workers,
        "engine": "simulated",
        "path": "virtual time",
        "batch_size": batch_size,
        "mini_batch_size": -(-batch_size // protocol.num_pushes),
        "pushes_per_update": protocol.num_pushes,
        "num_samples": work.num_samples,
        "seed": settings.seed,
        "order": "shuffled",
        "device": "cpu",
        "devices": ["virtual"],
        "learning_rates": [settings.lr or task.learning_rate],
        "num_parameters": work.replica.layout.num_parameters,
        "update_bytes": work.update_bytes,
        "epochs": settings.epochs or task.epochs,
        "program": written(TaskProgram(task=spec)),
        "threads": torch.get_num_threads(),
        "lookahead": 0,
        "drop_last": False,
        "init": settings.init,
        "dropped": settings.dropped,
        "nonfinite": settings.nonfinite,
    }


class _Rehearsal:
    """Evaluates at the end of an epoch and inside it, and decides when the run ends."""

    def __init__(
        self,
        task: Task,
        settings: RunSettings,
        work: TrainingWork,
        trace: Trace,
        watcher: Watcher,
    ) -> None:
        self.watcher = watcher
        self._epochs = settings.epochs or task.epochs
        self._settings = settings
        self._work = work
        self._trace = trace
        self._evaluated_version = -1
        self._epoch_pushes, self._evaluations = math.inf, 1
        self._start_pushes = 0  # pushes at the start of the epoch
        self._has_ended = False  # whether an epoch has just ended
        self._num_evaluated = 0  # inside the epoch

    def play(self, run: SimulatedRun, epoch_pushes: float, evaluations: int) -> None:
        """Make the whole run, with ``evaluations`` in each epoch of ``epoch_pushes``."""
        if evaluations > 1:
            self._evaluate(0, 0.0)  # the curve starts before the first update
        self._epoch_pushes, self._evaluations = epoch_pushes, evaluations
        try:
            counts = run.run(self._settings.updates, partial(self._progress, run))
        except KeyboardInterrupt:
            run.stop("interrupted")
            run.close()
            if not run.counts.updates:
                raise
            raise Interrupted(write_report(self._trace.path.parent)) from None
        if self._work.store.version != self._evaluated_version:
            self._evaluate(run.coordinator.epoch, counts.times_s[-1])  # as a live run does
        run.close()

    def _progress(self, run: SimulatedRun, done: int) -> None:
        self.watcher.progress(done)
        if self._has_ended:
            self._start_pushes, self._has_ended, self._num_evaluated = run.counts.pushes, False, 0
        share = (run.counts.pushes - self._start_pushes) / self._epoch_pushes
        num_due = min(self._evaluations - 1, int(self._evaluations * share))  # the last: at its end
        if num_due <= self._num_evaluated:
            return
        self._num_evaluated = num_due
        accuracy = self._accuracy(self._evaluate(run.coordinator.epoch, run.now_s))
        target = self._settings.target_accuracy
        if target is not None and accuracy >= target and not run.ending:
            run.stop(f"accuracy {accuracy:.4f} reached {target:g}")

    def _accuracy(self, metrics: Mapping[str, float]) -> float:
        return metrics.get(accuracy_among(metrics) or "", 0.0)

    def _evaluate(self, epoch: int, at_s: float) -> dict[str, float]:
        """Evaluate; return the means of all metrics, none if there is no test data."""
        totals = self._work.evaluate()
        metrics = {name: value / count for name, (value, count) in totals.items() if count}
        self._evaluated_version = self._work.store.version
        if totals:
            self._trace.evaluated(at_s, epoch, self._evaluated_version, totals)
            self.watcher.evaluated(epoch, at_s, metrics)
        return metrics

    def ended(self, epoch: int, at_s: float) -> bool:
        """Evaluate at the end of an epoch; return whether to go on."""
        self._has_ended = True
        metrics = self._evaluate(epoch, at_s)
        target, seconds = self._settings.target_accuracy, self._settings.seconds
        if target is not None and self._accuracy(metrics) >= target:
            return False
        if seconds is not None and at_s >= seconds:
            return False
        return epoch + 1 < self._epochs
