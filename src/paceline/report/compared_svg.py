"""The picture of a comparison: error against time, a curve a protocol.

    +--------------------------------------+
    | lenet, 8 workers                     |
    | --- full-sync   - - k-sync:6         |   the legend, with the time to the target
    | test error (share that is wrong)     |
    |   0.9 |\\___                          |   thick: the typical run; thin: the other seeds
    |   0.1 |____\\_________               |
    |       0        20       40      s    |
    +--------------------------------------+

Where a run has fewer than 3 evaluations the training loss stands in a second panel, and its label
says so. Colours differ in how dark they are and lines in their dashes, so a grey print can be
read. This module must not know runs.
"""

from .compared import Comparison, Contender, Outcome, finite
from .summary import Point
from .svg import FAINT, LEFT, RIGHT, WIDTH, Panel, frame, head, line, nice_ticks, rule, text
from .svg import time_axis as draw_time_axis
from .terminal import format_duration, loss_range

COLOURS = ("#141414", "#c0392b", "#e08a00", "#5c1a8b", "#1f8a70", "#7fb2e5")
"""Any two differ by about a tenth of the grey scale when they are printed without colour."""
DASHES = ("", "9 4", "3 3", "12 3 3 3", "16 5", "1 4", "8 3 2 3 2 3")
"""Of another length than the colours, so that more protocols than colours still differ."""

_LEGEND_TOP, _LEGEND_LINE = 66, 20
_HIGH, _LOW, _GAP, _BELOW = 300, 170, 52, 56
"""Pixels: a panel by itself, one of two, between the two, below the last."""
_THICK, _THIN = 'stroke-width="2.5"', 'stroke-width="1" stroke-opacity="0.45"'


def draw_comparison(one: Comparison) -> str:
    """The text of an SVG file."""
    runs = [outcome for contender in one.contenders for outcome in contender.outcomes]
    points = [point for run in runs for point in (*run.errors, *run.losses)]
    stop_s = max((point.t for point in points), default=0.0) or 1.0
    rows = -(-len(one.contenders) // 2)
    top = _LEGEND_TOP + _LEGEND_LINE * rows + 30
    height = _HIGH if one.has_curves else _LOW
    errors = [point for run in runs for point in finite(run.errors)]
    panels = [_panel(errors, top, height, stop_s, from_zero=True)]
    labels = [_error_label(one)]
    if not one.has_curves:
        losses = [point for run in runs for point in finite(run.losses)]
        panels.append(_panel(losses, panels[0].bottom + _GAP, height, stop_s, from_zero=False))
        labels.append("training loss (mean of neighbouring updates; a run has < 3 test points)")
    parts = head(f"{one.task}, {one.workers} workers", panels[-1].bottom + _BELOW)
    parts.append(text(LEFT, 44, one.conditions))
    parts += _legend(one)
    for number, (panel, label) in enumerate(zip(panels, labels, strict=True)):
        parts += frame(panel, label, nice_ticks(panel.low, panel.high, 5))
        parts += _target(one, panel) if number == 0 else []
        parts += _curves(one, panel, is_loss=number == 1)
    parts += draw_time_axis(panels[-1], _time_label(one))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    points: list[Point], top: float, height: float, stop_s: float, *, from_zero: bool
) -> Panel:
    low, high = loss_range(points)
    ticks = nice_ticks(0.0 if from_zero and low >= 0.0 else low, high, 5)
    return Panel(top=top, low=ticks[0], high=ticks[-1], stop_s=stop_s, height=height)


def _error_label(one: Comparison) -> str:
    if one.measure == "test error":
        return "test error (share of the test samples that are wrong)"
    return "test loss (mean over the test samples)"


def _time_label(one: Comparison) -> str:
    if one.is_simulated:
        return "virtual seconds since the first step"
    return "seconds of training (evaluations do not count)"


def style(number: int) -> tuple[str, str]:
    """Colour and dashes of the protocol with this number."""
    return COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]


def _legend(one: Comparison) -> list[str]:
    """Two columns: a piece of the line, the protocol, its time to the target."""
    parts = []
    for number, contender in enumerate(one.contenders):
        x = LEFT + (number % 2) * (WIDTH - LEFT - RIGHT) / 2
        y = _LEGEND_TOP + _LEGEND_LINE * (number // 2)
        colour, dash = style(number)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        parts.append(
            f'<line x1="{x:.1f}" y1="{y}" x2="{x + 44:.1f}" y2="{y}" stroke="{colour}" '
            f"{_THICK}{dashes}/>"
        )
        parts.append(text(x + 52, y + 4, f"{contender.protocol}{_reached(one, contender)}"))
    return parts


def _reached(one: Comparison, contender: Contender) -> str:
    if not contender.outcomes:
        return ", failed" if contender.failures else ", not run"
    if one.target_accuracy is None:
        return ""
    median_s = contender.figure("target_s").median
    if median_s is None:
        return ", not reached"
    return f", target at {format_duration(median_s)}"


def _target(one: Comparison, panel: Panel) -> list[str]:
    if one.target_accuracy is None or one.measure != "test error":
        return []
    y = panel.y(1.0 - one.target_accuracy)
    words = f"target: {1.0 - one.target_accuracy:.3g}"
    return [
        rule(LEFT, y, WIDTH - RIGHT, y, FAINT),
        text(LEFT + 6, y - 5, words),
    ]


def _curves(one: Comparison, panel: Panel, *, is_loss: bool) -> list[str]:
    parts = []
    for number, contender in enumerate(one.contenders):
        colour, dash = style(number)
        for run in contender.outcomes:
            if run is not contender.typical:
                parts += _curve(run, panel, (colour, dash, _THIN), is_loss=is_loss)
        if contender.typical is not None:
            parts += _curve(contender.typical, panel, (colour, dash, _THICK), is_loss=is_loss)
    return parts


def _curve(run: Outcome, panel: Panel, look: tuple[str, str, str], *, is_loss: bool) -> list[str]:
    """One run; its evaluations have dots."""
    points = finite(run.losses if is_loss else run.errors)
    if not points:
        return []
    colour, dash, stroke = look
    parts = line(panel, points, colour, dash, stroke)
    if not is_loss and stroke == _THICK:
        parts += [
            f'<circle cx="{panel.x(point.t):.1f}" cy="{panel.y(point.value):.1f}" r="3" '
            f'fill="{colour}"/>'
            for point in points
        ]
    return parts
