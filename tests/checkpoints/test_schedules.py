"""A run that goes on has the schedules of one that was never stopped, each in its own rhythm."""

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

KEYS = ("parameters", "last", "momenta", "states")


def _run(case: str, folder: Path, **settings: Any) -> list[dict[str, Any]]:
    """What the workers came to; with ``resume`` the run in ``folder`` goes on."""
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
    for one, other in zip(results, others, strict=True):
        for key in KEYS:
            assert repr(one[key]) == repr(other[key])


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
def test_resumed_is_never_stopped(tmp_path: Path, case: str, where: dict[str, Any]) -> None:
    settings = {"workers": 2, "protocol": "full-sync", **where}
    cuts = [1, 4] if "local" in settings["protocol"] else [4, 17]
    whole = _run(case, tmp_path / "whole", **settings)
    _assert_same(_cut_and_resumed(case, tmp_path / "cut", cuts, **settings), whole)


def test_under_k_sync_the_rate_goes_on_with_the_version(tmp_path: Path) -> None:
    settings = {"workers": 2, "protocol": "k-sync:1", "engine": "inline"}
    whole = _run("each", tmp_path / "whole", **settings)
    cut = _cut_and_resumed("each", tmp_path / "cut", [4, 17], **settings)
    for one, other in zip(cut, whole, strict=True):
        assert (one["version"], one["last"]) == (other["version"], other["last"])
        assert one["states"] == other["states"]


@pytest.mark.parametrize("case", ["every fourth, last", "restarts, a fraction"])
def test_another_rhythm_goes_on_from_an_epochs_end(tmp_path: Path, case: str) -> None:
    settings = {"workers": 2, "protocol": "full-sync", "engine": "inline"}
    whole = _run(case, tmp_path / "whole", **settings)
    cut = tmp_path / "cut"
    _run(case, cut, updates=14, checkpoint_every="1 epoch", keep=3, **settings)
    *_, newest = sorted((cut / "run" / "checkpoints").glob("[0-9]*"), key=lambda one: int(one.name))
    shutil.rmtree(newest)
    _assert_same(_run(case, cut, resume=True, updates=10**6), whole)


def test_from_the_middle_of_an_epoch_it_is_refused_by_name(tmp_path: Path) -> None:
    settings = {"workers": 2, "protocol": "full-sync", "engine": "inline"}
    with pytest.raises(ConfigError, match=r"ExponentialLR is stepped in a rhythm of its own"):
        _cut_and_resumed("every fourth, last", tmp_path, [16], **settings)
