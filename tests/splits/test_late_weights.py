"""Weight gradients of linear layers computed once for several micro-batches."""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.splits.late_weights import LateWeights

MICRO_BATCHES = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1)).double()


class Wide(nn.Linear):
    """A subclass, which may compute something else."""


class Own(nn.Module):
    """One layer used twice, a weight that is also read as a value, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.bare, self.still = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.wide = Wide(6, 6)
        self.still.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(torch.tanh(self.twice(torch.tanh(self.first(x)))))
        x = self.wide(self.still(self.bare(x)))
        return self.last(functional.linear(x, self.twice.weight))


def test_late_gradients_equal_those_of_a_backward_pass() -> None:
    torch.manual_seed(0)
    plain = Own().double()
    model = copy.deepcopy(plain)
    late = LateWeights([model])
    for x in MICRO_BATCHES:
        plain(x).square().sum().backward()
    with late.kept():
        for x in MICRO_BATCHES:
            model(x).square().sum().backward()
    assert model.first.weight.grad is None
    assert model.wide.weight.grad is not None
    late.add()
    assert late.num_bytes > 0
    for name, parameter in model.named_parameters():
        expected = plain.get_parameter(name).grad
        assert (parameter.grad is None) == (expected is None), name
        if parameter.grad is not None and expected is not None:
            assert torch.allclose(parameter.grad, expected, rtol=1e-12), name
    before = model.first.weight.grad
    late.add()
    assert model.first.weight.grad is before
    assert late.num_bytes == 0


def test_layer_may_get_its_input_by_keyword() -> None:
    layer = nn.Linear(5, 2).double()
    late = LateWeights([layer])
    with late.kept():
        layer(input=MICRO_BATCHES[0]).sum().backward()
    late.add()
    assert layer.weight.grad is not None
    assert torch.allclose(layer.weight.grad, MICRO_BATCHES[0].sum(0).expand(2, 5))


def test_input_gradients_are_available_at_once() -> None:
    layer = nn.Linear(5, 2).double()
    x = MICRO_BATCHES[0].clone().requires_grad_()
    with LateWeights([layer]).kept():
        layer(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(4, 2).double() @ layer.weight)
    assert "forward" not in vars(layer)


def test_gradient_hook_is_called_once() -> None:
    layer = nn.Linear(5, 2).double()
    late, heard = LateWeights([layer]), list[Tensor]()
    layer.weight.register_post_accumulate_grad_hook(lambda one: heard.append(one))
    with late.kept():
        for x in MICRO_BATCHES:
            layer(x).sum().backward()
    assert not heard
    late.add()
    assert len(heard) == 1


def test_hooked_or_modified_layers_are_left_alone() -> None:
    layers = [nn.Linear(5, 2).double() for _ in range(4)]
    layers[0].weight.register_hook(lambda gradient: gradient * 2)
    layers[1].register_forward_hook(lambda *_: None)
    layers[2] = nn.utils.weight_norm(layers[2])
    layers[3].forward = own = lambda x: functional.linear(x, layers[3].weight * 2)  # type: ignore[method-assign, assignment]  # as some scripts do
    with LateWeights(layers).kept():
        for layer in layers:
            layer(MICRO_BATCHES[0]).sum().backward()
    assert all(one.grad is not None for layer in layers[:3] for one in layer.parameters())
    assert layers[3].weight.grad is not None
    assert layers[3].forward is own


def test_layers_with_sequence_inputs_compute_as_usual() -> None:
    layer = nn.Linear(5, 2).double()
    late = LateWeights([layer])
    with late.kept():
        layer(MICRO_BATCHES).sum().backward()
    assert layer.weight.grad is not None
    late.add()
    assert late.num_bytes == 0


def test_layers_under_autocast_compute_as_usual() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2))
    model = copy.deepcopy(plain)
    late = LateWeights([model])

    def step(module: nn.Module) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = module(MICRO_BATCHES[0].float())
        outputs.float().square().sum().backward()

    step(plain)
    with late.kept():
        step(model)
    late.add()
    for ours, torchs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert torchs.grad is not None
        assert torch.equal(ours.grad, torchs.grad)


def test_inputs_kept_by_an_aborted_pass_are_discarded() -> None:
    layer = nn.Linear(5, 2).double()
    late = LateWeights([layer])
    with late.kept():
        layer(MICRO_BATCHES[1]).sum().backward()
    with late.kept():
        layer(MICRO_BATCHES[0]).sum().backward()
    late.add()
    assert layer.weight.grad is not None
    assert torch.allclose(layer.weight.grad, MICRO_BATCHES[0].sum(0).expand(2, 5))
