"""Running statistics of each worker's mini-batches, in the worker that computes their layer."""

import copy

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.spread.batch_norm import NormStatistics
from threaded import close_to

WEIGHTS = (3, 2)


def layer_and_statistics() -> tuple[nn.BatchNorm1d, NormStatistics]:
    layer = nn.BatchNorm1d(4).double()
    return layer, NormStatistics([layer], [(buffer, True) for buffer in layer.buffers()])


def mini_batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 4, generator=generator, dtype=torch.float64) for size in WEIGHTS]


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 1, 0, 1), (0, 0, 1, 1)])
def test_an_update_takes_the_mean_in_any_order(order: tuple[int, ...]) -> None:
    layer, statistics = layer_and_statistics()
    batches, copies = mini_batches(), [copy.deepcopy(layer) for _ in WEIGHTS]
    for _ in range(2):
        for worker in order:
            with statistics.of(worker):
                layer(batches[worker])
            copies[worker](batches[worker])
        statistics.average(WEIGHTS)
        means = [(3 * one + 2 * other) / 5 for one, other in zip(
            *([each.running_mean, each.running_var] for each in copies), strict=True
        )]  # fmt: skip
        assert all(map(close_to, (layer.running_mean, layer.running_var), means))
        assert layer.num_batches_tracked == copies[0].num_batches_tracked
        assert not statistics.has_edits
        for each in copies:
            for buffer, mean in zip((each.running_mean, each.running_var), means, strict=True):
                buffer.copy_(mean)
        statistics.restart()


def test_a_worker_without_weight_does_not_count_and_no_pass_changes_nothing() -> None:
    layer, statistics = layer_and_statistics()
    first, second = mini_batches()
    expected = copy.deepcopy(layer)
    expected(first)
    with statistics.of(1):
        layer(second * torch.nan)
    with statistics.of(0):
        layer(first)
    statistics.average([1, 0])
    assert close_to(layer.running_mean, expected.running_mean)
    statistics.restart()
    before = copy.deepcopy(layer.state_dict())
    layer.eval()
    with statistics.of(0):
        layer(first)
    statistics.average(WEIGHTS)
    assert all(torch.equal(layer.state_dict()[name], value) for name, value in before.items())


def test_what_a_script_changes_is_seen_and_kept() -> None:
    layer, statistics = layer_and_statistics()
    first, _ = mini_batches()
    with statistics.of(0):
        layer(first)
    layer.reset_running_stats()
    statistics.average(WEIGHTS)
    assert statistics.has_edits
    assert int(layer.num_batches_tracked) == 0
    assert not layer.running_mean.any()
    statistics.restart()
    assert not statistics.has_edits


def test_a_backward_pass_that_would_read_other_statistics_is_refused() -> None:
    layer, statistics = layer_and_statistics()
    first, _ = mini_batches()
    with statistics.of(0):
        layer(first)
    layer.eval()
    with torch.no_grad(), statistics.of(1):
        layer(first)
    with pytest.raises(ConfigError, match="in evaluation mode, with gradients"), statistics.of(1):
        layer(first)
    statistics.restart()
    with statistics.of(1):
        layer(first.requires_grad_()).sum().backward()
