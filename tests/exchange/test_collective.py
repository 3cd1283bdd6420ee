"""The collective of docs/add-a-collective.md gives the plain loop's result."""

import functools
import importlib
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import exchange
from paceline.exchange.averaging import Averaging
from paceline.exchange.distributed import DistributedAveraging
from paceline.exchange.group import Made, TorchGroup, start_group
from paceline.trace.records import Header
from reference import differ, plain_loop
from runs import assert_each_sample_once, train
from tiny import EPOCHS, NUM_SAMPLES, TASK, WITH_BATCH_NORM

cloudpickle.register_pickle_by_value(sys.modules[__name__])
PAGE = Path(__file__).parents[2] / "docs" / "add-a-collective.md"


def model_of_a_member(make: Any, folder: str) -> nn.Module:
    """In a member the table has the page's class; the replaced all-reduce is gone."""
    if "RANK" in os.environ:
        sys.path.insert(0, folder)
        exchange.AVERAGINGS["collective"] = "tree:TreeAveraging"
        TorchGroup.all_reduce = None  # type: ignore[assignment, method-assign]
    model: nn.Module = make()
    return model


def test_members_rendezvous_in_a_folder_of_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "run #1? a%20b"
    folder.mkdir()
    group = start_group(str(folder / "rendezvous"), 0, 1, torch.device("cpu"))
    try:
        assert (group.rank, group.size) == (0, 1)
    finally:
        dist.destroy_process_group()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("task", [TASK, WITH_BATCH_NORM], ids=["plain", "with buffers"])
def test_the_documented_collective_works_as_described(tmp_path: Path, task: Any) -> None:
    (tmp_path / "tree.py").write_text(PAGE.read_text().split("```python\n")[1].split("```")[0])
    chosen = {"workers": 3, "protocol": "full-sync", "path": "collective"}
    expected = train(task, tmp_path / "expected", **chosen) if task is WITH_BATCH_NORM else None
    armed = replace(task, model=functools.partial(model_of_a_member, task.model, str(tmp_path)))
    run = train(armed, tmp_path / "found", **chosen)
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    assert differ(run.state, expected.state if expected else plain_loop(task)) < 1e-6


KNOWN_TO_GLOO = {
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8,
    torch.bool, torch.int32, torch.int64,
}  # fmt: skip
"""Of any other type it says "Invalid scalar type"."""


class SameInAll:
    """Three members with equal tensors."""

    def all_reduce(self, tensor: Tensor, *, is_maximum: bool, at_once: bool) -> Made:
        assert tensor.dtype in KNOWN_TO_GLOO
        if not is_maximum:
            own = tensor.clone()
            tensor.add_(own).add_(own)
        return Made()


def test_equal_buffers_of_any_dtype_are_unchanged_by_averaging() -> None:
    numbers = torch.arange(2000.0) / 64 + 1.0
    types = (torch.float32, torch.bfloat16, torch.float16, torch.int16, torch.uint16, torch.bool)
    buffers = [numbers.to(dtype) for dtype in types]
    member = object.__new__(DistributedAveraging)
    member._group = SameInAll()  # type: ignore[assignment]  # only what buffers need
    member._replica = SimpleNamespace(buffers=[buffer.clone() for buffer in buffers])  # type: ignore[assignment]  # as above
    member._reduce_buffers(1 / 3)
    for result, before in zip(member._replica.buffers, buffers, strict=True):
        assert torch.equal(result, before)


UNEVEN = 13
"""Samples an update: more for some workers than for others, and 8 in the last one."""


@functools.cache
def in_shared_memory(workers: int, protocol: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        chosen = {"workers": workers, "protocol": protocol, "batch_size": UNEVEN}
        return train(WITH_BATCH_NORM, Path(folder), collective="shared", **chosen).state


@pytest.mark.timeout(60)
@pytest.mark.parametrize("protocol", ["full-sync", "local-sgd:2"])
@pytest.mark.parametrize(
    ("workers", "collective"),
    [
        (2, "native"), (2, "ring"), (2, "bidirectional-ring"), (2, "tree"), (2, "double-tree"),
        (2, "hub"), (2, "fully-connected"), (2, "halving-doubling"), (2, "bine"),
        (2, "hierarchical:2"),
        (3, "native"), (3, "ring"), (3, "bidirectional-ring"), (3, "tree"), (3, "double-tree"),
        (3, "hub:1"), (3, "fully-connected"), (3, "halving-doubling"), (3, "bine"),
        (3, "hierarchical:3"),
        (4, "native"), (4, "ring"), (4, "bidirectional-ring"), (4, "tree"), (4, "double-tree:3"),
        (4, "hub"), (4, "fully-connected"), (4, "halving-doubling"), (4, "bine"),
        (4, "hierarchical:2"),
    ],
)  # fmt: skip
def test_a_run_matches_shared_memory(
    tmp_path: Path, workers: int, protocol: str, collective: str
) -> None:
    chosen = {"workers": workers, "protocol": protocol, "batch_size": UNEVEN}
    run = train(WITH_BATCH_NORM, tmp_path, collective=collective, **chosen)
    header = run.records[0]
    assert isinstance(header, Header)
    assert (run.path, header.text("collective")) == ("collective", collective)
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    assert differ(run.state, in_shared_memory(workers, protocol)) < 1e-6


def test_the_table_has_the_documented_averagings() -> None:
    assert sorted(exchange.AVERAGINGS) == ["collective", "peers"]
    for name in exchange.AVERAGINGS.values():
        module, _, kind = name.partition(":")
        assert issubclass(getattr(importlib.import_module(module), kind), Averaging)
