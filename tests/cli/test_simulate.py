"""``paceline simulate``: text, JSON, errors, and a trace that the report reads."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli import simulate
from paceline.report.summary import summarize

Say = Callable[[str], tuple[int, str, str]]


def test_text_reports_time_staleness_waste_and_utilisation(say: Say) -> None:
    code, out, _ = say("simulate --workers 8 --protocol k-async:4 --delay exp:1s --updates 2000")
    assert code == 0
    for word in ("time an update", "634.5 ms (closed form)", "p99", "thrown away", "utilisation"):
        assert word in out
    assert "mean 1.00:" in out
    assert "####" in out, "no histogram"


def test_json_numbers_agree_with_each_other(say: Say) -> None:
    _, out, _ = say(
        "simulate --workers 20 --protocol k-sync:10 --delay 10ms+exp:5ms --updates 4000 --json"
    )
    report = json.loads(out)
    assert report["updates"] == 4000
    assert report["pushes"] == 40_000
    assert report["cancelled"] == 40_000
    assert report["staleness_histogram"] == {"0": 40_000}
    assert abs(report["time_off"]) < 0.01
    assert report["time_per_update_s"] == pytest.approx(report["virtual_s"] / 4000)
    assert 0 < report["thrown_away"] < 1
    assert 0 < report["utilisation"] <= 1


def test_simulation_does_not_become_the_latest_run(say: Say, tmp_path: Path) -> None:
    assert say("train quadratic --engine inline --updates 4 --name live")[0] == 0
    assert say("simulate quadratic --workers 2 --delay 1ms --updates 4")[0] == 0
    assert (tmp_path / "runs" / "latest").readlink() == Path("live")
    assert len(list((tmp_path / "runs").glob("simulated-quadratic-*"))) == 1


def test_every_json_field_is_documented(say: Say) -> None:
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
    section = page.split("## `paceline simulate`")[1].split("\n## ")[0]
    _, out, _ = say("simulate --workers 2 --protocol async --delay 1s --updates 50 --json")
    assert [name for name in json.loads(out) if f"| `{name}` |" not in section] == []


def test_report_reads_the_trace_of_a_simulation(say: Say, tmp_path: Path) -> None:
    line = "simulate --workers 4 --protocol k-sync:3 --delay exp:10ms --updates 200 --json"
    _, plain, _ = say(line)
    _, traced, _ = say(f"{line} --run-dir here")
    first, second = json.loads(plain), json.loads(traced)
    assert first.pop("wall_s") >= 0
    assert second.pop("wall_s") >= 0
    for name in first:  # sums of seconds are added up in another order
        assert first[name] == pytest.approx(second[name]), name
    summary = summarize(tmp_path / "here")
    assert summary.engine == "simulated"
    assert summary.updates == 200
    assert summary.superseded.count == first["cancelled"]
    assert summary.time_per_update_s == pytest.approx(first["time_per_update_s"], rel=1e-4)
    code, out, _ = say("report here")
    assert code == 0
    assert "200" in out
    code, _, err = say(f"{line} --run-dir here")
    assert code == 2
    assert "already holds a run" in err


def test_simulation_draws_from_the_times_of_a_run(say: Say) -> None:
    """A run of two workers, the second four times as slow; then a simulation of two like them."""
    once = "--workers 2 --protocol async --delay 10ms --slow 1=4x --updates 400"
    say(f"simulate {once} --run-dir measured")
    again = "--workers 2 --protocol full-sync --like measured --updates 60 --json"
    _, out, _ = say(f"simulate {again}")
    assert json.loads(out)["time_per_update_s"] == pytest.approx(0.040)
    _, out, _ = say(f"simulate {again.replace('--workers 2', '--workers 8')}")
    assert 0.010 < json.loads(out)["time_per_update_s"] <= 0.040
    _, out, _ = say(f"simulate {again} --delay 1s")
    assert json.loads(out)["time_per_update_s"] == pytest.approx(1.040)
    for line, message in (
        (f"{again} --cores 0", "cores must be >= 1"),
        ("--workers 2 --delay 1s --cores 2", "add --like RUN"),
        (again.replace("measured", "nowhere"), "cannot be read"),
    ):
        code, _, err = say(f"simulate {line}")
        assert code == 2
        assert message in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--workers 2", "the workers have no time for a step"),
        ("--workers 2 --delay 0=1s", "worker 1 has no time for a step"),
        ("--workers 2 --delay 0ms", "a step of worker 0 takes no time"),
        ("--workers 2 --delay pareto:1,1s", "must be > 1 for a finite mean"),
        ("--workers 2 --delay exp:-1s", "must be >= 0"),
        ("--workers 0 --delay 1s", "workers must be >= 1, got 0"),
        ("--workers 2 --delay 1s --updates 0", "updates must be >= 1, got 0"),
        ("--workers 2 --delay 1s --protocol k-sync:3", "needs K <= 2"),
        ("--workers 2 --delay 1s --protocol k-snyc:3", "did you mean 'k-sync'"),
        ("--workers 2 --delay 1s --slow fast", "slow must read WORKER=FACTORx"),
        ("--workers 2 --delay 1s --slow 1=2x@1s", "must read WORKER=FACTORx@FAST/SLOW"),
        ("--workers 2 --delay 1s --away 1=never", "must read WORKER=FROM..UNTIL"),
        ("--workers 1 --delay 1s --away 0=1s..", "all workers are gone and none returns"),
        ("--workers 2 --delay 1s --link 1ms,1MB/s", "give --bytes"),
        ("--workers 2 --delay 1s --lr 0.1", "--lr is for training: name a task"),
        ("nonsense --workers 2 --delay 1s", "unknown task 'nonsense'"),
    ],
)
def test_invalid_options_are_refused(say: Say, line: str, said: str) -> None:
    code, out, err = say(f"simulate {line}")
    assert code == 2
    assert out == ""
    assert said in err


def test_task_is_trained_in_virtual_time(say: Say, tmp_path: Path) -> None:
    line = "simulate quadratic --workers 4 --protocol k-async:2 --delay exp:10ms --epochs 1"
    code, out, _ = say(f"{line} --updates 20 --json --run-dir learned")
    assert code == 0
    report = json.loads(out)
    assert report["engine"] == "simulated"
    assert report["updates"] == report["forecast"]["updates"] <= 20
    assert report["final_loss"] is not None
    for name in ("trace.jsonl", "summary.json", "curve.svg", "model.safetensors"):
        assert (tmp_path / "learned" / name).is_file()


@pytest.mark.parametrize(
    "wrong", ["nonsense", "quadratic --protocol k-sync:9", "quadratic --batch-size 1"]
)
def test_refused_simulation_leaves_no_folder(say: Say, tmp_path: Path, wrong: str) -> None:
    assert say(f"simulate {wrong} --workers 2 --delay 1s")[0] == 2
    assert list(tmp_path.glob("runs/*")) == []


def test_interrupted_simulation_has_a_summary(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(heard: object, done: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(simulate._Progress, "progress", stop)
    code, out, err = say("simulate quadratic --workers 2 --delay 1s --run-dir cut --json")
    assert (code, err) == (130, "interrupted\n")
    report = json.loads(out)
    assert (report["updates"], report["ended"]) == (3, "interrupted")
    assert json.loads(Path("cut/summary.json").read_text()) == report


def test_trained_simulation_is_replayed_and_timing_only_is_refused(
    say: Say,
) -> None:
    line = "simulate quadratic --workers 2 --delay exp:10ms --updates 4"
    assert say(f"{line} --run-dir plain")[0] == 0
    assert say("replay plain")[0] == 0
    code, out, err = say("report plain --sample 3")
    assert (code, err) == (0, "")
    assert "sample 3" in out
    assert say(f"{line} --batched --run-dir batched")[0] == 0
    code, _, err = say("replay batched")
    assert (code, "it ran with --batched, which rounds differently" in err) == (2, True)
    assert say(f"{line.replace(' quadratic', '')} --run-dir timed")[0] == 0
    code, _, err = say("replay timed")
    assert (code, "it simulated only time, without a task" in err) == (2, True)


def test_timing_simulation_does_not_import_torch() -> None:
    code = (
        "import sys; from paceline.cli.app import run; "
        "run('simulate --workers 2 --protocol async --delay 1s --updates 50'.split()); "
        "print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split()[-1] == "False"


def test_staleness_rule_and_its_lack_of_effect_are_reported(say: Say) -> None:
    line = "simulate --workers 8 --delay exp:10ms --updates 500 --protocol"
    _, dropped, _ = say(f"{line} async --staleness drop:6")
    assert "async+drop:6" in dropped
    assert "pushes dropped" in dropped
    assert "none where stale pushes are dropped" in dropped
    _, scaled, _ = say(f"{line} k-batch-async:2+inverse --json")
    actual = json.loads(scaled)
    counts = {int(lag): count for lag, count in actual["staleness_histogram"].items()}
    expected = sum(count / (lag + 1) for lag, count in counts.items()) / actual["pushes"]
    assert actual["mean_scale"] == pytest.approx(expected)
    _, idle, _ = say(f"{line} k-sync:2 --staleness inverse")
    assert "staleness inverse has no effect: under k-sync:2 no gradient is stale" in idle
    code, _, error = say(f"{line} async --staleness invers")
    assert code == 2
    assert "did you mean 'inverse'" in error


def test_batched_needs_a_task(say: Say) -> None:
    code, _, error = say("simulate --workers 4 --delay 10ms --batched")
    assert code == 2
    assert "--batched is for training: name a task" in error


def test_batched_refuses_local_steps(say: Say, tmp_path: Path) -> None:
    line = f"simulate quadratic --workers 4 --delay 10ms --run-dir {tmp_path} --batched"
    code, _, error = say(f"{line} --protocol local-sgd:4")
    assert code == 2
    assert "under local-sgd:4 each worker steps on parameters of its own" in error


def test_diverging_run_still_has_a_report(say: Say) -> None:
    """Its last evaluation is nan."""
    line = "simulate quadratic --workers 2 --delay exp:5ms --updates 20 --lr 100 --nonfinite skip"
    code, out, err = say(f"{line} --json")
    assert (code, err) == (0, "")
    assert json.loads(out)["epochs"][0]["test_loss"] is None


def test_adaptive_keeps_its_setting_without_a_task(say: Say) -> None:
    _, out, _ = say("simulate --workers 3 --protocol adaptive --delay exp:5ms --updates 50")
    assert "adaptive keeps its initial setting" in out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--delay exp:1e307s", "it must take from"),
        ("--delay exp:1e-320s --protocol async", "a step of worker 0 takes"),
        ("--delay exp:5ms --bytes 5kB", "add --link or --server"),
        ("--delay exp:5ms --run-dir /proc/nowhere", "cannot be made"),
    ],
)
def test_impossible_conditions_get_a_short_error(say: Say, flags: str, said: str) -> None:
    code, _, err = say(f"simulate --workers 4 --updates 20 {flags}")
    assert code == 2
    assert said in err
    assert "Traceback" not in err


def test_profile_of_another_task_is_refused(say: Say) -> None:
    profile = "train quadratic --engine inline --workers 2 --protocol async --updates 60"
    assert say(f"{profile} --run-dir of-another")[0] == 0
    code, _, err = say("simulate softmax --workers 2 --like of-another --updates 5")
    assert code == 2
    assert "task quadratic in the profile, softmax here" in err
