"""The simulated time of an update, for the figures that need no gradients.

It must not know the paper's numbers.
"""

from dataclasses import dataclass

from paceline.predict.simulation import World, forecast
from paceline.report.forecast import Forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Seconds per update: simulated, and by theory if it gives a value."""

    seconds: float
    error_s: float
    """Standard error; nan for fewer than 40 updates."""
    theory_s: float | None
    staleness_versions: float
    fresh_share: float
    """Share of the gradients that are of the newest version."""


def update_time(
    protocol: str, num_workers: int, delay: str, num_updates: int, seed: int = 1
) -> Timed:
    """Simulate ``num_updates`` updates of one protocol; all workers draw from ``delay``."""
    result: Forecast = forecast(
        protocol, num_workers, World(delay=(delay,), seed=seed), num_updates
    )
    return Timed(
        seconds=result.time_per_update_s,
        error_s=float("nan") if result.time_error_s is None else result.time_error_s,
        theory_s=result.theory_time_s,
        staleness_versions=result.staleness_versions.mean,
        fresh_share=result.staleness_histogram.get(0, 0) / result.pushes,
    )
