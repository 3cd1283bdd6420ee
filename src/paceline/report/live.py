"""Observers of a running run: their contract, and the two without a terminal.

    QuietObserver    nothing on standard output (``--json``)
    PlainObserver    lines without control codes, for a pipe, a file or a CI log
    ScreenObserver   a live table, for a terminal (``screen.py``)

An engine calls an observer a few times a second and never waits for it. If its output is closed, an
observer drops what it would print. This module must not know engines, nor how a number was
measured.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TextIO

from ..plan import Plan
from ..system.streams import Lasting
from .summary import Summary
from .terminal import render_summary
from .text import format_duration


class WorkerCounts(Protocol):
    """What is counted of one worker: its pushes, their samples, and where its time went."""

    @property
    def pushes(self) -> int: ...
    @property
    def samples(self) -> int: ...
    @property
    def compute_s(self) -> float: ...
    @property
    def input_s(self) -> float: ...
    @property
    def wait_s(self) -> float: ...
    @property
    def push_s(self) -> float: ...
    @property
    def superseded_s(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProgress:
    """What one worker did so far."""

    worker: int
    state: str
    """A short text for people: ``training``, ``between epochs``, ``slow 3.1x``, ``gone``."""
    pushes: int
    samples_per_s: float
    compute_share: float
    input_share: float
    """Share of the time waiting for batches; part of ``compute_share``."""
    wait_share: float
    push_share: float
    mean_staleness: float
    """Versions."""

    @classmethod
    def of(
        cls, counts: WorkerCounts, *, worker: int, state: str, trained_s: float, staleness: int
    ) -> "WorkerProgress":
        """From counts over ``trained_s`` seconds; ``staleness`` is the sum over its pushes."""
        total_s = counts.compute_s + counts.wait_s + counts.push_s + counts.superseded_s
        share = 1.0 / total_s if total_s else 0.0
        return cls(
            worker=worker, state=state, pushes=counts.pushes,
            samples_per_s=counts.samples / trained_s if trained_s else 0.0,
            compute_share=counts.compute_s * share, input_share=counts.input_s * share,
            wait_share=counts.wait_s * share, push_share=counts.push_s * share,
            mean_staleness=staleness / counts.pushes if counts.pushes else 0.0,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a run."""

    t: float
    """Seconds since the run's start."""
    epoch: int
    """From 0."""
    epochs: int | None
    version: int
    updates_total: int | None
    samples: int
    samples_per_s: float
    loss: float
    """Mean of the newest updates; nan before the first."""
    eta_s: float | None
    """Seconds left; None: unknown."""
    workers: tuple[WorkerProgress, ...]

    @property
    def share_done(self) -> float:
        """How much of the run is done: 0 to 1."""
        if self.updates_total:
            return min(1.0, self.version / self.updates_total)
        if self.eta_s is not None and self.t + self.eta_s > 0:
            return self.t / (self.t + self.eta_s)
        return 0.0


class Observer(Protocol):
    """Receives the events of a run."""

    shown_plan: Plan | None
    """The plan that it received; None before that."""

    @property
    def trouble(self) -> str:
        """Why its output cannot be written; empty: it can."""

    def plan(self, plan: Plan) -> None:
        """Receive the plan, before the first step."""

    def note(self, text: str) -> None:
        """Receive a sentence that the user should read."""

    def printed(self, text: str) -> None:
        """Receive standard output of the main worker, as it arrives."""

    def progress(self, progress: Progress) -> None:
        """Receive the progress of the run."""

    def evaluated(
        self, epoch: int, metrics: Mapping[str, float], version: int | None = None
    ) -> None:
        """Receive means over the whole test data at one version.

        Args:
            epoch: from 0.
            metrics: name -> mean over the test samples.
            version: the version evaluated inside the epoch; None: at its end.
        """

    def finished(self, summary: Summary) -> None:
        """Receive the summary; the run ended in order."""

    def close(self) -> None:
        """Release resources, also after an error; may be called twice."""


