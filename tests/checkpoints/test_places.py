"""Where checkpoints go, also when somebody takes the run's folder away."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.checkpoints.due import CheckpointPlaces
from paceline.trace import FILE_NAME, Trace


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trace]:
    """Of a run in ``tmp_path/run``; temporary folders lie in ``tmp_path``."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "run"
    folder.mkdir()
    one = Trace(folder / FILE_NAME)
    one.header(task="a task")
    yield one
    one.close()


def take_away(folder: Path) -> None:
    """Nobody can make this folder again: a file has its name."""
    shutil.rmtree(folder)
    folder.write_text("mine\n")


def test_numbers_count_up_in_the_runs_own_folder(trace: Trace, tmp_path: Path) -> None:
    places = CheckpointPlaces(trace, keep=2)
    asides = [places.begin(), places.begin(), places.begin_last(100)]
    assert asides == [tmp_path / "run" / "checkpoints" / f".new-{number}" for number in (1, 2, 3)]
    assert places.unsaved == ""


def test_a_folder_that_was_deleted_is_there_again(trace: Trace, tmp_path: Path) -> None:
    places = CheckpointPlaces(trace, keep=2)
    shutil.rmtree(tmp_path / "run")
    assert places.begin().is_dir()
    assert (tmp_path / "run" / FILE_NAME).exists()


def test_the_last_one_goes_elsewhere_with_its_trace(trace: Trace, tmp_path: Path) -> None:
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


def test_where_nothing_came_of_it_nothing_stays(trace: Trace, tmp_path: Path) -> None:
    places = CheckpointPlaces(trace, keep=2)
    take_away(tmp_path / "run")
    aside = places.begin_last(100)
    assert aside is not None
    places.leave_elsewhere()
    assert not aside.parents[1].exists()
    assert "it is in no checkpoint; " in places.unsaved


def test_where_there_is_room_nowhere_it_is_said(trace: Trace, tmp_path: Path) -> None:
    places = CheckpointPlaces(trace, keep=2)
    assert places.begin_last(1 << 60) is None
    assert "could not be written" in places.unsaved
    assert places.unsaved.endswith("has none")
    assert [one.name for one in tmp_path.iterdir()] == ["run"]


def test_a_folder_that_is_back_takes_the_last_one(trace: Trace, tmp_path: Path) -> None:
    places = CheckpointPlaces(trace, keep=2)
    assert places.begin_last(1 << 60) is None
    assert places.begin_last(100) is not None
    assert places.unsaved == ""
