"""The report of a script that trains in trials, row by row."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.report.summary import summarize
from paceline.report.trials import has_trials, read_trials

Say = Callable[[str], tuple[int, str, str]]
Make = Callable[..., Path]


@pytest.fixture
def make(run_dir: Path) -> Make:
    """A folder of trials with these names, each with a trace of this many lines (None: all)."""
    lines = (run_dir / "trace.jsonl").read_text().splitlines(keepends=True)

    def made(listed: dict[str, str], **num_lines: int | None) -> Path:
        folder = run_dir / "search"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        rows = [{"name": name, "failure": failure} for name, failure in listed.items()]
        (folder / "trials.json").write_text(json.dumps({"trials": rows}))
        for name in {**listed, **num_lines}:
            (folder / name).mkdir()
            trace = "".join(lines[: num_lines.get(name)])
            (folder / name / "trace.jsonl").write_text(trace)
        return folder

    return made


def test_each_trial_is_a_row_in_order_of_creation(make: Make, say: Say) -> None:
    folder = make({"wide": "", "narrow": "worker 1: no good"})
    code, out, err = say(f"report {folder}")
    assert (code, err) == (0, "")
    assert [line.split() for line in out.splitlines()] == [
        ["trial", "test", "accuracy", "loss", "updates", "time", "ended"],
        ["wide", "0.8000", "0.5", "3", "8.0", "s", "finished"],
        ["narrow", "0.8000", "0.5", "3", "8.0", "s", "failed"],
        ["files:", str(folder)],
    ]


def test_a_row_in_json_is_the_summary_of_its_run(make: Make, say: Say) -> None:
    folder = make({"wide": "", "narrow": "worker 1: no good"})
    code, out, _ = say(f"report {folder} --json")
    assert code == 0
    first, second = json.loads(out)["trials"]
    assert (first["failure"], second["failure"]) == (None, "worker 1: no good")
    expected = json.loads(json.dumps(summarize(folder / "wide").to_json()))
    assert first == {"name": "wide", "failure": None, **expected}


def test_the_interrupted_trial_comes_last(make: Make, say: Say) -> None:
    folder = make({"wide": ""}, another=-3, unbegun=1)
    code, out, _ = say(f"report {folder}")
    assert code == 0
    rows = out.splitlines()[1:-1]
    assert [row.split()[0] for row in rows] == ["wide", "another"]
    assert rows[1].endswith("not yet, or cut off")
    assert read_trials(make({}, another=-3)).trials[0].name == "another"


def test_a_folder_without_trials_has_none(run_dir: Path, tmp_path: Path) -> None:
    assert not has_trials(run_dir)
    assert not has_trials(tmp_path / "nowhere")
    assert not has_trials(run_dir / "trace.jsonl")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "trials.json is damaged: Expecting"),
        ("[]", "trials.json is damaged: list indices"),
        ('{"trials": [{"name": "a"}]}', "trials.json is damaged: 'failure'"),
        ('{"trials": [{"name": "../a", "failure": ""}]}', r"'\.\./a' is not a trial's name"),
    ],
)
def test_a_damaged_list_is_named(make: Make, text: str, why: str) -> None:
    folder = make({})
    (folder / "trials.json").write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_trials(folder)


def test_a_missing_trial_is_named(make: Make, say: Say) -> None:
    folder = make({"wide": "", "narrow": ""})
    shutil.rmtree(folder / "narrow")
    code, _, err = say(f"report {folder}")
    assert code == 2
    assert f"no run found at {folder}/narrow" in err


@pytest.mark.parametrize("verb", ["report {} --sample 3", "replay {}"])
def test_a_command_for_one_run_asks_for_one_trial(make: Make, say: Say, verb: str) -> None:
    folder = make({"wide": ""})
    code, _, err = say(verb.format(folder))
    assert code == 2
    assert f"{folder} holds the trials of a script: give the folder of one of them" in err
