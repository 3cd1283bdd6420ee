"""A write into a state dict, which is a copy, reaches the model or is refused by name."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.script.given import GivenStates
from paceline.script.patches import clone_state, leave_state

Given = tuple[nn.Sequential, GivenStates]


@pytest.fixture
def prepared() -> Iterator[Given]:
    """A model whose state dicts are copies."""
    model, given = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), GivenStates()
    clone_state(model, given)
    yield model, given
    leave_state(model)


def _of_a_part(model: Any) -> None:
    model[0].state_dict()["weight"].zero_()


def _in_a_loop(model: nn.Module) -> None:
    for name, value in model.state_dict().items():
        if "num_batches" not in name:
            value.clamp_(-0.1, 0.1)


def _one_by_one(model: nn.Module) -> None:
    for name in ("0.weight", "1.bias"):
        model.state_dict()[name].fill_(7.0)
    model.state_dict()


@pytest.mark.parametrize("write", [_of_a_part, _in_a_loop, _one_by_one])
def test_a_write_that_does_not_reach_the_model_is_refused(
    prepared: Given, write: Callable[[nn.Module], None]
) -> None:
    model, given = prepared
    write(model)
    with pytest.raises(ConfigError, match=r"state_dict\(\)\['.*weight'\] was written to"):
        given.check()


def _loaded(model: nn.Module) -> None:
    state = model.state_dict()
    for value in state.values():
        value.zero_()
    model.load_state_dict(state)


def _loaded_after_another(model: nn.Module) -> None:
    state = model.state_dict()
    state["0.weight"].fill_(3.0)
    model.state_dict()
    model.load_state_dict(state, strict=False)


def _put_into(model: nn.Module) -> None:
    state = model.state_dict()
    state.update({name: value * 0.5 for name, value in state.items()})


def _read(model: nn.Module) -> None:
    kept = copy.deepcopy(model.state_dict())
    for value in kept.values():
        value.zero_()


def _kept_and_copied_from(model: nn.Module) -> None:
    state = model.state_dict()
    state["0.weight"].mul_(2.0)
    with torch.no_grad():
        model.get_parameter("0.weight").copy_(state["0.weight"])


def _written_without_a_change(model: nn.Module) -> None:
    model.kept = state = model.state_dict()  # type: ignore[assignment]  # so that it is kept
    state["0.weight"].clamp_(-9.0, 9.0)


@pytest.mark.parametrize(
    "use",
    [
        _loaded, _loaded_after_another, _put_into, _read, _kept_and_copied_from,
        _written_without_a_change,
    ],
)  # fmt: skip
def test_writes_that_lose_nothing_are_allowed(
    prepared: Given, use: Callable[[nn.Module], None]
) -> None:
    model, given = prepared
    with torch.inference_mode():
        model.state_dict()
    use(model)
    given.check()
    given.check_all()


def test_a_kept_copy_is_checked_again_at_an_epochs_start(prepared: Given) -> None:
    model, given = prepared
    kept = model.state_dict()
    given.check()
    kept["0.weight"].zero_()
    given.check()
    with pytest.raises(ConfigError, match="was written to"):
        given.check_all()


def test_watching_a_copy_keeps_no_memory(prepared: Given) -> None:
    model, given = prepared
    model.state_dict()
    assert all(watch.tensor() is None for watch in given._new)
    assert not any(watch.counter.untyped_storage().nbytes() for watch in given._new)
