"""The ceilings file: written values are read; damage is reported in one sentence."""

import json
from pathlib import Path

import pytest

from paceline.errors import FileError
from paceline.system.ceilings import ceilings_path, read_ceilings, write_ceilings


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_sections_are_independent() -> None:
    assert read_ceilings("collectives") == (None, "")
    write_ceilings("collectives", {"2": [1.5]})
    assert write_ceilings("memory", 7) == ceilings_path()
    assert read_ceilings("collectives") == ({"2": [1.5]}, "")
    write_ceilings("collectives", {})
    assert read_ceilings("collectives") == ({}, "")
    assert read_ceilings("memory") == (7, "")


def test_each_machine_reads_its_own_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "one")
    write_ceilings("memory", 1)
    monkeypatch.setattr("platform.node", lambda: "other")
    assert read_ceilings("memory") == (None, "")
    write_ceilings("memory", 2)
    monkeypatch.setattr("platform.node", lambda: "one")
    assert read_ceilings("memory") == (1, "")


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", "[" * 5000, '{"format": 2, "machines": {}}', '{"format": 1}',
        '{"format": 1, "machines": 3}', "\xff", "x" * (1 << 21),
    ],
    ids=range(10),
)  # fmt: skip
def test_damaged_file_is_ignored_and_can_be_rewritten(text: str) -> None:
    path = ceilings_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode("latin-1"))
    result, why = read_ceilings("memory")
    assert result is None
    assert why == f"{path} is ignored: it is damaged, or of another version of Paceline"
    write_ceilings("memory", 3)
    assert read_ceilings("memory") == (3, "")


def test_machine_without_sections_counts_as_damaged() -> None:
    write_ceilings("memory", 1)
    whole = json.loads(ceilings_path().read_text())
    (name,) = whole["machines"]
    ceilings_path().write_text(json.dumps({"format": 1, "machines": {name: [1, 2]}}))
    assert read_ceilings("memory")[0] is None
    write_ceilings("memory", 2)
    assert read_ceilings("memory") == (2, "")


def test_unreadable_home_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of another user: the run continues without it."""
    monkeypatch.setenv("XDG_CACHE_HOME", f"/tmp/{'long' * 100}")
    result, why = read_ceilings("memory")
    assert result is None
    assert why == f"{ceilings_path()} is ignored: File name too long"


def test_unwritable_file_is_reported(home: Path) -> None:
    home.mkdir()
    (home / "paceline").write_text("a file, and no folder")
    with pytest.raises(FileError):
        write_ceilings("memory", 1)
    ceilings_path().parent.unlink()
    ceilings_path().mkdir(parents=True)
    result, why = read_ceilings("memory")
    assert result is None
    assert "is ignored: " in why
    assert "\n" not in why
