"""One member's copy of the model: its memory, and what is pushed."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import (
    FakeQuantize,
    MinMaxObserver,
    PlaceholderObserver,
    disable_observer,
)
from torch.nn import functional

from paceline.errors import ConfigError
from paceline.replica.held import HeldMemory
from paceline.replica.layers import grain, watch_forward
from paceline.replica.own_gradients import OwnGradients
from paceline.replica.replica import (
    Replica,
    refuse_another_device,
    refuse_hooks,
    refuse_observers,
    refuse_shared_memory,
    refuse_what_cannot_be_carried,
)
from paceline.replica.seeding import kept_random_state, seed_all


class Called(Exception):
    """The work was called off."""


def replica(model: nn.Module | None = None) -> Replica:
    model = nn.Linear(2, 1) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Replica(model, optimizer, optimizer)


def slot_of(member: Replica) -> Tensor:
    return torch.zeros(member.layout.slot_bytes, dtype=torch.uint8)


def test_gradients_are_in_the_slot_as_soon_as_they_are_computed() -> None:
    member = replica()
    slot = slot_of(member)
    member.push_into(slot, lambda: None)
    member.model(torch.tensor([[3.0, 4.0]])).sum().backward()
    views = [place.view(slot) for place in member.layout.parameters.places]
    assert [view.tolist() for view in views] == [[[3.0, 4.0]], [1.0]]
    present = memoryview(bytearray(2))
    member.parameters[0].grad = None
    member.collect(present)
    assert present.tolist() == [0, 1]
    assert views[0].tolist() == [[0.0, 0.0]]


def test_gradients_in_torchs_memory_go_to_the_slot_when_gathered_anew() -> None:
    member = replica()
    slot, present, arrived = slot_of(member), memoryview(bytearray(2)), list[int]()
    member.push_into(slot, lambda: None)
    own = OwnGradients(member)
    own.arrived = arrived.append
    member.leave_to(own)
    member.model(torch.tensor([[3.0, 4.0]])).sum().backward()
    member.gather(present)
    assert (sorted(arrived), present.tolist(), int(slot.sum())) == ([0, 1], [1, 1], 0)
    member.gather_anew()
    views = [place.view(slot) for place in member.layout.parameters.places]
    assert [view.tolist() for view in views] == [[[3.0, 4.0]], [1.0]]
    member.model(torch.tensor([[1.0, 1.0]])).sum().backward()
    assert [view.tolist() for view in views] == [[[4.0, 5.0]], [2.0]]
    assert len(arrived) == 2


def test_gradients_are_still_counted_when_the_script_starts_to_keep_them() -> None:
    member = replica()
    member.push_into(slot_of(member), lambda: None)
    results, kept = [member.num_hooked], list[Tensor | None]()
    for _ in range(3):
        kept += [parameter.grad for parameter in member.parameters]
        member.model.zero_grad()
        member.model(torch.tensor([[3.0, 4.0]])).sum().backward()
        results.append(member.num_hooked)
    member.gather_anew()
    member.model(torch.tensor([[3.0, 4.0]])).sum().backward()
    assert [*results, member.num_hooked] == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("is_forward", [True, False])
def test_a_step_is_called_off_between_two_layers(is_forward: bool) -> None:
    member = replica(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    num_checks = 0

    def check() -> None:
        nonlocal num_checks
        num_checks += 1
        if num_checks == 2:
            raise Called

    if is_forward:
        watch_forward(member.model, check)
    else:
        member.push_into(slot_of(member), check)
    with pytest.raises(Called):
        member.model(torch.ones(1, 2)).sum().backward()
    assert grain(member.model) == "between layers"
    copy.deepcopy(member.model)(torch.ones(1, 2))  # takes nothing of it along


def test_replaced_memory_is_restored_if_equal_and_refused_otherwise() -> None:
    member = replica()
    home = member.live_alone()
    parameter = member.parameters[0]
    place = member.layout.parameters.places[0].view(home).data_ptr()
    parameter.data = parameter.data.clone()
    member.held.check_parameters()
    assert parameter.data_ptr() == place
    parameter.data = parameter.data + 1.0
    with pytest.raises(ConfigError, match="'weight' was changed after prepare"):
        member.held.check_parameters()
    parameter.data = parameter.data.double()
    with pytest.raises(ConfigError, match=r"torch\.float64 of shape"):
        member.held.check_kinds()


def test_values_of_a_replaced_buffer_are_copied_to_the_original() -> None:
    norm = nn.BatchNorm1d(2)
    member = replica(norm)
    member.live_alone()
    mean = norm.running_mean
    norm.running_mean = torch.full((2,), 5.0)
    member.held.take_buffers()
    assert norm.running_mean is mean
    assert norm.running_mean.tolist() == [5.0, 5.0]


def test_values_of_a_buffer_with_replaced_memory_are_copied_back() -> None:
    norm = nn.BatchNorm1d(2)
    member = replica(norm)
    place, home = member.layout.buffers.places[0], member.live_alone()
    mean: Any = norm.running_mean
    for value, keep in ((5.0, member.held.take_buffers), (7.0, member.held.drop_buffers)):
        mean.data = torch.full((2,), value)
        keep()
        assert mean.data_ptr() == place.view(home).data_ptr()
        assert mean.tolist() == [5.0, 5.0]
    mean.data = torch.zeros(3)
    with pytest.raises(
        ConfigError, match=r"buffer 'running_mean' was of shape \(2,\) .* is of shape \(3,\)"
    ):
        member.held.take_buffers()


def test_a_buffer_resized_after_prepare_is_named() -> None:
    norm = nn.BatchNorm1d(2)
    norm.register_buffer("seen", torch.empty(0))
    member = replica(norm)
    member.live_alone()
    member.held.take_buffers()
    norm.seen.resize_(3)
    words = (
        r"buffer 'seen' was of shape \(0,\) in prepare\(\) and is of shape \(3,\) now: .*before "
    )
    with pytest.raises(ConfigError, match=words):
        member.held.take_buffers()


def test_a_non_persistent_buffer_may_have_any_size() -> None:
    norm = nn.BatchNorm1d(2)
    norm.register_buffer("mask", torch.empty(0), persistent=False)
    member = replica(norm)
    member.live_alone()
    norm.mask.resize_(3)
    member.held.take_buffers()
    norm.mask.data = torch.ones(4)
    member.held.take_buffers()
    member.held.drop_buffers()
    assert norm.mask.tolist() == [1.0] * 4


class _SomeBuffers(nn.Module):
    """A module whose ``named_buffers`` omits one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("constant", torch.ones(1))

    def named_buffers(self, *arguments: Any, **options: Any) -> Any:
        results = super().named_buffers(*arguments, **options)
        return ((name, value) for name, value in results if name != "constant")


