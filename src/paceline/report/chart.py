"""Curves in one diagram or several, as one SVG file, drawn by hand: it opens anywhere, offline.

    +--------------------------------------+
    | title                                |
    | subtitle                             |
    | --- one curve   - o - another        |   the legend
    | label (unit)                         |
    |   0.9 |\\___o                         |   thick: the curve; thin: its repeats; dots: its
    |   0.1 |____\\__o______                |   measured points
    |       0        20       40           |
    |          x_label (unit)              |
    +--------------------------------------+

A curve looks the same in every diagram. Colours differ in brightness and lines in their dashes, so
a grey print can be read. `draw_chart` draws a whole picture; its parts (`Panel`, `frame`, ...)
serve other pictures, too. Above 300 lines because a picture and its parts are read together. This
module must not know runs.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from .text import LARGEST, Point

WIDTH = 720
LEFT, RIGHT = 72, 24
INK, FAINT, GRID = "#222222", "#555555", "#dddddd"
COLOURS = ("#141414", "#c0392b", "#e08a00", "#5c1a8b", "#1f8a70", "#7fb2e5")
"""Any two differ by about a tenth of the grey scale in a print without colour."""
DASHES = ("", "9 4", "3 3", "12 3 3 3", "16 5", "1 4", "8 3 2 3 2 3")
"""Not as many as colours, so that more curves than colours still differ."""

_LEGEND_TOP, _LEGEND_LINE = 66, 20
_GAP, _AXIS, _BELOW = 52, 30, 56
"""Pixels: between two diagrams, for an axis between them, below the last."""
_THICK, _THIN = 'stroke-width="2.5"', 'stroke-width="1" stroke-opacity="0.45"'
_NOT_IN_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Control characters and halves of pairs, as in names that a script or a file system gives."""
_LEAST = 1e-300
"""Smaller ranges and times count as 0."""
_NARROW = 1e-9
"""Ranges narrower than this share of the larger end are drawn as one value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line; ``t`` of its points is the x value. Curves with the same name look alike."""

    name: str
    points: tuple[Point, ...] = ()
    dots: tuple[Point, ...] = ()
    others: tuple[tuple[Point, ...], ...] = ()
    """The curve with other seeds, drawn thin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagram:
    """One pair of axes.

    Args:
        label: the y axis, with its unit.
        x_label: the x axis, with its unit; empty: the axis of the next diagram is shared.
        is_log2: x values of points are logarithms to base 2.
        log10_from: x values of points are logarithms to base 10, less this.
        mark: the value of a thin horizontal line, and its label.
    """

    label: str
    curves: tuple[Curve, ...]
    x_label: str = ""
    height: float = 300.0
    from_zero: bool = False
    stop: float | None = None
    """The end of the x axis; None: the last point."""
    is_log2: bool = False
    log10_from: int | None = None
    mark: tuple[float, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """The place of a diagram and the range of its axes."""

    top: float
    low: float
    high: float
    stop: float
    height: float

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def x(self, t: float) -> float:
        return LEFT + (t / self.stop) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        inside = min(self.high, max(self.low, value))
        return self.top + self.height * (1 - (inside - self.low) / (self.high - self.low))


def draw_chart(title: str, subtitle: str, diagrams: Sequence[Diagram]) -> str:
    """Return diagrams below each other, with one legend, as the text of an SVG file."""
    names = list(dict.fromkeys(curve.name for diagram in diagrams for curve in diagram.curves))
    stop = last_t(point for diagram in diagrams for point in _points(diagram))
    top = _LEGEND_TOP + _LEGEND_LINE * -(-len(names) // 2) + 30.0
    panels, all_ticks = [], []
    for diagram in diagrams:
        own_stop = (diagram.stop or last_t(_points(diagram))) if diagram.x_label else stop
        ticks = _ticks(diagram, own_stop)
        all_ticks.append(ticks)
        panels.append(
            Panel(top=top, low=ticks[0], high=ticks[-1], stop=own_stop, height=diagram.height)
        )
        top = panels[-1].bottom + _GAP + (_AXIS if diagram.x_label else 0)
    parts = head(title, panels[-1].bottom + _BELOW)
    parts.append(text(LEFT, 44, subtitle))
    dotted = {curve.name for diagram in diagrams for curve in diagram.curves if curve.dots}
    parts += _legend(names, dotted)
    for diagram, panel, ticks in zip(diagrams, panels, all_ticks, strict=True):
        parts += frame(panel, diagram.label, ticks)
        parts += _mark(diagram, panel)
        for curve in diagram.curves:
            parts += _curve(curve, panel, *style(names.index(curve.name)))
        if diagram.x_label:
            parts += x_axis(panel, diagram.x_label, _powers(diagram))
    return "\n".join([*parts, "</svg>"]) + "\n"


def style(number: int) -> tuple[str, str]:
    """Return colour and dashes of the curve with this number."""
    return COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]


def _points(diagram: Diagram) -> list[Point]:
    curves = diagram.curves
    lists = [points for curve in curves for points in (curve.points, curve.dots, *curve.others)]
    return [point for points in lists for point in points]


def _ticks(diagram: Diagram, stop: float) -> tuple[float, ...]:
    """Return the ticks of the y axis; the first and the last are its ends."""
    points = [
        point for point in _points(diagram) if point.t <= stop and abs(point.value) <= LARGEST
    ]
    values = [point.value for point in points] or [0.0, 1.0]
    if diagram.mark is not None:
        values.append(diagram.mark[0])
    low, high = min(values), max(values)
    return nice_ticks(0.0 if diagram.from_zero and low >= 0.0 else low, high, 5)


def _legend(names: Sequence[str], dotted: set[str]) -> list[str]:
    """Return the legend in two columns: a piece of each line, and its name."""
    parts = []
    for number, name in enumerate(names):
        x = LEFT + (number % 2) * (WIDTH - LEFT - RIGHT) / 2
        y = _LEGEND_TOP + _LEGEND_LINE * (number // 2)
        colour, dash = style(number)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        parts.append(
            f'<line x1="{x:.1f}" y1="{y}" x2="{x + 44:.1f}" y2="{y}" stroke="{colour}" '
            f"{_THICK}{dashes}/>"
        )
        if name in dotted:
            parts.append(_dot(x + 22, y, colour))
        parts.append(text(x + 52, y + 4, name))
    return parts


def _powers(diagram: Diagram) -> Callable[[int], str] | None:
    """Return the labels of whole ticks of a logarithmic axis; None: the axis is linear."""
    if diagram.is_log2:
        return lambda tick: f"{2**tick:,}"
    start = diagram.log10_from
    return None if start is None else lambda tick: f"{10.0 ** (tick + start):g}"


def _mark(diagram: Diagram, panel: Panel) -> list[str]:
    if diagram.mark is None:
        return []
    value, words = diagram.mark
    y = panel.y(value)
    # Below the line at the right end: curves that reached the mark have stopped there.
    label = text(WIDTH - RIGHT - 4, y + 16, words, anchor="end")
    return [rule(LEFT, y, WIDTH - RIGHT, y, FAINT), label]


def _curve(curve: Curve, panel: Panel, colour: str, dash: str) -> list[str]:
    parts = []
    for points, look in [*((repeat, _THIN) for repeat in curve.others), (curve.points, _THICK)]:
        if inside := _until(points, panel.stop):
            parts += line(panel, inside, colour, dash, look)
    dots = [dot for dot in curve.dots if dot.t <= panel.stop]
    return [*parts, *(_dot(panel.x(dot.t), panel.y(dot.value), colour) for dot in dots)]


def _until(points: Sequence[Point], stop: float) -> list[Point]:
    """Cut a curve at the end of the axis, with an interpolated last point."""
    inside = [point for point in points if point.t <= stop]
    if inside and len(inside) < len(points):
        before, after = inside[-1], points[len(inside)]
        share = (stop - before.t) / (after.t - before.t)
        inside.append(Point(t=stop, value=before.value + share * (after.value - before.value)))
    return inside


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'


# -- the parts of a picture -----------------------------------------------------------------------


def last_t(points: Iterable[Point]) -> float:
    """Return the end of a time axis: the last point, or 1 if no point is after 0."""
    last = max((point.t for point in points), default=0.0)
    return last if last > _LEAST else 1.0


def head(title: str, height: float) -> list[str]:
    """Return the start of an SVG file: size, white background and title."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'width="{WIDTH}" height="{height:.0f}" font-family="Helvetica, Arial, sans-serif" '
        f'font-size="13" fill="{INK}">',
        f"<title>{_in_xml(title)}</title>",
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>',
        text(LEFT, 24, title, size=16, weight="bold"),
    ]


