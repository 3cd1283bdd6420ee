"""The contract of every candidate; a new one is tested by being listed."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from paceline.speed import Speed, Value
from paceline.tuning import allocator
from paceline.tuning.candidate import Candidate, Objects, num_samples_of
from paceline.tuning.candidates import (
    CANDIDATES,
    ChannelsLast,
    CopiesAhead,
    LoaderWorkers,
    OptimizerKernel,
    autocast,
)
from speeds import load
from subjects import batch, loss_of, network, subject

OPTIONS = [
    pytest.param(one, value, id=f"{one.name}={value}")
    for one in CANDIDATES
    for value in one.options(subject(), Speed())
]


@pytest.fixture(autouse=True)
def same_process() -> Iterator[None]:
    yield
    allocator.restore(False)


def losses(
    candidate: Candidate, value: Value, num_steps: int = 3, objects: Objects | None = None
) -> list[float]:
    """The losses of a few steps with ``value`` in effect."""
    objects = objects or subject().objects
    candidate.apply(objects, value)
    precision = value if candidate.name == "precision" else "fp32"
    results = []
    for _ in range(num_steps):
        objects.optimizer.zero_grad()
        with autocast(torch.device("cpu"), str(precision)):
            loss = loss_of(objects.model, batch())
        loss.backward()  # type: ignore[no-untyped-call]
        objects.optimizer.step()
        results.append(float(loss.detach()))
    return results


@pytest.mark.parametrize(("candidate", "value"), OPTIONS)
def test_option_changes_losses_only_by_rounding(candidate: Candidate, value: Value) -> None:
    """And not at all if it keeps the bits, with the same threads: those that were set stay."""
    expected = losses(candidate, getattr(Speed(), candidate.name))
    actual = losses(candidate, value)
    tolerance = 2e-2 if candidate.name == "precision" else 1e-5
    assert actual == pytest.approx(expected, abs=tolerance)
    assert actual == expected or not candidate.keeps_bits


def loaded(*, is_channels_last: bool) -> Objects:
    """Objects with loaded momentum in the usual memory order, whatever that of the weights."""
    objects = subject().objects
    if is_channels_last:
        model: Any = objects.model
        model.to(memory_format=torch.channels_last)
    load(objects.optimizer)
    return objects


@pytest.mark.parametrize("is_channels_last", [True, False])
@pytest.mark.parametrize("value", ["fused", "foreach"])
def test_optimizer_kernel_accepts_state_of_another_memory_order(
    value: str, is_channels_last: bool
) -> None:
    expected = losses(OptimizerKernel(), "as it is", objects=loaded(is_channels_last=False))
    objects = loaded(is_channels_last=is_channels_last)
    actual = losses(OptimizerKernel(), value, objects=objects)
    assert actual == pytest.approx(expected, abs=1e-5)


def test_optimizer_state_follows_the_memory_order_of_its_weights() -> None:
    objects = loaded(is_channels_last=False)
    ChannelsLast().apply(objects, True)
    for one, state in objects.optimizer.state.items():
        assert state["momentum_buffer"].stride() == one.stride()
    weight = next(objects.model.parameters())
    assert weight.is_contiguous(memory_format=torch.channels_last)


def test_only_weights_of_four_dimensions_get_their_channels_last() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv3d(2, 2, 3), nn.Linear(2, 2))
    ChannelsLast().apply(subject(model).objects, True)
    flat, deep = (model.get_parameter(f"{number}.weight") for number in (0, 1))
    assert flat.is_contiguous(memory_format=torch.channels_last)
    assert deep.is_contiguous()


def test_weights_sharing_memory_are_not_converted() -> None:
    model = network()
    weight = next(model.parameters())
    model.register_parameter("again", nn.Parameter(weight.detach()))
    assert list(ChannelsLast().options(subject(), Speed())) == [True]
    assert list(ChannelsLast().options(subject(model), Speed())) == []


def test_loader_workers_are_tried_only_if_batches_stay_the_same() -> None:
    gpu = torch.device("cuda")
    kept = subject(device=gpu, may_load_elsewhere=False)
    assert list(LoaderWorkers().options(kept, Speed())) == []
    assert list(CopiesAhead().options(kept, Speed())) == []
    fetched = subject(device=gpu, may_load_elsewhere=False, loader_workers=2)
    assert list(LoaderWorkers().options(fetched, Speed())) == []
    assert list(CopiesAhead().options(fetched, Speed())) == [True]
    assert list(LoaderWorkers().options(subject(), Speed())) == [1, 2, 4]


def test_current_number_of_loader_workers_is_not_tried_again() -> None:
    own = subject(loader_workers=2)
    assert list(LoaderWorkers().options(own, Speed())) == [1, 4]
    assert list(LoaderWorkers().options(own, Speed(loader_workers=4))) == [1, 2]


@pytest.mark.parametrize(
    ("lengths", "size"), [((12, 8), 12), ((8, 12), 8), ((3, 8, 8), 8), ((), 5)]
)
def test_batch_size_is_the_most_common_tensor_length(lengths: tuple[int, ...], size: int) -> None:
    assert num_samples_of([torch.zeros(length, 2) for length in lengths], 5) == size


@pytest.mark.parametrize(("candidate", "value"), OPTIONS)
def test_parameters_and_names_stay_those_of_the_user(candidate: Candidate, value: Value) -> None:
    objects = subject().objects
    model, names = objects.model, list(objects.model.state_dict())
    held = [id(parameter) for parameter in model.parameters()]
    candidate.apply(objects, value)
    assert [id(parameter) for parameter in model.parameters()] == held
    assert list(model.state_dict()) == names
    copied = copy.deepcopy(model)
    expected = loss_of(model.eval(), batch())
    with torch.no_grad():
        next(iter(model.parameters())).fill_(0.0)
    assert loss_of(copied.eval(), batch()).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda one: one.name)
def test_default_value_of_a_candidate_changes_nothing(candidate: Candidate) -> None:
    default = getattr(Speed(), candidate.name)
    before = subject()
    strides = [parameter.stride() for parameter in before.objects.model.parameters()]
    groups = [dict(group) for group in before.objects.optimizer.param_groups]
    threads = torch.get_num_threads()
    candidate.apply(before.objects, default)
    assert [parameter.stride() for parameter in before.objects.model.parameters()] == strides
    assert [dict(group) for group in before.objects.optimizer.param_groups] == groups
    assert torch.get_num_threads() == threads
    assert candidate.words(default)


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda one: one.name)
def test_chosen_value_is_not_offered_again(candidate: Candidate) -> None:
    for value in candidate.options(subject(), Speed()):
        speed = Speed().having(candidate.name, value)
        assert value != getattr(Speed(), candidate.name)
        if isinstance(value, bool) or candidate.name == "loader_workers":
            assert value not in candidate.options(subject(), speed)
