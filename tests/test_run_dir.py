"""The folder of a run: created or found, held by one run, and removed without a trace."""

import errno
import shutil
from pathlib import Path

import pytest

from paceline.config import RunSettings
from paceline.errors import ConfigError
from paceline.launch.lives import claim
from paceline.run_dir import RUNS, RunFolder, fresh_folder, make_folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def claimed(**settings: str) -> RunFolder:
    return make_folder(RunSettings(**settings), "lenet")  # type: ignore[arg-type]


def test_latest_points_back_when_the_newest_run_is_refused() -> None:
    first = claimed(name="first")
    second = claimed(name="second")
    assert (RUNS / "latest").resolve() == second.path.resolve()
    second.discard([])
    second.close()
    assert (RUNS / "latest").resolve() == first.path.resolve()
    assert not second.path.exists()
    first.close()


def test_latest_stays_with_a_run_started_after_a_refused_one() -> None:
    first = claimed(name="first")
    second, third = claimed(name="second"), claimed(name="third")
    second.discard([])
    second.close()
    assert (RUNS / "latest").resolve() == third.path.resolve()
    third.discard([])
    third.close()
    assert not (RUNS / "latest").is_symlink()  # no dangling link
    first.close()


def test_run_works_without_symlinks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: str) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", target, None, str(self))

    monkeypatch.setattr(Path, "symlink_to", refuse)
    messages = list[str]()
    folder = claim(RunSettings(name="one"), "lenet", messages.append)
    assert messages == ["runs/latest does not point to runs/one: Operation not permitted"]
    folder.discard([])
    folder.close()
    assert not RUNS.exists()


def test_files_of_others_stay_in_the_folder() -> None:
    folder = claimed(run_dir="out")
    (folder.path / "theirs").touch()
    (folder.path / "trace.jsonl").touch()
    folder.discard(["trace.jsonl", "theirs-too"])
    folder.close()
    assert [path.name for path in Path("out").iterdir()] == ["theirs"]


@pytest.mark.parametrize("num_busy", [2, 9])
def test_worker_that_still_writes_hides_no_refusal(
    num_busy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file comes between the removal of all others and that of their folder."""
    folder, left, own = claimed(run_dir="out"), list(range(num_busy)), shutil.rmtree
    (folder.path / "logs").mkdir()

    def remove(name: str, *, dir_fd: int) -> None:
        if left:
            left.pop()
            raise OSError(errno.ENOTEMPTY, "Directory not empty", name)
        own(name, dir_fd=dir_fd)

    monkeypatch.setattr(shutil, "rmtree", remove)
    folder.discard(["logs"])
    folder.close()
    assert [path.name for path in Path().glob("out/*")] == (["logs"] if num_busy == 9 else [])
    assert Path("out").exists() == (num_busy == 9)


def test_folder_holding_a_run_and_taken_name_are_refused() -> None:
    Path("out").mkdir()
    (Path("out") / "trace.jsonl").touch()
    with pytest.raises(ConfigError, match="already holds a run"):
        claimed(run_dir="out")
    claimed(name="one").close()
    with pytest.raises(ConfigError, match="exists already; choose another --name"):
        claimed(name="one")
    with pytest.raises(ConfigError, match="is not empty"):
        fresh_folder("compare", Path("out"))


def test_refused_run_leaves_the_lock_to_a_later_one() -> None:
    first = claimed(run_dir="out")
    assert first.hold() is None
    (Path("out") / "theirs").touch()
    first.discard([])
    second = claimed(run_dir="out")
    assert second.hold() is None
    first.close()
    third = claimed(run_dir="out")
    with pytest.raises(ConfigError, match="another run is at work"):
        third.hold()
    third.close()
    second.close()


def test_partial_files_are_removed_on_claim_and_on_close() -> None:
    folder = claimed(run_dir="out")
    half = Path("out") / ".best.safetensors.0123abcd.part"
    half.touch()
    assert folder.hold() is None
    assert not half.exists()
    half.touch()
    folder.close()
    assert not half.exists()


def test_folder_is_held_by_one_run_at_a_time() -> None:
    first = claimed(run_dir="out")
    assert first.hold() is None
    second = claimed(run_dir="out", resume="auto")
    with pytest.raises(ConfigError, match="another run is at work"):
        second.hold()
    first.close()
    assert second.hold() is None
    second.close()
    assert not (Path("out") / "lock").exists()
