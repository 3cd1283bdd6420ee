"""The launcher's own decisions: refusals, and restarts."""

from pathlib import Path

import pytest

from paceline.checkpoints.resumption import Origin
from paceline.config import MOST_PROCESSES, RunSettings
from paceline.errors import AllGone, ConfigError
from paceline.launch import lives
from paceline.launch.launcher import launch_run
from paceline.launch.lives import Lives
from paceline.program import TaskProgram
from paceline.report.live import QuietObserver
from paceline.system.files import OpenFolder


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": MOST_PROCESSES + 1}, "are more than one machine can run .*simulate"),
        ({"workers": 2, "protocol": "k-sync:3"}, "k-sync:3"),
        ({"fault": ("kill worker 7 at update 3",)}, "worker 7"),
        ({"checkpoint_every": "often"}, "often"),
    ],
)
def test_impossible_settings_are_refused_before_a_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        launch_run(TaskProgram(task="quadratic"), RunSettings(**settings), QuietObserver())  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_progress_resets_the_number_of_restarts(tmp_path: Path) -> None:
    """The rule alone: a life that gets further than all before it resets the count."""
    faults = ("kill worker 0 at update 3", "kill worker 0 at update 3", "kill worker 1 at 4s")
    settings = RunSettings(workers=2, fault=faults, respawn=True)
    these = Lives(settings, Origin(about={}), OpenFolder.open(tmp_path))
    lost = AllGone("worker 0 ended: killed by signal 9")
    for version in (-1, -1, 4, 2, 3, 5, 5, 5):
        message = these.go_on(lost, version, ["kill worker 0 at update 3"])
        assert message.endswith("the run begins again from the start")
        assert these.origin.note == message
    assert these.settings.fault == ("kill worker 1 at 4s",)
    with pytest.raises(AllGone, match="3 times without getting beyond update 5"):
        these.go_on(lost, 5, [])


@pytest.mark.parametrize(
    ("exported", "threads"), [("", 4), ("3", 3), ("2,2", 2), ("0", 4), ("many", 4), ("99999", 4)]
)
def test_a_worker_has_at_most_the_exported_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, exported: str, threads: int
) -> None:
    """As in torch; all workers together have no more threads than cores."""
    monkeypatch.setattr(lives, "num_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", exported)
    assert lives._default_threads(2) == threads
