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
from .compared import Comparison
from .compared_lines import draw_comparison
from .summary import Summary, summarize
from .svg import draw_curve

SUMMARY_NAME = "summary.json"
CURVE_NAME = "curve.svg"
COMPARISON_NAME, PICTURE_NAME = "comparison.json", "comparison.svg"


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
