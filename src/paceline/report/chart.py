"""Curves in one diagram or several, as one SVG file, drawn by hand: it opens anywhere, offline.

    +--------------------------------------+
    | title                                |
    | what is the same for all curves      |
    | --- one curve   - o - another        |   the legend
    | what goes up (unit)                  |
    |   0.9 |\\___o                         |   thick: the curve; thin: its repeats; dots: its
    |   0.1 |____\\__o______                |   measured points
    |       0        20       40           |
    |          what goes right (unit)      |
    +--------------------------------------+

A curve has the same look in every diagram. Colours differ in how dark they are and lines in their
dashes, so a grey print can be read. `draw_chart` makes the whole; its parts (`Panel`, `frame`,
`line`, ...) make pictures of another form, too. Above 300 lines because a picture and its parts are
read together. This module must not know runs.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from .text import LARGEST, Point

WIDTH = 720
LEFT, RIGHT = 72, 24
INK, FAINT, GRID = "#222222", "#555555", "#dddddd"
COLOURS = ("#141414", "#c0392b", "#e08a00", "#5c1a8b", "#1f8a70", "#7fb2e5")
"""Any two differ by about a tenth of the grey scale when they are printed without colour."""
DASHES = ("", "9 4", "3 3", "12 3 3 3", "16 5", "1 4", "8 3 2 3 2 3")
"""Of another length than the colours, so that more curves than colours still differ."""

_LEGEND_TOP, _LEGEND_LINE = 66, 20
_GAP, _AXIS, _BELOW = 52, 30, 56
"""Pixels: between two diagrams, for an axis between them, below the last."""
_THICK, _THIN = 'stroke-width="2.5"', 'stroke-width="1" stroke-opacity="0.45"'
_LEAST = 1e-300
"""Narrower than that is no range, and earlier no time."""
_NARROW = 1e-9
"""Of the larger end: a range below that is one value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line; ``t`` of its points is whatever goes right. Curves of one name look alike."""

    name: str
    points: tuple[Point, ...] = ()
    dots: tuple[Point, ...] = ()
    others: tuple[tuple[Point, ...], ...] = ()
    """The same with other seeds: thin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagram:
    """One pair of axes.

    Args:
        label: what goes up, with its unit.
        x_label: what goes right, with its unit; empty: it shares the axis of the next diagram.
        is_log2: points lie at the logarithm, to base 2, of what goes right.
        log10_from: points lie at its logarithm, to base 10, less this.
        mark: a value to draw a thin level line at, and its words.
    """

    label: str
    curves: tuple[Curve, ...]
    x_label: str = ""
    height: float = 300.0
    from_zero: bool = False
    stop: float | None = None
    """Where the axis ends; None: with the last point."""
    is_log2: bool = False
    log10_from: int | None = None
    mark: tuple[float, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One diagram: where it lies and what it spans."""

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
    """The text of an SVG file."""
    names = list(dict.fromkeys(one.name for part in diagrams for one in part.curves))
    stop = last_t(point for part in diagrams for point in _points(part))
    top = _LEGEND_TOP + _LEGEND_LINE * -(-len(names) // 2) + 30.0
    panels, all_ticks = [], []
    for part in diagrams:
        own = (part.stop or last_t(_points(part))) if part.x_label else stop
        ticks = _ticks(part, own)
        all_ticks.append(ticks)
        panels.append(Panel(top=top, low=ticks[0], high=ticks[-1], stop=own, height=part.height))
        top = panels[-1].bottom + _GAP + (_AXIS if part.x_label else 0)
    parts = head(title, panels[-1].bottom + _BELOW)
    parts.append(text(LEFT, 44, subtitle))
    dotted = {one.name for part in diagrams for one in part.curves if one.dots}
    parts += _legend(names, dotted)
    for part, panel, ticks in zip(diagrams, panels, all_ticks, strict=True):
        parts += frame(panel, part.label, ticks)
        parts += _mark(part, panel)
        for curve in part.curves:
            parts += _curve(curve, panel, *style(names.index(curve.name)))
        if part.x_label:
            parts += x_axis(panel, part.x_label, _powers(part))
    return "\n".join([*parts, "</svg>"]) + "\n"


def style(number: int) -> tuple[str, str]:
    """Colour and dashes of the curve with this number."""
    return COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]


def _points(part: Diagram) -> list[Point]:
    curves = part.curves
    lists = [one for curve in curves for one in (curve.points, curve.dots, *curve.others)]
    return [point for points in lists for point in points]


def _ticks(part: Diagram, stop: float) -> tuple[float, ...]:
    """The values of its axis that goes up; the first and the last are its ends."""
    points = [point for point in _points(part) if point.t <= stop and abs(point.value) <= LARGEST]
    values = [point.value for point in points] or [0.0, 1.0]
    if part.mark is not None:
        values.append(part.mark[0])
    low, high = min(values), max(values)
    return nice_ticks(0.0 if part.from_zero and low >= 0.0 else low, high, 5)


def _legend(names: Sequence[str], dotted: set[str]) -> list[str]:
    """Two columns: a piece of the line, and its name."""
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


def _powers(part: Diagram) -> Callable[[int], str] | None:
    """What stands at each whole place of a logarithmic axis; None: it is none."""
    if part.is_log2:
        return lambda tick: f"{2**tick:,}"
    start = part.log10_from
    return None if start is None else lambda tick: f"{10.0 ** (tick + start):g}"


def _mark(part: Diagram, panel: Panel) -> list[str]:
    if part.mark is None:
        return []
    value, words = part.mark
    y = panel.y(value)
    # Below it and at the end, where a curve that has reached it has stopped.
    label = text(WIDTH - RIGHT - 4, y + 16, words, anchor="end")
    return [rule(LEFT, y, WIDTH - RIGHT, y, FAINT), label]


def _curve(curve: Curve, panel: Panel, colour: str, dash: str) -> list[str]:
    parts = []
    for points, look in [*((one, _THIN) for one in curve.others), (curve.points, _THICK)]:
        if inside := _until(points, panel.stop):
            parts += line(panel, inside, colour, dash, look)
    dots = [dot for dot in curve.dots if dot.t <= panel.stop]
    return [*parts, *(_dot(panel.x(dot.t), panel.y(dot.value), colour) for dot in dots)]


def _until(points: Sequence[Point], stop: float) -> list[Point]:
    """A curve up to where the axis ends, to the pixel."""
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
    """Where an axis of time ends: with the last point, or at 1 where nothing lies behind 0."""
    last = max((point.t for point in points), default=0.0)
    return last if last > _LEAST else 1.0


def head(title: str, height: float) -> list[str]:
    """The first lines of a picture: its size, a white ground, its title."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'width="{WIDTH}" height="{height:.0f}" font-family="Helvetica, Arial, sans-serif" '
        f'font-size="13" fill="{INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>',
        text(LEFT, 24, title, size=16, weight="bold"),
    ]


def nice_ticks(low: float, high: float, num_steps: int) -> tuple[float, ...]:
    """Round values that span ``[low, high]`` in about ``num_steps`` steps of 1, 2 or 5 times 10^n.

    A range that is empty, or too narrow for floats to have steps in it, is drawn wider. Both are
    to be at most ``LARGEST``.
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
    """The label, the horizontal grid with its values, and the axis.

    Args:
        is_log10: what lies at a tick is called 10 to the tick.
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
    """The axis below a panel, with its values and its name.

    Args:
        power: of a logarithmic axis: what stands at each whole place.
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
    """A curve; ``look`` is the other attributes of its stroke."""
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
    """A thin straight line."""
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'stroke="{colour}" stroke-width="1"{dashed}/>'
    )


def text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 13, weight: str = "normal"
) -> str:
    """Words at a place."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )
