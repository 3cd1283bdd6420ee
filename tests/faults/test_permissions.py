"""Files without permission, and caches of another user: one sentence."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.cli import app as command
from paceline.data import fetch as fetch_module
from paceline.errors import ConfigError
from paceline.tuning import remembered as remembered_module
from paceline.tuning.remembered import folder, remembered

Say = Callable[[str], tuple[int, str, str]]
_VERSION, _OVERRIDE, _SEARCH = 0x20080522, 1, 2
"""Of <linux/capability.h>."""
Paceline = Callable[[str], tuple[int, str]]


@contextmanager
def obeying_modes() -> Iterator[None]:
    """In here file modes bind root as any other user."""
    libc, header = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(_VERSION, 0)
    before, fewer = (ctypes.c_uint32 * 6)(), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, before) == 0
    fewer[:] = before[:]
    fewer[0] &= ~(1 << _OVERRIDE | 1 << _SEARCH)  # in effect; they stay permitted
    assert libc.capset(header, fewer) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path
    subprocess.run(["chmod", "-R", "u+rwX", str(tmp_path)], check=True)


@pytest.fixture
def paceline(here: Path, say: Say) -> Paceline:
    """The command as a user bound by file modes: exit code and output."""

    def run(line: str) -> tuple[int, str]:
        with obeying_modes():
            code, out, err = say(line)
        return code, out + err

    return run


TRAIN = "train quadratic --engine inline --device cpu --updates 3 --run-dir run"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train = TRAIN.replace("--run-dir run", f"--run-dir {folder}")
    assert command.run([*train.split(), "--log", "csv"]) == 0
    return folder


@pytest.fixture
def run(here: Path, trained: Path) -> Path:
    shutil.copytree(trained, here / "run", symlinks=True)
    return here / "run"


@pytest.mark.parametrize(
    ("name", "mode", "verb", "words"),
    [
        (".", 0o000, "report run", "error: run: Permission denied"),
        (".", 0o000, "train quadratic --resume run", "Permission denied"),
        (".", 0o500, "train quadratic --resume run --updates 9", "Permission denied"),
        ("trace.jsonl", 0o000, "report run", "the trace run/trace.jsonl cannot be read"),
        ("trace.jsonl", 0o000, "replay run", "the trace run/trace.jsonl cannot be read"),
        ("trace.jsonl", 0o400, "train quadratic --resume run --updates 9", "run/trace.jsonl"),
        ("checkpoints", 0o000, "train quadratic --resume run --updates 9", "checkpoints"),
        ("checkpoints/1", 0o000, "train quadratic --resume run --updates 9", "manifest.json"),
        ("checkpoints/1/run.json", 0o000, "train quadratic --resume run", "run.json"),
        ("logs", 0o000, "train quadratic --resume run --updates 9 --engine local", "run/logs"),
        ("metrics.csv", 0o000, "train quadratic --resume run --updates 9 --log csv", "metrics"),
    ],
)
def test_a_file_that_may_not_be_opened_is_named(
    paceline: Paceline, run: Path, name: str, mode: int, verb: str, words: str
) -> None:
    (run / name).chmod(mode)
    code, output = paceline(verb)
    assert code in (1, 2), output
    assert "Traceback" not in output
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert words in line


def test_a_run_folder_that_cannot_be_made_is_named(here: Path, paceline: Paceline) -> None:
    here.chmod(0o500)
    code, output = paceline(TRAIN)
    assert code == 2
    assert output.strip().splitlines()[-1] == "error: run: Permission denied"


def test_an_unreadable_settings_file_is_named(here: Path, paceline: Paceline) -> None:
    (here / "paceline.toml").write_text("workers = 1")
    (here / "paceline.toml").chmod(0)
    code, output = paceline(TRAIN)
    assert code == 2
    assert "the settings file paceline.toml cannot be read: Permission denied" in output


def test_an_unreadable_cache_is_skipped_or_named(here: Path, paceline: Paceline) -> None:
    (here / "cache").mkdir()
    (here / "cache").chmod(0)
    code, output = paceline("data")
    assert code == 0, output
    code, output = paceline("data get mnist")
    assert code == 2
    assert "Traceback" not in output


# -- caches ----------------------------------------------------------------------------------------


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for outcomes where no cache is writable."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(remembered_module.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / f"paceline-fast-{os.geteuid()}"


def everybodys(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def somebody_elses(path: Path) -> None:
    path.mkdir(mode=0o755)
    os.chown(path, 1234, 1234)


@pytest.mark.parametrize("plant", [everybodys, somebody_elses])
def test_a_cache_of_another_user_is_not_trusted(
    scratch: Path, plant: Callable[[Path], None]
) -> None:
    if plant is somebody_elses and os.geteuid() != 0:
        pytest.skip("only root may give files away")
    plant(scratch)
    with pytest.raises(ConfigError, match=r"belongs to user 1234|everybody may write to it"):
        folder()
    with pytest.raises(ConfigError, match="--fast auto: the workers share the outcome"):
        remembered("a", pytest.fail, is_shared=True)
    assert list(scratch.iterdir()) == []


def test_a_lock_that_is_a_link_is_not_followed(scratch: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    scratch.mkdir()
    (scratch / "a.lock").symlink_to(victim)
    with pytest.raises(ConfigError, match="it is a link"):
        remembered("a", pytest.fail, is_shared=True)
    assert victim.read_text() == "mine"


def test_a_world_writable_data_folder_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data").chmod(0o1777)
    env = {"PACELINE_DATA": str(tmp_path / "data"), "XDG_CACHE_HOME": str(tmp_path / "none")}
    with pytest.raises(ConfigError, match="everybody may write to it; set PACELINE_DATA"):
        fetch_module.fetch("mnist", env=env)
    assert list((tmp_path / "data").iterdir()) == []
