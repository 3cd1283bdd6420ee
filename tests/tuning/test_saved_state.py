"""What an optimizer saves is what plain code saves, and what it loads is put in order."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.speed import Value
from paceline.tuning.candidate import Candidate, Objects
from paceline.tuning.candidates import ChannelsLast, OptimizerKernel
from paceline.tuning.saved_state import KeptKernel
from subjects import SIZE, batch, loss_of, network

CHOICES: list[tuple[tuple[Candidate, Value], ...]] = [
    (),
    ((OptimizerKernel(), "fused"),),
    ((OptimizerKernel(), "foreach"),),
    ((ChannelsLast(), True),),
    ((OptimizerKernel(), "fused"), (ChannelsLast(), True)),
]
NAMES = [" ".join(str(value) for _, value in choice) or "plain" for choice in CHOICES]
KINDS = [torch.optim.SGD, torch.optim.Adam]


def objects(kind: Any, choice: Any = ()) -> Objects:
    model = network()
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.05, **options)
    made = Objects(model=model, optimizer=optimizer, sizes=frozenset({SIZE}))
    for candidate, value in choice:
        candidate.apply(made, value)
    return made


def train(made: Objects) -> list[float]:
    losses = []
    for _ in range(3):
        made.optimizer.zero_grad()
        loss = loss_of(made.model, batch())
        loss.backward()  # type: ignore[no-untyped-call]
        made.optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def load(made: Objects, saved: Any) -> None:
    made.model.load_state_dict(saved[0])
    made.optimizer.load_state_dict(saved[1])


def save(made: Objects) -> Any:
    return copy.deepcopy((made.model.state_dict(), made.optimizer.state_dict()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("choice", CHOICES, ids=NAMES)
def test_saved_state_is_that_of_plain_code(kind: Any, choice: Any) -> None:
    plain, tuned = objects(kind), objects(kind, choice)
    train(plain)
    train(tuned)
    expected, actual = plain.optimizer.state_dict(), tuned.optimizer.state_dict()
    assert actual["param_groups"] == expected["param_groups"]
    for number, entries in expected["state"].items():
        for key, value in entries.items():
            assert actual["state"][number][key].stride() == value.stride()
            torch.testing.assert_close(actual["state"][number][key], value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("second", CHOICES, ids=NAMES)
@pytest.mark.parametrize("first", CHOICES, ids=NAMES)
def test_state_loads_whatever_either_run_chose(kind: Any, first: Any, second: Any) -> None:
    plain, begun, resumed = objects(kind), objects(kind, first), objects(kind, second)
    train(plain)
    train(begun)
    load(resumed, save(begun))
    for parameter, state in resumed.optimizer.state.items():
        for value in state.values():
            assert not second or value.shape != parameter.shape or _is_alike(value, parameter)
    kernels = [
        {name: group[name] for name in ("fused", "foreach")}
        for made in (resumed, objects(kind, second))
        for group in made.optimizer.param_groups
    ]
    assert kernels[0] == kernels[1]
    assert train(resumed) == pytest.approx(train(plain), abs=1e-5)


def _is_alike(value: Tensor, parameter: Tensor) -> bool:
    return value.stride() == parameter.stride()


def test_group_that_is_added_steps_as_chosen_and_is_saved_as_given() -> None:
    made = objects(torch.optim.SGD)
    KeptKernel(made.optimizer, "fused")
    made.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert made.optimizer.param_groups[1]["fused"] is True
    assert [group["fused"] for group in made.optimizer.state_dict()["param_groups"]] == [None, None]


def test_optimizer_prepared_twice_saves_what_the_script_chose() -> None:
    made = objects(torch.optim.SGD, (*CHOICES[4], *CHOICES[4]))
    train(made)
    saved = made.optimizer.state_dict()
    assert saved["param_groups"][0]["fused"] is None
    assert saved["state"][0]["momentum_buffer"].is_contiguous()
