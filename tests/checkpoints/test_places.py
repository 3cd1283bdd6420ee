"""Where checkpoints are saved, also when the run's folder is removed."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.checkpoints.due import CheckpointPlaces
from paceline.trace import FILE_NAME, Trace


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trace]:
    """The trace of a run in ``tmp_path/run``; temporary folders are in ``tmp_path``."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "run"
    folder.mkdir()
    trace = Trace(folder / FILE_NAME)
    trace.header(task="a task")
    yield trace
    trace.close()


def take_away(folder: Path) -> None:
    """Prevent that this folder is made again: a file has its name."""
    shutil.rmtree(folder)
    folder.write_text("mine\n")


def test_numbers_count_up_in_the_runs_own_folder(trace: Trace, tmp_path: Path) -> None:
    places = CheckpointPlaces(trace, keep=2)
    asides = [places.begin(), places.begin(), places.begin_last(100)]
    assert asides == [tmp_path / "run" / "checkpoints" / f".new-{number}" for number in (1, 2, 3)]
    assert places.unsaved == ""


def test_a_deleted_folder_is_made_again(trace: Trace, tmp_path: Path) -> None:
    places = CheckpointPlaces(trace, keep=2)
    shutil.rmtree(tmp_path / "run")
    assert places.begin().is_dir()
    assert (tmp_path / "run" / FILE_NAME).exists()


def test_the_last_checkpoint_is_saved_elsewhere_with_its_trace(
    trace: Trace, tmp_path: Path
) -> None:
    places = CheckpointPlaces(trace, keep=2)
    take_away(tmp_path / "run")
    with pytest.raises(OSError, match="run"):
        places.begin()
    aside = places.begin_last(100)
    assert aside is not None
    other = aside.parents[1]
    assert other.name.startswith("run-")
    assert places.keep_trace() == (other / FILE_NAME).stat().st_size > 0
    assert places.folder.folder == aside.parent
    assert f"it is in {other} instead; to continue from it: --resume {other}" in places.unsaved


def test_a_failed_save_elsewhere_leaves_nothing(trace: Trace, tmp_path: Path) -> None:
    places = CheckpointPlaces(trace, keep=2)
    take_away(tmp_path / "run")
    aside = places.begin_last(100)
    assert aside is not None
    places.leave_elsewhere()
    assert not aside.parents[1].exists()
    assert "it is in no checkpoint; " in places.unsaved


def test_a_lack_of_room_everywhere_is_reported(trace: Trace, tmp_path: Path) -> None:
    places = CheckpointPlaces(trace, keep=2)
    assert places.begin_last(1 << 60) is None
    assert "could not be written" in places.unsaved
    assert places.unsaved.endswith("has none")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_restored_folder_gets_the_last_checkpoint(trace: Trace, tmp_path: Path) -> None:
    places = CheckpointPlaces(trace, keep=2)
    assert places.begin_last(1 << 60) is None
    assert places.begin_last(100) is not None
    assert places.unsaved == ""
