"""What a simulation says of a protocol, beside what theory says of it.

    time an update        measured in virtual time, with its standard error | closed form | off by
    staleness             mean, p50, p99, histogram                         | closed form | off by
    thrown away           computed for nothing, of all that was computed
    utilisation           computed, of the time that workers were there

This module must not know how it was simulated; it is given the counts.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from .summary import Staleness, staleness_of
from .text import format_duration, four_figures

_BARS, _BAR_WIDTH = 10, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """One protocol under some conditions; ``docs/json.md`` describes every field."""

    protocol: str
    workers: int
    delay: str
    seed: int
    updates: int
    pushes: int
    virtual_s: float
    """Virtual seconds that the updates took."""
    time_per_update_s: float
    time_error_s: float | None
    """Standard error of it; null for fewer than 40 updates."""
    time_likely_s: tuple[float, float] | None = None
    """Where 9 of 10 live runs lie; null where no machine was measured."""
    machine_drift: float | None = None
    """Relative standard deviation of the machine's speed while it was measured; else null."""
    mini_batch_size: int | None = None
    """Samples of a step that was measured; null where no machine was."""
    samples_per_update: int | None = None
    """Those that an update of such steps averages (per local step)."""
    theory_time_s: float | None
    theory_time_source: str
    """What theory's value is, or why there is none."""
    staleness_versions: Staleness
    staleness_histogram: Mapping[int, int]
    """Pushes by the versions that they lagged behind."""
    theory_staleness_versions: float | None
    cancelled: int
    """Mini-batches called off."""
    discarded: int
    staleness_rule: str
    """What was done about stale pushes."""
    mean_scale: float | None
    """What the rule left of a push, in the mean; null where only a run with gradients can tell."""
    note: str
    """What the user should know besides; empty where there is nothing."""
    lost: int
    """Mini-batches that ended with their worker."""
    thrown_away: float
    """Seconds computed for nothing, of all that were computed."""
    utilisation: float
    """Seconds computed, of those that workers were there."""
    wall_s: float
    """Seconds that the simulation took."""

    @property
    def time_off(self) -> float | None:
        """How far the simulation is off theory: 0.01 is 1 % longer."""
        theory_s = self.theory_time_s
        return self.time_per_update_s / theory_s - 1.0 if theory_s else None

    @property
    def staleness_off_versions(self) -> float | None:
        theory = self.theory_staleness_versions
        return None if theory is None else self.staleness_versions.mean - theory

    def to_json(self) -> dict[str, object]:
        """The documented fields, in their order; unknown values are null."""
        fields: dict[str, object] = asdict(self)
        fields["staleness_histogram"] = {
            str(lag): count for lag, count in sorted(self.staleness_histogram.items())
        }
        fields["time_off"] = self.time_off
        fields["staleness_off_versions"] = self.staleness_off_versions
        return fields


def forecast_of(
    staleness: Mapping[int, int],
    times_s: "tuple[float, float, float]",
    computed_s: "tuple[float, float, float]",
    **fields: object,
) -> Forecast:
    """The forecast of some counts.

    Args:
        staleness: pushes by lag.
        times_s: virtual seconds of the run; an update; the standard error of that, or nan.
        computed_s: for pushes; for nothing; that workers were there.
        fields: all else, as `Forecast` has it.
    """
    virtual_s, mean_s, error_s = times_s
    used_s, wasted_s, there_s = computed_s
    spent_s = used_s + wasted_s
    return Forecast(
        virtual_s=virtual_s,
        time_per_update_s=mean_s,
        time_error_s=None if math.isnan(error_s) else error_s,
        staleness_versions=staleness_of(staleness),
        staleness_histogram=dict(staleness),
        thrown_away=wasted_s / spent_s if spent_s else 0.0,
        utilisation=spent_s / there_s if there_s else 0.0,
        **fields,  # type: ignore[arg-type]  # named by the caller
    )


