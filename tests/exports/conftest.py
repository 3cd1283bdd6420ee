"""The command line in a folder of its own, where nets.py can be imported."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from paceline.cli import app as command


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads of several tests at once would wait for each other's cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], tuple[int, str, str]]:
    """Run the command line: exit code, standard output, standard error."""
    shutil.copy(Path(__file__).parent / "nets.py", tmp_path / "somenets.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(line: str) -> tuple[int, str, str]:
        code = command.run(line.split())
        return code, *capsys.readouterr()

    return run