def test_a_buffer_that_named_buffers_omits_is_left_unchanged() -> None:
    model = _SomeBuffers()
    owners = HeldMemory(model, replica(model).layout)._owners
    assert [name for _, name, _ in owners] == ["mean"]


def test_sparse_gradients_and_step_hooks_are_refused_by_name() -> None:
    embedding = nn.Embedding(3, 2, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"module '' \(Embedding\) makes sparse"):
        refuse_what_cannot_be_carried(embedding, [optimizer])
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="SGD got step hooks after prepare"):
        refuse_hooks(optimizer)


@pytest.mark.parametrize("stay_with_torch", [False, True])
def test_a_sparse_gradient_of_a_function_is_refused_by_name(stay_with_torch: bool) -> None:
    member = replica(nn.Embedding(3, 2))
    member.push_into(slot_of(member), lambda: None)
    if stay_with_torch:
        member.leave_to(OwnGradients(member))
    output = functional.embedding(torch.tensor([1]), member.parameters[0], sparse=True)
    with pytest.raises(ConfigError, match="parameter 'weight' has a sparse gradient"):
        output.sum().backward()


def test_a_module_with_an_unrelated_sparse_attribute_is_accepted() -> None:
    attention = nn.Linear(2, 2)
    attention.sparse = True
    refuse_what_cannot_be_carried(attention, [])


def test_a_model_on_another_device_than_its_batches_is_refused() -> None:
    on_cpu, on_meta = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")
    gpu, cpu = torch.device("cuda", 1), torch.device("cpu")
    with pytest.raises(ConfigError, match=r"on cpu, .* on cuda:1 .*to\(pace.*--device cpu$"):
        refuse_another_device(on_cpu, gpu)
    with pytest.raises(ConfigError, match=r"on meta, .* on cpu .*model\.to_empty"):
        refuse_another_device(on_meta, cpu)
    refuse_another_device(on_cpu, cpu)
    refuse_another_device(nn.Identity(), gpu)  # a lack of trainable parameters is reported later
    refuse_another_device(nn.ModuleList([on_cpu, on_meta]), gpu)  # so are several devices


def test_a_compiled_model_is_on_its_own_models_device() -> None:
    compiled: Any = torch.compile(nn.Linear(2, 2))
    refuse_another_device(compiled, torch.device("cpu"))
    with pytest.raises(ConfigError, match="the model is on cpu"):
        refuse_another_device(compiled, torch.device("cuda", 0))


def test_two_parameters_in_one_memory_are_refused_and_one_object_is_accepted() -> None:
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    refuse_shared_memory(tied)
    tied[1].weight = nn.Parameter(tied[0].weight)
    with pytest.raises(ConfigError, match=r"'0\.weight' and '1\.weight'.*make them one object"):
        refuse_shared_memory(tied)
    tied.requires_grad_(False)
    refuse_shared_memory(tied)
    seen = nn.Linear(2, 2)
    seen.register_buffer("diagonal", seen.weight.detach().diagonal())
    with pytest.raises(ConfigError, match="'weight' and 'diagonal' of the model share memory"):
        refuse_shared_memory(seen)
    refuse_shared_memory(nn.LSTM(2, 3, num_layers=2, bidirectional=True))


def test_observers_are_refused_until_they_are_disabled() -> None:
    model = nn.Sequential(nn.Linear(2, 2), FakeQuantize())
    model(torch.ones(1, 2))
    with pytest.raises(ConfigError, match=r"a mean of ranges .*apply\(torch\.ao.*disable_observer"):
        refuse_observers(model)
    model.apply(disable_observer)
    refuse_observers(model)
    refuse_observers(nn.Sequential(nn.BatchNorm1d(2), PlaceholderObserver()))
    with pytest.raises(ConfigError, match=r"module '0' \(MinMaxObserver\).*then convert the"):
        refuse_observers(nn.Sequential(MinMaxObserver()))


def test_an_integer_parameter_is_refused_by_name() -> None:
    """Plain PyTorch trains other parameters, and its optimizer ignores it."""
    layer = nn.Linear(2, 2)
    layer.steps = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
    with pytest.raises(ConfigError, match=r"'steps' is of torch\.int64.*register_buffer\('steps'"):
        replica(layer)


def test_the_random_state_is_restored() -> None:
    seed_all(3)
    expected = torch.rand(2).tolist()
    seed_all(3)
    with kept_random_state():
        torch.rand(7)
        seed_all(4)
    assert torch.rand(2).tolist() == expected
