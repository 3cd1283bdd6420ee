"""What tests of the verbs share: the command line in a folder of its own."""

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli import app as command


@pytest.fixture
def say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], tuple[int, str, str]]:
    """Run the command line: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)

    def run(line: str) -> tuple[int, str, str]:
        code = command.run(line.split())
        return code, *capsys.readouterr()

    return run
