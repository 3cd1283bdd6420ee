"""A resumed run has the schedules of one that never stopped, each in its own rhythm."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import scheduled
from paceline.checkpoints.resumption import adopt
from paceline.config import resolve
from paceline.errors import ConfigError
from paceline.launch import launcher
from paceline.program import ScriptProgram
from paceline.report.live import QuietObserver
from runs import Run, run_script

PLACES = [{"engine": "inline"}, {"path": "store"}, {"path": "peers"}]
KEYS = ("parameters", "last", "momenta", "states")


def _run(case: str, folder: Path, **settings: Any) -> list[dict[str, Any]]:
    """The workers' results; with ``resume`` the run in ``folder`` is resumed."""
    folder.mkdir(exist_ok=True)
    chosen = {"device": "cpu", "threads": 1, **settings}
    chosen |= {"resume": str(folder / "run")} if "resume" in chosen else {}
    chosen |= {} if "resume" in chosen else {"run_dir": str(folder / "run")}
    program = ScriptProgram(path=scheduled.__file__, args=(case, str(folder)))
    launcher.launch_run(program, adopt(resolve(chosen, env={}, is_call=True)), QuietObserver())
    return [torch.load(path) for path in sorted(folder.glob("result-*.pt"))]


def _cut_and_resumed(case: str, folder: Path, cuts: list[int], **settings: Any) -> Any:
    _run(case, folder, updates=cuts[0], **settings)
    for cut in cuts[1:]:
        _run(case, folder, resume=True, updates=cut)
    return _run(case, folder, resume=True, updates=10**6)


def _assert_same(results: Any, others: Any) -> None:
    for result, other in zip(results, others, strict=True):
        for key in KEYS:
            assert repr(result[key]) == repr(other[key])


@pytest.mark.parametrize(
    "where",
    [
        {"engine": "inline"},
        {"path": "peers"},
        {"path": "store"},
        {"path": "peers", "protocol": "local-sgd:4"},
    ],
    ids=str,
)
@pytest.mark.parametrize("case", ["each", "each, before", "two rhythms", "sequential"])
def test_a_resumed_run_has_the_schedules_of_one_that_never_stopped(
    tmp_path: Path, case: str, where: dict[str, Any]
) -> None:
    settings = {"workers": 2, "protocol": "full-sync", **where}
    cuts = [1, 4] if "local" in settings["protocol"] else [4, 17]
    whole = _run(case, tmp_path / "whole", **settings)
    _assert_same(_cut_and_resumed(case, tmp_path / "cut", cuts, **settings), whole)


def test_under_k_sync_a_resumed_rate_follows_the_version(tmp_path: Path) -> None:
    settings = {"workers": 2, "protocol": "k-sync:1", "engine": "inline"}
    whole = _run("each", tmp_path / "whole", **settings)
    cut = _cut_and_resumed("each", tmp_path / "cut", [4, 17], **settings)
    for result, other in zip(cut, whole, strict=True):
        assert (result["version"], result["last"]) == (other["version"], other["last"])
        assert result["states"] == other["states"]


@pytest.mark.parametrize("case", ["every fourth, last", "restarts, a fraction"])
def test_an_irregular_scheduler_resumes_from_an_epochs_end(tmp_path: Path, case: str) -> None:
    settings = {"workers": 2, "protocol": "full-sync", "engine": "inline"}
    whole = _run(case, tmp_path / "whole", **settings)
    cut = tmp_path / "cut"
    _run(case, cut, updates=14, checkpoint_every="1 epoch", keep=3, **settings)
    *_, newest = sorted(
        (cut / "run" / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name)
    )
    shutil.rmtree(newest)
    _assert_same(_run(case, cut, resume=True, updates=10**6), whole)


