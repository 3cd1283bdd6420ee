"""The inputs of an exported model are the first samples of its task's data."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.checkpoints.state import load_tensors, save_model, tensors_of
from paceline.errors import ConfigError
from paceline.exports.subject import _inputs_of, _loaded
from tiny import COMPILED


@dataclass
class Samples:
    """A task with these samples to test with."""

    rows: list[Any]
    training_rows: list[Any] = field(default_factory=list)
    name: str = "samples"

    def splits(self) -> Any:
        test, train = ([(row, 0) for row in rows] for rows in (self.rows, self.training_rows))
        return SimpleNamespace(test=test, train=train)


@pytest.mark.parametrize("rows", [np.ones((2, 3)), torch.ones(2, 3), [1.0, 1.0]])
def test_samples_are_collated_as_by_a_loader(rows: Any) -> None:
    (made,) = _inputs_of(Samples(list(rows)))(3)  # type: ignore[arg-type]  # all that is asked of a task
    assert made.flatten()[0] == 1.0
    assert len(made) == 3


def test_task_without_test_samples_gives_those_to_train_on() -> None:
    (made,) = _inputs_of(Samples([], [1.0, 2.0]))(3)  # type: ignore[arg-type]  # all that is asked
    assert made.tolist() == [1.0, 2.0, 1.0]
    with pytest.raises(ConfigError, match="task samples: its data has no samples"):
        _inputs_of(Samples([]))(3)  # type: ignore[arg-type]  # all that is asked of a task


@pytest.mark.parametrize("row", [(torch.ones(1), torch.ones(1)), "text", object()])
def test_non_tensor_input_is_refused_with_its_type(row: Any) -> None:
    with pytest.raises(ConfigError, match=f"inputs of the task's data are {type(row).__name__}"):
        _inputs_of(Samples([row]))(1)  # type: ignore[arg-type]  # all that is asked of a task


def test_weights_of_a_compiled_model_are_loaded_into_its_module(tmp_path: Path) -> None:
    trained, path = COMPILED.module(), tmp_path / "model.safetensors"
    save_model(trained, path)
    made = _loaded("tiny", COMPILED.module(), lambda batch: (), path, COMPILED).model
    assert tensors_of(made).keys() == load_tensors(path).keys()
    assert all(one.equal(tensors_of(trained)[name]) for name, one in tensors_of(made).items())
    assert type(made) is nn.Sequential  # the module of the layers, not the compiled wrapper
    with pytest.raises(ConfigError, match=r"another model than other: 4\.weight is missing there"):
        _loaded("other", nn.Sequential(*made, nn.ReLU(), nn.Linear(1, 1)), lambda batch: (), path)
