"""``--accumulate`` over a stream: K consecutive mini-batches are a worker's part.

Where the stream ends among them, the last update takes those that were read.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import streamed
from meanwhile import stopped_at
from paceline.errors import WorkerError
from reference import differ
from runs import Run, run_script

CLOSE = 1e-6
SCRIPT = Path(streamed.__file__)


def _run(folder: Path, options: dict[str, Any], **settings: Any) -> tuple[Run, dict[str, Tensor]]:
    """A run and its first worker's result; all workers have the same."""
    chosen = {"workers": 2, "protocol": "full-sync", "seed": 5, "engine": "inline", **settings}
    run = run_script(SCRIPT, folder, str(folder), json.dumps(options), **chosen)
    first, *others = [torch.load(path) for path in sorted(folder.glob("result-*.pt"))]
    assert all(differ(first, other) < CLOSE for other in others)
    return run, first


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("size", [45, 48, 50, 75, 3])
def test_full_sync_matches_plain_pytorch(tmp_path: Path, workers: int, size: int) -> None:
    """The stream ends after an update, and in its first, a middle and its last mini-batch."""
    options = {"size": size, "batch_size": 8, "epochs": 2, "accumulate": 3}
    run, result = _run(tmp_path, options, workers=workers)
    assert differ(result, streamed.twin(5, 2, workers, size, 8, 3)) < CLOSE
    assert run.summary.samples == 2 * size
    assert run.summary.updates == 2 * -(-size // 24)
    assert run.summary.dropped_samples == 0


def test_full_sync_of_processes_matches_plain_pytorch(tmp_path: Path) -> None:
    options = {"size": 75, "batch_size": 8, "epochs": 2}
    run, result = _run(tmp_path, options, engine="local", accumulate=3)
    assert differ(result, streamed.twin(5, 2, 2, 75, 8, 3)) < CLOSE
    assert run.summary.samples == 150


@pytest.mark.parametrize(("size", "whole"), [(47, 40), (56, 56), (7, 0)])
def test_an_incomplete_batch_is_dropped_as_the_loader_asks(
    tmp_path: Path, size: int, whole: int
) -> None:
    options = {"size": size, "batch_size": 8, "drop_last": True, "accumulate": 3}
    if not whole:
        with pytest.raises(WorkerError, match="has no whole batch"):
            _run(tmp_path, options)
        return
    run, result = _run(tmp_path, options)
    assert run.summary.samples == whole
    assert differ(result, streamed.twin(5, 1, 2, whole, 8, 3)) < CLOSE


PROTOCOLS = [
    "k-sync:2", "k-batch-sync:2", "async", "k-async:2", "k-batch-async:2", "stale-synchronous:1",
    "local-sgd:3", "adaptive", "adaptive-local:4",
]  # fmt: skip


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_protocol_uses_each_mini_batch_once(tmp_path: Path, protocol: str) -> None:
    options = {"size": 41, "batch_size": 6, "accumulate": 2}
    run, _ = _run(tmp_path, options, workers=3, protocol=protocol)
    assert run.summary.samples == 41
    assert run.summary.dropped_samples == 0


@pytest.mark.parametrize("protocol", ["full-sync", "k-batch-async:2"])
@pytest.mark.parametrize("is_stateful", [False, True])
def test_deaths_neither_lose_nor_repeat_a_mini_batch(
    tmp_path: Path, protocol: str, is_stateful: bool
) -> None:
    """Of the reading worker and of another."""
    options = {"size": 320, "step_s": 0.005, "is_stateful": is_stateful, "accumulate": 2}
    run, result = _run(
        tmp_path, options, protocol=protocol, engine="local", respawn=True,
        fault=("kill worker 0 at update 6", "kill worker 1 at update 20"),
    )  # fmt: skip
    assert len(run.left) == 2
    assert run.summary.samples == 320
    assert run.used() == [Counter(range(160))]
    if protocol == "full-sync":
        assert differ(result, streamed.twin(5, 1, 2, 320, 4, 2)) < CLOSE


def test_a_resumed_run_ends_as_one_that_never_stopped(say: Any, tmp_path: Path) -> None:
    options = {"size": 240, "accumulate": 3, "step_s": 0.02, "say_at": 8}
    words, end = "launch --device cpu", f"{SCRIPT} {tmp_path} '{json.dumps(options)}'"
    with stopped_at(tmp_path / "is-there"):
        where = f"--workers 2 --seed 5 --run-dir {tmp_path / 'run'}"
        code, _, err = say(f"{words} {where} {end}")
    assert code == 143, err
    code, _, err = say(f"{words} --workers 2 --resume {tmp_path / 'run'} {end}")
    assert code == 0, err
    result = torch.load(tmp_path / "result-0.pt")
    assert differ(result, streamed.twin(5, 1, 2, 240, 4, 3)) < CLOSE


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_made_by_the_data_set_are_accumulated(tmp_path: Path, workers: int) -> None:
    options = {"size": 10, "batch_size": None, "batch": "per-worker", "accumulate": 2}
    run, _ = _run(tmp_path, options, workers=workers)
    assert run.summary.updates == -(-10 // (2 * workers))


def test_an_update_count_repeats_the_stream(tmp_path: Path) -> None:
    run, _ = _run(tmp_path, {"size": 24, "updates": [8], "accumulate": 2})
    assert run.summary.updates == 8
    assert run.summary.samples == 24 + 24 + 16
