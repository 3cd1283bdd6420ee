"""Weights that a script changes and publishes: whose are used, and what a resumed run has."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from paceline.context import Context
from paceline.errors import ConfigError
from paceline.exchange.solo import SoloExchange
from paceline.script.worker import Pace
from paceline.trace.records import Resumed
from reference import differ
from runs import Run, run_script

CLOSE = 1e-5
"""Of float32 numbers around 1, between sums in two orders."""

SCRIPT = """\
import torch
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace = paceline.connect()
torch.manual_seed(1)
data = TensorDataset(torch.randn(64, 6), torch.randn(64, 1))
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
loader = DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(4):
    if epoch == 2 and {who}:
        with torch.no_grad():
            model[2].weight.mul_(0.5 + pace.worker)
        pace.publish(model)
        {then}
    for x, y in loader:
        with pace.step():
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
pace.save()
"""


EVALUATE = "pace.evaluate(lambda b: {'e': ((model(b[0]) - b[1]).sum(), len(b[0]))}, loader)"


def run(folder: Path, who: str = "True", then: str = "", **settings: object) -> Run:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT.format(who=who, then=then))
    return run_script(folder / "train.py", folder, workers=2, **settings)


@pytest.mark.parametrize("protocol", ["full-sync", "local-sgd:2"])
def test_all_workers_get_the_main_workers_weights(protocol: str, tmp_path: Path) -> None:
    by_all = run(tmp_path / "all", protocol=protocol)
    in_store = run(tmp_path / "store", protocol=protocol, path="store")
    assert differ(by_all.state, in_store.state) < CLOSE
    by_main = run(tmp_path / "main", "pace.is_main", protocol=protocol)
    by_none = run(tmp_path / "none", "False", protocol=protocol)
    for name, value in by_all.state.items():
        assert torch.equal(value, by_main.state[name])
        assert not torch.equal(value, by_none.state[name])


STRUCK = """\
import os, signal, sys, torch

copies, whole = [], torch.Tensor.copy_

def half(out, source, *rest):
    if sys._getframe(1).f_code.co_name == "replace":
        copies.append(out)
        if len(copies) == {nth}:
            size = source.numel() // 2
            whole(out[size:], source[size:])  # what it has changed lies there
            os.kill(os.getpid(), signal.SIGKILL)
    return whole(out, source, *rest)

"""
"""The worker that does ``torch.Tensor.copy_ = half`` dies in the midst of what it publishes."""


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("path", ["peers", "store"])
def test_a_worker_that_dies_while_publishing_publishes_nothing(
    path: str, nth: int, tmp_path: Path
) -> None:
    """No other worker has its weights: all continue with those of the last update, none torn."""
    by_none = run(tmp_path / "none", "False", path=path)
    (tmp_path / "train.py").write_text(
        STRUCK.format(nth=nth) + SCRIPT.format(who="pace.is_main", then="torch.Tensor.copy_ = half")
    )
    struck = run_script(tmp_path / "train.py", tmp_path, workers=2, path=path)
    assert struck.left == ["killed by signal 9"]
    assert differ(struck.state, by_none.state) < CLOSE


def test_a_checkpoint_between_epochs_contains_the_published_weights(tmp_path: Path) -> None:
    """The restarted run begins after that, and does not publish again."""
    whole = run(tmp_path / "whole")
    again = run(
        tmp_path / "again", respawn=True, checkpoint_every="1 epoch", delay=("10ms",),
        fault=("kill worker 0 at update 18", "kill worker 1 at update 18"),
    )  # fmt: skip
    assert [record.version for record in again.records if isinstance(record, Resumed)] == [16]
    assert differ(again.state, whole.state) < CLOSE


def test_only_the_main_worker_can_publish_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"worker 1 called pace\.publish"):
        run(tmp_path / "run", "not pace.is_main")


@pytest.mark.parametrize("protocol", ["full-sync", "local-sgd:2", "async"])
def test_evaluating_different_weights_in_each_worker_is_refused(
    protocol: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="workers evaluate different weights"):
        run(tmp_path / "run", then=EVALUATE, protocol=protocol)


def test_weights_changed_alike_by_all_workers_are_evaluated(tmp_path: Path) -> None:
    run(tmp_path / "run", then=f"model[2].weight.data.fill_(1.0); {EVALUATE}")


@pytest.mark.parametrize("who", ["pace.is_main", "True"])
def test_different_weights_before_the_first_epoch_are_refused(who: str, tmp_path: Path) -> None:
    text = SCRIPT.format(who="False", then="")
    change = f"if {who}: model[2].weight.data.fill_(1.0)\n{EVALUATE}\nfor epoch in"
    (tmp_path / "train.py").write_text(text.replace("for epoch in", change))
    if who == "True":
        run_script(tmp_path / "train.py", tmp_path, workers=2)
        return
    with pytest.raises(ConfigError, match="workers evaluate different weights"):
        run_script(tmp_path / "train.py", tmp_path, workers=2)


@pytest.mark.parametrize("stop", [16, 20], ids=["before it", "after it, in the epoch"])
def test_a_resumed_run_publishes_once(stop: int, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", updates=stop)
    resumed = run(tmp_path / "parts", resume=str(tmp_path / "parts" / "run"), updates=32)
    assert all(torch.equal(value, resumed.state[name]) for name, value in whole.state.items())


def test_an_unprepared_model_is_refused() -> None:
    model = nn.Linear(2, 1)
    pace = Pace(SoloExchange(), Context())
    with pytest.raises(ConfigError, match=r"pace.publish\(\) was given a Linear"):
        pace.publish(model)
    loader = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
    pace.prepare(model, SGD(model.parameters(), lr=0.1), loader)
    pace.publish(model)
    with pytest.raises(ConfigError, match=r"pace.publish\(\) was given a Conv1d"):
        pace.publish(nn.Conv1d(1, 1, 1))


BEFORE = SCRIPT.replace(
    "for epoch in pace.epochs(4):\n    if epoch == 2 and {who}:\n",
    "if {who}:\n    if True:\n",
).replace("    for x, y in loader:", "for epoch in pace.epochs(4):\n    for x, y in loader:")


def test_a_resumed_run_ignores_weights_published_before_the_loop(tmp_path: Path) -> None:
    """As with pretrained weights, which the script loads in each of its lives."""
    text = BEFORE.format(who="True", then="").replace("0.5 + pace.worker", "0.5")
    states = []
    for name, cuts in (("whole", []), ("cut", [20])):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.py").write_text(text)
        settings = {"workers": 2, "protocol": "full-sync"}
        for number, cut in enumerate([*cuts, 32]):
            more = {"resume": str(folder / "run")} if number else {}
            result = run_script(folder / "train.py", folder, updates=cut, **settings, **more)
        states.append(result.state)
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name])
