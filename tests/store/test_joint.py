"""Several optimizers as one: groups, state, and a step of those with gradients."""

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from paceline.store.joint import JointOptimizer, joined, parameters_of, parts_of
from paceline.store.layout import lay_out
from paceline.store.optimizer import Updater
from paceline.store.optimizer_copy import is_elementwise, make_twin, state_rows
from tiny import Decaying


def made() -> tuple[nn.Linear, SGD, Adam]:
    torch.manual_seed(1)
    model = nn.Linear(2, 2)
    return model, SGD([model.weight], lr=0.5, momentum=0.9), Adam([model.bias], lr=0.1)


def test_a_single_optimizer_is_not_wrapped() -> None:
    _, first, _ = made()
    assert joined([first]) is first
    assert parts_of(first) == (first,)


def test_a_joint_optimizer_shares_the_groups_and_state_of_its_parts() -> None:
    model, first, second = made()
    both = joined([first, second])
    assert [*map(id, both.param_groups)] == [id(first.param_groups[0]), id(second.param_groups[0])]
    assert parameters_of(both) == [model.weight, model.bias]
    first.param_groups[0]["lr"] = 7.0
    assert both.param_groups[0]["lr"] == 7.0
    both.state[model.bias]["step"] = torch.tensor(3.0)
    assert second.state[model.bias]["step"] == 3
    assert both.state.get(model.weight) is None
    assert list(both.state) == [model.bias]


def test_replaced_groups_of_a_part_are_used() -> None:
    _, first, second = made()
    both = joined([first, second])
    saved = first.state_dict()
    saved["param_groups"][0]["lr"] = 3.0
    first.load_state_dict(saved)
    assert both.param_groups[0] is first.param_groups[0]
    assert both.param_groups[0]["lr"] == 3.0


def test_a_joint_optimizer_is_elementwise_if_all_parts_are() -> None:
    model, first, second = made()
    assert is_elementwise(joined([first, second]))
    assert not is_elementwise(joined([first, Decaying([model.bias], lr=0.1)]))
    twin = make_twin(joined([first, second]), [{"params": []}, {"params": []}])
    assert isinstance(twin, JointOptimizer)
    assert [type(part) for part in twin.parts] == [SGD, Adam]
    assert twin.parts[0].state is twin.parts[1].state is twin.state


def _stepped(present: list[int], factors: tuple[float, ...] = ()) -> list[Tensor]:
    """Weight and bias of a block after a step on gradients of 1."""
    model, first, second = made()
    both, parameters = joined([first, second]), [model.weight, model.bias]
    named = list(model.named_parameters())
    layout = lay_out(named, [], state_rows(both, parameters))
    block = torch.zeros(layout.block_bytes, dtype=torch.uint8)
    updater = Updater(both, parameters, layout, block)
    slot = torch.zeros(layout.slot_bytes, dtype=torch.uint8)
    for place in layout.parameters.places:
        place.view(slot).fill_(1.0)
    updater.step(slot, present, both.param_groups, factors)
    assert all(bool((place.view(slot) == 1).all()) for place in layout.parameters.places)
    return [place.view(block).flatten()[0] for place in layout.parameters.places]


def test_a_part_without_gradients_does_not_step() -> None:
    assert _stepped([1, 0]) == [-0.5, 0.0]
    weight, bias = _stepped([0, 1])
    assert weight == 0.0
    assert abs(float(bias) + 0.1) < 1e-6


def test_a_mean_of_fewer_pushes_is_rescaled() -> None:
    assert _stepped([1, 1], (3.0, 1.0))[0] == -1.5
