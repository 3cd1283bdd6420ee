"""The collective of docs/add-a-collective.md comes to what the plain loop does."""

import functools
import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from torch import nn

from paceline import exchange
from paceline.exchange.averaging import Averaging
from paceline.exchange.group import TorchGroup
from reference import differ, plain_loop
from runs import assert_each_sample_once, train
from tiny import EPOCHS, NUM_SAMPLES, TASK, WITH_BATCH_NORM

cloudpickle.register_pickle_by_value(sys.modules[__name__])
PAGE = Path(__file__).parents[2] / "docs" / "add-a-collective.md"


def model_of_a_member(make: Any, folder: str, name: str = "tree:TreeAveraging") -> nn.Module:
    """In a member the table has the page's class; the all-reduce that it replaces is gone."""
    if "RANK" in os.environ:
        sys.path.insert(0, folder)
        exchange.AVERAGINGS["collective"] = name
        TorchGroup.all_reduce = None  # type: ignore[assignment, method-assign]
    model: nn.Module = make()
    return model


@pytest.mark.timeout(60)
@pytest.mark.parametrize("task", [TASK, WITH_BATCH_NORM], ids=["plain", "with buffers"])
def test_the_collective_of_the_page_does_what_it_says(tmp_path: Path, task: Any) -> None:
    (tmp_path / "tree.py").write_text(PAGE.read_text().split("```python\n")[1].split("```")[0])
    chosen = {"workers": 3, "protocol": "full-sync", "path": "collective"}
    expected = train(task, tmp_path / "expected", **chosen) if task is WITH_BATCH_NORM else None
    armed = replace(task, model=functools.partial(model_of_a_member, task.model, str(tmp_path)))
    run = train(armed, tmp_path / "found", **chosen)
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    assert differ(run.state, expected.state if expected else plain_loop(task)) < 1e-6


@pytest.mark.timeout(60)
@pytest.mark.parametrize("collective", ["ring", "tree"])
def test_a_run_along_a_schedule_is_the_plain_loop(tmp_path: Path, collective: str) -> None:
    text = PAGE.read_text().split("```python schedule\n")[1].split("```")[0]
    (tmp_path / "along.py").write_text(text.replace('"ring"', f'"{collective}"'))
    chosen = {"workers": 3, "protocol": "full-sync", "path": "collective"}
    make = functools.partial(
        model_of_a_member, TASK.model, str(tmp_path), name="along:RingAveraging"
    )
    run = train(replace(TASK, model=make), tmp_path / "found", **chosen)
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    assert differ(run.state, plain_loop(TASK)) < 1e-6


def test_the_table_has_what_the_page_says() -> None:
    assert sorted(exchange.AVERAGINGS) == ["collective", "peers"]
    for name in exchange.AVERAGINGS.values():
        module, _, kind = name.partition(":")
        assert issubclass(getattr(importlib.import_module(module), kind), Averaging)
