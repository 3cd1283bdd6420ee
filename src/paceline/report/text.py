"""Numbers as plain text: times, tables, and curves of characters.

    format_duration    what people say         340 ms   7.4 s   2 min 03 s    reports, progress
    three_figures      what was measured       41.2 us  1.53 ms               measurements
    four_figures       what was computed       20.05 ms                       predictions

All reports, measurements and predictions write with these. This module must not know what a number
means.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

HEIGHT = 9
"""Lines of a plot."""
LARGEST = 1e300
"""With either sign: what is beyond is drawn at the edge, since floats cannot span it."""
_AXIS = 8
"""Columns of the numbers left of a plot."""
BESIDE = _AXIS + 7
"""Columns of all that stands beside a plot."""
_ROUNDED = 0.9995
"""From here on three figures of a number are those of 1: it is one of the next unit."""


def format_duration(seconds: float) -> str:
    """Seconds in the two largest units that people use: ``340 ms``, ``7.4 s``, ``2 min 03 s``."""
    if 0 < seconds < 1e-3 * _ROUNDED:
        return f"{seconds * 1e6:.0f} us"
    if 0 < seconds < _ROUNDED:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s" if seconds else "0 s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as they must be: the first to the left, the others to the right."""
    whole = [header, *rows]
    widths = [max(len(row[i]) for row in whole) for i in range(len(header))]
    return [
        "  ".join(
            f"{cell:<{width}}" if i == 0 else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in whole
    ]


def three_figures(seconds: float | None) -> str:
    """Three figures with a unit: ``41.2 us``, ``1.53 ms``, ``12.8 s``; "-" for None."""
    if seconds is None:
        return "-"
    size = abs(seconds)
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if size * factor >= _ROUNDED:
            is_short = size < 1000 * _ROUNDED
            return f"{seconds * factor:.3g} {unit}" if is_short else f"{seconds:,.0f} s"
    return f"{seconds * 1e9:.0f} ns"


def four_figures(seconds: float) -> str:
    """In the unit that suits, microseconds at least: ``1.234 s``, ``20.05 ms``."""
    if seconds >= 9999.5:
        return f"{seconds:,.0f} s"
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.4g} {unit}"
    return f"{seconds / 1e-6:.4g} us"


def or_dash(value: float | None, form: Callable[[float], str]) -> str:
    """The value so written; "-" where there is none."""
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
    """One curve of characters, on an axis of its own."""

    points: Sequence[Point]
    mark: str
    low: float
    high: float
    is_joined: bool = False
    """Whether the columns between two points are marked, too."""

    def row(self, value: float) -> int:
        """The line of the plot that a value lies on, from the top."""
        height = (value - self.low) / (self.high - self.low)
        return round((1 - min(1.0, max(0.0, height))) * (HEIGHT - 1))


def plot(
    series: Sequence[Series], width: int, legend: Sequence[str], right: tuple[str, str] = ("", "")
) -> list[str]:
    """Curves against time as characters, with their legend below.

    Args:
        series: the left axis is that of the first one.
        width: columns of the plot without what stands beside it.
        right: what stands at the top and at the bottom of the right axis.
    """
    stop_s = max(point.t for one in series for point in one.points)
    grid = [[" "] * width for _ in range(HEIGHT)]
    for one in series:
        before: tuple[int, float] | None = None
        for point in one.points:
            column = max(0, round(point.t / stop_s * (width - 1)) if stop_s > 0 else 0)
            grid[one.row(point.value)][column] = one.mark
            if before is not None and one.is_joined:
                start, value = before
                for i in range(start + 1, column):
                    share = (i - start) / (column - start)
                    grid[one.row(value + share * (point.value - value))][i] = one.mark
            before = column, point.value
    low, high = series[0].low, series[0].high
    lines = []
    # A loss that hardly moved still has two different ends.
    digits = next((n for n in range(3, 7) if f"{high:.{n}g}" != f"{low:.{n}g}"), 7)
    for row, cells in enumerate(grid):
        left = {0: f"{high:.{digits}g}", HEIGHT - 1: f"{low:.{digits}g}"}.get(row, "")
        beside = {0: right[0], HEIGHT - 1: right[1]}.get(row, "")
        lines.append(f"{left:>{_AXIS}} |{''.join(cells)}|{beside}")
    lines.append(f"{'':>{_AXIS}}  0 s{format_duration(stop_s):>{width - 3}}")
    rows = ["   ".join(legend)] if len("   ".join(legend)) <= width else legend
    return [*lines, *(f"{'':>{_AXIS}}  {row}" for row in rows)]


def loss_range(losses: Sequence[Point]) -> tuple[float, float]:
    """The least and the largest loss to draw; never an empty range."""
    values = [point.value for point in losses if abs(point.value) <= LARGEST]
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)
