"""What goes into a model that is exported: the first samples of its task's data."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import ConfigError
from paceline.exports.subject import _inputs_of


@dataclass
class Samples:
    """A task with these samples to test with."""

    rows: list[Any]

    def splits(self) -> Any:
        return SimpleNamespace(test=[(one, 0) for one in self.rows], train=None)


@pytest.mark.parametrize("rows", [np.ones((2, 3)), torch.ones(2, 3), [1.0, 1.0]])
def test_samples_are_put_together_as_a_loader_does(rows: Any) -> None:
    (made,) = _inputs_of(Samples(list(rows)))(3)  # type: ignore[arg-type]  # all that is asked of a task
    assert made.flatten()[0] == 1.0
    assert len(made) == 3


@pytest.mark.parametrize("row", [(torch.ones(1), torch.ones(1)), "text", object()])
def test_what_is_no_tensor_is_refused_by_its_type(row: Any) -> None:
    with pytest.raises(ConfigError, match=f"inputs of the task's data are {type(row).__name__}"):
        _inputs_of(Samples([row]))(1)  # type: ignore[arg-type]  # all that is asked of a task
