"""The metrics of a run for other tools: a CSV file, or TensorBoard's.

One log a run, written where the run is conducted, so N workers do not write N of them. The
x-axis is the version: the number of updates. This module must not know who measured the values.
"""

import abc
import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError


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

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "metrics.csv").open("w", encoding="utf-8", newline="")
        self._rows = csv.writer(self._file, lineterminator="\n")
        self._rows.writerow(("version", "t_s", "name", "value"))

    def write(self, version: int, t_s: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._rows.writerow((version, f"{t_s:.3f}", name, repr(value)))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardLog(MetricsLog):
    """TensorBoard's event files under ``tensorboard/``.

    Raises:
        ConfigError: tensorboardX is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise ConfigError(
                "--log tensorboard needs tensorboardX: pip install 'paceline[tensorboard]', "
                "or use --log csv"
            ) from None
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def write(self, version: int, t_s: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, version)

    def close(self) -> None:
        self._writer.close()


LOGS: Mapping[str, type[CsvLog] | type[TensorBoardLog]] = {
    "csv": CsvLog,
    "tensorboard": TensorBoardLog,
}


def open_log(kind: str, folder: Path) -> MetricsLog:
    """The log of this kind in the run's folder."""
    return LOGS[kind](folder)
