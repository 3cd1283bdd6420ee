"""Changes that torch does not count are found in a large model, where each step checks a part."""

import pytest
import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.replica.edits import Edits
from paceline.replica.replica import Replica

NUM_STRETCHES = 4


def _watched() -> tuple[nn.Module, Edits]:
    """Two MiB of parameters: four stretches."""
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = Replica(model, optimizer, optimizer)
    replica.push_into(torch.zeros(replica.layout.slot_bytes, dtype=torch.uint8), lambda: None)
    return model, Edits(replica, is_refused=True)


def _differentiate(model: nn.Module, edits: Edits) -> None:
    model.zero_grad()
    edits.before_backward()
    model(torch.ones(2, 512)).square().sum().backward()
    edits.after_backward()


@pytest.mark.parametrize("layer", [0, 1])
def test_a_change_that_torch_does_not_count_is_found_within_a_round(layer: int) -> None:
    model, edits = _watched()
    with pytest.raises(ConfigError, match="gradients were changed"):
        _halve(model, edits, layer)


def _halve(model: nn.Module, edits: Edits, layer: int) -> None:
    for _ in range(NUM_STRETCHES + 1):
        _differentiate(model, edits)
        model[layer].weight.grad.data.mul_(0.5)  # type: ignore[index, union-attr]
        edits.check()
        edits.pushed()


def test_unchanged_gradients_are_never_refused() -> None:
    model, edits = _watched()
    for step in range(2 * NUM_STRETCHES):
        for _ in range(1 + step % 2):
            _differentiate(model, edits)
        for parameter in model.parameters():
            parameter.grad.data.norm()  # type: ignore[union-attr]
        edits.check()
        edits.pushed()


def test_nan_is_not_taken_for_a_change() -> None:
    model, edits = _watched()
    edits.before_backward()
    (model(torch.ones(2, 512)).sum() * float("nan")).backward()
    edits.after_backward()
    edits.check()
