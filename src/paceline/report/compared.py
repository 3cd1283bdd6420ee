"""Several protocols under the same conditions, run by run, as numbers that can be compared.

    summaries -> Outcome (a run) -> Contender (a protocol, over its seeds) -> Comparison

Times are seconds of training: an evaluation costs none, so a live run and one in virtual time
mean the same by them. A figure is the median over the seeds, with the least and the most beside
it. This module must not know terminals, pictures or how a run was made.
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
"""Fewer points than these are no curve: the training loss is shown beside them."""


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
    """Discarded by the protocol, or late."""
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
    """A figure over the seeds; None where it was not measured, or the target not reached."""

    median: float | None
    least: float | None
    most: float | None


FIGURES = (
    "target_s", "test_error", "best_accuracy", "test_loss", "training_loss", "updates",
    "time_per_update_s", "mean_staleness_versions", "dropped_samples", "unused_pushes",
    "abandoned_steps", "trained_s",
)  # fmt: skip
"""What is compared: the numbers of an outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedProtocol:
    """One protocol, over its seeds."""

    protocol: str
    outcomes: tuple[RunOutcome, ...]
    failures: tuple[str, ...] = ()
    """Why runs under it ended without a result."""

    def figure(self, name: str) -> Spread:
        """A number of its outcomes; a target that was not reached lies behind all others."""
        missing = math.inf if name == "target_s" else math.nan
        values = [
            missing if (v := getattr(outcome, name)) is None else v for outcome in self.outcomes
        ]
        values = [value for value in values if not math.isnan(value)]
        if not values:
            return Spread(median=None, least=None, most=None)
        found = (statistics.median(values), min(values), max(values))
        median, least, most = (value if math.isfinite(value) else None for value in found)
        return Spread(median=median, least=least, most=most)

    @property
    def typical(self) -> RunOutcome | None:
        """The run in the middle: by its time to the target, then by its last error."""
        ranked = sorted(self.outcomes, key=_rank)
        return ranked[(len(ranked) - 1) // 2] if ranked else None


def _rank(one: RunOutcome) -> tuple[float, float]:
    error = one.test_error if one.test_error is not None else one.test_loss
    return (
        math.inf if one.target_s is None else one.target_s,
        math.inf if error is None else error,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All of them."""

    task: str
    workers: int
    conditions: str
    """Stragglers and batch in words: ``slow 0=4x, 32 samples a mini-batch``."""
    is_simulated: bool
    target_accuracy: float | None
    repeats: int
    contenders: tuple[ComparedProtocol, ...]
    folder: str
    interrupted_in: str = ""
    """The run that Ctrl-C ended; empty where none was."""

    @property
    def measure(self) -> str:
        """What the error of a run is: test error, or test loss where there is no accuracy."""
        is_wrong = any(
            o.test_error is not None for contender in self.contenders for o in contender.outcomes
        )
        return "test error" if is_wrong else "test loss"

    @property
    def has_curves(self) -> bool:
        """Whether every run was evaluated often enough that its errors are a curve."""
        outcomes = [outcome for contender in self.contenders for outcome in contender.outcomes]
        return all(len(one.errors) >= FEWEST_EVALUATIONS for one in outcomes)

    @property
    def clock(self) -> str:
        """Which seconds are meant."""
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
    """What is compared of a run."""
    trained = _trained(summary)
    measured = [(trained(one.t), one.value) for one in summary.accuracies]
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
    """A function from seconds since the first step to seconds of training.

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
    """Neighbours averaged, so that several noisy curves can lie over each other."""
    size = max(1, -(-len(losses) // most))
    parts = [losses[i : i + size] for i in range(0, len(losses), size)]
    return tuple(
        Point(t=part[-1].t, value=math.fsum(one.value for one in part) / len(part))
        for part in parts
    )


def finite(points: Sequence[Point]) -> tuple[Point, ...]:
    """Those that can be drawn."""
    return tuple(point for point in points if math.isfinite(point.value))
