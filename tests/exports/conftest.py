"""The command line in a folder where nets.py can be imported."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

Say = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def say(say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    """The usual ``say``, with ``somenets`` as a module that tests can name."""
    shutil.copy(Path(__file__).parent / "nets.py", tmp_path / "somenets.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    return say
