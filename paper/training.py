"""Loss against time and updates: a task trained in virtual time, with true gradients.

    setting + protocol + seed -> predict/rehearsal.py -> trace -> the loss at some updates

A run is the same for every figure that uses it, and is made once. It must not know figures.
"""

import math
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.config import RunSettings
from paceline.predict.rehearsal import rehearse
from paceline.predict.simulation import World
from paceline.protocols import parse
from paceline.report.text import Point
from paceline.trace import FILE_NAME, read_trace
from paceline.trace.records import Evaluated

from .tasks import Images, softmax


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The common settings of a figure's runs; the symbols are the paper's."""

    num_workers: int
    """P."""
    delay: str
    """X."""
    mini_batch_size: int
    """m."""
    eta: float
    penalty: float
    """lambda."""
    num_evaluations: int = 40
    """Per run."""
    staleness: str = "none"
    """The rule for stale gradients, as `--staleness` takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """F(w) at one version."""

    at_s: float
    version: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One protocol with one seed."""

    measured: tuple[Measured, ...]
    updates: int
    virtual_s: float

    @property
    def final(self) -> float:
        """ln F(w) at the end: the mean over the last tenth of the run, since the loss is noisy."""
        tail = [point.loss for point in self.measured if point.version >= 0.9 * self.updates]
        return log(statistics.fmean(tail))

    def by_time(self) -> tuple[Point, ...]:
        """Return ln F(w) against virtual seconds."""
        return tuple(Point(t=point.at_s, value=log(point.loss)) for point in self.measured)

    def by_updates(self) -> tuple[Point, ...]:
        """Return ln F(w) against updates."""
        return tuple(
            Point(t=float(point.version), value=log(point.loss)) for point in self.measured
        )

    def loss_at(self, at_s: float) -> float:
        """Return ln F(w) at a time, interpolated between the two adjacent evaluations."""
        before = self.measured[0]
        for after in self.measured:
            if after.at_s >= at_s:
                span_s = after.at_s - before.at_s
                share = (at_s - before.at_s) / span_s if span_s else 0.0
                return log(before.loss + share * (after.loss - before.loss))
            before = after
        return log(before.loss)


def log(loss: float) -> float:
    """Return ln(loss), which the paper plots; infinity unless the loss is positive and finite."""
    return math.log(loss) if 0.0 < loss < math.inf else math.inf


_runs: dict[tuple[object, ...], Run] = {}


def train(setting: Setting, images: Images, protocol: str, num_updates: int, seed: int) -> Run:
    """Return one run, simulated at the first call.

    Raises:
        ConfigError: the setting is impossible.
    """
    key = (setting, id(images), protocol, num_updates, seed)
    if key not in _runs:
        _runs[key] = _train(setting, images, protocol, num_updates, seed)
    return _runs[key]


def _train(setting: Setting, images: Images, protocol: str, num_updates: int, seed: int) -> Run:
    rule = parse(protocol, setting.num_workers)
    # Cancelled mini-batches are lost, too, so each update may take one from every worker.
    num_samples = num_updates * max(rule.num_pushes, setting.num_workers) * setting.mini_batch_size
    times = num_samples // len(images.train) + 1
    task = softmax(
        images, penalty=setting.penalty, eta=setting.eta,
        mini_batch_size=setting.mini_batch_size, times=times,
    )  # fmt: skip
    settings = RunSettings(
        workers=setting.num_workers, protocol=protocol, updates=num_updates, seed=seed,
        mini_batch_size=setting.mini_batch_size, dropped="skip", nonfinite="skip",
        staleness=setting.staleness,
    )  # fmt: skip
    world = World(delay=(setting.delay,), seed=seed)
    updates_an_epoch = times * len(images.train) / (rule.num_pushes * setting.mini_batch_size)
    evaluations = max(2, round(setting.num_evaluations * updates_an_epoch / num_updates))
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        rehearsed = rehearse(task, settings, world, run_dir, evaluations=evaluations)
        measured = tuple(_evaluations(run_dir))
    return Run(
        measured=measured, updates=rehearsed.summary.updates,
        virtual_s=rehearsed.forecast.virtual_s,
    )  # fmt: skip


def _evaluations(run_dir: Path) -> Iterator[Measured]:
    for record in read_trace(run_dir / FILE_NAME):
        if isinstance(record, Evaluated):
            loss = record.mean("loss")
            loss = math.nan if loss is None else loss
            yield Measured(at_s=record.t_s, version=record.version, loss=loss)
