"""Files that a run writes beside its trace, and a comparison beside its runs.

    a run           summary.json     curve.svg          computed from the trace
    a comparison    comparison.json  comparison.svg     computed from the traces of its runs

Files written during a run are in ``logs.py``. This module must not know engines, nor who
measured the values.
"""

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from ..system.files import OpenFolder
from .chart import RIGHT, WIDTH, Panel, frame, head, last_t, line, nice_ticks, text, x_axis
from .compared import Comparison
from .compared_lines import draw_comparison
from .summary import Summary, summarize
from .text import Point, loss_range

SUMMARY_NAME = "summary.json"
CURVE_NAME = "curve.svg"
COMPARISON_NAME, PICTURE_NAME = "comparison.json", "comparison.svg"

_HEIGHT, _TOP, _GAP, _PANEL = 460, 64, 46, 142
"""Pixels: height of the picture, top of the first panel, gap between panels, height of one."""
_LOSS, _ACCURACY = "#1b4f8f", "#b5541c"


def write_report(run_dir: Path, identity: Sequence[int] | None = None) -> Summary:
    """Write the summary and the curve of the run in ``run_dir``; return the summary.

    Args:
        run_dir: the run's folder.
        identity: of that folder, if it is open already.

    Raises:
        ConfigError: there is no trace, or it is damaged.
    """
    summary = summarize(run_dir)
    with closing(OpenFolder.open(run_dir, identity)) as place:
        place.replace(SUMMARY_NAME, _as_json(summary.to_json()))
        place.replace(CURVE_NAME, draw_curve(summary).encode())
    return summary


def write_comparison(comparison: Comparison, folder: Path) -> None:
    """Write the files of a comparison into its folder."""
    with closing(OpenFolder.open(folder)) as place:
        place.replace(COMPARISON_NAME, _as_json(comparison.to_json()))
        place.replace(PICTURE_NAME, draw_comparison(comparison).encode())


def _as_json(fields: dict[str, object]) -> bytes:
    return json.dumps(fields, indent=2, allow_nan=False).encode() + b"\n"


# -- the curve ----------------------------------------------------------------------------------
#
#     +--------------------------------------+
#     | lenet, full-sync, 2 workers          |
#     | training loss                        |   solid line
#     |   2.3 |\___                          |
#     |   0.5 |    \__________               |
#     | test accuracy                        |   dashed line with dots, the best and the last
#     |   1.0 |        o----o----o           |   with their values
#     |   0.0 |___o____________________      |
#     |       0        20       40      s    |
#     +--------------------------------------+
#
# Two panels share the time axis; lines differ in form and not only in colour, so a grey print can
# be read.


def draw_curve(summary: Summary) -> str:
    """Return an SVG file as text: training loss and test accuracy against seconds."""
    points = (*summary.losses, *summary.accuracies)
    stop_s = last_t(points)
    low, high = loss_range(summary.losses)
    ticks = nice_ticks(low, high, 4)
    loss = Panel(
        top=_TOP, low=min(low, ticks[0]), high=max(high, ticks[-1]), stop=stop_s, height=_PANEL
    )
    accuracy = Panel(top=_TOP + _PANEL + _GAP, low=0.0, high=1.0, stop=stop_s, height=_PANEL)
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


def _dots(panel: Panel, points: Sequence[Point]) -> list[str]:
    """Return a dot per evaluation, and the values of the best and the last."""
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
