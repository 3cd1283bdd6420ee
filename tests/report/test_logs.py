"""Metrics are written for other tools, once a run."""

import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.config import RunSettings
from paceline.errors import ConfigError
from paceline.launch import launcher
from paceline.program import TaskProgram
from paceline.report.live import QuietObserver
from paceline.report.logs import open_log
from paceline.system.files import OpenFolder
from runs import train
from tiny import TASK


def test_the_csv_has_one_value_a_line(tmp_path: Path) -> None:
    log = open_log("csv", OpenFolder.open(tmp_path))
    log.write(235, 7.4, {"acc": 0.1, "loss": 2.3})
    log.write(470, 14.8, {"acc": 0.5})
    log.close()
    log.close()
    assert (tmp_path / "metrics.csv").read_text() == (
        "version,t_s,name,value\n235,7.400,acc,0.1\n235,7.400,loss,2.3\n470,14.800,acc,0.5\n"
    )


def test_the_csv_of_a_resumed_run_keeps_rows_up_to_its_version(tmp_path: Path) -> None:
    rows = [
        "version,t_s,name,value",
        "235,7.400,acc,0.1",
        "\u00b2,7.400,acc,0.1",
        "470,9.000,acc,0.2",
    ]
    path = tmp_path / "metrics.csv"
    path.write_text("\n".join(rows) + "\n")
    open_log("csv", OpenFolder.open(tmp_path), version=235).close()
    assert path.read_text() == "\n".join(rows[:2]) + "\n"
    path.write_text("\n".join([rows[0], "9" * 5000 + ",1,acc,1"]))
    with pytest.raises(ConfigError, match=r"metrics\.csv is damaged: .*; move it away"):
        open_log("csv", OpenFolder.open(tmp_path), version=235)


def test_a_damaged_identity_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Wandb())  # type: ignore[arg-type]
    (tmp_path / "wandb-run.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"wandb-run\.txt is damaged: .*; move it away"):
        open_log("wandb", OpenFolder.open(tmp_path), version=235)


def test_tensorboard_gets_an_event_file(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    log = open_log("tensorboard", OpenFolder.open(tmp_path))
    log.write(235, 7.4, {"acc": 0.1})
    log.close()
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


def test_a_missing_tensorboard_is_reported_with_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[tensorboard\]'.*--log csv"):
        open_log("tensorboard", OpenFolder.open(tmp_path))


# -- clients of other projects, by a stand-in that records its calls -------------------------------


class Recorded:
    """A client that records its calls in order; ``fails`` names the call that raises."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[tuple[str, object]] = []
        self._fails = fails

    def note(self, name: str, what: object) -> None:
        self.calls.append((name, what))
        if name == self._fails:
            raise RuntimeError("nobody answers\nat all")


class Wandb(Recorded):
    """A stand-in for wandb: ``init`` gives a run with ``id``, ``log`` and ``finish``."""

    def init(self, **options: object) -> "Wandb":
        self.note("init", options)
        self.id = options["id"] or "abc123"
        return self

    def log(self, values: dict[str, float], *, step: int) -> None:
        self.note("log", (step, values))

    def finish(self, *, exit_code: int) -> None:
        self.note("finish", exit_code)


class Mlflow(Recorded):
    """A stand-in for mlflow: ``MlflowClient`` with the methods that are used."""

    def MlflowClient(self) -> "Mlflow":
        return self

    def get_experiment_by_name(self, name: str) -> None:
        self.note("get_experiment_by_name", name)

    def create_experiment(self, name: str) -> str:
        self.note("create_experiment", name)
        return "7"

    def create_run(self, experiment_id: str, *, run_name: str) -> SimpleNamespace:
        self.note("create_run", (experiment_id, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="f00"))

    def update_run(self, run_id: str, *, status: str) -> None:
        self.note("update_run", (run_id, status))

    def log_metric(self, run_id: str, key: str, value: float, *, step: int) -> None:
        self.note("log_metric", (run_id, key, value, step))

    def set_terminated(self, run_id: str, status: str) -> None:
        self.note("set_terminated", (run_id, status))


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)


def test_wandb_gets_the_metrics_and_resumes_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", client)  # type: ignore[arg-type]
    log = open_log("wandb", OpenFolder.open(tmp_path))
    log.write(235, 7.4, {"acc": 0.1, "loss": 2.3})
    log.close()
    log.close()
    begun = {"project": "paceline", "name": tmp_path.name, "dir": str(tmp_path)}
    assert client.calls == [
        ("init", {**begun, "id": None, "resume": None}),
        ("log", (235, {"acc": 0.1, "loss": 2.3})),
        ("finish", 0),
    ]
    client.calls.clear()
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    open_log("wandb", OpenFolder.open(tmp_path), version=235).close()
    resumed = {**begun, "project": "mine", "id": "abc123", "resume": "allow"}
    assert client.calls == [("init", resumed), ("finish", 0)]


def test_mlflow_gets_the_metrics_and_resumes_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", client)  # type: ignore[arg-type]
    log = open_log("mlflow", OpenFolder.open(tmp_path))
    log.write(235, 7.4, {"acc": 0.1, "loss@1": 2.3})
    log.close()
    assert client.calls == [
        ("get_experiment_by_name", "paceline"),
        ("create_experiment", "paceline"),
        ("create_run", ("7", tmp_path.name)),
        ("log_metric", ("f00", "acc", 0.1, 235)),
        ("log_metric", ("f00", "loss_1", 2.3, 235)),
        ("set_terminated", ("f00", "FINISHED")),
    ]
    client.calls.clear()
    with pytest.raises(KeyError), closing(open_log("mlflow", OpenFolder.open(tmp_path), 235)):
        raise KeyError
    assert client.calls == [
        ("update_run", ("f00", "RUNNING")), ("set_terminated", ("f00", "FAILED")),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["wandb", "mlflow"])
def test_a_missing_client_is_reported_in_one_sentence(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(
        ConfigError, match=rf"pip install 'paceline\[{kind}\]'.*--log csv"
    ) as caught:
        open_log(kind, OpenFolder.open(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_client_that_fails_to_start_is_reported_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Wandb(fails="init"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"its client failed: nobody answers$"):
        open_log("wandb", OpenFolder.open(tmp_path))


def test_a_lost_server_does_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Wandb(fails="log")
    monkeypatch.setitem(sys.modules, "wandb", client)  # type: ignore[arg-type]
    run = train(TASK, tmp_path, engine="inline", log="wandb")
    assert run.summary.updates == 10
    assert any("wandb: nobody answers" in note for note in run.notes)
    assert client.calls[-1] == ("finish", 0)


def test_a_dry_run_starts_no_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", client)  # type: ignore[arg-type]
    settings = RunSettings(engine="inline", device="cpu", dry_run=True, log="wandb")
    launcher.launch_run(TaskProgram(task=TASK), settings, QuietObserver())
    assert client.calls == []
