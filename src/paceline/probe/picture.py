"""A probe as a picture: each figure on a logarithmic axis, the textbook's range as a grey bar.

    latencies     0.1 ns |---o-------====--| 1 s        o here (line to the median), == textbook
    bandwidths    1 GB/s |--------o--------| 1 TB/s
    arithmetic    1 Gop/s ...
    latency of a load against the size of its array, both logarithmic

Drawn by hand as `report/chart.py` draws. This module must not measure.
"""

import math
from collections.abc import Callable, Sequence

from ..plan import format_bytes
from ..report import chart
from .figures import Figure, Unit
from .memory import LatencyOfSize
from .probing import Probe

_LINE, _GAP, _TOP = 22, 66, 100
_NAMES, _VALUES = 262, 92
"""Pixels for the names to the left and the values to the right of the axis."""
_TEXTBOOK, _HERE = "#c9c9c9", chart.COLOURS[1]
_CURVE_HEIGHT = 220
_TITLES = (
    (Unit.SECONDS, "time"), (Unit.BYTES, "bandwidth"), (Unit.OPERATIONS, "arithmetic"),
    (Unit.COUNT, "reads a second"),
)  # fmt: skip


def draw_probe(probe: Probe) -> str:
    """The text of an SVG file."""
    parts: list[str] = []
    top = float(_TOP)
    for unit, title in _TITLES:
        figures = [figure for figure in probe.figures if figure.unit is unit and figure.samples]
        if figures:
            figures.sort(key=lambda figure: figure.best or 0.0)
            parts += _axis(figures, title, top)
            top += _LINE * len(figures) + _GAP
    if len(probe.curve) > 1:
        parts += _curve(probe.curve, top + 8)
        top += _CURVE_HEIGHT + _GAP + 24
    words = f"{probe.processor or 'processor'}, {probe.cores} cores"
    return "\n".join([
        *chart.head("What this machine can do", top),
        chart.text(chart.LEFT, 44, f"{words}; load before {probe.load:.1f}"),
        *_legend(64), *parts, "</svg>",
    ]) + "\n"  # fmt: skip


def _legend(y: float) -> list[str]:
    x = chart.LEFT
    return [
        _dot(x + 6, y, _HERE), chart.text(x + 18, y + 4, "here, the best; a line to the median"),
        _bar(x + 292, y - 6, x + 332), chart.text(x + 340, y + 4, "the textbook"),
    ]  # fmt: skip


def _axis(figures: Sequence[Figure], title: str, top: float) -> list[str]:
    """A row for each figure, and the axis below."""
    ends = [value for figure in figures for value in _values(figure)]
    low, high = math.floor(math.log10(min(ends))), math.ceil(math.log10(max(ends)))
    high = max(high, low + 1)
    left, right = float(_NAMES), float(chart.WIDTH - _VALUES)
    bottom = top + _LINE * len(figures)

    def x(value: float) -> float:
        return left + (math.log10(value) - low) / (high - low) * (right - left)

    unit = figures[0].unit
    parts = [chart.text(chart.LEFT - 48, top - 8, title, weight="bold")]
    step = max(1, math.ceil((high - low) / 6))
    for power in range(low, high + 1):
        parts.append(chart.rule(x(10.0**power), top, x(10.0**power), bottom, chart.GRID))
        if (power - low) % step == 0:
            words = unit.render(10.0**power)
            parts.append(chart.text(x(10.0**power), bottom + 18, words, anchor="middle", size=12))
    parts.append(chart.rule(left, bottom, right, bottom, chart.FAINT))
    for number, figure in enumerate(figures):
        parts += _row(figure, top + _LINE * (number + 0.5), x)
    return parts


def _row(figure: Figure, y: float, x: Callable[[float], float]) -> list[str]:
    best, median = figure.best or 0.0, figure.median or 0.0
    parts = [chart.text(chart.LEFT - 48, y + 4, figure.what, size=12)]
    if figure.textbook is not None:
        low, high = (x(value) for value in figure.textbook)
        parts.append(_bar(low - 3, y - 6, high + 3))
    parts += [
        chart.rule(x(best), y, x(median), y, _HERE), _dot(x(best), y, _HERE),
        chart.text(chart.WIDTH - _VALUES + 8, y + 4, figure.unit.render(best), size=12),
    ]  # fmt: skip
    return parts


def _values(figure: Figure) -> tuple[float, ...]:
    return (figure.best or 0.0, figure.median or 0.0, *(figure.textbook or ()))


def _curve(curve: Sequence[LatencyOfSize], top: float) -> list[str]:
    """The latency of one load against the size of its array."""
    first, last = math.log2(curve[0].num_bytes), math.log2(curve[-1].num_bytes)
    logs = [math.log10(point.latency_s) for point in curve]
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    left, right = float(chart.LEFT + 20), float(chart.WIDTH - chart.RIGHT - 20)

    def place(point: LatencyOfSize) -> tuple[float, float]:
        share = (math.log2(point.num_bytes) - first) / (last - first)
        up = (math.log10(point.latency_s) - low) / max(high - low, 1)
        return left + share * (right - left), top + _CURVE_HEIGHT * (1 - up)

    parts = [chart.text(chart.LEFT - 48, top - 10, "one load, by the size of its array",
                        weight="bold")]  # fmt: skip
    for power in range(low, high + 1):
        y = top + _CURVE_HEIGHT * (1 - (power - low) / max(high - low, 1))
        parts.append(chart.rule(left, y, right, y, chart.GRID))
        parts.append(chart.text(left - 8, y + 4, Unit.SECONDS.render(10.0**power), anchor="end",
                                size=12))  # fmt: skip
    points = [place(point) for point in curve]
    drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts.append(f'<polyline points="{drawn}" fill="none" stroke="{_HERE}" stroke-width="2"/>')
    for number, (point, (x, y)) in enumerate(zip(curve, points, strict=True)):
        parts.append(_dot(x, y, _HERE))
        if number % 3 == 0:
            bottom = top + _CURVE_HEIGHT
            parts.append(chart.rule(x, bottom, x, bottom + 5, chart.FAINT))
            words = format_bytes(point.num_bytes).replace(".0", "")
            parts.append(chart.text(x, bottom + 20, words, anchor="middle", size=12))
    return parts


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'


def _bar(left: float, top: float, right: float) -> str:
    return (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="12" '
        f'fill="{_TEXTBOOK}"/>'
    )
