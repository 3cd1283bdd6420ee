"""Time and memory of pieces."""

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hard_to_cut as nets
from paceline.errors import ConfigError
from paceline.partition.graph import INPUT
from paceline.splits import measuring
from paceline.splits.channels import find_pairs
from paceline.splits.clocks import TakenTimes, TimedClock, threads
from paceline.splits.late_weights import LateWeights
from paceline.splits.measuring import Measurement, measure
from paceline.splits.tracing import trace
from paceline.workloads.images import build_alexnet


def mlp(width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, width), nn.Tanh())


def test_pieces_sum_to_the_time_of_the_whole() -> None:
    result = measure(trace(mlp(), (torch.randn(8, 16),)), (torch.randn(8, 16),))
    assert sum(node.forward_s for node in result.graph.nodes) == pytest.approx(result.forward_s)
    backward_s = sum(node.backward_s + node.late_s + node.first_s for node in result.graph.nodes)
    assert backward_s == pytest.approx(result.backward_s)
    assert not result.is_counted


def test_no_tensor_is_kept_after_a_measurement() -> None:
    """Hooks on what is saved refer to each other through graphs that no collector looks into."""
    inputs = (torch.randn(8, 16),)
    traced = trace(mlp(), inputs)

    def num_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(one), Tensor) for one in gc.get_objects())

    measure(traced, inputs)
    before = num_tensors()
    measure(traced, inputs)
    assert num_tensors() == before


def test_momentary_slowness_changes_no_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = itertools.count()

    class ClockWithAPause(TimedClock):
        """All pieces take the same time, but the first waits in the second of three rounds."""

        def both(
            self, forward: Callable[[], Any], module: nn.Module, late: LateWeights | None = None
        ) -> TakenTimes:
            forward()
            seconds = 5.0 if next(calls) == 4 else 1.0
            return TakenTimes(seconds, 2 * seconds, 0.0)

    monkeypatch.setattr(measuring, "TimedClock", ClockWithAPause)
    x = torch.randn(4, 3)
    graph = measure(trace(nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))), (x,)), (x,)).graph
    assert [node.forward_s for node in graph.nodes] == pytest.approx([1 / 3] * 3)
    assert [node.backward_s for node in graph.nodes] == pytest.approx([2 / 3] * 3)


