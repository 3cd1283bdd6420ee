"""Parameters exchanged in fragments equal a plain PyTorch loop on every supported path."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from paceline.errors import ConfigError
from paceline.workloads.base import Task
from reference import differ
from runs import Run, assert_each_sample_once, train
from streaming import OuterStep, Streamed, names_of_fragments
from tiny import EPOCHS, NUM_SAMPLES, TASK, WITH_BATCH_NORM, Tied, with_optimizer

cloudpickle.register_pickle_by_value(sys.modules[__name__])
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
"""Twelve batches per epoch; the last update of two workers is short."""
ADAMW = replace(with_optimizer(torch.optim.AdamW, 0.01), batch_size=12)


class Poisoned(Tied):
    """Its outputs are huge where the first input is large, as in two samples."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = super().forward(inputs)
        return outputs * torch.where(inputs[:, :1] > 2.0, inputs.new_tensor(1e150), 1.0)


class Overflowing(torch.optim.SGD):
    """A step that is not finite from a finite gradient; other gradients are dropped earlier."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        held = self.param_groups[0]["params"]
        gradients = [one.grad for one in held if one.grad is not None]
        if any(bool((gradient.abs() > 1e100).any()) for gradient in gradients):
            for one in held:
                one.data.fill_(torch.inf)


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("task", [MOMENTUM, ADAMW], ids=["momentum", "AdamW"])
def test_inline_fragments_equal_the_plain_loop(
    tmp_path: Path, task: Task, workers: int, outer: str
) -> None:
    run = _train(task, tmp_path, workers, outer=outer, engine="inline")
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    assert differ(run.state, _expected(run, task, workers, outer)) < EXACT


@pytest.mark.parametrize(
    ("way", "workers"),
    [("through the store", 2), ("between peers", 2), ("between peers", 3), ("all-reduce", 2)],
)
def test_live_fragments_equal_the_plain_loop(tmp_path: Path, way: str, workers: int) -> None:
    outer = "nesterov:0.7,0.9"
    settings: dict[str, Any] = {"protocol": "local-sgd:6", "fragments": 3, **WAYS[way]}
    run = _train(FINE, tmp_path, workers, outer=outer, **settings)
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    assert differ(run.state, _expected(run, FINE, workers, outer, 3)) < EXACT
    apart = differ(run.state, _expected(run, FINE, workers, outer, 1))
    assert apart > 100 * EXACT, "all would be exchanged each time"


@pytest.mark.parametrize("way", ["through the store", "between peers"])
def test_killed_worker_loses_only_unexchanged_steps(tmp_path: Path, way: str) -> None:
    """Others compute its mini-batches; its replacement starts from the global copy."""
    task, outer = replace(FINE, epochs=6, learning_rate=0.01), "nesterov:0.7,0.9"
    run = _train(
        task, tmp_path, 3, protocol="local-sgd:4", outer=outer, delay=("20ms",),
        fault=("kill worker 1 at update 5",), respawn=True, **WAYS[way],
    )  # fmt: skip
    assert run.left == ["killed by signal 9"]
    assert_each_sample_once(run, NUM_SAMPLES, 6)
    assert max(push.ticket.member for push in run.pushes) == 3, "nobody took its place"
    assert differ(run.state, _expected(run, task, 4, outer)) < EXACT


@pytest.mark.parametrize("way", WAYS)
def test_one_fragment_equals_plain_local_sgd_bitwise(tmp_path: Path, way: str) -> None:
    """Except where pushes are summed in the order of arrival."""
    plain, run = (
        _train(FINE, tmp_path / text, 2, protocol=f"local-sgd:2{text}", fragments=1, **WAYS[way])
        for text in ("", "+fragments:1")
    )
    assert differ(run.state, plain.state) <= (1e-12 if way == "through the store" else 0.0)


@pytest.mark.parametrize("way", WAYS)
def test_nonfinite_update_resets_workers_to_the_global_copy(tmp_path: Path, way: str) -> None:
    """Every parameter of the worker that made the step is not finite."""
    task = replace(FINE, model=Poisoned, optimizer=lambda held, rate: Overflowing(held, lr=rate))
    run = _train(task, tmp_path, 2, nonfinite="skip", **WAYS[way])
    skipped = {push.ticket.version for push in run.pushes if not push.is_finite}
    assert len(skipped) == 2 * EPOCHS, "one for each of the two samples, and none is carried on"
    assert all(bool(torch.isfinite(value).all()) for value in run.state.values())


def test_too_many_fragments_are_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="8 fragments need as many parameters, but the model has"):
        _train(FINE, tmp_path, 2, protocol="local-sgd:8", fragments=8, engine="inline")


OVERLAPS = {
    "inline": ["local-sgd:4+fragments:2,1", "local-sgd:3+fragments:1,2"],
    "through the store": ["local-sgd:4+fragments:2,1"],
    "between peers": ["local-sgd:4+fragments:2,1"],
    "all-reduce": ["local-sgd:4+fragments:2,1", "local-sgd:3+fragments:1,2"],
}


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(
    ("way", "protocol"), [(way, one) for way, every in OVERLAPS.items() for one in every]
)
def test_overlapped_fragments_equal_the_plain_loop(
    tmp_path: Path, way: str, protocol: str, workers: int
) -> None:
    """Half its own and half the received values; the next difference is to the received ones."""
    task, outer = replace(FINE, batch_size=4), "nesterov:0.7,0.9"
    run = _train(task, tmp_path, workers, 1, protocol=protocol, outer=outer, **WAYS[way])
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    count, overlap = (int(one) for one in protocol.partition("fragments:")[2].split(","))
    expected = _expected(run, task, workers, outer, count, overlap)
    assert differ(run.state, expected) < EXACT
    assert differ(expected, _expected(run, task, workers, outer, count)) > 100 * EXACT


@pytest.mark.parametrize("protocol", ["local-sgd:4+fragments:2", "local-sgd:4+fragments:2,1"])
def test_compressed_fragments_stay_near_uncompressed_ones(tmp_path: Path, protocol: str) -> None:
    """int4 with error feedback per fragment: close to the uncompressed ones, but not equal."""
    outer = "nesterov:0.7,0.9"
    way: dict[str, Any] = {"protocol": protocol, "outer": outer, **WAYS["all-reduce"]}
    run = _train(FINE, tmp_path, 2, 1, compress="int4", **way)
    expected = _expected(run, FINE, 2, outer, 2, protocol.count(","))
    assert EXACT < differ(run.state, expected) < 0.05


def _train(task: Task, folder: Path, workers: int, fragments: int = 2, **settings: Any) -> Run:
    chosen = {"protocol": "local-sgd:2", "fragments": fragments, **settings}
    return train(task, folder, workers=workers, **chosen)


def _expected(
    run: Run, task: Task, workers: int, outer: str = "none", fragments: int = 2, overlap: int = 0
) -> Any:
    names = names_of_fragments(task, fragments)
    return Streamed(task, workers, names, OUTERS[outer], overlap).run(run.records)
