"""Changes of gradients in torch's own memory are found like those of gathered ones."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.replica.edits import Edits
from paceline.replica.own_gradients import OwnGradients
from paceline.replica.replica import Replica


def _watched() -> tuple[nn.Module, Edits]:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).to(torch.float64)
    model.register_parameter("turn", nn.Parameter(torch.ones(2, dtype=torch.complex128)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, Edits(OwnGradients(Replica(model, optimizer, optimizer)), is_refused=True)


def _differentiate(model: nn.Module, edits: Edits) -> None:
    edits.before_backward()
    turn = model.get_parameter("turn")
    outputs = model[0](torch.ones(1, 3, dtype=torch.float64))  # type: ignore[index]
    (model[1](outputs).square().sum() + turn.abs().sum()).backward()  # type: ignore[index]
    edits.after_backward()


def _replace(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def _in_place(gradient: Tensor) -> Tensor:
    return gradient.mul_(0.5)


def _behind(gradient: Tensor) -> Tensor:
    gradient.data.mul_(0.5)
    return gradient


@pytest.mark.parametrize("name", ["0.weight", "1.bias", "turn"])
@pytest.mark.parametrize("change", [_replace, _in_place, _behind])
def test_a_change_is_found(change: Callable[[Tensor], Tensor], name: str) -> None:
    model, edits = _watched()
    _differentiate(model, edits)
    parameter = model.get_parameter(name)
    assert parameter.grad is not None
    parameter.grad = change(parameter.grad)
    with pytest.raises(ConfigError, match="changed between backward"):
        edits.check()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulated_or_dropped_gradients_are_not_changes(set_to_none: bool) -> None:
    model, edits = _watched()
    for _ in range(3):
        _differentiate(model, edits)
        _differentiate(model, edits)
        edits.check()
        model.zero_grad(set_to_none=set_to_none)
        edits.check()


def test_an_explained_change_is_allowed() -> None:
    model, edits = _watched()
    _differentiate(model, edits)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(2.0)
    edits.explained()
    edits.check()
    _differentiate(model, edits)