def test_bytes_are_counted_in_the_first_round_only(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, counted = (torch.randn(8, 16),), list[int]()
    own = measuring._Walk._kept_bytes

    def kept_bytes(walk: Any, *args: Any) -> int:
        counted.append(own(walk, *args))
        return counted[-1]

    monkeypatch.setattr(measuring._Walk, "_kept_bytes", kept_bytes)
    traced = trace(mlp(), inputs)
    once, twice = Measurement(traced, inputs), Measurement(traced, inputs)
    once.add_round()
    twice.add_round()
    twice.add_round()
    assert len(counted) == 2 * len(traced.pieces)
    assert once.result().graph.activation_bytes == twice.result().graph.activation_bytes > 0
    assert len(once.rounds_s) == 1
    assert all(s > 0.0 for s in twice.rounds_s)


def test_byte_counts_are_those_of_the_tensors() -> None:
    inputs = (torch.randn(8, 16),)
    graph = measure(trace(mlp(), inputs), inputs).graph
    assert [node.parameter_bytes for node in graph.nodes] == [
        4 * (16 * 32 + 32), 0, 4 * (32 * 16 + 16), 0,
    ]  # fmt: skip
    assert graph.parameter_bytes == sum(parameter.nbytes for parameter in mlp().parameters())
    hidden, narrow = 4 * 8 * 32, 4 * 8 * 16
    flowing = [(edge.source, edge.num_bytes, edge.gradient_bytes) for edge in graph.edges]
    assert flowing == [
        (INPUT, narrow, 0), (0, hidden, hidden), (1, hidden, hidden), (2, narrow, narrow),
        (3, narrow, narrow),
    ]  # fmt: skip


def test_activations_are_what_autograd_keeps_each_counted_once() -> None:
    """The inputs (for the first weight's gradient), ReLU's output, Tanh's."""
    model, inputs = mlp(), (torch.randn(8, 16),)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not any(
            tensor.untyped_storage()._cdata == parameter.untyped_storage()._cdata
            for parameter in model.parameters()
        ):
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = model(*inputs)
    graph = measure(trace(model, inputs), inputs).graph
    assert graph.activation_bytes == sum(kept.values())
    assert outputs.requires_grad


def test_frozen_weights_count_as_buffers_not_activations() -> None:
    model, inputs = mlp(), (torch.randn(8, 16),)
    trained = measure(trace(model, inputs), inputs).graph
    model[2].requires_grad_(False)
    frozen = measure(trace(model, inputs), inputs).graph
    assert frozen.activation_bytes == trained.activation_bytes
    assert [node.buffer_bytes for node in frozen.nodes] == [0, 0, 4 * (32 * 16 + 16), 0]


class Scaled(nn.Module):
    """Two operations read one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.second(self.first(x) * self.scale) * self.scale
        return scaled


def test_buffer_read_by_several_operations_counts_once() -> None:
    inputs = (torch.randn(8, 4),)
    graph = measure(trace(Scaled(), inputs), inputs).graph
    assert sum(node.buffer_bytes for node in graph.nodes) == 4 * 4


def test_model_without_operations_is_refused() -> None:
    inputs = (torch.randn(2, 4),)
    with pytest.raises(ConfigError, match="a model without operations cannot be cut"):
        measure(trace(nn.Identity(), inputs), inputs)


def test_tied_parameters_are_ties_and_buffers_are_counted() -> None:
    words = torch.tensor([[1, 2, 3], [4, 5, 0]])
    graph = measure(trace(nets.TiedEnds(), (words,)), (words,)).graph
    (tie,) = graph.ties
    assert (tie.name, tie.num_bytes) == ("tokens.weight", 4 * 11 * 6)
    assert tie.nodes == (0, len(graph) - 1)
    images = (torch.ones(2, 2, 5, 5),)
    graph = measure(trace(nets.Normed(), images), images).graph
    assert sum(node.buffer_bytes for node in graph.nodes) == 4 * 8 + 8


def test_measuring_leaves_gradients_and_buffers_unchanged() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    inputs = (torch.randn(6, 4),)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    measure(trace(model, inputs), inputs)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_meta_model_is_counted() -> None:
    with torch.device("meta"):
        model, inputs = mlp(512), (torch.empty(64, 512),)
    result = measure(trace(model, inputs), inputs)
    assert result.is_counted
    first, second, third, _ = result.graph.nodes
    assert first.forward_s > 0.0
    assert third.parameter_bytes == 4 * (32 * 512 + 512)
    assert first.backward_s > first.forward_s
    assert second.work_s < first.work_s


def test_layer_pairs_of_alexnet_are_split_over_channels() -> None:
    with torch.device("meta"):
        model, inputs = build_alexnet(), (torch.empty(2, 1, 28, 28),)
    traced = trace(model.eval(), inputs)
    graph = measure(traced, inputs).graph
    pairs = find_pairs(traced, graph)
    names = [(graph.nodes[pair.nodes[0]].name, graph.nodes[pair.nodes[-1]].name) for pair in pairs]
    assert names == [("1", "4"), ("7", "9"), ("11", "16"), ("19", "21")]
    assert pairs[0].in_bytes == 0  # images need no gradient
    assert pairs[1].in_bytes == 2 * 192 * 13 * 13 * 4


class Shared(nn.Module):
    """Another operation reads the channels between two layers, which change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        channels = self.first(x)
        changed = nn.functional.relu(channels, inplace=True)
        summed: torch.Tensor = self.second(changed) + channels.mean(1, keepdim=True)
        return summed


def test_channels_read_by_another_operation_are_not_split() -> None:
    inputs = (torch.randn(3, 4),)
    traced = trace(Shared(), inputs)
    assert find_pairs(traced, measure(traced, inputs).graph) == ()


def test_number_of_threads_is_restored() -> None:
    before = torch.get_num_threads()
    with threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
