"""One contract for every engine: threads of one process, shared memory, and sockets alone.

The third is made here (``socket_engine.py``): its members are processes without shared memory, so
whatever an exchange needs of one is a message. Under a fixed order of pushes all engines give the
same bytes; under any, each sample counts once, whatever happens to members.
"""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import RunSettings
from paceline.engines import ENGINES
from paceline.errors import ConfigError
from paceline.events import Joined, Left, Stalled
from paceline.trace.records import Heard
from reference import differ, plain_loop
from runs import Run, assert_each_sample_once, train
from tiny import EPOCHS, NUM_SAMPLES, TASK, WITH_BATCH_NORM, with_optimizer

SOCKETS = "socket_engine:SocketEngine"
ALL = pytest.mark.parametrize("engine", ["inline", "local", "sockets"])
WITH_PROCESSES = pytest.mark.parametrize("engine", ["local", "sockets"])
PROTOCOLS = (
    "full-sync", "k-sync:2", "k-batch-sync:2", "async", "k-async:2", "k-batch-async:2",
    "stale-synchronous:1", "local-sgd:2+nesterov:0.5,0.5", "adaptive", "adaptive-local:2",
    "post-local-sgd:3,2", "local-sgd:4+fragments:2",
)  # fmt: skip
IN_ORDER = (
    "full-sync", "k-sync:2", "local-sgd:2+nesterov:0.5,0.5", "adaptive-local:2",
    "post-local-sgd:3,2", "local-sgd:4+fragments:2",
)  # fmt: skip
"""With two workers, one push of each an update: what comes of them is one thing."""


@pytest.fixture
def run_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Train on an engine; the socket engine replaces the local one in the table."""

    def run(engine: str, task: Any = TASK, folder: str = "", **settings: Any) -> Run:
        with monkeypatch.context() as patch:
            if engine == "sockets":
                patch.setitem(ENGINES, "local", SOCKETS)
                engine = "local"
            (tmp_path / folder).mkdir(exist_ok=True)
            chosen = {"workers": 2, "path": "store", **settings}
            return train(task, tmp_path / folder, engine=engine, **chosen)

    return run


def facts(run: Run, kind: type) -> list[Any]:
    return [
        record.fact
        for record in run.records
        if isinstance(record, Heard) and type(record.fact) is kind
    ]


@ALL
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_each_sample_counts_once(run_on: Any, engine: str, protocol: str) -> None:
    run = run_on(engine, workers=3, protocol=protocol)
    assert run.num_epochs_ended() == EPOCHS
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)


@pytest.mark.parametrize("engine", ["local", "sockets"])
@pytest.mark.parametrize("protocol", IN_ORDER)
def test_one_order_of_pushes_gives_the_same_bytes(run_on: Any, engine: str, protocol: str) -> None:
    task = with_optimizer(torch.optim.Adam, 0.05)
    expected = run_on("inline", task, "expected", protocol=protocol).state
    result = run_on(engine, task, "found", protocol=protocol).state
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[name], expected[name]) for name in expected)


@ALL
def test_buffers_are_those_of_one_process(run_on: Any, engine: str) -> None:
    result = run_on(engine, WITH_BATCH_NORM, "found", protocol="full-sync")
    expected = run_on("inline", WITH_BATCH_NORM, "expected", protocol="full-sync")
    assert all(torch.equal(result.state[name], value) for name, value in expected.state.items())


@ALL
@pytest.mark.parametrize("protocol", ["full-sync", "k-batch-async:2", "local-sgd:2"])
@pytest.mark.parametrize("worker", [0, 2])
def test_a_death_loses_no_sample(run_on: Any, engine: str, protocol: str, worker: int) -> None:
    kill = f"kill worker {worker} at step 3"
    settings = {"workers": 3, "protocol": protocol, "delay": ("10ms",)}  # or others do all of it
    run = run_on(engine, **settings, fault=(kill,))
    assert run.left == ["killed by signal 9"]
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    if protocol == "full-sync":
        assert differ(run.state, plain_loop(TASK)) < 1e-6


@ALL
def test_the_run_continues_without_a_stalled_worker(run_on: Any, engine: str) -> None:
    stop = "stop worker 1 at update 2 for 20s"
    run = run_on(engine, workers=3, protocol="full-sync", fault=(stop,), stall_after=1.0)
    assert len(facts(run, Stalled)) + len(facts(run, Left)) >= 1
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    assert differ(run.state, plain_loop(TASK)) < 1e-6


@WITH_PROCESSES
@pytest.mark.parametrize("protocol", ["full-sync", "async"])
def test_a_new_worker_replaces_a_dead_one(run_on: Any, engine: str, protocol: str) -> None:
    settings = {"protocol": protocol, "respawn": True, "epochs": 60}
    run = run_on(engine, fault=("kill worker 1 at update 4",), delay=("10ms",), **settings)
    assert len(facts(run, Joined)) == 3
    assert_each_sample_once(run, NUM_SAMPLES, 60)
    newcomer = max(fact.ticket.member for fact in run.pushes)
    assert newcomer == 2


@ALL
@pytest.mark.parametrize("protocol", ["full-sync", "local-sgd:2", "local-sgd:3+fragments:3"])
def test_a_resumed_run_ends_as_an_uninterrupted_one(
    run_on: Any, tmp_path: Path, engine: str, protocol: str
) -> None:
    settings = {"protocol": protocol, "checkpoint_every": "2 updates"}
    whole = run_on(engine, folder="whole", **settings)
    run_on(engine, folder="parts", updates=3, **settings)
    result = run_on(engine, folder="parts", resume=str(tmp_path / "parts" / "run"), **settings)
    assert all(torch.equal(result.state[name], value) for name, value in whole.state.items())


def test_the_table_lists_the_engines_of_the_setting() -> None:
    with pytest.raises(
        ConfigError, match="engine must be one of local, inline, torchrun, got 'nowhere'"
    ):
        RunSettings(engine="nowhere")
    assert sorted(ENGINES) == ["inline", "local", "torchrun"]


def test_the_documented_engine_works_as_described(
    run_on: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[2] / "docs" / "add-an-engine.md"
    (tmp_path / "counting.py").write_text(page.read_text().split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(ENGINES, "inline", "counting:CountingEngine")
    run = run_on("inline", protocol="full-sync")
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    sent = importlib.import_module("counting").CountingEngine.sent
    assert sent["Finish"] == run.summary.updates
    assert sent["Add"] == sent["Grant"] == 2 * run.summary.updates
    assert sent["EndEpoch"] == 2 * EPOCHS
