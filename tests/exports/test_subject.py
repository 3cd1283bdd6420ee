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
from paceline.exports.subject import (
    InputShape,
    _inputs_of,
    _loaded,
    _num_values,
    random_inputs,
)
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


def test_samples_of_another_shape_are_left_out() -> None:
    rows = [torch.ones(3), torch.ones(2), torch.zeros(3)]
    (made,) = _inputs_of(Samples(rows))(3)  # type: ignore[arg-type]  # all that is asked of a task
    assert made.tolist() == [[1.0] * 3, [0.0] * 3, [1.0] * 3]


class Masked(nn.Module):
    """Words of 50 and kinds of 3 are looked up, and a mask is not."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds = nn.Embedding(50, 4), nn.Embedding(3, 4)

    def forward(self, words: torch.Tensor, kinds: torch.Tensor, mask: torch.Tensor) -> Any:
        made = self.words(words) + self.kinds(kinds[:, :5])
        return (made * mask.unsqueeze(2)).mean(1)


def test_integers_are_drawn_for_the_table_that_they_are_looked_up_in() -> None:
    shapes = [InputShape((5,), torch.int64)] * 3
    model = Masked()
    assert _num_values(model, shapes) == [50, 3, 2]
    assert model.training
    words, kinds, mask = random_inputs(shapes, [50, 3, 2])(64)
    assert [int(one.max()) for one in (words, kinds, mask)] == [49, 2, 1]
    single = nn.Sequential(nn.Embedding(1, 2), nn.Linear(7, 1))  # and does not run
    assert _num_values(single, shapes[:1]) == [1]
    assert _num_values(nn.Linear(7, 1), shapes[:1]) == [2]


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
