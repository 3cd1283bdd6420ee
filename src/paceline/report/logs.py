"""Metrics of a run for other tools, written as they arrive: one log per run, with ``--log``.

    csv, tensorboard   files in the run's folder
    wandb, mlflow      a run on a server, written by the service's own client

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
from io import StringIO, TextIOWrapper
from pathlib import Path
from typing import Any, ClassVar

from ..errors import ConfigError
from ..system.files import OpenFolder, read_text

_CSV = "metrics.csv"
_MOST_OF_IDENTITY = 1000
"""Limit of the file with a run's identity, bytes."""


class MetricsLog(abc.ABC):
    """A destination for metrics."""

    @abc.abstractmethod
    def write(self, version: int, t_s: float, values: Mapping[str, float]) -> None:
        """Write values at a version, ``t_s`` seconds after the run's start."""

    @abc.abstractmethod
    def close(self) -> None:
        """Flush and close; may be called twice."""


class CsvLog(MetricsLog):
    """``metrics.csv``: one value per line, so metrics may differ between versions.

    version,t_s,name,value
    """

    def __init__(self, place: OpenFolder, version: int | None = None) -> None:
        kept = [["version", "t_s", "name", "value"], *_rows_up_to(place, version)]
        text = StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(kept)
        place.replace(_CSV, text.getvalue().encode())
        self._file = os.fdopen(place.append(_CSV), "a", encoding="utf-8", newline="")
        self._rows = csv.writer(self._file, lineterminator="\n")

    def write(self, version: int, t_s: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._rows.writerow((version, f"{t_s:.3f}", name, repr(value)))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _rows_up_to(place: OpenFolder, version: int | None) -> list[list[str]]:
    """Return earlier rows of a resumed run, up to its checkpoint; later ones are written again."""
    if version is None or not place.has(_CSV):
        return []
    with TextIOWrapper(place.read(_CSV), encoding="utf-8", newline="") as file:
        try:
            rows = list(csv.reader(file))[1:]
            return [row for row in rows if row and row[0].isdecimal() and int(row[0]) <= version]
        except (ValueError, csv.Error) as error:
            raise ConfigError(f"{place.path / _CSV} is damaged: {error}; move it away") from None


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
    """A run on a server, written by the service's client, which has the address and credentials.

    The run's identity on the server is stored in the run's folder, so that a resumed run continues
    there.

    Raises:
        ConfigError: the client is not installed, or cannot start a run.
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
        earlier = None
        if version is not None and place.has(file):
            try:
                earlier = read_text(place.read(file), _MOST_OF_IDENTITY).strip()
            except ValueError as error:
                raise ConfigError(
                    f"{place.path / file} is damaged: {error}; move it away"
                ) from None
        try:
            identity = self.begin(client, place.path, earlier or None)
        except Exception as error:  # a client may raise anything
            raise ConfigError(
                f"--log {self.name}: its client failed: {_first_line(error)}"
            ) from None
        place.write(file, identity.encode())
        self._is_open = True

    @abc.abstractmethod
    def begin(self, client: Any, folder: Path, identity: str | None) -> str:
        """Start a run, or continue the one with this identity; return its identity."""

    @abc.abstractmethod
    def send(self, version: int, values: Mapping[str, float]) -> None:
        """Send values at a version."""

    @abc.abstractmethod
    def end(self, *, has_failed: bool) -> None:
        """End the run on the server."""

    def write(self, version: int, t_s: float, values: Mapping[str, float]) -> None:
        """Send values; OSError, as from a file, since a lost server must not end the training."""
        try:
            self.send(version, values)
        except Exception as error:  # a client may raise anything
            raise OSError(0, f"{self.name}: {_first_line(error)}") from None

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            with suppress(Exception):  # the client logs its own failures
                self.end(has_failed=sys.exc_info()[0] is not None)


class WandbLog(ClientLog):
    """Weights & Biases: the project is ``WANDB_PROJECT``, or ``paceline``; its files in ``wandb/``.

    It ignores steps that it has already, so after a resume it keeps the first values written after
    the checkpoint.
    """

    name = "wandb"

    def begin(self, client: Any, folder: Path, identity: str | None) -> str:
        self._run = client.init(
            project=os.environ.get("WANDB_PROJECT") or "paceline",
            name=folder.name, dir=str(folder), id=identity, resume="allow" if identity else None,
        )  # fmt: skip
        return str(self._run.id)

    def send(self, version: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=version)

    def end(self, *, has_failed: bool) -> None:
        self._run.finish(exit_code=int(has_failed))


class MlflowLog(ClientLog):
    """MLflow: the experiment is ``MLFLOW_EXPERIMENT_NAME``, or ``paceline``."""

    name = "mlflow"

    def begin(self, client: Any, folder: Path, identity: str | None) -> str:
        self._client = api = client.MlflowClient()
        if identity is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "paceline"
            experiment = api.get_experiment_by_name(name)
            experiment_id = (
                api.create_experiment(name) if experiment is None else experiment.experiment_id
            )
            identity = str(api.create_run(experiment_id, run_name=folder.name).info.run_id)
        else:
            api.update_run(identity, status="RUNNING")
        self._id = identity
        return identity

    def send(self, version: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():  # MLflow allows letters, digits and a few signs
            self._client.log_metric(self._id, re.sub(r"[^\w\-. /]", "_", name), value, step=version)

    def end(self, *, has_failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if has_failed else "FINISHED")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


LOGS: Mapping[str, type[CsvLog | TensorBoardLog | WandbLog | MlflowLog]] = {
    "csv": CsvLog,
    "tensorboard": TensorBoardLog,
    "wandb": WandbLog,
    "mlflow": MlflowLog,
}
CLIENTS_RUNS = ("wandb-run.txt", "mlflow-run.txt")
"""Files with the identity of a run on a server."""


def open_log(kind: str, place: OpenFolder, version: int | None = None) -> MetricsLog:
    """Open a log in the run's folder; a resumed run gives the ``version`` of its checkpoint."""
    return LOGS[kind](place, version)
