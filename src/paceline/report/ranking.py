"""The advice of ``paceline plan``: protocols ranked, with reasons.

It is given forecasts and each protocol's result in the race; it must not know how they were
computed.
"""

import math
import statistics
from dataclasses import asdict, dataclass

from .forecast import Forecast, format_range
from .text import format_duration

RACE_SEEDS = 3
"""Number of seeds with which the last two protocols race."""


@dataclass(slots=True, kw_only=True)
class Standing:
    """The result of a protocol when it left the race."""

    protocol: str
    virtual_s: float
    loss: float
    updates: int
    rank: int = 0
    wins: int = 0
    """For the last two: seeds with which it was ahead, of ``RACE_SEEDS`` or of ``target_s``."""
    target_s: tuple[float, ...] = ()
    """Virtual seconds to the target, one per seed; inf: not reached."""
    best: float | None = None
    """The value nearest to the target; None: no value was finite."""

    @property
    def to_target_s(self) -> float:
        """Median of ``target_s``; inf if half of the runs missed the target, or none was made."""
        return statistics.median(self.target_s) if self.target_s else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedProtocol:
    """One protocol: its forecast and its result in the race."""

    forecast: Forecast
    standing: Standing
    num_steps: int = 1
    """Mini-batches per push."""

    @property
    def pushes_per_s(self) -> float:
        """Mini-batches per second that go into updates."""
        forecast = self.forecast
        return self.num_steps * forecast.pushes / forecast.virtual_s if forecast.virtual_s else 0.0

    @property
    def efficiency(self) -> float:
        """Share of the workers' time that goes into updates: 0 to 1."""
        return self.forecast.utilisation * (1.0 - self.forecast.thrown_away)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """When the advised protocol reaches the target, in virtual time.

    Attributes:
        name: accuracy or loss.
        best: the value nearest to the target; None: no value was finite.
        virtual_s: seconds to the target, or until the race ended.
    """

    name: str
    value: float
    is_reached: bool
    best: float | None
    virtual_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The advised protocol and its competitors; ``docs/json.md`` describes every field."""

    task: str
    workers: int
    cores: int | None
    """Cores that the workers share; None: each has its own."""
    mini_batch_size: int
    profile_dir: str
    profile_steps: int
    step_s: float
    push_s: float
    candidates: tuple[RankedProtocol, ...]
    """Ranked, the advised protocol first."""
    are_alike: bool
    """Whether the race did not tell the first two apart."""
    target: Target | None

    @property
    def advised(self) -> str:
        return self.candidates[0].forecast.protocol

    def to_json(self) -> dict[str, object]:
        """The documented fields, in order."""
        return {
            "task": self.task,
            "workers": self.workers,
            "cores": self.cores,
            "mini_batch_size": self.mini_batch_size,
            "profile": self.profile_dir,
            "profile_steps": self.profile_steps,
            "step_s": self.step_s,
            "push_s": self.push_s,
            "advised": self.advised,
            "why": why(self),
            "how_sure": how_sure(self),
            "candidates": [_row(candidate) for candidate in self.candidates],
            "target": None if self.target is None else asdict(self.target),
        }


def _row(candidate: RankedProtocol) -> dict[str, object]:
    forecast, standing = candidate.forecast, candidate.standing
    return {
        "protocol": forecast.protocol,
        "time_per_update_s": forecast.time_per_update_s,
        "time_likely_s": forecast.time_likely_s,
        "pushes_per_s": candidate.pushes_per_s,
        "efficiency": candidate.efficiency,
        "thrown_away": forecast.thrown_away,
        "staleness_versions": forecast.staleness_versions.mean,
        "rank": standing.rank,
        "race_loss": standing.loss if standing.loss < float("inf") else None,
        "race_virtual_s": standing.virtual_s,
        "race_updates": standing.updates,
        "race_wins": standing.wins,
        "target_s": standing.to_target_s if standing.to_target_s < math.inf else None,
    }


def render_advice(advice: Advice) -> list[str]:
    """Return the table, the advice, the reason and the confidence as lines of text."""
    lines = [
        f"{advice.task}, {advice.workers} workers, mini-batches of {advice.mini_batch_size}",
        f"profile: {advice.profile_steps} steps of {format_duration(advice.step_s)}, "
        f"plus {format_duration(advice.push_s)} each for the push ({advice.profile_dir})",
        "",
        f"{'protocol':<20}{'an update':>11}{'likely':>19}{'batches/s':>11}{'efficient':>11}"
        f"{'stale':>7}{'loss':>9}{'after':>9}{'to target' if advice.target else '':>11}".rstrip(),
    ]
    for candidate in advice.candidates:
        forecast, standing = candidate.forecast, candidate.standing
        lines.append(
            f"{forecast.protocol:<20}{format_duration(forecast.time_per_update_s):>11}"
            f"{_likely(forecast):>19}{candidate.pushes_per_s:>11,.1f}"
            f"{100 * candidate.efficiency:>9.0f} %"
            f"{forecast.staleness_versions.mean:>7.1f}{standing.loss:>9.4g}"
            f"{format_duration(standing.virtual_s):>9}{_to_target(standing):>11}".rstrip()
        )
    place = "separate machines or cores, one per worker"
    if advice.cores is not None:
        place = f"one machine whose {advice.cores} cores all workers share"
    lines += ["", f"Times are predicted for {place}; 9 of 10 runs lie in",
              "the likely range. Losses were measured in virtual time, with real gradients: "
              "lower is better.", "",
              f"advice: --protocol {advice.advised} --mini-batch-size {advice.mini_batch_size}",
              f"why: {why(advice)}", f"how sure: {how_sure(advice)}"]  # fmt: skip
    if advice.target is not None:
        lines.append(_target(advice.target))
    return lines


def _likely(forecast: Forecast) -> str:
    ends_s = forecast.time_likely_s
    return "" if ends_s is None else format_range(ends_s)


def why(advice: Advice) -> str:
    """Return the advantage of the advised protocol, against full-sync if it is a candidate."""
    first = advice.candidates[0]
    others = {candidate.forecast.protocol: candidate for candidate in advice.candidates[1:]}
    base = others.get("full-sync") or next(iter(others.values()), None)
    if base is None:
        return "it is the only candidate"
    ratio = first.pushes_per_s / base.pushes_per_s if base.pushes_per_s else 0.0
    text = (
        f"{ratio:.2f}x the useful mini-batches a second of {base.forecast.protocol}, at a mean "
        f"staleness of {first.forecast.staleness_versions.mean:.1f} versions"
    )
    if first.standing.loss < base.standing.loss:
        text += f"; loss {first.standing.loss:.4g} against {base.standing.loss:.4g} in the race"
    return text


def how_sure(advice: Advice) -> str:
    """Return how clearly the advised protocol is ahead of the second."""
    if len(advice.candidates) < 2:
        return "nothing was compared"
    first, second = advice.candidates[:2]
    if first.standing.target_s:
        return _how_sure_of_target(advice)
    if not math.isfinite(first.standing.loss):
        return "not at all: every protocol diverged; lower --lr"
    text = (
        f"ahead of {second.forecast.protocol} with {first.standing.wins} of {RACE_SEEDS} "
        f"seeds (mean loss {first.standing.loss:.4g} against {second.standing.loss:.4g})"
    )
    if advice.are_alike:
        return f"{text}: no clear difference, either will do"
    is_clear = first.standing.wins == RACE_SEEDS
    return f"{text}: {'clear' if is_clear else 'close, try both'}"


def _how_sure_of_target(advice: Advice) -> str:
    """Return how clearly the advised protocol reaches the target before the second."""
    first, second = (candidate.standing for candidate in advice.candidates[:2])
    if not second.target_s:
        seeds = "one seed" if len(first.target_s) == 1 else f"{len(first.target_s)} seeds"
        return f"only this protocol reached the target, with {seeds}"
    num_seeds = min(len(first.target_s), len(second.target_s))
    text = (
        f"reached the target before {second.protocol} with {first.wins} of {num_seeds} seeds "
        f"(median {_to_target(first)} against {_to_target(second)})"
    )
    if advice.are_alike:
        return f"{text}: no clear difference, either will do"
    return f"{text}: {'clear' if first.wins == num_seeds else 'close, try both'}"


def _to_target(standing: Standing) -> str:
    if not standing.target_s:
        return ""
    return format_duration(standing.to_target_s) if standing.to_target_s < math.inf else "never"


def _target(target: Target) -> str:
    goal = f"{target.name} {target.value:g}"
    if target.is_reached:
        return f"{goal}: after about {format_duration(target.virtual_s)}"
    outcome = f"{goal}: not reached in {format_duration(target.virtual_s)} of virtual time"
    if target.best is None:
        return f"{outcome}, and no value was finite; lower --lr"
    return f"{outcome}, the best was {target.best:.4f}; give the race more --seconds"