def nice_ticks(low: float, high: float, num_steps: int) -> tuple[float, ...]:
    """Round values that span ``[low, high]`` in about ``num_steps`` steps of 1, 2 or 5 times 10^n.

    A range that is empty, or too narrow for steps between floats, is widened. The absolute values
    of both must be at most ``LARGEST``.
    """
    largest = max(abs(low), abs(high))
    if high - low <= max(_NARROW * largest, _LEAST):
        margin = 0.5 * largest or 0.5
        low, high = low - margin, low + margin
    rough = (high - low) / num_steps
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    num_digits = 2 - math.floor(math.log10(step))
    return tuple(round(i * step, num_digits) for i in range(first, last + 1))


def frame(panel: Panel, label: str, ticks: Sequence[float], *, is_log10: bool = False) -> list[str]:
    """Return the label, the horizontal grid with its values, and the y axis.

    Args:
        is_log10: whether ticks are labelled with 10 to their power.
    """
    parts = [text(LEFT, panel.top - 12, label, weight="bold")]
    for tick in ticks:
        y = panel.y(tick)
        parts.append(rule(LEFT, y, WIDTH - RIGHT, y, GRID))
        words = f"{10**tick:,g}" if is_log10 else f"{tick:,g}"
        parts.append(text(LEFT - 8, y + 4, words, anchor="end"))
    parts.append(rule(LEFT, panel.top, LEFT, panel.bottom, FAINT))
    return parts


