"""Parameters and state that a step replaces are in the block, as if changed in place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import ConfigError
from paceline.store.layout import Layout, lay_out
from paceline.store.optimizer import Updater
from paceline.store.optimizer_copy import EXISTS, state_rows
from paceline.store.replaced import Replaced

Rule = Callable[[nn.Parameter, dict[str, Any], float], None]


class Own(Optimizer):
    """A user's optimizer: a rule for one parameter."""

    def __init__(self, parameters: Any, rule: Rule) -> None:
        self.rule = rule
        super().__init__(parameters, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.rule(weight, self.state[weight], group["lr"])


def new_weights(weight: nn.Parameter, _: dict[str, Any], lr: float) -> None:
    weight.data = weight.data - lr * weight.grad


def new_state(weight: nn.Parameter, state: dict[str, Any], lr: float) -> None:
    state["m"] = 0.9 * state.get("m", torch.zeros_like(weight)) + weight.grad
    weight.add_(state["m"], alpha=-lr)


def old_memory(weight: nn.Parameter, state: dict[str, Any], lr: float) -> None:
    """State tensors that swap names, and the old weights."""
    new = weight.grad + state.get("first", torch.zeros_like(weight))
    state["second"], state["first"] = state.get("first", torch.zeros_like(weight)), new
    state["before"] = weight.data
    weight.data = weight.data - lr * (state["first"] + 3 * state["second"])


def rebuilt(weight: nn.Parameter, state: dict[str, Any], lr: float) -> None:
    """All state is replaced, with a number."""
    count = state.get("t", 0) + 1
    state.clear()
    state.update(t=count, m=weight.grad * count)
    weight.sub_(state["m"], alpha=lr)


def late(weight: nn.Parameter, state: dict[str, Any], lr: float) -> None:
    state["t"] = state.get("t", 0) + 1
    if state["t"] == 4:
        state["slow"] = weight.clone()


def dropped(weight: nn.Parameter, state: dict[str, Any], lr: float) -> None:
    state["t"] = state.get("t", 0) + 1
    state["m"] = weight.grad
    if state["t"] == 4:
        del state["m"]


def other_type(weight: nn.Parameter, state: dict[str, Any], lr: float) -> None:
    state["t"] = state.get("t", 0) + 1
    state["m"] = weight.grad.double() if state["t"] == 4 else weight.grad


def other_shape(weight: nn.Parameter, state: dict[str, Any], lr: float) -> None:
    state["t"] = state.get("t", 0) + 1
    weight.data = weight.data[:1] if state["t"] == 4 else weight.data


def no_tensor(weight: nn.Parameter, state: dict[str, Any], lr: float) -> None:
    state["m"] = 3.0 if "m" in state else torch.tensor(2.0)


def _begun(rule: Rule, num_blocks: int) -> tuple[nn.Linear, Own, Layout, list[Tensor]]:
    torch.manual_seed(3)
    model = nn.Linear(3, 2)
    optimizer = Own(model.parameters(), rule)
    parameters = list(model.parameters())
    layout = lay_out(list(model.named_parameters()), [], state_rows(optimizer, parameters))
    blocks = [torch.zeros(layout.block_bytes, dtype=torch.uint8) for _ in range(num_blocks)]
    return model, optimizer, layout, blocks


def _steps_in_turn(rule: Rule, num_steps: int = 6) -> None:
    """Updates by two members that take turns in two blocks, as in the store, beside plain ones."""
    model, optimizer, layout, blocks = _begun(rule, 2)
    plain = nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    twin = Own(plain.parameters(), rule)
    parameters = list(model.parameters())
    for place, weight in zip(layout.parameters.places, parameters, strict=True):
        place.view(blocks[0]).copy_(weight.detach())
    updaters = [
        [Updater(optimizer, parameters, layout, block) for block in blocks] for _ in range(2)
    ]
    slot = torch.zeros(layout.slot_bytes, dtype=torch.uint8)
    for number in range(num_steps):
        new = blocks[(number + 1) % 2]
        new.copy_(blocks[number % 2])
        for place, its in zip(layout.parameters.places, plain.parameters(), strict=True):
            its.grad = torch.randn(its.shape)
            place.view(slot).copy_(its.grad)
        updaters[number // 3 % 2][(number + 1) % 2].step(slot, [1, 1], optimizer.param_groups)
        twin.step()
        for place, its in zip(layout.parameters.places, plain.parameters(), strict=True):
            assert torch.equal(place.view(new), its)
        for entry in [entry for entry in layout.entries if entry.key != EXISTS]:
            state = twin.state[list(plain.parameters())[entry.parameter]]
            value = torch.as_tensor(state[entry.key])
            assert torch.equal(entry.place.view(new).reshape(value.shape).to(value.dtype), value)


@pytest.mark.parametrize("rule", [new_weights, new_state, old_memory, rebuilt])
def test_parameters_and_state_replaced_by_a_step_are_in_the_block(rule: Rule) -> None:
    _steps_in_turn(rule)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (late, "Own has made 'slow' for 'weight' later than in its first step"),
        (dropped, "Own.step has removed 'm' from the state of 'weight'"),
        (other_type, "has changed 'm' of 'weight' to torch.float64 of shape"),
        (other_shape, r"has changed 'weight' to torch.float32 of shape \(1, 3\)"),
        (no_tensor, "has replaced the tensor 'm' of 'weight' by a float"),
    ],
)
def test_a_replacement_without_a_place_in_the_block_is_refused(rule: Rule, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _steps_in_turn(rule)


def test_a_reverted_step_leaves_no_missing_state() -> None:
    _, optimizer, layout, (block,) = _begun(new_state, 1)
    updater = Updater(optimizer, optimizer.param_groups[0]["params"], layout, block)
    slot = torch.zeros(layout.slot_bytes, dtype=torch.uint8)
    updater.step(slot, [1, 1], optimizer.param_groups)
    updater.revert(updater.private_state())
    updater.step(slot, [1, 0], optimizer.param_groups)
    assert isinstance(updater._replaced, Replaced)
