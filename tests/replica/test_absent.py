"""A parameter held elsewhere has a shape, and nothing else."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.replica.absent import AbsentParameter, forget


def given_up() -> nn.Linear:
    layer = nn.Linear(3, 4)
    forget(layer.weight, "head.weight", "on worker 1")
    return layer


def test_an_absent_parameter_keeps_its_identity_and_frees_its_memory() -> None:
    layer = nn.Linear(3, 4)
    weight = layer.weight
    weight.grad = torch.ones(4, 3)
    storage = weight.untyped_storage()
    forget(weight, "weight", "on worker 1")
    assert layer.weight is weight
    assert isinstance(weight, AbsentParameter)
    assert not isinstance(layer.bias, AbsentParameter)
    assert (tuple(weight.shape), weight.numel(), weight.dtype) == ((4, 3), 12, torch.float32)
    assert weight.requires_grad
    assert {weight: 1}[weight] == 1
    assert "on worker 1" in repr(weight)
    assert storage.nbytes() == 48  # the caller's own hold on it; the parameter has let go
    assert sum(parameter.numel() for parameter in layer.parameters()) == 16


LOOKS: list[Callable[[nn.Linear], object]] = [
    lambda one: one.weight.norm(),
    lambda one: one.weight.grad,
    lambda one: one.weight.data,
    lambda one: one.weight.detach(),
    lambda one: one.weight + 1,
    lambda one: one(torch.ones(3)),
    lambda one: one.double(),
    lambda one: nn.utils.clip_grad_norm_(one.parameters(), 1.0),
    copy.deepcopy,
    pickle.dumps,
]


@pytest.mark.parametrize("look", LOOKS)
def test_reading_an_absent_parameter_says_where_it_is(
    look: Callable[[nn.Linear], object],
) -> None:
    with pytest.raises(ConfigError, match=r"'head.weight' is on worker 1, .* model.state_dict"):
        look(given_up())
