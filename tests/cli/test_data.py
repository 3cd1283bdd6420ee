"""``paceline data``: lists and fetches data sets, with JSON on request."""

import json
from pathlib import Path

import pytest

from paceline.cli.app import run
from paceline.data.catalogue import CATALOGUE


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with only the data that ships with the package, and no programs."""
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_list_names_every_data_set_and_its_search_path(empty: Path, capsys) -> None:
    assert run(["data"]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in CATALOGUE)
    assert f"not in {empty / 'data' / 'mnist'}\n" in output
    assert "`paceline data get mnist` fetches it" in output


def test_json_list_is_one_object(empty: Path, capsys) -> None:
    assert run(["data", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["data_folder"] == str(empty / "data")
    states = {row["name"]: row["state"] for row in listed["data_sets"]}
    assert states["digits"] == "here"
    assert states["mnist"] == "missing"


def test_damaged_data_set_is_listed_with_the_file(empty: Path, capsys) -> None:
    folder = empty / "data" / "mnist"
    folder.mkdir(parents=True)
    (folder / "train-labels-idx1-ubyte").write_bytes(b"cut")
    assert run(["data"]) == 0
    output = capsys.readouterr().out
    assert "damaged" in output
    assert f"{folder / 'train-labels-idx1-ubyte'} is damaged: expected 60,008 bytes" in output


def test_present_data_set_is_not_fetched(capsys) -> None:
    assert run(["data", "get", "digits"]) == 0
    assert "was here already, checksums are right" in capsys.readouterr().out
    assert run(["data", "get", "digits", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["was_here"], answer["source"]) == (True, None)


def test_unknown_data_set_gets_a_suggestion(capsys) -> None:
    assert run(["data", "get", "minst"]) == 2
    assert "did you mean 'mnist'" in capsys.readouterr().err


def test_failed_fetch_gives_its_reason_and_valid_json(
    capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(address: str, timeout: float) -> None:
        raise OSError("no network in tests")

    monkeypatch.setattr("urllib.request.urlopen", no_network)
    assert run(["data", "get", "mnist", "--json"]) == 2
    captured = capsys.readouterr()
    message = json.loads(captured.out)["error"]["message"]
    assert "no network in tests" in message
    assert "no npm here" in message
    assert "trying the web" in captured.err