class QuietObserver:
    """Writes nothing to standard output; notes and the script's output go to ``errors``.

    Args:
        errors: where notes and the script's output go; standard error by default.
    """

    def __init__(self, errors: TextIO | None = None) -> None:
        self.shown_plan: Plan | None = None
        self._errors = Lasting(sys.stderr if errors is None else errors)

    @property
    def trouble(self) -> str:
        return self._errors.trouble

    def plan(self, plan: Plan) -> None:
        self.shown_plan = plan

    def note(self, text: str) -> None:
        self._errors.write(f"note: {text}\n")
        self._errors.flush()

    def printed(self, text: str) -> None:
        self._errors.write(text)
        self._errors.flush()

    def progress(self, progress: Progress) -> None:
        return None

    def evaluated(
        self, epoch: int, metrics: Mapping[str, float], version: int | None = None
    ) -> None:
        return None

    def finished(self, summary: Summary) -> None:
        return None

    def close(self) -> None:
        return None


class PlainObserver:
    """Plain lines: the plan, a line every few seconds and at each evaluation, the summary.

    Args:
        out: where lines go; standard output by default.
        every_s: seconds of the run between two lines of progress.
    """

    def __init__(self, out: TextIO | None = None, every_s: float = 5.0) -> None:
        self.shown_plan: Plan | None = None
        self._out = Lasting(sys.stdout if out is None else out, tell_on_errors)
        self._every_s = every_s
        self._next_s = every_s
        self._last_version = -1
        self._is_at_line_start = True

    @property
    def trouble(self) -> str:
        return self._out.trouble

    def plan(self, plan: Plan) -> None:
        self.shown_plan = plan
        self._next_s = self._every_s  # relative to this run's start, which may be one of several
        self._last_version = -1
        for line in plan.render():
            self._line(line)
        self._line("")

    def note(self, text: str) -> None:
        self._line(f"note: {text}")

    def printed(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
        if text:
            self._is_at_line_start = text.endswith("\n")

    def progress(self, progress: Progress) -> None:
        is_soon = self._next_s - self._every_s <= progress.t < self._next_s
        if is_soon or progress.version == self._last_version:
            return  # no new update, as during an evaluation; an earlier time is a watched restart's
        self._next_s, self._last_version = progress.t + self._every_s, progress.version
        self._line(format_progress(progress))

    def evaluated(
        self, epoch: int, metrics: Mapping[str, float], version: int | None = None
    ) -> None:
        self._line(format_metrics(epoch, metrics, version))

    def finished(self, summary: Summary) -> None:
        self._line("")
        for line in render_summary(summary):
            self._line(line)

    def close(self) -> None:
        self._out.flush()

    def _line(self, text: str) -> None:
        if not self._is_at_line_start:
            self._out.write("\n")
        self._out.write(f"{text}\n")
        self._out.flush()
        self._is_at_line_start = True


def tell_on_errors(reason: str) -> None:
    """Report on standard error that standard output cannot be written."""
    errors = Lasting(sys.stderr)
    errors.write(f"note: standard output cannot be written ({reason}): the run goes on\n")
    errors.flush()


def format_progress(progress: Progress) -> str:
    """One line: ``epoch 3/10  update 512/2,350  loss 0.7312  8,912 samples/s  40 s left``."""
    of_epochs = f"/{progress.epochs}" if progress.epochs else ""
    of_updates = f"/{progress.updates_total:,}" if progress.updates_total else ""
    parts = [f"epoch {progress.epoch + 1}{of_epochs}", f"update {progress.version:,}{of_updates}"]
    if not math.isnan(progress.loss):
        parts.append(f"loss {progress.loss:.4f}")
    parts.append(f"{progress.samples_per_s:,.0f} samples/s")
    if progress.eta_s is not None:
        parts.append(f"{format_duration(progress.eta_s)} left")
    return "  ".join(parts)


def format_metrics(epoch: int, metrics: Mapping[str, float], version: int | None) -> str:
    """One line: ``epoch 3: test acc 0.7412, test loss 0.6881``; inside an epoch: ``update 80:``."""
    values = ", ".join(f"test {name} {value:.4f}" for name, value in metrics.items())
    where = f"epoch {epoch + 1}" if version is None else f"update {version:,}"
    return f"{where}: {values or 'nothing was measured'}"


def choose_observer(is_json: bool) -> Observer:
    """Return the observer for the output: JSON, a terminal, or a pipe or file."""
    if is_json:
        return QuietObserver()
    if sys.stdout.isatty():
        from .screen import ScreenObserver

        return ScreenObserver()
    return PlainObserver()
