"""Gradients of several optimizers: which are present during a push, and which after it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from paceline.errors import ConfigError
from paceline.replica.clips import Clips
from paceline.replica.replica import Replica
from paceline.replica.set_aside import SetAside
from paceline.store.clip import UNCLIPPED, Clip
from paceline.store.joint import joined


def made() -> tuple[nn.Linear, list[torch.optim.Optimizer], SetAside]:
    """Two optimizers: one steps the weight (gradient 1), one the bias (gradient 2)."""
    model = nn.Linear(1, 1)
    optimizers: list[torch.optim.Optimizer] = [SGD([model.weight], 0.1), SGD([model.bias], 0.1)]
    both = joined(optimizers)
    replica = Replica(model, both, both)
    replica.live_alone()
    slot = torch.zeros(replica.layout.slot_bytes, dtype=torch.uint8)
    replica.push_into(slot, lambda: None)
    (model.weight + 2 * model.bias).sum().backward()  # type: ignore[no-untyped-call]
    return model, optimizers, SetAside(replica, optimizers)


def grads(model: nn.Linear) -> list[float | None]:
    return [
        None if parameter.grad is None else float(parameter.grad)
        for parameter in (model.weight, model.bias)
    ]


def test_only_one_optimizers_gradients_are_present_and_then_all_again() -> None:
    model, _, aside = made()
    with aside.only(0):
        assert grads(model) == [1.0, None]
    assert grads(model) == [1.0, 2.0]
    with aside.only(1):
        assert grads(model) == [None, 2.0]
    assert grads(model) == [1.0, 2.0]


def test_a_step_pushes_the_gradients_present_at_its_time() -> None:
    model, _, aside = made()
    aside.take(1)
    (3 * model.bias).sum().backward()  # type: ignore[no-untyped-call]
    assert (aside.stepped, grads(model)) == (0b10, [1.0, 5.0])
    with aside.taken():
        assert grads(model) == [None, 2.0]
    assert (aside.stepped, grads(model)) == (0, [1.0, 5.0])


def test_gradients_dropped_meanwhile_are_not_restored() -> None:
    model, _, aside = made()
    aside.take(0)
    with aside.taken():
        aside.drop()
        model.weight.grad = model.bias.grad = None
    assert grads(model) == [None, None]


def test_a_clip_covers_the_gradients_that_are_pushed_together() -> None:
    model, optimizers, _ = made()
    clips = Clips(model, optimizers)
    clips.ask_norm(model.weight, 3.0)
    clips.ask_norm(model.bias, 4.0)
    assert clips.waits(0b01)
    with pytest.raises(ConfigError, match="the step of 2 of the 2 optimizers, and is clipped once"):
        clips.take(0b11)
    assert clips.take(0b01) == Clip(max_norm=3.0)
    assert clips.take(0b10) == Clip(max_norm=4.0)
    assert clips.take(0b11) == UNCLIPPED
    clips.ask_norm(model.parameters(), 5.0)
    clips.ask_value(model.weight, 0.5)
    clips.ask_value(model.bias, 0.5)
    assert clips.take(0b11) == Clip(max_norm=5.0, max_value=0.5)


def test_clipping_part_of_an_optimizers_gradients_is_refused() -> None:
    model = nn.Linear(1, 1)
    other = nn.Linear(1, 1)
    every = nn.ModuleList([model, other])
    for parameter in every.parameters():
        parameter.grad = torch.ones_like(parameter)
    clips = Clips(every, [SGD(layer.parameters(), 0.1) for layer in (model, other)])
    with pytest.raises(ConfigError, match=r"not those of one or more of the 2 optimizers"):
        clips.ask_norm([model.weight], 1.0)


@pytest.mark.parametrize(
    "read",
    [
        lambda norm: norm + 1,
        lambda norm: torch.stack([norm, norm]),
        lambda norm: torch.maximum(torch.ones(()), other=norm),
    ],
)
def test_a_norm_cannot_be_read_before_the_step(
    read: Callable[[Tensor], Tensor],
) -> None:
    model, optimizers, _ = made()
    clips = Clips(model, optimizers)
    norm = clips.ask_norm(model.parameters(), 5.0)
    with pytest.raises(ConfigError, match=r"exists only after optimizer.step\(\)"):
        read(norm)
    clips.take(0b11)
    clips.fill(2.0)
    assert torch.isfinite(read(norm)).all()
