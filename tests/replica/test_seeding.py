"""Which models need no random state."""

import pytest
from torch import nn

from paceline.replica.seeding import draws_nothing
from paceline.workloads import load_task


class Own(nn.Linear):
    """May do anything."""


def hooked() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: None)
    return layer


def hooked_parameter() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.weight.register_hook(lambda gradient: gradient)
    return layer


def patched() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.forward = lambda inputs: inputs  # type: ignore[method-assign]
    return layer


@pytest.mark.parametrize("name", ["softmax", "mlp", "lenet"])
def test_plain_layers_draw_nothing(name: str) -> None:
    assert draws_nothing(load_task(name).model())


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)),
        nn.RReLU(),
        Own(2, 2),
        hooked(),
        hooked_parameter(),
        patched(),
    ],
    ids=["dropout", "rrelu", "own class", "hook", "parameter's hook", "patched"],
)
def test_what_may_draw_is_seeded(model: nn.Module) -> None:
    assert not draws_nothing(model)
