"""A script's objects: which are accepted, what is replaced on them, what is refused."""

import copy
import gc
import pickle
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    ExponentialLR,
    LinearLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader

from paceline.errors import ConfigError
from paceline.replica.held_state import SharedState
from paceline.script.patches import sort_out
from paceline.script.unprepared import Strays, StraySchedulers, leaves_of


def objects() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, DataLoader(range(4), batch_size=2)  # type: ignore[arg-type]


def test_objects_are_found_in_any_order_and_each_once() -> None:
    model, optimizer, loader = objects()
    assert sort_out((loader, model, optimizer)) == ([model], [optimizer], loader)
    assert sort_out((model, optimizer)) == ([model], [optimizer], None)
    with pytest.raises(ConfigError, match="needs one loader, got DataLoader, DataLoader"):
        sort_out((model, optimizer, loader, loader))
    with pytest.raises(ConfigError, match="was given one optimizer twice"):
        sort_out((model, optimizer, optimizer, loader))
    with pytest.raises(ConfigError, match="needs a model, got none"):
        sort_out((optimizer, loader))
    other = torch.optim.Adam([model.bias])
    with pytest.raises(ConfigError, match="two optimizers step parameter 'bias'"):
        sort_out((model, optimizer, other, loader))
    with pytest.raises(ConfigError, match="got dict"):
        sort_out((model, optimizer, loader, {}))


def test_shared_state_can_be_read_but_not_replaced() -> None:
    model, optimizer, _ = objects()
    newest: dict[Any, dict[str, Any]] = {
        model.get_parameter("bias"): {"momentum_buffer": torch.ones(1)}
    }
    has_begun = False
    kept = SharedState(optimizer, lambda: newest, lambda: has_begun)
    assert optimizer.state_dict()["state"][1]["momentum_buffer"] == 1
    with pytest.raises(ConfigError, match=r"optimizer\.state is kept by the run"):
        optimizer.state[model.get_parameter("bias")]
    assert type(copy.deepcopy(optimizer.state)) is defaultdict
    assert len(pickle.loads(pickle.dumps(optimizer.state))) == 1
    optimizer.load_state_dict(optimizer.state_dict())
    assert kept.take_loaded() is not None
    assert kept.take_loaded() is None
    kept.check()
    has_begun = True
    with pytest.raises(ConfigError, match="before the first epoch"):
        optimizer.load_state_dict({})
    with pytest.raises(ConfigError, match="add_param_group"):
        optimizer.add_param_group({"params": []})


def test_a_parameter_trained_by_hand_is_found() -> None:
    known, other = nn.Linear(1, 1), nn.Linear(1, 1)
    strays = Strays(known.parameters())

    def loss() -> torch.Tensor:
        result: torch.Tensor = other(known(torch.ones(1))).sum()
        return result

    assert {*leaves_of(loss())} == {*known.parameters(), *other.parameters()}
    strays.look(loss())
    with torch.no_grad():
        known.weight += 1.0
    strays.look(loss())
    with torch.no_grad():
        other.weight += 1.0
    with pytest.raises(ConfigError, match=r"of shape \(1, 1\) is trained by hand"):
        strays.look(loss())


@pytest.mark.parametrize("shows", [False, True])
def test_unprepared_schedulers_are_found_oldest_first(shows: bool) -> None:
    """However they hold their optimizer, and whatever the collector has done between them."""
    optimizer, other = (SGD([nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
    first = StepLR(optimizer, 3)
    gc.collect()
    second, third = ReduceLROnPlateau(optimizer), StepLR(optimizer, 5)
    apart, known = StepLR(other, 3), StepLR(optimizer, 7)
    if shows:
        assert [vars(scheduler)["optimizer"] for scheduler in (first, known)] == [optimizer] * 2
    assert StraySchedulers(optimizer, [known]).found() == [first, second, third]
    assert StraySchedulers(other).found() == [apart]
    assert StraySchedulers(other, [apart]).found() == []


def test_strays_beside_a_prepared_scheduler_are_found_by_their_count() -> None:
    """What a prepared one holds steps with it."""
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    prepared = SequentialLR(optimizer, [LinearLR(optimizer), ExponentialLR(optimizer, 0.9)], [2])
    stray = ExponentialLR(optimizer, 0.5)
    strays = StraySchedulers(optimizer, [prepared])
    assert strays.found() == [stray]
    for _ in range(7):  # between epochs it may step
        strays.open()
        optimizer.step()
        prepared.step()
        strays.check()
        stray.step()
    with pytest.raises(ConfigError, match="ExponentialLR was stepped inside the loop, but it was"):
        strays.check()


def test_list_of_items_is_refused_with_the_loader_to_make() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=r"got list; for items of which each is a step's: load"):
        sort_out((model, torch.optim.SGD(model.parameters(), lr=0.1), [torch.zeros(2)]))
