"""Figures that compare several protocols under the same conditions, run by run.

    summaries -> Outcome (a run) -> Contender (a protocol, over its seeds) -> Comparison

Times are seconds of training, without evaluations, so live runs and runs in virtual time can be
compared. A figure is the median over the seeds, with its minimum and maximum. This module must not
know terminals, pictures or how a run was made.
"""

import bisect
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from .summary import Summary
from .text import Point

FEWEST_EVALUATIONS = 3
"""With fewer evaluations in a run there is no curve of errors: training loss is shown too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """One run; ``docs/json.md`` describes every field."""

    seed: int
    target_s: float | None
    """Seconds of training until the target; None where it was not reached, or none was set."""
    test_error: float | None
    """1 - accuracy of the last evaluation."""
    best_accuracy: float | None
    test_loss: float | None
    training_loss: float | None
    updates: int
    time_per_update_s: float | None
    mean_staleness_versions: float
    dropped_samples: int
    unused_pushes: int
    """Pushes that the protocol discarded, or that came late."""
    abandoned_steps: int
    trained_s: float
    ended: str
    run_dir: str
    errors: tuple[Point, ...]
    """Test error, or test loss where the task has no accuracy, against seconds of training."""
    losses: tuple[Point, ...]
    """Training loss; not in the JSON."""

    def to_json(self) -> dict[str, object]:
        """The documented fields, in their order."""
        fields: dict[str, object] = asdict(self)
        del fields["losses"]
        return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median, minimum and maximum over the seeds; None: not measured, or target not reached."""

    median: float | None
    least: float | None
    most: float | None


FIGURES = (
    "target_s", "test_error", "best_accuracy", "test_loss", "training_loss", "updates",
    "time_per_update_s", "mean_staleness_versions", "dropped_samples", "unused_pushes",
    "abandoned_steps", "trained_s",
)  # fmt: skip
"""The fields of `RunOutcome` that are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedProtocol:
    """One protocol and its runs, one per seed."""

    protocol: str
    outcomes: tuple[RunOutcome, ...]
    failures: tuple[str, ...] = ()
    """Why runs ended without a result."""

    def figure(self, name: str) -> Spread:
        """Return the spread of a field over the runs; a target not reached counts as infinite."""
        missing = math.inf if name == "target_s" else math.nan
        values = [
            missing if (v := getattr(outcome, name)) is None else v for outcome in self.outcomes
        ]
        values = [value for value in values if not math.isnan(value)]
        if not values:
            return Spread(median=None, least=None, most=None)
        spread = (statistics.median(values), min(values), max(values))
        median, least, most = (value if math.isfinite(value) else None for value in spread)
        return Spread(median=median, least=least, most=most)

    @property
    def typical(self) -> RunOutcome | None:
        """The median run, by time to the target, then by last error; None without runs."""
        ranked = sorted(self.outcomes, key=_rank)
        return ranked[(len(ranked) - 1) // 2] if ranked else None


def _rank(outcome: RunOutcome) -> tuple[float, float]:
    error = outcome.test_error if outcome.test_error is not None else outcome.test_loss
    return (
        math.inf if outcome.target_s is None else outcome.target_s,
        math.inf if error is None else error,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All protocols, and the conditions that they were run under."""

    task: str
    workers: int
    conditions: str
    """Stragglers and batch as text: ``slow 0=4x, 32 samples a mini-batch``."""
    is_simulated: bool
    target_accuracy: float | None
    repeats: int
    contenders: tuple[ComparedProtocol, ...]
    folder: str
    interrupted_in: str = ""
    """The run that Ctrl-C ended; empty: none."""

    @property
    def measure(self) -> str:
        """What is plotted: test error, or test loss where there is no accuracy."""
        is_wrong = any(
            outcome.test_error is not None
            for contender in self.contenders
            for outcome in contender.outcomes
        )
        return "test error" if is_wrong else "test loss"

    @property
    def has_curves(self) -> bool:
        """Whether every run has enough evaluations for a curve of errors."""
        outcomes = [outcome for contender in self.contenders for outcome in contender.outcomes]
        return all(len(outcome.errors) >= FEWEST_EVALUATIONS for outcome in outcomes)

    @property
    def clock(self) -> str:
        """The unit of time."""
        return "virtual seconds" if self.is_simulated else "seconds of training"

    def to_json(self) -> dict[str, object]:
        """The documented fields, in their order."""
        return {
            "task": self.task,
            "workers": self.workers,
            "conditions": self.conditions,
            "is_simulated": self.is_simulated,
            "target_accuracy": self.target_accuracy,
            "repeats": self.repeats,
            "folder": self.folder,
            "interrupted_in": self.interrupted_in,
            "protocols": [
                {
                    "protocol": contender.protocol,
                    "runs": [outcome.to_json() for outcome in contender.outcomes],
                    "failures": list(contender.failures),
                    **{name: asdict(contender.figure(name)) for name in FIGURES},
                }
                for contender in self.contenders
            ],
        }


def outcome_of(summary: Summary, seed: int, target_accuracy: float | None) -> RunOutcome:
    """Return the figures of a run that are compared."""
    trained = _trained(summary)
    measured = [(trained(point.t), point.value) for point in summary.accuracies]
    test_losses = finite(
        [Point(t=trained(loss.t), value=loss.value) for loss in summary.test_losses]
    )
    errors = tuple(Point(t=t, value=1.0 - accuracy) for t, accuracy in measured)
    reached = (
        t for t, accuracy in measured if target_accuracy is not None and accuracy >= target_accuracy
    )
    return RunOutcome(
        seed=seed,
        target_s=next(reached, None),
        test_error=errors[-1].value if errors else None,
        best_accuracy=max((accuracy for _, accuracy in measured), default=None),
        test_loss=test_losses[-1].value if test_losses else None,
        training_loss=summary.final_loss,
        updates=summary.updates,
        time_per_update_s=summary.time_per_update_s,
        mean_staleness_versions=summary.staleness_versions.mean,
        dropped_samples=summary.dropped_samples,
        unused_pushes=summary.discarded_pushes + summary.late_pushes,
        abandoned_steps=summary.superseded.count,
        trained_s=sum(epoch.seconds for epoch in summary.epochs),
        ended=summary.ended,
        run_dir=summary.run_dir,
        errors=errors or test_losses,
        losses=_smooth([Point(t=trained(loss.t), value=loss.value) for loss in summary.losses]),
    )


def _trained(summary: Summary) -> Callable[[float], float]:
    """Return a function from seconds since the first step to seconds of training.

    The time between epochs does not count. Epochs follow one another, so one search finds the last
    that began before ``t``.
    """
    starts = [epoch.t - epoch.seconds for epoch in summary.epochs]
    durations = [epoch.seconds for epoch in summary.epochs]
    before = [0.0, *itertools.accumulate(durations)]

    def seconds(t: float) -> float:
        last = bisect.bisect_right(starts, t) - 1
        return 0.0 if last < 0 else before[last] + min(t - starts[last], durations[last])

    return seconds


def _smooth(losses: Sequence[Point], most: int = 48) -> tuple[Point, ...]:
    """Average neighbouring points, down to at most ``most``, to make noisy curves readable."""
    size = max(1, -(-len(losses) // most))
    parts = [losses[i : i + size] for i in range(0, len(losses), size)]
    return tuple(
        Point(t=part[-1].t, value=math.fsum(point.value for point in part) / len(part))
        for part in parts
    )


def finite(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the points with a finite value."""
    return tuple(point for point in points if math.isfinite(point.value))
