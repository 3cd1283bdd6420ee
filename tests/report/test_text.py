"""Numbers are written with as many figures as are significant."""

import pytest

from paceline.report.text import format_duration, four_figures, or_dash, table, three_figures


@pytest.mark.parametrize(
    ("seconds", "people", "measured", "computed"),
    [
        (0.0, "0 s", "0 ns", "0 us"),
        (4.12e-5, "41 us", "41.2 us", "41.2 us"),
        (0.020054, "20.1 ms", "20.1 ms", "20.05 ms"),
        (12.8341, "12.8 s", "12.8 s", "12.83 s"),
        (1234.0, "20 min 34 s", "1,234 s", "1234 s"),
        (9.996e-4, "1 ms", "1 ms", "999.6 us"),
        (0.9996, "1.0 s", "1 s", "999.6 ms"),
        (59.97, "1 min 00 s", "60 s", "59.97 s"),
        (999.7, "16 min 40 s", "1,000 s", "999.7 s"),
        (12345.0, "3 h 25 min", "12,345 s", "12,345 s"),
    ],
)
def test_a_time_is_written_for_its_reader(
    seconds: float, people: str, measured: str, computed: str
) -> None:
    assert format_duration(seconds) == people
    assert three_figures(seconds) == measured
    assert four_figures(seconds) == computed


def test_an_unknown_value_is_a_dash() -> None:
    assert (or_dash(None, str), or_dash(1, str), three_figures(None)) == ("-", "1", "-")


def test_a_column_is_as_wide_as_its_widest_cell() -> None:
    assert table(("way", "time"), [("eager", "1 s"), ("aoti", "250 ms")]) == [
        "way      time",
        "eager     1 s",
        "aoti   250 ms",
    ]
