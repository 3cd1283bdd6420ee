"""A forecast is shown beside theory, with its deviation."""

import math

from paceline.report.forecast import Forecast, forecast_of, render_forecast


def forecast(error_s: float = 0.001, theory_s: float | None = 0.100) -> Forecast:
    """Ten pushes of 1.0 s in all, a fifth of it wasted; the workers were present for 2.0 s."""
    return forecast_of(
        {0: 6, 1: 3, 5: 1},
        times_s=(1.02, 0.102, error_s),
        computed_s=(0.8, 0.2, 2.0),
        protocol="async", workers=2, delay="exp:20ms", seed=0, updates=10, pushes=10,
        theory_time_s=theory_s, theory_time_source="renewal", theory_staleness_versions=1.0,
        cancelled=2, discarded=0, staleness_rule="none", mean_scale=None, note="", lost=0,
        wall_s=0.5,
    )  # fmt: skip


def test_shares_are_of_all_computing_and_of_the_time_present() -> None:
    result = forecast()
    assert math.isclose(result.thrown_away, 0.2)
    assert math.isclose(result.utilisation, 0.5)
    assert math.isclose(result.staleness_versions.mean, 0.8)


def test_the_forecast_is_compared_with_theory_in_percent_and_standard_errors() -> None:
    result = forecast()
    assert result.time_off is not None
    assert math.isclose(result.time_off, 0.02)
    text = "\n".join(render_forecast(result))
    assert "100 ms (renewal): simulated +2.00 %, 2.0 standard errors" in text
    assert "mean 1.00: -0.20 versions" in text
    assert "20.0 % of all computing; mini-batches: 2 cancelled" in text


def test_unknown_figures_are_null() -> None:
    result = forecast(error_s=math.nan, theory_s=None)
    assert (result.time_error_s, result.time_off) == (None, None)
    assert "  theory        renewal" in render_forecast(result)


def test_pushes_are_drawn_by_staleness() -> None:
    lines = render_forecast(forecast())
    bars = lines[lines.index("staleness, versions") + 1 :]
    assert bars[0].endswith("60.0 %")
    assert [bar.count("#") for bar in bars] == [40, 20, 0, 0, 0, 7]
