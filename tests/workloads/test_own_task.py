"""An invalid part of a task is named in one sentence."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from paceline.data.arrays import Splits
from paceline.errors import ConfigError
from paceline.workloads.base import Task
from runs import train
from tiny import TASK, WIDTH


def splits(*parts: Tensor) -> Callable[[], Splits]:
    return lambda: Splits(train=TensorDataset(*parts), test=None, source="made up")


def no_pairs(outputs: Tensor, targets: Tensor) -> Any:
    return {"acc": 0.5}


INPUTS = torch.zeros(24, WIDTH, dtype=torch.float64)
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "a data set as data": (
        {"data": lambda: TensorDataset(INPUTS)},
        "task tiny: data must return paceline.Splits.*, got TensorDataset",
    ),
    "a model that is none": (
        {"model": lambda: 3}, "task tiny: model must return an nn.Module, got int",
    ),
    "samples of one part": (
        {"data": splits(INPUTS)}, r"task tiny: a sample .* a pair \(inputs, targets\), got 1 parts",
    ),
    "a loss that is a number": (
        {"loss": lambda outputs, targets: 1.0}, r"a tensor with one number, .*got 1\.0; leave",
    ),
    "a loss for each sample": (
        {"loss": lambda outputs, targets: outputs.sum(1)}, r"got a tensor of shape \(6,\); .*mean",
    ),
    "a metric without its count": (
        {"metrics": no_pairs}, r"must return \(sum over samples, .* for 'acc': a float",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_invalid_task_gets_a_one_line_error(case: str, tmp_path: Path) -> None:
    changes, message = CASES[case]
    task: Task = replace(TASK, **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        train(task, tmp_path, workers=2, engine="inline")
    assert "\n" not in str(caught.value)


NO_MODEL = """
import torch
from torch.utils.data import TensorDataset
from paceline import Splits, Task
from paceline.workloads.base import classification_metrics

rows = TensorDataset(torch.zeros(10, 4), torch.zeros(10, dtype=torch.int64))
task = Task(
    name="none", model=lambda: 3, loss=torch.nn.functional.cross_entropy,
    data=lambda: Splits(train=rows, test=rows), learning_rate=0.1, batch_size=5, epochs=1,
    metrics=classification_metrics,
)
"""


@pytest.mark.parametrize("line", ["simulate {} -n 2 --delay 1ms", "verify {} -n 1", "export {}"])
def test_every_verb_names_a_model_that_is_none(
    say: Callable[[str], tuple[int, str, str]], tmp_path: Path, line: str
) -> None:
    (tmp_path / "modelless.py").write_text(NO_MODEL)
    code, _, err = say(line.format("modelless:task"))
    assert code == 2
    assert "task none: model must return an nn.Module, got int" in err


def test_splits_accept_a_tensor_data_set_in_a_type_checker() -> None:
    hints = get_type_hints(Splits)
    assert hints["train"] == Dataset[tuple[Tensor, ...]]
    assert hints["test"] == Dataset[tuple[Tensor, ...]] | None
