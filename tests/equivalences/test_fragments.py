"""Parameters exchanged in fragments: a plain loop of PyTorch, on every path that carries them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.workloads.base import Task
from reference import differ
from runs import Run, assert_each_sample_once, train
from streaming import OuterStep, Streamed, names_of_fragments
from tiny import EPOCHS, NUM_SAMPLES, TASK, WITH_BATCH_NORM, with_optimizer

EXACT = 1e-10
OUTERS = {"none": OuterStep(), "nesterov:0.7,0.9": OuterStep(0.7, 0.9, is_nesterov=True)}
WAYS: dict[str, dict[str, Any]] = {
    "inline": {"engine": "inline"},
    "through the store": {"path": "store"},
    "between peers": {"path": "peers"},
    "all-reduce": {"path": "collective"},
}
MOMENTUM = replace(WITH_BATCH_NORM, batch_size=13, learning_rate=0.02)
FINE = replace(TASK, batch_size=5, learning_rate=0.05)
"""Twelve batches an epoch; the last of two workers' updates is short."""
ADAMW = replace(with_optimizer(torch.optim.AdamW, 0.01), batch_size=12)


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("task", [MOMENTUM, ADAMW], ids=["momentum", "AdamW"])
def test_inline_it_is_the_plain_loop(tmp_path: Path, task: Task, workers: int, outer: str) -> None:
    run = _train(task, tmp_path, workers, outer=outer, engine="inline")
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    assert differ(run.state, _expected(run, task, workers, outer)) < EXACT


@pytest.mark.parametrize(
    ("way", "workers"),
    [("through the store", 2), ("between peers", 2), ("between peers", 3), ("all-reduce", 2)],
)
def test_live_it_is_the_plain_loop(tmp_path: Path, way: str, workers: int) -> None:
    outer = "nesterov:0.7,0.9"
    settings: dict[str, Any] = {"protocol": "local-sgd:6", "fragments": 3, **WAYS[way]}
    run = _train(FINE, tmp_path, workers, outer=outer, **settings)
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    assert differ(run.state, _expected(run, FINE, workers, outer, 3)) < EXACT
    apart = differ(run.state, _expected(run, FINE, workers, outer, 1))
    assert apart > 100 * EXACT, "all would be exchanged each time"


def _train(task: Task, folder: Path, workers: int, fragments: int = 2, **settings: Any) -> Run:
    chosen = {"protocol": "local-sgd:2", "fragments": fragments, **settings}
    return train(task, folder, workers=workers, **chosen)


def _expected(run: Run, task: Task, workers: int, outer: str = "none", fragments: int = 2) -> Any:
    names = names_of_fragments(task, fragments)
    return Streamed(task, workers, names, OUTERS[outer]).run(run.records)