def render_forecast(one: Forecast) -> list[str]:
    """The forecast as lines of plain text."""
    stale = one.staleness_versions
    error = "" if one.time_error_s is None else f" +- {four_figures(one.time_error_s)}"
    rows = [
        ("simulated", f"{one.protocol}, {one.workers:,} workers, each step {one.delay}"),
        ("mini-batch", _batch(one)),
        ("updates", f"{one.updates:,} of {one.pushes:,} pushes in "
                    f"{format_duration(one.virtual_s)} of virtual time"),
        ("time an update", f"{four_figures(one.time_per_update_s)}{error}"),
        ("  likely", _likely(one)),
        ("  theory", _theory_time(one)),
        ("staleness", f"mean {stale.mean:.2f}, p50 {stale.p50}, p99 {stale.p99}, "
                      f"max {stale.max} versions"),
        ("  theory", _theory_staleness(one)),
        ("  rule", _rule(one)),
        ("thrown away", f"{100 * one.thrown_away:.1f} % of all computing"
                        f"{_what_was_lost(one)}"),
        ("utilisation", f"{100 * one.utilisation:.1f} % of the workers' time is computing"),
        ("took", f"{one.wall_s:.2f} s here, {one.pushes / max(one.wall_s, 1e-9):,.0f} pushes a "
                 f"second, seed {one.seed}"),
        ("note", one.note),
    ]  # fmt: skip
    lines = [f"{label:<16}{text}" for label, text in rows if text]
    return [*lines, *_histogram(one.staleness_histogram)]


def _batch(one: Forecast) -> str:
    """Of what steps the times are; empty where none was measured."""
    if one.mini_batch_size is None:
        return ""
    return f"{one.mini_batch_size:,} samples, {one.samples_per_update:,} an update"


def _likely(one: Forecast) -> str:
    if one.time_likely_s is None:
        return ""
    return (
        f"{format_range(one.time_likely_s)} in 9 of 10 live runs (the machine's speed changed by "
        f"{100 * (one.machine_drift or 0.0):.1f} % while it was measured)"
    )


def format_range(ends_s: tuple[float, float]) -> str:
    """``18.6 to 22.1 ms``: the unit once where both have the same."""
    low, high = map(four_figures, ends_s)
    value, _, unit = low.partition(" ")
    return f"{value if high.endswith(f' {unit}') else low} to {high}"


def _theory_time(one: Forecast) -> str:
    if one.theory_time_s is None or one.time_off is None:
        return one.theory_time_source
    off = f"simulated {100 * one.time_off:+.2f} %"
    if one.time_error_s:
        num_errors = abs(one.time_per_update_s - one.theory_time_s) / one.time_error_s
        off += f", {num_errors:.1f} standard errors"
    return f"{four_figures(one.theory_time_s)} ({one.theory_time_source}): {off}"


def _theory_staleness(one: Forecast) -> str:
    if one.theory_staleness_versions is None:
        return "nobody knows a closed form"
    return f"mean {one.theory_staleness_versions:.2f}: {one.staleness_off_versions:+.2f} versions"


def _rule(one: Forecast) -> str:
    """What the staleness rule did; empty where there is none."""
    if one.staleness_rule == "none":
        return ""
    if one.mean_scale is None:
        return f"{one.staleness_rule}: it changes steps, not times; name a task to see them"
    if one.staleness_rule.startswith("drop"):
        return f"{one.staleness_rule}: {one.discarded:,} pushes dropped"
    return f"{one.staleness_rule}: a push counts {one.mean_scale:.3f} in the mean"


def _what_was_lost(one: Forecast) -> str:
    counts = ((one.cancelled, "called off"), (one.discarded, "not used"), (one.lost, "lost"))
    told = ", ".join(f"{count:,} {what}" for count, what in counts if count)
    return f": mini-batches {told}" if told else ""


def _histogram(counts: Mapping[int, int]) -> list[str]:
    """Bars of the staleness; nothing where all pushes are fresh."""
    if set(counts) <= {0}:
        return []
    low, high = min(counts), max(counts)
    width = -(-(high - low + 1) // _BARS)
    total = sum(counts.values())
    lines = ["", "staleness, versions"]
    bins: list[tuple[str, int]] = []
    for start in range(low, high + 1, width):
        inside = sum(count for lag, count in counts.items() if start <= lag < start + width)
        bins.append((str(start) if width == 1 else f"{start} to {start + width - 1}", inside))
    most = max(count for _, count in bins)
    for label, count in bins:
        bar = "#" * round(_BAR_WIDTH * count / most)
        lines.append(f"{label:>14} |{bar:<{_BAR_WIDTH}}| {100 * count / total:.1f} %")
    return lines
