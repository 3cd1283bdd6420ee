"""``paceline partition``, and the table of splits of ``paceline plan``."""

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from paceline.predict import split_costs

Say = Callable[[str], tuple[int, str, str]]
MODEL = """
from torch import nn

def layers():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))

def twelve():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
"""
SMALL = "--input 1,8 --batch-size 8 --micro-batches 2"


@pytest.fixture(autouse=True)
def _model(tmp_path: Path) -> None:
    (tmp_path / "five_small_layers.py").write_text(MODEL)


@pytest.fixture
def no_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the neighbour processes where a test does not need them: each takes seconds to start."""
    monkeypatch.setattr(split_costs, "neighbours", lambda *_: nullcontext())


def test_model_is_cut_and_plotted(say: Say, tmp_path: Path) -> None:
    line = f"partition five_small_layers:layers -n 4 {SMALL}"
    code, out, err = say(f"{line} --plot cut.svg")
    assert code == 0, err
    assert "layers: 360 parameters, 5 pieces by torch.fx" in out
    assert (tmp_path / "cut.svg").read_text().startswith("<svg")


@pytest.mark.usefixtures("no_neighbours")
def test_slow_worker_gets_fewer_layers_and_json_is_documented(say: Say) -> None:
    line = f"partition five_small_layers:layers -n 4 {SMALL}"
    code, out, err = say(f"{line} --json --speeds 1,1,1,0.5 --schedule gpipe")
    assert code == 0, err
    report = json.loads(out)
    assert [len(part["layers"]) for part in report["parts"]].count(2) == 1
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
    section = page.split("## `paceline partition`")[1].split("\n## ")[0]
    for name in (*report, *report["parts"][0]):
        assert f"`{name}`" in section, name


@pytest.mark.usefixtures("no_neighbours")
def test_too_many_cuts_to_try_are_reported(say: Say) -> None:
    speeds = ",".join(str(1 + i / 10) for i in range(12))
    line = f"partition five_small_layers:twelve -n 12 {SMALL} --json"
    code, out, err = say(line)
    assert code == 0, err
    assert "of all cuts" in json.loads(out)["step_s"]
    code, out, err = say(f"{line} --speeds {speeds}")
    assert code == 0, err
    report = json.loads(out)
    assert report["about"]["of all cuts"].startswith("too many to try")
    assert "of all cuts" not in report["step_s"]


def test_plan_with_memory_prints_the_table_of_splits(say: Say) -> None:
    code, out, err = say(f"plan five_small_layers:layers -n 2 --memory 8GiB {SMALL} --json")
    assert code == 0, err
    report = json.loads(out)
    names = [split["split"] for split in report["splits"]]
    assert names == ["none", "data", "network", "layer", "shard-1", "shard-2", "shard-3"]
    assert report["advised"] in names
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
    section = page.split("## `paceline plan TASK --memory`")[1].split("\n## ")[0]
    for name in (*report, *report["splits"][0]):
        assert f"`{name}`" in section, name


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("-n 6", "6 parts are wanted, but this model has only 5 pieces"),
        ("-n 2 --memory 2", "--memory must be a size such as 512MiB or 2GiB, got '2'"),
        ("-n 2 --speeds 1,x", "--speeds must be numbers such as 1,1,0.5, got '1,x'"),
        ("-n 2 --speeds 1", "--speeds needs one for each of 2 workers, got 1"),
        ("-n 2 --speeds 1,0", "the speed of a worker must be > 0, got 0"),
        ("-n 2 --speeds 1,nan", "the speed of a worker must be > 0, got nan"),
        ("-n 2 --speeds 1,1e-300", "this machine's 1, such as 1,1,0.5, got 1e-300"),
        ("-n 2 --speeds 1e9,1", "this machine's 1, such as 1,1,0.5, got 1e+09"),
        ("-n 0", "-n must be >= 1, got 0"),
        ("-n 2 --memory 1KiB", "--memory 1.0 KiB is less than Python and torch alone take"),
        ("-n 2 --plot no/where.svg", "no is not a folder"),
        ("-n 2 --memory 1e300GiB", "such as 512MiB or 2GiB, got '1e300GiB'"),
        ("-n 2 --memory 1e-300GiB", "such as 512MiB or 2GiB, got '1e-300GiB'"),
    ],
)
def test_invalid_options_get_a_short_error_without_measuring(
    say: Say, flags: str, message: str
) -> None:
    start_s = time.monotonic()
    code, out, err = say(f"partition five_small_layers:layers {SMALL} {flags}")
    assert (code, out) == (2, "")
    assert message in err
    assert "measuring" not in err or flags in ("-n 6", "-n 2 --memory 1KiB")
    assert time.monotonic() - start_s < 2.0  # nothing was measured and no process was started


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("lenet -n 2 --input 1,8", "lenet is a task and has its own inputs: leave --input out"),
        ("'' -n 2", "package.module:function is required, got ''"),
        ("'' -n 2 --input 1,8", "'' must read package.module:function"),
        (
            "nets/five.py:layers -n 2 --input 1,8",
            "names a file; write the module, nets.five:layers",
        ),
    ],
)
def test_error_says_when_the_name_is_no_model(say: Say, line: str, message: str) -> None:
    code, out, err = say(f"partition {line}")
    assert (code, out) == (2, "")
    assert message in err.splitlines()[-1]


def test_inputs_larger_than_memory_are_reported(say: Say) -> None:
    code, out, err = say("partition five_small_layers:layers -n 2 --input 1,9999999999999")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith("error: out of memory")
