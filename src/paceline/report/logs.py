"""Metrics of a run for other tools, written as they come: one log a run, where one is asked for.

    csv, tensorboard   files in the run's folder
    wandb, mlflow      a run at a server, by its own client

The x-axis is the version: the number of updates. This module must not know engines, nor who
measured the values.
"""

import abc
import csv
import importlib
import os
import re
import sys
from collections.abc import Mapping
from contextlib import closing, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, ClassVar

from ..errors import ConfigError
from ..system.files import OpenFolder, read_text

_CSV = "metrics.csv"
_MOST_OF_IDENTITY = 1000
"""Bytes."""


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


class ClientLog(MetricsLog):
    """A run at a server, by its own client, which knows its address and credentials.

    Its identity lies in the run's folder, so that a run that goes on goes on there, too.

    Raises:
        ConfigError: the client is not installed, or will not begin.
    """

    name: ClassVar[str]

    def __init__(self, place: OpenFolder, version: int | None = None) -> None:
        try:
            client: Any = importlib.import_module(self.name)
        except ImportError:
            raise ConfigError(
                f"--log {self.name} needs its client: pip install 'paceline[{self.name}]', or use "
                "--log csv"
            ) from None
        file = f"{self.name}-run.txt"
        known = None
        if version is not None and place.has(file):
            known = read_text(place.read(file), _MOST_OF_IDENTITY).strip()
        try:
            identity = self.begin(client, place.path, known or None)
        except Exception as error:  # a client's own errors are not known
            raise ConfigError(f"--log {self.name}: its client says {_first(error)}") from None
        place.write(file, identity.encode())
        self._is_open = True

    @abc.abstractmethod
    def begin(self, client: Any, folder: Path, known: str | None) -> str:
        """Begin a run, or go on with the known one; its identity."""

    @abc.abstractmethod
    def send(self, version: int, values: Mapping[str, float]) -> None:
        """Write values at a version."""

    @abc.abstractmethod
    def end(self, *, has_failed: bool) -> None:
        """The run is over."""

    def write(self, version: int, t_s: float, values: Mapping[str, float]) -> None:
        """OSError, as of a file: a server that is away ends no training."""
        try:
            self.send(version, values)
        except Exception as error:  # the same
            raise OSError(0, f"{self.name}: {_first(error)}") from None

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            with suppress(Exception):  # the client logs its own failures
                self.end(has_failed=sys.exc_info()[0] is not None)


class WandbLog(ClientLog):
    """Weights & Biases: the project is ``WANDB_PROJECT``, or ``paceline``; its files in ``wandb/``.

    A step that it has already is not written again, so of a run that goes on it keeps what came
    after the checkpoint the first time.
    """

    name = "wandb"

    def begin(self, client: Any, folder: Path, known: str | None) -> str:
        self._run = client.init(
            project=os.environ.get("WANDB_PROJECT") or "paceline",
            name=folder.name, dir=str(folder), id=known, resume="allow" if known else None,
        )  # fmt: skip
        return str(self._run.id)

    def send(self, version: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=version)

    def end(self, *, has_failed: bool) -> None:
        self._run.finish(exit_code=int(has_failed))


class MlflowLog(ClientLog):
    """MLflow: the experiment is ``MLFLOW_EXPERIMENT_NAME``, or ``paceline``."""

    name = "mlflow"

    def begin(self, client: Any, folder: Path, known: str | None) -> str:
        self._client = made = client.MlflowClient()
        if known is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "paceline"
            result = made.get_experiment_by_name(name)
            experiment = made.create_experiment(name) if result is None else result.experiment_id
            known = str(made.create_run(experiment, run_name=folder.name).info.run_id)
        else:
            made.update_run(known, status="RUNNING")
        self._id = known
        return known

    def send(self, version: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():  # it takes letters, digits and a few signs
            self._client.log_metric(self._id, re.sub(r"[^\w\-. /]", "_", name), value, step=version)

    def end(self, *, has_failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if has_failed else "FINISHED")


def _first(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


LOGS: Mapping[str, type[CsvLog | TensorBoardLog | WandbLog | MlflowLog]] = {
    "csv": CsvLog,
    "tensorboard": TensorBoardLog,
    "wandb": WandbLog,
    "mlflow": MlflowLog,
}
CLIENTS_RUNS = ("wandb-run.txt", "mlflow-run.txt")
"""Files with the identity of a run at a server."""


def open_log(kind: str, place: OpenFolder, version: int | None = None) -> MetricsLog:
    """The log of this kind in the run's folder; ``version``: the run goes on from there."""
    return LOGS[kind](place, version)
