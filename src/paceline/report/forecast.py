"""The forecast of a protocol by simulation, compared with theory.

    time an update        measured in virtual time, with its standard error | closed form | off by
    staleness             mean, p50, p99, histogram                         | closed form | off by
    thrown away           share of the computing time whose work was not used
    utilisation           share of the workers' time spent computing

This module must not know how the counts that it is given were simulated.
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
    """Virtual seconds of all updates."""
    time_per_update_s: float
    time_error_s: float | None
    """Standard error of ``time_per_update_s``; null for fewer than 40 updates."""
    time_likely_s: tuple[float, float] | None = None
    """Range of 9 of 10 live runs; null where no machine was measured."""
    machine_drift: float | None = None
    """Relative standard deviation of the machine's speed; null where no machine was measured."""
    mini_batch_size: int | None = None
    """Samples of a measured step; null where no machine was measured."""
    samples_per_update: int | None = None
    """Samples that an update averages (per local step); null where no machine was measured."""
    theory_time_s: float | None
    theory_time_source: str
    """The formula of ``theory_time_s``, or why there is none."""
    staleness_versions: Staleness
    staleness_histogram: Mapping[int, int]
    """Staleness in versions -> number of pushes."""
    theory_staleness_versions: float | None
    cancelled: int
    """Mini-batches that were cancelled."""
    discarded: int
    staleness_rule: str
    """The rule for stale pushes: ``none``, ``inverse``, ``distance:C``, ``drop:S``."""
    mean_scale: float | None
    """Mean factor that the rule applied to a push; null where it depends on gradients."""
    note: str
    """A remark for the user, or empty."""
    lost: int
    """Mini-batches lost with their worker."""
    thrown_away: float
    """Share of the computing time whose work was not used."""
    utilisation: float
    """Share of the workers' time spent computing."""
    wall_s: float
    """Seconds that the simulation took."""

    @property
    def time_off(self) -> float | None:
        """Relative deviation from theory (0.01: simulated time is 1 % longer); None without one."""
        theory_s = self.theory_time_s
        return self.time_per_update_s / theory_s - 1.0 if theory_s else None

    @property
    def staleness_off_versions(self) -> float | None:
        theory = self.theory_staleness_versions
        return None if theory is None else self.staleness_versions.mean - theory

    def to_json(self) -> dict[str, object]:
        """The documented fields, in order; unknown values are null."""
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
    """Return the forecast computed from counts.

    Args:
        staleness: lag in versions -> number of pushes.
        times_s: virtual seconds of the run, of an update, and the latter's standard error or nan.
        computed_s: seconds computed for pushes, seconds wasted, seconds that workers were present.
        fields: the other fields of `Forecast`.
    """
    virtual_s, mean_s, error_s = times_s
    used_s, wasted_s, present_s = computed_s
    spent_s = used_s + wasted_s
    return Forecast(
        virtual_s=virtual_s,
        time_per_update_s=mean_s,
        time_error_s=None if math.isnan(error_s) else error_s,
        staleness_versions=staleness_of(staleness),
        staleness_histogram=dict(staleness),
        thrown_away=wasted_s / spent_s if spent_s else 0.0,
        utilisation=spent_s / present_s if present_s else 0.0,
        **fields,  # type: ignore[arg-type]  # named by the caller
    )


def render_forecast(forecast: Forecast) -> list[str]:
    """Return the forecast as lines of plain text."""
    stale = forecast.staleness_versions
    error = "" if forecast.time_error_s is None else f" +- {four_figures(forecast.time_error_s)}"
    pushes_per_s = forecast.pushes / max(forecast.wall_s, 1e-9)
    rows = [
        ("simulated", f"{forecast.protocol}, {forecast.workers:,} workers, each step "
                      f"{forecast.delay}"),
        ("mini-batch", _batch(forecast)),
        ("updates", f"{forecast.updates:,} of {forecast.pushes:,} pushes in "
                    f"{format_duration(forecast.virtual_s)} of virtual time"),
        ("time an update", f"{four_figures(forecast.time_per_update_s)}{error}"),
        ("  likely", _likely(forecast)),
        ("  theory", _theory_time(forecast)),
        ("staleness", f"mean {stale.mean:.2f}, p50 {stale.p50}, p99 {stale.p99}, "
                      f"max {stale.max} versions"),
        ("  theory", _theory_staleness(forecast)),
        ("  rule", _rule(forecast)),
        ("thrown away", f"{100 * forecast.thrown_away:.1f} % of all computing"
                        f"{_lost_work(forecast)}"),
        ("utilisation", f"{100 * forecast.utilisation:.1f} % of the workers' time is computing"),
        ("took", f"{forecast.wall_s:.2f} s here, {pushes_per_s:,.0f} pushes a second, seed "
                 f"{forecast.seed}"),
        ("note", forecast.note),
    ]  # fmt: skip
    lines = [f"{label:<16}{text}" for label, text in rows if text]
    return [*lines, *_histogram(forecast.staleness_histogram)]


def _batch(forecast: Forecast) -> str:
    """Samples of a step and an update; empty where no step was measured."""
    if forecast.mini_batch_size is None:
        return ""
    return f"{forecast.mini_batch_size:,} samples, {forecast.samples_per_update:,} an update"


def _likely(forecast: Forecast) -> str:
    if forecast.time_likely_s is None:
        return ""
    drift = 100 * (forecast.machine_drift or 0.0)
    return (
        f"{format_range(forecast.time_likely_s)} in 9 of 10 live runs (the machine's speed changed "
        f"by {drift:.1f} % while it was measured)"
    )


def format_range(ends_s: tuple[float, float]) -> str:
    """Return a range of times, with a common unit written once: ``18.6 to 22.1 ms``."""
    low, high = map(four_figures, ends_s)
    value, _, unit = low.partition(" ")
    return f"{value if high.endswith(f' {unit}') else low} to {high}"


def _theory_time(forecast: Forecast) -> str:
    if forecast.theory_time_s is None or forecast.time_off is None:
        return forecast.theory_time_source
    off = f"simulated {100 * forecast.time_off:+.2f} %"
    if forecast.time_error_s:
        num_errors = (
            abs(forecast.time_per_update_s - forecast.theory_time_s) / forecast.time_error_s
        )
        off += f", {num_errors:.1f} standard errors"
    return f"{four_figures(forecast.theory_time_s)} ({forecast.theory_time_source}): {off}"


def _theory_staleness(forecast: Forecast) -> str:
    theory = forecast.theory_staleness_versions
    if theory is None:
        return "no closed form is known"
    return f"mean {theory:.2f}: {forecast.staleness_off_versions:+.2f} versions"


def _rule(forecast: Forecast) -> str:
    """What the staleness rule did; empty where there is none."""
    if forecast.staleness_rule == "none":
        return ""
    if forecast.mean_scale is None:
        return (
            f"{forecast.staleness_rule}: it changes steps, not times; name a task to see its effect"
        )
    if forecast.staleness_rule.startswith("drop"):
        return f"{forecast.staleness_rule}: {forecast.discarded:,} pushes dropped"
    return f"{forecast.staleness_rule}: a push counts {forecast.mean_scale:.3f} on average"


def _lost_work(forecast: Forecast) -> str:
    counts = (
        (forecast.cancelled, "cancelled"),
        (forecast.discarded, "not used"),
        (forecast.lost, "lost"),
    )
    losses = ", ".join(f"{count:,} {fate}" for count, fate in counts if count)
    return f"; mini-batches: {losses}" if losses else ""


def _histogram(counts: Mapping[int, int]) -> list[str]:
    """Return a bar chart of the staleness; no lines if all pushes are fresh."""
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
