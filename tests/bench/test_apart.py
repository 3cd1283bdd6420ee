"""Apart: answers are returned, errors are classified, and no process is left behind."""

import os
from pathlib import Path

import psutil
import pytest

from own_tree import python_path
from paceline.bench.apart import Apart
from paceline.errors import ConfigError, WorkerError

SEAT = """
import os
from paceline.errors import ConfigError

class Seat:
    def __init__(self, start):
        self.total = start

    def add(self, number):
        print("a library prints what it likes")
        self.total += number
        return {"total": self.total, "pid": os.getpid()}

    def refuse(self):
        raise ConfigError("not like this")

    def fail(self):
        raise ValueError("mine")

    def die(self):
        os.write(2, b"last words\\n")
        os._exit(3)
"""


@pytest.fixture
def seat(tmp_path: Path) -> Apart:
    (tmp_path / "seats.py").write_text(SEAT)
    return Apart("seats:Seat", {"start": 40}, {"PYTHONPATH": python_path(tmp_path)})


def test_object_lives_in_another_process_and_keeps_its_state(seat: Apart) -> None:
    with seat:
        assert seat.ask("add", number=1)["total"] == 41
        answer = seat.ask("add", number=1)
        assert answer["total"] == 42
        assert answer["pid"] != os.getpid()
    assert not psutil.pid_exists(answer["pid"])


def test_modules_in_the_working_folder_do_not_shadow_pythons_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "random.py").write_text("raise OSError('not this one')")
    monkeypatch.chdir(folder)
    (tmp_path / "seats.py").write_text(SEAT)
    with Apart("seats:Seat", {"start": 40}, {"PYTHONPATH": python_path(tmp_path)}) as seat:
        assert seat.ask("add", number=1)["total"] == 41


def test_error_names_its_source_and_the_process_survives(seat: Apart) -> None:
    with seat:
        with pytest.raises(ConfigError, match="not like this"):
            seat.ask("refuse")
        with pytest.raises(WorkerError, match="ValueError: mine"):
            seat.ask("fail")
        assert seat.ask("add", number=2)["total"] == 42


def test_error_of_a_dead_process_quotes_its_last_output(seat: Apart) -> None:
    with seat, pytest.raises(WorkerError, match="ended with 3: last words"):
        seat.ask("die")
