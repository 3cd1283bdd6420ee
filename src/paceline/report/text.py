"""Numbers as plain text: times, tables, and curves of characters.

    format_duration    340 ms   7.4 s   2 min 03 s    reports, progress
    three_figures      41.2 us  1.53 ms               measurements
    four_figures       20.05 ms                       predictions

All reports, measurements and predictions use these functions. This module must not know what a
number means.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

HEIGHT = 9
"""Lines of a plot."""
LARGEST = 1e300
"""Larger absolute values are drawn at the edge, since floats cannot span such a range."""
_AXIS = 8
"""Columns of the numbers left of a plot."""
BESIDE = _AXIS + 7
"""Columns that a plot needs besides its width."""
_ROUNDED = 0.9995
"""From here on a number rounds to 1 in three figures, so the next unit is used."""


def format_duration(seconds: float) -> str:
    """Return a duration for people: ``340 ms``, ``7.4 s``, ``2 min 03 s``."""
    if 0 < seconds < 1e-3 * _ROUNDED:
        return f"{seconds * 1e6:.0f} us"
    if 0 < seconds < _ROUNDED:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s" if seconds else "0 s"
    rounded = round(seconds)
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return aligned lines: the first column to the left, the others to the right."""
    lines = [header, *rows]
    widths = [max(len(row[i]) for row in lines) for i in range(len(header))]
    return [
        "  ".join(
            f"{cell:<{width}}" if i == 0 else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in lines
    ]


def three_figures(seconds: float | None) -> str:
    """Return a time with three figures: ``41.2 us``, ``1.53 ms``, ``12.8 s``; "-" for None."""
    if seconds is None:
        return "-"
    size = abs(seconds)
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if size * factor >= _ROUNDED:
            is_short = size < 1000 * _ROUNDED
            return f"{seconds * factor:.3g} {unit}" if is_short else f"{seconds:,.0f} s"
    return f"{seconds * 1e9:.0f} ns"


def four_figures(seconds: float) -> str:
    """Return a time with four figures, in s, ms or us: ``1.234 s``, ``20.05 ms``."""
    if seconds >= 9999.5:
        return f"{seconds:,.0f} s"
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.4g} {unit}"
    return f"{seconds / 1e-6:.4g} us"


def or_dash(value: float | None, form: Callable[[float], str]) -> str:
    """Return the formatted value, or "-" for None."""
    return "-" if value is None else form(value)


# -- the curve ---------------------------------------------------------------------------------
#
#     2.31 |*                                        | 1.0
#          | **                          o           |        * training loss  (left)
#          |   ****                o                 |        o test accuracy  (right)
#     0.52 |       *********************             | 0.0
#           0 s                              74.0 s


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A point of a curve: ``t`` seconds after the first step."""

    t: float
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve of characters, with its own range of values."""

    points: Sequence[Point]
    mark: str
    low: float
    high: float
    is_joined: bool = False
    """Whether the columns between two points are marked."""

    def row(self, value: float) -> int:
        """Return the line of the plot for a value, from the top."""
        height = (value - self.low) / (self.high - self.low)
        return round((1 - min(1.0, max(0.0, height))) * (HEIGHT - 1))


def plot(
    series: Sequence[Series], width: int, legend: Sequence[str], right: tuple[str, str] = ("", "")
) -> list[str]:
    """Plot curves against time as lines of characters, with the legend below.

    Args:
        series: the curves; the left axis belongs to the first one.
        width: columns of the plot without its axes.
        legend: one text per curve.
        right: labels at the top and the bottom of the right axis.
    """
    stop_s = max(point.t for curve in series for point in curve.points)
    grid = [[" "] * width for _ in range(HEIGHT)]
    for curve in series:
        previous: tuple[int, float] | None = None
        for point in curve.points:
            column = max(0, round(point.t / stop_s * (width - 1)) if stop_s > 0 else 0)
            grid[curve.row(point.value)][column] = curve.mark
            if previous is not None and curve.is_joined:
                start, value = previous
                for i in range(start + 1, column):
                    share = (i - start) / (column - start)
                    grid[curve.row(value + share * (point.value - value))][i] = curve.mark
            previous = column, point.value
    low, high = series[0].low, series[0].high
    lines = []
    # Enough digits that both ends differ, even if the loss hardly changed.
    digits = next((n for n in range(3, 7) if f"{high:.{n}g}" != f"{low:.{n}g}"), 7)
    for row, cells in enumerate(grid):
        left = {0: f"{high:.{digits}g}", HEIGHT - 1: f"{low:.{digits}g}"}.get(row, "")
        beside = {0: right[0], HEIGHT - 1: right[1]}.get(row, "")
        lines.append(f"{left:>{_AXIS}} |{''.join(cells)}|{beside}")
    lines.append(f"{'':>{_AXIS}}  0 s{format_duration(stop_s):>{width - 3}}")
    rows = ["   ".join(legend)] if len("   ".join(legend)) <= width else legend
    return [*lines, *(f"{'':>{_AXIS}}  {row}" for row in rows)]


def loss_range(losses: Sequence[Point]) -> tuple[float, float]:
    """Return the smallest and the largest loss to draw; never an empty range."""
    values = [point.value for point in losses if abs(point.value) <= LARGEST]
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)
