"""``paceline compare``: simulated, live, interrupted and refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.config import RunSettings
from paceline.errors import ConfigError, LinkError, WorkerError
from paceline.predict import comparison, rehearsal
from paceline.report.summary import summarize

Say = Callable[[str], tuple[int, str, str]]
VIRTUAL = "compare quadratic --workers 3 --simulated --delay exp:10ms --slow 0=4x --run-dir here"


def test_simulated_protocols_meet_the_same_stragglers(say: Say, tmp_path: Path) -> None:
    protocols = "--protocols full-sync,k-sync:2,async --repeats 2 --updates 40"
    code, out, err = say(f"{VIRTUAL} {protocols} --mini-batch-size 8 --seed 5")
    assert code == 0
    assert "[6/6] async, seed 6: no accuracy" in err
    report = json.loads((tmp_path / "here" / "comparison.json").read_text())
    assert (tmp_path / "here" / "comparison.svg").read_text().startswith("<svg")
    by_name = {protocol["protocol"]: protocol for protocol in report["protocols"]}
    times = {name: one["time_per_update_s"]["median"] for name, one in by_name.items()}
    assert times["async"] < times["k-sync:2"] < times["full-sync"]
    for name, folder in (("k-sync:2", "k-sync-2"), ("async", "async")):
        for run, seed in zip(by_name[name]["runs"], (5, 6), strict=True):
            assert run["seed"] == seed
            assert Path(run["run_dir"]) == Path("here") / folder / f"seed-{seed}"
            summary = summarize(tmp_path / run["run_dir"])
            assert run["updates"] == summary.updates == 40
            assert run["test_loss"] is not None  # the end is evaluated, though no epoch is complete
    for name in by_name:
        assert f"\n{name} " in out


def test_same_seed_gives_the_same_run(say: Say) -> None:
    line = "--protocols async,k-async:2 --updates 20 --json"
    _, one, _ = say(f"{VIRTUAL} {line}")
    _, other, _ = say(f"{VIRTUAL}2 {line}")
    assert one.replace("here", "here2") == other


def test_epoch_can_be_evaluated_several_times(say: Say) -> None:
    line = "--protocols full-sync,async --epochs 2 --mini-batch-size 32 --json"
    _, whole, _ = say(f"{VIRTUAL} {line}")
    _, fine, _ = say(f"{VIRTUAL}2 {line} --evaluations 4")
    for first, second in zip(
        json.loads(whole)["protocols"], json.loads(fine)["protocols"], strict=True
    ):
        (coarse,), (finer,) = first["runs"], second["runs"]
        assert len(coarse["errors"]) == 2
        assert len(finer["errors"]) == 1 + 8
        assert finer["errors"][0]["t"] == 0.0  # before any training
        assert all(point in finer["errors"] for point in coarse["errors"])
        assert finer["training_loss"] == coarse["training_loss"]  # evaluating changes nothing


def test_settings_file_of_train_and_launch_is_ignored(say: Say, tmp_path: Path) -> None:
    """Only half of it would apply: the flags of compare have defaults of their own."""
    (tmp_path / "paceline.toml").write_text("epochs = 1\nlr = 1e-6\nworkers = 8\n")
    line = "--workers 3 --delay exp:10ms --updates 9 --json"
    _, out, _ = say(f"compare quadratic --protocols async --simulated --run-dir one {line}")
    (run,) = json.loads(out)["protocols"][0]["runs"]
    assert say(f"simulate quadratic --protocol async --run-dir two {line}")[0] == 0
    for folder in (run["run_dir"], "two"):
        header = json.loads((tmp_path / folder / "trace.jsonl").read_text().splitlines()[0])
        assert (header["epochs"], header["workers"], header["learning_rates"]) == (10, 3, [0.1])


def test_live_comparison_uses_the_same_mini_batch_size_everywhere(say: Say) -> None:
    code, out, _ = say(
        "compare quadratic --protocols full-sync,async --workers 2 --updates 6 --device cpu --json"
    )
    assert code == 0
    report = json.loads(out)
    assert report["conditions"] == "mini-batches of 32"
    assert not report["is_simulated"]
    assert [protocol["updates"]["median"] for protocol in report["protocols"]] == [6, 6]
    for one in report["protocols"]:
        folder = Path(one["runs"][0]["run_dir"])
        assert folder.parent.name.startswith("compare-quadratic-")
        assert (folder / "trace.jsonl").is_file()


def test_ctrl_c_keeps_finished_runs(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    def second_is_cut(*given: object, **named: object) -> rehearsal.Rehearsed:
        if given[1].protocol == "async":  # type: ignore[attr-defined]
            raise KeyboardInterrupt
        return whole(*given, **named)  # type: ignore[arg-type]

    whole = rehearsal.rehearse
    monkeypatch.setattr(rehearsal, "rehearse", second_is_cut)
    code, out, err = say(f"{VIRTUAL} --protocols full-sync,async,k-sync:2 --updates 9")
    assert code == 130
    assert "interrupted in async, seed 0" in out
    assert "\nfull-sync " in out
    assert "k-sync:2, seed" not in err
    code, out, _ = say(f"{VIRTUAL}2 --protocols async,full-sync --updates 9 --json")
    assert code == 130
    assert json.loads(out)["error"]["kind"] == "Interrupted"


def let_async_fail(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fails(task: str, settings: RunSettings, *given: Any, **named: Any) -> rehearsal.Rehearsed:
        if settings.protocol == "async":
            raise error
        return whole(task, settings, *given, **named)

    whole = rehearsal.rehearse
    monkeypatch.setattr(rehearsal, "rehearse", fails)


def test_failed_run_is_reported_and_the_others_continue(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_async_fail(monkeypatch, WorkerError("the gradient is not finite:\n  more"))
    code, out, _ = say(f"{VIRTUAL} --protocols async,full-sync --updates 9")
    assert code == 0
    assert "async failed: the gradient is not finite\n" in out
    assert "\nfull-sync " in out
    assert say(f"{VIRTUAL}2 --protocols async --updates 9")[0] == 1  # no run succeeded


@pytest.mark.parametrize("error", [ConfigError("not carried"), LinkError("full")])
def test_finished_runs_are_kept_when_a_later_one_is_refused(
    say: Say, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    let_async_fail(monkeypatch, error)
    code, out, _ = say(f"{VIRTUAL} --protocols full-sync,async --updates 9")
    assert code == 0
    assert "async failed: " in out
    assert "\nfull-sync " in out
    if isinstance(error, ConfigError):  # in the first run it is the user's error
        code, _, err = say(f"{VIRTUAL}2 --protocols async,full-sync --updates 9")
        assert (code, err.splitlines()[-1]) == (2, f"error: {error}")


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ("--protocols full-sync,k-snyc:2 --workers 3 --simulated --delay 1s", "'k-sync'?"),
        ("--protocols k-sync:4 --workers 3", "needs K <= 3"),
        ("--protocols async,asgd --workers 3", "async is given twice"),
        ("--protocols , --workers 3", "nothing to compare"),
        ("--protocols async --workers 3 --repeats 0", "repeats must be >= 1"),
        ("--protocols async --workers 3 --evaluations 3", "add --simulated"),
        (
            "--protocols full-sync,k-batch-sync:9 --workers 3 --batch-size 8",
            "an update of k-batch-sync:9 has 9 pushes, more than --batch-size 8 has samples",
        ),
        ("--protocols async --workers 3 --simulated", "the workers have no time for a step"),
        (
            "--protocols async --workers 3 --simulated --delay 1ms --device cuda",
            "leave out --device",
        ),
        ("--protocols async --workers 3 --slow nonsense", "slow must read"),
        ("--protocols async --workers 3 --link 1ms,1MB/s", "add --simulated"),
        ("--protocols async --workers 3 --cores 0", "add --simulated"),
        ("--protocols async --workers 3 --target-accuracy 85", "write 0.85 for 85 %"),
    ],
)
def test_invalid_options_are_refused_before_anything_starts(
    say: Say, rest: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(comparison, "_run", lambda *given: pytest.fail("a run has begun"))
    code, out, err = say(f"compare quadratic {rest}")
    assert code == 2
    assert out == ""
    assert said in err
    assert list(tmp_path.iterdir()) == []


def test_number_of_workers_is_required(say: Say) -> None:
    """With one worker, formerly the default, most protocols are the same."""
    code, out, err = say("compare quadratic --protocols full-sync,async")
    assert (code, out) == (2, "")
    assert "--workers" in err


def test_unknown_task_and_nonempty_folder_are_refused(say: Say, tmp_path: Path) -> None:
    code, _, err = say("compare lent --protocols async --workers 2")
    assert code == 2
    assert "did you mean 'lenet'" in err
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "mine").touch()
    code, _, err = say(f"{VIRTUAL} --protocols async")
    assert code == 2
    assert "here is not empty" in err
