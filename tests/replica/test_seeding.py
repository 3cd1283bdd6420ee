"""Which models need no random state, and which generators have one."""

import pytest
import torch
from torch import nn

from paceline.replica.seeding import draws_nothing, kept_random_state, seed_all
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
def test_a_model_that_may_draw_is_seeded(model: nn.Module) -> None:
    assert not draws_nothing(model)


class Accelerator:
    """The functions of torch.xpu and torch.mps for random numbers."""

    def __init__(self) -> None:
        self.state = torch.zeros(1)

    def is_initialized(self) -> bool:
        return True

    is_available = is_initialized

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        self.state = torch.full((1,), float(seed))

    def get_rng_state(self) -> torch.Tensor:
        return self.state

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.state = state


@pytest.mark.parametrize("name", ["cuda", "xpu", "mps"])
def test_the_generator_of_any_accelerator_is_seeded_and_restored(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = Accelerator()
    monkeypatch.setattr(torch, name, accelerator)
    seed_all(3)
    with kept_random_state():
        seed_all(4)
        assert accelerator.state == 4
    assert accelerator.state == 3
