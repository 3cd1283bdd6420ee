"""``with pace.trial():``: several models trained one after another in one script.

One worker is plain PyTorch. Under full-sync a search is one process's; under any protocol a trial is
what a run of its own is. Between trials, and after them, everything that was prepared is plain.
"""

import json
import signal
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

import trialled
from meanwhile import meanwhile, stop
from paceline.checkpoints.resumption import has_checkpoint
from paceline.config import RunSettings
from paceline.context import Context
from paceline.errors import ConfigError, Interrupted, WorkerError
from paceline.exchange.solo import SoloExchange
from paceline.launch import launcher
from paceline.program import ScriptProgram
from paceline.report.live import QuietObserver
from paceline.report.trials import TrialsSummary
from paceline.script.worker import Pace
from reference import differ
from runs import nothing_left, run_script

CLOSE = 1e-6
SCRIPT = Path(trialled.__file__)
Say = Callable[[str], tuple[int, str, str]]
TRIALS = [f"lr-{rate}" for rate in trialled.RATES]


class Found(NamedTuple):
    """What came of a search: its summary, of each worker what it noted, and what was said."""

    summary: TrialsSummary
    each: list[dict[str, Any]]
    words: str
    folder: Path

    def of(self, number: int, worker: int = 0) -> dict[str, Tensor]:
        """What a trial came to."""
        found = self.each[worker]["found"]
        return {name: one for name, one in found.items() if name.startswith(f"{number} ")}

    @property
    def notes(self) -> list[str]:
        return [one for one in self.words.splitlines() if one.startswith("note: ")]


def search(folder: Path, case: str, what: str = "nothing", **settings: Any) -> Found:
    """Run a search; the launcher's error, where there is one, is raised."""
    folder.mkdir(exist_ok=True)
    words = StringIO()
    chosen = RunSettings(
        **{"run_dir": str(folder / "run"), "device": "cpu", "threads": 1, "workers": 2, **settings}
    )
    program = ScriptProgram(path=str(SCRIPT), args=(case, str(folder), what))
    with nothing_left():
        summary = launcher.launch_run(program, chosen, QuietObserver(words))
    assert isinstance(summary, TrialsSummary)
    return Found(summary, results(folder), words.getvalue(), folder / "run")


def results(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(path) for path in sorted(folder.glob("result-*.pt"))]


def twin_of(case: str) -> dict[str, Tensor]:
    return trialled.find(case, trialled.Plain())


def part(found: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    return {name: one for name, one in found.items() if name.startswith(f"{number} ")}


def launched(folder: Path, text: str, **settings: Any) -> str:
    """Run this script; what was said."""
    script, words = folder / "script.py", StringIO()
    script.write_text(PREPARED + text)
    chosen = {"run_dir": str(folder / "run"), "device": "cpu", "threads": 1, "workers": 2}
    program = ScriptProgram(path=str(script), args=(str(folder),))
    with nothing_left():
        launcher.launch_run(program, RunSettings(**{**chosen, **settings}), QuietObserver(words))
    return words.getvalue()


PREPARED = """\
import os, sys, torch
from pathlib import Path
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace = paceline.connect()
folder = Path(sys.argv[1])
data = TensorDataset(torch.rand(32, 2), torch.rand(32, 1))

def prepared(rate=0.1):
    model = nn.Linear(2, 1)
    return pace.prepare(model, SGD(model.parameters(), lr=rate), DataLoader(data, batch_size=8))

def fn(batch):
    return {"acc": (float(len(batch[0])), len(batch[0]))}

def train(model, optimizer, loader, epochs=2):
    for epoch in pace.epochs(epochs):
        for x, y in loader:
            with pace.step():
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()

"""


# -- what it comes to ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", trialled.CASES)
def test_alone_a_search_is_its_plain_twin_to_the_last_bit(case: str) -> None:
    found = trialled.find(case, Pace(SoloExchange(), Context()))
    assert differ(found, twin_of(case)) == 0.0


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("case", trialled.CASES)
def test_full_sync_is_its_plain_twin(tmp_path: Path, case: str, workers: int) -> None:
    found = search(tmp_path, case, workers=workers, engine="inline")
    assert len(found.each) == workers
    for one in found.each:
        assert differ(one["found"], twin_of(case)) < CLOSE
    assert [one.summary.ended for one in found.summary.trials] == ["finished"] * 3


@pytest.mark.parametrize("case", ["sgd", "later", "again", "stream"])
def test_processes_do_as_the_inline_engine(tmp_path: Path, case: str) -> None:
    found = search(tmp_path, case)
    assert [one["is_main"] for one in found.each] == [True, False]
    for one in found.each:
        assert differ(one["found"], twin_of(case)) < CLOSE


def test_a_process_group_carries_all_trials(tmp_path: Path) -> None:
    found = search(tmp_path, "later", path="collective")
    assert differ(found.each[1]["found"], twin_of("later")) < CLOSE


@pytest.mark.parametrize("protocol", ["async", "k-sync:1", "local-sgd:2", "adaptive"])
def test_under_any_protocol_workers_come_to_one_model(tmp_path: Path, protocol: str) -> None:
    found = search(tmp_path, "again", protocol=protocol)
    weights = [
        {name: value for name, value in one["found"].items() if "state" not in name}
        for one in found.each
    ]
    assert differ(*weights) == 0.0
    assert [one.summary.samples for one in found.summary.trials] == [128] * 3


@pytest.mark.parametrize("workers", [1, 2])
def test_a_trial_is_what_a_run_of_its_own_is_to_the_last_bit(tmp_path: Path, workers: int) -> None:
    """Shuffled, with dropout, and seeded once at the script's top."""
    alone = {}
    for name in ("a", "b"):
        alone[name] = _drawn(tmp_path / f"alone-{name}", f"{name}-", workers)[name]
    among = _drawn(tmp_path / "among", "b-a-", workers)
    for name in ("a", "b"):
        assert torch.equal(alone[name], among[name])
    assert not torch.equal(among["a"], among["b"])


DRAWN = PREPARED + """
from contextlib import nullcontext
torch.manual_seed(7)
names = [one for one in sys.argv[2].split("-") if one]
for name in names:
    with pace.trial(name) if len(names) > 1 else nullcontext():
        model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        rate = {"a": 0.1, "b": 0.2}[name]
        model, optimizer, loader = pace.prepare(
            model, SGD(model.parameters(), lr=rate), DataLoader(data, batch_size=8, shuffle=True)
        )
        train(model, optimizer, loader)
    if pace.is_main:
        torch.save(model[2].weight.detach().clone(), folder / f"{name}.pt")
"""


def _drawn(folder: Path, names: str, workers: int) -> dict[str, Tensor]:
    folder.mkdir()
    (folder / "script.py").write_text(DRAWN)
    run_script(folder / "script.py", folder, str(folder), names, workers=workers)
    return {path.stem: torch.load(path) for path in folder.glob("*.pt")}
