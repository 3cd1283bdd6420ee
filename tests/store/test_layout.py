"""The layout of tensors and optimizer state in memory, and clips of gradients."""

import math

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.store.clip import UNCLIPPED, Clip
from paceline.store.layout import (
    ALIGN_BYTES,
    Layout,
    Section,
    bind,
    in_one_memory,
    lay_out,
    named_buffers,
)
from paceline.store.optimizer_copy import EXISTS, is_elementwise, is_twin, make_twin, state_rows


def model(num_outputs: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, num_outputs), nn.BatchNorm1d(num_outputs)).double()


def layout_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> Layout:
    parameters = list(module.parameters())
    rows = state_rows(optimizer, parameters)
    return lay_out(module.named_parameters(), named_buffers(module), rows)


def adam(module: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(module.parameters())


def test_tensors_are_contiguous_and_aligned() -> None:
    module = model()
    layout = layout_of(module, adam(module))
    sections = (layout.parameters, layout.buffers, layout.state)
    stop = 0
    for place in (place for section in sections for place in section.places):
        assert place.offset == stop
        assert place.offset % ALIGN_BYTES == 0
        stop += -(-place.num_bytes // ALIGN_BYTES) * ALIGN_BYTES
    assert stop == layout.block_bytes
    assert layout.num_parameters == sum(parameter.numel() for parameter in module.parameters())


def test_equal_models_have_equal_digests_and_others_not() -> None:
    digests = [layout_of(module, adam(module)).digest() for module in (model(), model(), model(4))]
    assert digests[0] == digests[1] != digests[2]


def test_a_bound_tensor_keeps_its_values_in_the_block_only() -> None:
    module = model()
    layout = layout_of(module, adam(module))
    block = torch.zeros(layout.block_bytes, dtype=torch.uint8)
    place = layout.parameters.places[0]
    place.view(block).copy_(module[0].weight.detach())
    kept, weight = module[0].weight.detach().clone(), module[0].weight
    bind([weight], Section((place,), 0, place.num_bytes), block)
    assert weight is module[0].weight
    assert torch.equal(weight, kept)
    place.view(block).zero_()
    assert not weight.any()


def test_resizing_an_empty_tensor_does_not_overwrite_its_neighbour() -> None:
    module = nn.Module()
    module.register_buffer("seen", torch.empty(0, 3))
    module.register_buffer("beside", torch.ones(3))
    layout = lay_out([], named_buffers(module), [])
    block = torch.zeros(layout.block_bytes, dtype=torch.uint8)
    layout.buffers.places[1].view(block).fill_(1.0)
    bind(module.buffers(), layout.buffers, block)
    assert module.seen.shape == (0, 3)
    module.seen.resize_(5, 3).fill_(7.0)
    assert module.beside.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("is_loaded", [True, False])
def test_state_has_the_memory_order_of_its_parameter(is_loaded: bool) -> None:
    """Whatever order loaded state has: pieces of both are taken by memory order."""
    weight = nn.Parameter(torch.zeros(4, 2, 3, 3).contiguous(memory_format=torch.channels_last))
    optimizer = torch.optim.Adam([weight], amsgrad=True)
    if is_loaded:
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        optimizer.state[weight] = {name: torch.zeros(4, 2, 3, 3) for name in names}
        optimizer.state[weight]["step"] = torch.tensor(1.0)
    layout = lay_out([("weight", weight)], [], state_rows(optimizer, [weight]))
    of_weight = [entry.place for entry in layout.entries if entry.place.shape == weight.shape]
    assert [place.strides for place in of_weight] == [weight.stride()] * 3


def over(memory: Tensor, *, is_trained: bool = True) -> nn.Parameter:
    parameter = nn.Parameter(memory, requires_grad=is_trained)
    assert parameter.data_ptr() == memory.data_ptr()
    return parameter


MEMORY = torch.zeros(6, 4)
APART = {
    "side by side": [over(MEMORY[:3]), over(MEMORY[3:])],
    "columns": [over(MEMORY[:, :2]), over(MEMORY[:, 2:])],
    "rows in turn": [over(MEMORY[::2]), over(MEMORY[1::2])],
    "of nothing": [over(MEMORY), over(MEMORY[:0])],
    "frozen": [over(MEMORY, is_trained=False), MEMORY],
    "constants": [MEMORY, MEMORY[0].expand(3, 4), over(torch.ones(1).expand(5))],
    "without memory": [over(torch.empty(4, device="meta")), over(torch.empty(4, device="meta"))],
}
TOGETHER = {
    "one memory": [over(MEMORY), over(MEMORY)],
    "a part": [over(MEMORY), over(MEMORY[2])],
    "the end": [over(MEMORY[:3]), over(MEMORY[2:])],
    "a column": [over(MEMORY[:, :2]), over(MEMORY[:, 1:])],
    "a buffer": [over(MEMORY), MEMORY.view(24)],
    "one of them is frozen": [over(MEMORY, is_trained=False), over(MEMORY.t())],
    "repeated": [over(MEMORY[5:]), MEMORY[5].expand(3, 4)],
    "another type": [over(MEMORY), MEMORY.view(torch.int16)],
    "an element": [over(MEMORY[:, 0]), over(MEMORY[3, :1])],
}


@pytest.mark.parametrize("case", APART)
def test_tensors_in_separate_memory_are_allowed(case: str) -> None:
    tensors = [(str(number), tensor) for number, tensor in enumerate(APART[case])]
    assert in_one_memory(tensors) is None
    assert in_one_memory(tensors[::-1]) is None


@pytest.mark.parametrize("case", TOGETHER)
def test_tensors_that_share_memory_are_named(case: str) -> None:
    tensors = [(str(number), tensor) for number, tensor in enumerate(TOGETHER[case])]
    tensors.insert(1, ("other", torch.zeros(7)))
    for some in (tensors, tensors[::-1]):
        assert sorted(in_one_memory(some) or ()) == ["0", "1"]


def test_optimizer_state_is_found_by_a_step_that_changes_nothing() -> None:
    module = model()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    optimizer = adam(module)
    keys = {key for _, key, _, _ in state_rows(optimizer, list(module.parameters()))}
    assert keys == {EXISTS, "step", "exp_avg", "exp_avg_sq"}
    assert not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), before, strict=True))
    twin = make_twin(optimizer, [{**optimizer.param_groups[0], "params": []}])
    assert is_twin(twin)
    assert not is_twin(optimizer)
    assert is_elementwise(twin)


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    class Asking(torch.optim.SGD):
        def step(self, closure):  # type: ignore[no-untyped-def, override]
            raise AssertionError

    module = model()
    with pytest.raises(ConfigError, match="step cannot be called without arguments"):
        state_rows(Asking(module.parameters(), lr=0.1), list(module.parameters()))


def test_an_optimizer_that_needs_the_graph_is_refused() -> None:
    class Curved(torch.optim.SGD):
        def step(self):  # type: ignore[no-untyped-def, override]
            held = self.param_groups[0]["params"]
            torch.autograd.grad([parameter.grad for parameter in held], held)

    module = model()
    with pytest.raises(
        ConfigError, match=r"Curved\.step cannot be made on a copy.*--protocol local"
    ):
        state_rows(Curved(module.parameters(), lr=0.1), list(module.parameters()))


def test_a_clip_scales_as_torch_does() -> None:
    gradient = nn.Parameter(torch.zeros(3))
    gradient.grad = torch.tensor([3.0, 0.0, 4.0])
    torch.nn.utils.clip_grad_norm_([gradient], 1.0)
    result = torch.tensor([3.0, 0.0, 4.0]) * Clip(max_norm=1.0).factor(5.0)
    assert torch.equal(result, gradient.grad)
    assert UNCLIPPED.factor(math.inf) == Clip(max_norm=9.0).factor(5.0) == 1.0
    assert [str(UNCLIPPED), str(Clip(1.0, 2.0))] == ["nothing", "norm 1 and value 2"]
