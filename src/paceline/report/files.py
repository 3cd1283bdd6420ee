"""What a run leaves beside its trace, and what a comparison of runs leaves beside them.

    a run           summary.json     curve.svg          follow from the trace at any time
                    a log of metrics (CSV, TensorBoard) written as they come, one a run
    a comparison    comparison.json  comparison.svg     follow from the traces of its runs

The x-axis of a log is the version: the number of updates. This module must not know engines, nor
who measured the values.
"""

import abc
import csv
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from ..errors import ConfigError
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
"""Pixels: of the curve in all, above its first panel, between the two, height of one."""
_LOSS, _ACCURACY = "#1b4f8f", "#b5541c"


def write_report(run_dir: Path, identity: Sequence[int] | None = None) -> Summary:
    """Summarise the run in ``run_dir`` and write its files there.

    Args:
        identity: of that folder, where it is open already.

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
    """The text of an SVG file: training loss and test accuracy against seconds."""
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


# -- logs of metrics ---------------------------------------------------------------------------

_CSV = "metrics.csv"


class MetricsLog(abc.ABC):
    """Where metrics are written."""

    @abc.abstractmethod
    def write(self, version: int, t_s: float, values: Mapping[str, float]) -> None:
        """Values at a version, ``t_s`` seconds after the run's start."""

    @abc.abstractmethod
    def close(self) -> None:
        """Write what is buffered; may be called twice."""


class CsvLog(MetricsLog):
    """``metrics.csv``: one value a line, so that a metric may come and go.

    version,t_s,name,value
    """

    def __init__(self, place: OpenFolder, version: int | None = None) -> None:
        kept = _rows_up_to(place, version)
        self._file = os.fdopen(place.fresh(_CSV), "w", encoding="utf-8", newline="")
        self._rows = csv.writer(self._file, lineterminator="\n")
        self._rows.writerow(("version", "t_s", "name", "value"))
        self._rows.writerows(kept)

    def write(self, version: int, t_s: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._rows.writerow((version, f"{t_s:.3f}", name, repr(value)))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _rows_up_to(place: OpenFolder, version: int | None) -> list[list[str]]:
    """What the run that goes on wrote before; what came after its checkpoint is written again."""
    if version is None or not place.has(_CSV):
        return []
    with TextIOWrapper(place.read(_CSV), encoding="utf-8", newline="") as file:
        try:
            rows = list(csv.reader(file))[1:]
        except (ValueError, csv.Error) as error:
            raise ConfigError(f"{place.path / _CSV} is damaged: {error}; move it away") from None
    return [row for row in rows if row and row[0].isdigit() and int(row[0]) <= version]


class TensorBoardLog(MetricsLog):
    """TensorBoard's event files under ``tensorboard/``.

    Raises:
        ConfigError: tensorboardX is not installed.
    """

    def __init__(self, place: OpenFolder, version: int | None = None) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise ConfigError(
                "--log tensorboard needs tensorboardX: pip install 'paceline[tensorboard]', "
                "or use --log csv"
            ) from None
        after = None if version is None else version + 1
        with closing(place.make_inner("tensorboard")) as folder:
            self._writer: Any = SummaryWriter(str(folder.path), purge_step=after)

    def write(self, version: int, t_s: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, version)

    def close(self) -> None:
        self._writer.close()


LOGS: Mapping[str, type[CsvLog] | type[TensorBoardLog]] = {
    "csv": CsvLog,
    "tensorboard": TensorBoardLog,
}


def open_log(kind: str, place: OpenFolder, version: int | None = None) -> MetricsLog:
    """The log of this kind in the run's folder; ``version``: the run goes on from there."""
    return LOGS[kind](place, version)