@pytest.mark.parametrize("case", ["every fourth, last", "restarts, a fraction"])
def test_the_newest_resumable_checkpoint_is_used(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the last two checkpoints the newer is from the stop, inside an epoch."""
    settings = {"workers": 2, "protocol": "full-sync", "engine": "inline"}
    whole = _run(case, tmp_path / "whole", **settings)
    notes: list[str] = []
    monkeypatch.setattr(QuietObserver, "note", lambda self, text: notes.append(text))
    cut = tmp_path / "cut"
    _run(case, cut, updates=14, checkpoint_every="1 epoch", keep=2, **settings)
    assert not any("no checkpoint inside an epoch" in note for note in notes)
    _assert_same(_run(case, cut, resume=True, updates=10**6), whole)
    assert any("the one before, is used instead" in note for note in notes)


def test_checkpoints_that_cannot_be_resumed_from_are_reported_during_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(QuietObserver, "note", lambda self, text: notes.append(text))
    settings = {"workers": 2, "protocol": "full-sync", "engine": "inline"}
    _run("each", tmp_path / "each", **settings)
    assert not any("no checkpoint inside an epoch" in note for note in notes)
    _run("every fourth, last", tmp_path / "fourth", **settings)
    (result,) = (
        note for note in notes if "no checkpoint inside an epoch can be resumed from" in note
    )
    assert "ExponentialLR is stepped in a rhythm of its own inside the loop" in result
    assert "--checkpoint-every '1 epoch'" in result


def test_an_irregular_scheduler_is_refused_inside_an_epoch(tmp_path: Path) -> None:
    settings = {"workers": 2, "protocol": "full-sync", "engine": "inline"}
    with pytest.raises(ConfigError, match=r"ExponentialLR is stepped in a rhythm of its own"):
        _cut_and_resumed("every fourth, last", tmp_path, [16], **settings)


OF_TWO = """
import json, sys, time, torch, paceline
from torch.utils.data import DataLoader, TensorDataset

where, sleep_s = sys.argv[1], float(sys.argv[2])
pace = paceline.connect()
torch.manual_seed(2)
models = [torch.nn.Linear(3, 1).double() for _ in range(2)]
first = torch.optim.SGD(models[0].parameters(), lr=0.1, momentum=0.9)
second = torch.optim.Adam(models[1].parameters(), lr=0.05)
own = [
    torch.optim.lr_scheduler.LambdaLR(first, lambda n: 0.9 ** n),
    torch.optim.lr_scheduler.OneCycleLR(second, 0.05, total_steps=31),
]
loader = DataLoader(TensorDataset(torch.randn(80, 3).double()), batch_size=8)
*_, loader = pace.prepare(*models, first, second, *own, loader)
for _ in pace.epochs(3):
    for (rows,) in loader:
        with pace.step():
            time.sleep(sleep_s)
            for model, optimizer, scheduler in zip(models, (first, second), own):
                if where == "before":
                    scheduler.step()
                optimizer.zero_grad()
                (model(rows) - rows.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
                if where == "behind the step":
                    scheduler.step()
            if where == "at the end":
                own[0].step()
                own[1].step()
        if where == "behind the block":
            own[0].step()
            own[1].step()
pace.save()
if pace.is_main:
    rates = [one.param_groups[0]["lr"] for one in (first, second)]
    json.dump([rates, [one.last_epoch for one in own]], open(f"{sys.argv[3]}/rates.json", "w"))
"""
"""Of two optimizers each step is a version, and a scheduler of each follows its steps."""


def _of_two(where: str, folder: Path, sleep_s: float = 0.0, **settings: Any) -> Run:
    folder.mkdir(exist_ok=True)
    script = folder.parent / "two.py"
    script.write_text(OF_TWO)
    return run_script(script, folder, where, str(sleep_s), str(folder), **settings)


def _assert_same_of_two(folder: Path, run: Run, whole: Run) -> None:
    result, wanted = (
        json.loads((place / "rates.json").read_text())
        for place in (folder, folder.parent / "whole")
    )
    assert result == wanted
    assert wanted[1] == [30, 30]
    assert all(torch.equal(value, whole.state[name]) for name, value in run.state.items())


@pytest.mark.parametrize(
    "how", [{"engine": "inline"}, {"path": "store"}, {"path": "peers"}], ids=str
)
@pytest.mark.parametrize("where", ["behind the step", "at the end", "behind the block"])
def test_one_of_several_optimizers_resumes_with_its_own_steps(
    tmp_path: Path, where: str, how: dict[str, Any]
) -> None:
    settings = {"workers": 2, "protocol": "full-sync", **how}
    whole = _of_two(where, tmp_path / "whole", **settings)
    cut = tmp_path / "cut"
    _of_two(where, cut, updates=8, **settings)
    for updates in (31, 40, 99):
        resume = str(cut / "run")
        run = _of_two(where, cut, resume=resume, updates=updates, **settings)
    _assert_same_of_two(cut, run, whole)


def test_several_optimizers_restart_after_a_death(tmp_path: Path) -> None:
    """From a checkpoint taken during the step that made its version."""
    settings = {"workers": 2, "protocol": "full-sync"}
    whole = _of_two("behind the step", tmp_path / "whole", **settings)
    run = _of_two(
        "behind the step", tmp_path / "cut", 0.02, respawn=True, checkpoint_every="6 updates",
        fault=("kill worker 1 at update 33",), **settings,
    )  # fmt: skip
    assert any("the run begins again from" in note for note in run.notes)
    _assert_same_of_two(tmp_path / "cut", run, whole)


def test_a_scheduler_call_before_the_step_of_several_optimizers_is_irregular(
    tmp_path: Path,
) -> None:
    settings = {"workers": 2, "protocol": "full-sync", "engine": "inline"}
    _of_two("before", tmp_path / "cut", updates=8, **settings)
    with pytest.raises(ConfigError, match="is stepped in a rhythm of its own"):
        _of_two("before", tmp_path / "cut", resume=str(tmp_path / "cut" / "run"), **settings)