def x_axis(panel: Panel, label: str, power: Callable[[int], str] | None = None) -> list[str]:
    """Return the x axis below a panel, with its values and its label.

    Args:
        power: for a logarithmic axis: the label of each whole tick.
    """
    bottom = panel.bottom
    parts = [rule(LEFT, bottom, WIDTH - RIGHT, bottom, FAINT)]
    ticks: Sequence[float] = nice_ticks(0.0, panel.stop, 6)
    if power is not None:
        ticks = range(int(panel.stop * 1.001) + 1)
    for tick in ticks:
        if tick <= panel.stop * 1.001:
            x = panel.x(tick)
            words = f"{tick:g}" if power is None else power(int(tick))
            parts.append(rule(x, bottom, x, bottom + 5, FAINT))
            parts.append(text(x, bottom + 20, words, anchor="middle"))
    return [*parts, text((LEFT + WIDTH - RIGHT) / 2, bottom + 40, label, anchor="middle")]


def line(
    panel: Panel, points: Sequence[Point], colour: str, dash: str, look: str = 'stroke-width="2"'
) -> list[str]:
    """Return a curve; ``look`` holds further attributes of its stroke."""
    drawn = " ".join(f"{panel.x(p.t):.1f},{panel.y(p.value):.1f}" for p in points)
    if not drawn:
        middle = (LEFT + WIDTH - RIGHT) / 2
        return [text(middle, panel.top + panel.height / 2, "not measured", anchor="middle")]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return [
        f'<polyline points="{drawn}" fill="none" stroke="{colour}" {look}'
        f'{dashes} stroke-linejoin="round"/>'
    ]


def rule(x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "") -> str:
    """Return a thin straight line."""
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'stroke="{colour}" stroke-width="1"{dashed}/>'
    )


def text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 13, weight: str = "normal"
) -> str:
    """Return text at a position."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'font-weight="{weight}">{_in_xml(text)}</text>'
    )


def _in_xml(words: str) -> str:
    """Words with signs of XML escaped, and characters that it forbids replaced."""
    return escape(_NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", words))
