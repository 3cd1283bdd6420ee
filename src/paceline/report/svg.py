"""The curve of a run as one SVG file, drawn by hand: it opens anywhere, offline.

    +--------------------------------------+
    | lenet, full-sync, 2 workers          |
    | training loss                        |   solid line
    |   2.3 |\\___                          |
    |   0.5 |    \\__________               |
    | test accuracy                        |   dashed line with dots, each with its value
    |   1.0 |        o----o----o           |
    |   0.0 |___o____________________      |
    |       0        20       40      s    |
    +--------------------------------------+

Two panels share the time axis; lines differ in form and not only in colour, so a grey print can
be read. Its parts (`Panel`, `frame`, `line`, ...) draw charts of several curves, too (chart.py).
This module must not know traces.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from .summary import Point, Summary
from .terminal import loss_range

WIDTH, _HEIGHT = 720, 460
LEFT, RIGHT = 72, 24
_TOP, _GAP, _PANEL = 64, 46, 142
"""Pixels: above the first panel, between the panels, height of one."""
INK, FAINT, GRID = "#222222", "#555555", "#dddddd"
_LEAST = 1e-300
"""Narrower than that is no range, and earlier no time."""
_NARROW = 1e-9
"""Of the larger end: a range below that is one value."""
_LOSS, _ACCURACY = "#1b4f8f", "#b5541c"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One diagram: where it lies and what it spans."""

    top: float
    low: float
    high: float
    stop: float
    height: float = _PANEL

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def x(self, t: float) -> float:
        return LEFT + (t / self.stop) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        inside = min(self.high, max(self.low, value))
        return self.top + self.height * (1 - (inside - self.low) / (self.high - self.low))


def draw_curve(summary: Summary) -> str:
    """The text of an SVG file: training loss and test accuracy against seconds."""
    points = (*summary.losses, *summary.accuracies)
    stop_s = last_t(points)
    low, high = loss_range(summary.losses)
    ticks = nice_ticks(low, high, 4)
    loss = Panel(top=_TOP, low=min(low, ticks[0]), high=max(high, ticks[-1]), stop=stop_s)
    accuracy = Panel(top=_TOP + _PANEL + _GAP, low=0.0, high=1.0, stop=stop_s)
    workers = f"{summary.workers} worker{'s' * (summary.workers != 1)}"
    title = f"{summary.task}, {summary.protocol}, {workers}"
    parts = [
        *head(title, _HEIGHT),
        *frame(loss, "training loss (mean over neighbouring updates)", ticks),
        *line(loss, summary.losses, _LOSS, ""),
        *frame(accuracy, "test accuracy (share of all test samples)", (0.0, 0.5, 1.0)),
        *line(accuracy, summary.accuracies, _ACCURACY, "7 4"),
        *_dots(accuracy, summary.accuracies),
        *x_axis(accuracy, "seconds since the first step"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


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
    """Round values that span ``[low, high]`` in about so many steps of 1, 2 or 5 times 10^n.

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


def x_axis(panel: Panel, label: str, *, is_log2: bool = False) -> list[str]:
    """The axis below a panel, with its values and its name.

    Args:
        is_log2: what lies at t is called 2 to the t.
    """
    bottom = panel.bottom
    parts = [rule(LEFT, bottom, WIDTH - RIGHT, bottom, FAINT)]
    for tick in range(int(panel.stop) + 1) if is_log2 else nice_ticks(0.0, panel.stop, 6):
        if tick <= panel.stop * 1.001:
            x = panel.x(tick)
            words = f"{2**tick:,}" if is_log2 else f"{tick:g}"
            parts.append(rule(x, bottom, x, bottom + 5, FAINT))
            parts.append(text(x, bottom + 20, words, anchor="middle"))
    return [*parts, text((LEFT + WIDTH - RIGHT) / 2, bottom + 40, label, anchor="middle")]


def line(
    panel: Panel, points: Sequence[Point], colour: str, dash: str, look: str = 'stroke-width="2"'
) -> list[str]:
    """A curve; ``look`` is what else is said of its stroke."""
    drawn = " ".join(f"{panel.x(p.t):.1f},{panel.y(p.value):.1f}" for p in points)
    if not drawn:
        middle = (LEFT + WIDTH - RIGHT) / 2
        return [text(middle, panel.top + panel.height / 2, "not measured", anchor="middle")]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return [
        f'<polyline points="{drawn}" fill="none" stroke="{colour}" {look}'
        f'{dashes} stroke-linejoin="round"/>'
    ]


def _dots(panel: Panel, points: Sequence[Point]) -> list[str]:
    """A dot for each evaluation, and the values of the best and the last one beside theirs."""
    parts = [
        f'<circle cx="{panel.x(p.t):.1f}" cy="{panel.y(p.value):.1f}" r="4" fill="#ffffff" '
        f'stroke="{_ACCURACY}" stroke-width="2"/>'
        for p in points
    ]
    if points:
        best = max(points, key=lambda point: point.value)
        for point, word in {best.t: (best, "best"), points[-1].t: (points[-1], "last")}.values():
            y = panel.y(point.value)
            y += 20 if y < panel.top + 24 or word == "last" else -10
            x = min(panel.x(point.t), WIDTH - RIGHT)
            parts.append(text(x, y, f"{word} {point.value:.3f}", anchor="end"))
    return parts


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
