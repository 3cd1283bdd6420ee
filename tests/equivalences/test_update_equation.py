"""Every protocol follows its update equation, live and inline.

A run of real processes, with one slow worker and random delays, is compared to the update
equation in the arrival order of its trace, with the exact stale parameters; and to an inline run
that gets the same pushes in the same order. One test per protocol, because live runs are slow.
"""

from pathlib import Path

import pytest

from reference import State, differ, replay, replay_local_sgd
from runs import Run, assert_each_sample_once, same_arrivals, train
from tiny import EPOCHS, NUM_SAMPLES, TASK, WITH_BATCH_NORM

CLOSE = 1e-6
PROTOCOLS = [
    "full-sync",
    "k-sync:2",
    "k-batch-sync:2",
    "k-batch-sync:5",
    "async",
    "k-async:2",
    "k-batch-async:2",
    "k-batch-async:4",
    "stale-synchronous:0",
    "stale-synchronous:1",
    "local-sgd:3",
]
STRAGGLERS = {"slow": ("0=3x",), "delay": ("exp:3ms",)}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_live_run_follows_the_update_equation_and_equals_inline(
    tmp_path: Path, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = WITH_BATCH_NORM
    live = train(task, tmp_path / "live", workers=3, protocol=protocol, path="store", **STRAGGLERS)
    assert_each_sample_once(live, NUM_SAMPLES, EPOCHS)
    assert differ(live.state, _equation(live, protocol, workers=3)) < CLOSE
    with same_arrivals(live, monkeypatch):
        inline = train(task, tmp_path / "inline", workers=3, protocol=protocol, engine="inline")
    assert inline.orders == live.orders
    assert [push.ticket for push in inline.pushes] == [push.ticket for push in live.pushes]
    assert differ(inline.state, live.state) < CLOSE


@pytest.mark.parametrize("protocol", ["full-sync", "local-sgd:1", "local-sgd:3"])
def test_peers_follow_the_update_equation(tmp_path: Path, protocol: str) -> None:
    """With batch norm: buffers are averaged by samples, counters are the maximum."""
    run = train(
        WITH_BATCH_NORM, tmp_path, workers=2, protocol=protocol, path="peers", slow=("1=2x",)
    )
    assert run.path == "peers"
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    assert differ(run.state, _equation(run, protocol, workers=2)) < CLOSE
    assert int(run.state["norm.num_batches_tracked"]) > 0


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_inline_run_follows_the_update_equation(tmp_path: Path, protocol: str) -> None:
    run = train(WITH_BATCH_NORM, tmp_path, workers=3, protocol=protocol, engine="inline")
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    assert differ(run.state, _equation(run, protocol, workers=3)) < CLOSE


def test_inline_and_peers_make_the_same_decisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers decide without a coordinator exactly as the coordinator would."""
    peers = train(TASK, tmp_path / "peers", workers=2, protocol="full-sync", path="peers")
    with same_arrivals(peers, monkeypatch):
        inline = train(TASK, tmp_path / "inline", workers=2, protocol="full-sync", engine="inline")
    assert peers.orders == inline.orders
    assert differ(peers.state, inline.state) < CLOSE


def test_repeated_inline_run_is_bitwise_identical(tmp_path: Path) -> None:
    once, again = (
        train(WITH_BATCH_NORM, tmp_path / name, workers=3, protocol="k-async:2", engine="inline")
        for name in ("once", "again")
    )
    assert once.orders == again.orders
    assert differ(once.state, again.state) == 0.0


def _equation(run: Run, protocol: str, workers: int) -> State:
    if protocol.startswith("local-sgd"):
        return replay_local_sgd(WITH_BATCH_NORM, run.records, workers)
    return replay(WITH_BATCH_NORM, run.records)
