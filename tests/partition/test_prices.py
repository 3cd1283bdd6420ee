"""Prices of all splits, and the advice."""

from dataclasses import replace

import pytest

from paceline.collectives.base import LinkCost
from paceline.partition.costs import Exchanges, SplitCosts
from paceline.partition.graph import ChannelPair, WorkGraph, chain
from paceline.partition.pipeline import Pipeline, workers
from paceline.partition.prices import SplitPrice, price_splits

LAYERS = 8
PARAMETERS = LAYERS * 1000


def model_at(batch: float) -> WorkGraph:
    """Eight equal layers, 3 s per sample in each."""
    return chain(
        [f"l{i}" for i in range(LAYERS)], seconds=[3.0 * batch] * LAYERS,
        num_bytes=round(4 * batch), parameter_bytes=1000,
    )  # fmt: skip


def costs(num: int, **changes: object) -> SplitCosts:
    link = changes.pop("link", LinkCost(latency_s=0.0, s_per_byte=0.0))
    pipeline = Pipeline(
        workers=changes.pop("workers", workers(num)), link=link, micro_batches=4, state_copies=1
    )
    given = {
        "graph_at": model_at, "alone_s": 3.0 * 16 * LAYERS, "batch_size": 16, "pipeline": pipeline,
        "exchanges": together(sum_s=lambda size, num: 2 * (num - 1) / num * size * link.s_per_byte),
    }  # fmt: skip
    return SplitCosts(**{**given, **changes})


def together(**changes: object) -> Exchanges:
    return Exchanges(**{"sum_s": lambda size, num: 0.0, **changes})


def by_name(asked: SplitCosts) -> dict[str, SplitPrice]:
    return {price.name: price for price in price_splits(asked).prices}


def test_table_lists_all_splits() -> None:
    assert [price.name for price in price_splits(costs(4)).prices] == [
        "none", "data", "network", "layer", "shard-1", "shard-2", "shard-3", "2x2",
    ]  # fmt: skip
    assert [price.name for price in price_splits(costs(1)).prices] == ["none"]


def test_free_communication_divides_all_work() -> None:
    prices = by_name(costs(4))
    alone_s = 3.0 * 16 * LAYERS
    assert prices["none"].step_s == pytest.approx(alone_s)
    assert prices["data"].step_s == pytest.approx(alone_s / 4)
    assert prices["network"].step_s == pytest.approx(alone_s / 4 * (4 + 3) / 4)  # M + P - 1 of M
    assert prices["2x2"].step_s == pytest.approx(alone_s / 4 * (4 + 1) / 4)


def test_each_worker_draws_its_share_and_computes_its_loss() -> None:
    pairs = (ChannelPair(nodes=(0, 1, 2), in_bytes=64, out_bytes=32),)
    plain = by_name(costs(4, pairs=pairs))
    slower = by_name(costs(4, pairs=pairs, script_s=lambda batch: 0.5 * batch))
    for name, price in plain.items():
        expected_s = 0.5 * (16 if name == "none" else 4)
        assert slower[name].step_s == pytest.approx(price.step_s + expected_s), name


def test_a_network_is_priced_as_its_parts_compute() -> None:
    plain = by_name(costs(4))
    slower = by_name(costs(4, parts_at=lambda batch: model_at(1.5 * batch)))
    assert slower["network"].step_s == pytest.approx(1.5 * plain["network"].step_s)
    assert slower["data"].step_s == plain["data"].step_s


def test_bytes_and_memory_follow_the_formulas() -> None:
    prices = by_name(costs(4))
    assert prices["data"].sent_bytes == round(2 * 3 / 4 * PARAMETERS)
    assert prices["shard-1"].sent_bytes == prices["data"].sent_bytes
    assert prices["shard-3"].sent_bytes == round(3 * 3 / 4 * PARAMETERS)
    assert prices["none"].memory_bytes == 4 * PARAMETERS
    # Parameters, gradients, those between epochs, momentum; of several gradients twice, and of its
    # share parameters and momentum are kept besides.
    assert prices["data"].memory_bytes == 4 * PARAMETERS + 3 * PARAMETERS // 4
    pieces = 3 * PARAMETERS // 4  # parameter, gradient, momentum
    assert prices["shard-1"].memory_bytes == 2 * PARAMETERS + pieces
    assert prices["shard-2"].memory_bytes == PARAMETERS + pieces
    assert prices["shard-3"].memory_bytes == pieces
    with_layers = by_name(costs(4, largest_bytes=500))
    assert with_layers["shard-3"].memory_bytes == pieces + 500 * 4.25
    assert with_layers["data"].memory_bytes == prices["data"].memory_bytes + 500
    assert prices["network"].memory_bytes >= 3 * PARAMETERS // 4
    a_border = 4 * 4  # a micro-batch of 4 samples, 4 bytes each; forward, and back
    share = 4 * 4  # of each worker's mini-batch its inputs; with gpipe also gradients of outputs
    assert prices["network"].sent_bytes == 4 * 2 * a_border + share
    gpipe = replace(costs(4).pipeline, schedule="gpipe")
    assert by_name(costs(4, pipeline=gpipe))["network"].sent_bytes == 4 * 2 * a_border + 2 * share


def test_pipeline_is_priced_with_its_best_micro_batches() -> None:
    """More micro-batches fill the pipeline better, until messages cost more than that saves."""
    ways = {"micro_batches_each": (1, 2, 4)}
    alone_s = 3.0 * 16 * LAYERS
    alike = by_name(costs(2, has_fixed_rows=True, **ways))["network"]
    assert alike.step_s == pytest.approx(alone_s / 2 * (8 + 1) / 8)
    sized = by_name(costs(2, **ways))["network"]
    assert alone_s / 2 < (sized.step_s or 0.0) < alone_s / 2 * (8 + 1) / 8
    slow = LinkCost(latency_s=100.0, s_per_byte=0.0)
    few = by_name(costs(2, link=slow, **ways))["network"]
    assert few.placement is not None
    assert few.placement.micro_batches == 2
    assert by_name(costs(4, batch_size=3, **ways))["network"].why.endswith("fewer than 4 workers")


def test_memory_bound_work_is_no_faster_with_more_workers() -> None:
    """Two workers that each step half of the parameters are no faster than one that steps all."""
    pipeline = Pipeline(workers=workers(2), micro_batches=4, update_s_per_byte=0.25)
    no_work = {"cores": 2, "alone_s": 0.0, "graph_at": lambda _: model_at(1e-9)}
    prices = by_name(costs(2, pipeline=pipeline, **no_work))
    alone, both = prices["none"], prices["data"]
    assert alone.step_s == pytest.approx(both.step_s)
    moved = by_name(costs(2, cores=2, graph_at=lambda _: model_at(1e-9), moved_s_per_byte=1.0))
    copied = 2 + 2 / 2 + 4 / 2  # to all, two whose mean stays in a cache, both kept
    assert moved["data"].step_s == pytest.approx(2 * copied * PARAMETERS)


def test_memory_time_is_shared_and_at_least_that_of_one_worker() -> None:
    shared = costs(2, cores=2.0, lone_factor=1.25)
    assert shared.by_memory([3.0, 3.0]) == 6.0
    assert shared.by_memory([3.0, 1.0]) == 4.0
    assert shared.by_memory([3.0, 0.1]) == pytest.approx(1.25 * 3.0)
    assert costs(2).by_memory([3.0, 1.0]) == 3.0  # on a machine each


def test_shared_core_time_is_the_longest_worker_or_total_work() -> None:
    shared = costs(3, cores=2.0)
    assert shared.by_cores([2.0, 2.0, 2.0]) == 3.0
    assert shared.by_cores([4.0, 1.0, 1.0]) == 4.0
    assert costs(3).by_cores([2.0, 2.0, 1.0]) == 2.0


def test_shards_exchange_each_unit_separately() -> None:
    """Parameters forward and, with shard-3, backward, gradients once; and five meetings."""
    taken = together(gather_s=lambda size: size, reduce_s=lambda size: 10 * size, meeting_s=0.5)
    units = {"exchanges": taken, "unit_bytes": (100, 300), "graph_at": lambda _: model_at(1e-9)}
    prices = by_name(costs(2, **units))
    assert prices["shard-1"].step_s == pytest.approx(11 * 400 + 2.5)
    assert prices["shard-2"].step_s == prices["shard-1"].step_s
    assert prices["shard-3"].step_s == pytest.approx(12 * 400 + 2.5)
    with_norms = by_name(costs(2, buffer_kinds=2, **units))
    assert with_norms["shard-1"].step_s == pytest.approx(11 * 400 + 3.5)


def test_collective_operations_after_computing_cost_a_turn() -> None:
    """A turn is paid by the passes of the model, gradients and updates of copies, the first reduce,
    each unit with shard-2, its parameters with shard-3, and each sum over channels."""
    pairs = (ChannelPair(nodes=(0, 1, 2), in_bytes=64, out_bytes=32),)
    few = {"unit_bytes": (100, 300), "pairs": pairs, "graph_at": lambda _: model_at(1e-9)}
    first, second = (by_name(costs(2, exchanges=together(turn_s=s), **few)) for s in (0.0, 1.0))
    turns = {
        name: second[name].step_s - first[name].step_s for name in first if second[name].step_s
    }
    passes = 2
    assert turns == pytest.approx({
        "none": 0, "data": 2, "network": passes, "layer": passes + 2,
        "shard-1": passes + 1, "shard-2": passes + 2, "shard-3": passes + 4,
    })  # fmt: skip


def test_newly_allocated_memory_costs_time_unless_kept() -> None:
    prices = by_name(costs(2, fresh_s_per_byte=1.0, graph_at=lambda _: model_at(1e-9)))
    assert prices["data"].step_s == pytest.approx(0.0, abs=1e-6)  # its processes keep the memory
    assert prices["shard-1"].step_s == pytest.approx(PARAMETERS)  # all gradients
    assert prices["shard-3"].step_s == pytest.approx(3 * PARAMETERS)  # and parameters, twice


@pytest.mark.parametrize(
    ("node", "late_bytes", "waited_s"),
    [(0, 0, 10.0), (0, 1, 10.0), (LAYERS - 1, 0, 10.0), (LAYERS - 1, 1, 0.0)],
)
def test_others_work_hides_late_work_once_per_update(
    node: int, late_bytes: int, waited_s: float
) -> None:
    """The last part is done with its backward passes while the first one still has some; but the
    first one waits for what delays the last one's first backward pass."""

    def once(batch: float) -> WorkGraph:
        graph = model_at(batch)
        nodes = list(graph.nodes)
        nodes[node] = replace(nodes[node], first_s=10.0, late_bytes=late_bytes)
        return replace(graph, nodes=tuple(nodes))

    plain, longer = (
        by_name(costs(2, graph_at=graph_at))["network"] for graph_at in (model_at, once)
    )
    assert longer.placement is not None
    assert len(longer.placement.parts[0].nodes) == LAYERS // 2
    assert longer.step_s - plain.step_s == pytest.approx(waited_s)


def test_layer_pair_divides_its_work_and_sums_twice() -> None:
    link = LinkCost(latency_s=0.0, s_per_byte=0.001)
    pairs = (ChannelPair(nodes=(0, 1, 2), in_bytes=64, out_bytes=32),)
    taken = together(sum_s=lambda size, num: size * 0.001, gather_s=lambda size: size * 0.1)
    result = by_name(costs(2, pairs=pairs, link=link, exchanges=taken))["layer"]
    layer_s = 3.0 * 16
    ends = 2 * 4 * 16  # inputs and gradients of outputs, half in each
    assert result.step_s == pytest.approx(5 * layer_s + 3 * layer_s / 2 + 96 * 0.001 + ends * 0.1)
    assert result.sent_bytes == 96 + ends / 2
    assert by_name(costs(2))["layer"].step_s is None
    moved = by_name(costs(2, pairs=pairs, exchanges=taken, moved_s_per_byte=1.0))["layer"]
    held = 5000 + 3000 / 2  # gradients are moved and checked; a bias is added to 32 bytes
    assert moved.step_s - result.step_s == pytest.approx(3 * held + 2 * 32 + 2 * ends)


def test_measured_columns_are_priced_as_they_were_measured() -> None:
    """All wait for the worker with the most channels, or all share the cores."""
    pairs = (ChannelPair(nodes=(0, 1, 2), in_bytes=64, out_bytes=32),)

    def layer_s(*columns_s: float, cores: float) -> float:
        asked = costs(3, pairs=pairs, columns_s=columns_s, cores=cores, batch_size=12)
        return by_name(asked)["layer"].step_s or 0.0

    rest_s = layer_s(1.0, 1.0, 1.0, cores=3) - 1.0
    assert layer_s(2.0, 2.0, 5.0, cores=3) - rest_s == pytest.approx(5.0)
    assert layer_s(2.0, 2.0, 3.0, cores=2) - rest_s == pytest.approx(3.5)


def test_columns_hold_a_gradient_in_flight() -> None:
    pairs = (ChannelPair(nodes=(0, 1, 2), in_bytes=64, out_bytes=32),)
    all_of = tuple(replace(pairs[0], nodes=(i, i + 1)) for i in range(0, LAYERS, 2))
    some, every = (by_name(costs(2, pairs=each))["layer"] for each in (pairs, all_of))
    assert some.memory_bytes == 3 * (5000 + 3000 / 2) + 1000
    assert every.memory_bytes == 3 * 8000 / 2 + 500


def test_workers_wait_for_the_slowest_of_them() -> None:
    pairs = (ChannelPair(nodes=(0, 1, 2), in_bytes=64, out_bytes=32),)
    for more in ({}, {"columns_s": (9.0, 9.0)}):
        steady, uneven = (
            by_name(costs(2, pairs=pairs, waiting=waiting, **more)) for waiting in (1.0, 1.25)
        )
        assert uneven.pop("none").step_s == steady["none"].step_s
        for name, price in uneven.items():
            assert price.step_s == pytest.approx(1.25 * steady[name].step_s), name


def test_models_that_cannot_be_divided_over_channels_say_why() -> None:
    pairs = (ChannelPair(nodes=(0, 1, 2), in_bytes=64, out_bytes=32),)
    fixed = by_name(costs(2, pairs=pairs, has_fixed_rows=True))["layer"]
    assert fixed.step_s is None
    assert "torch.export" in fixed.why
    assert "batch norm" in by_name(costs(2, batch_norms=("1",)))["layer"].why
    assert "for 2 workers" in by_name(costs(2))["layer"].why
    assert by_name(costs(2, undivided="it fails"))["layer"].why == "it fails"


def test_small_model_is_advised_not_to_split() -> None:
    link = LinkCost(latency_s=1e5, s_per_byte=10.0)
    taken = together(**dict.fromkeys(("gather_s", "reduce_s"), lambda size: 1e5 + 10.0 * size))
    small = {"cores": 2, "alone_s": 3.0 * 8 * LAYERS, "moved_s_per_byte": 1, "unit_bytes": (8000,)}
    table = price_splits(costs(2, link=link, exchanges=taken, **small))
    assert table.advised.name == "none"
    assert table.reason.startswith("do not split: ")


def test_processes_sharing_cores_gain_nothing() -> None:
    """Four single-threaded processes on two cores; one process alone uses both."""
    table = price_splits(costs(4, cores=2, alone_s=3.0 * 16 * LAYERS / 2))
    assert table.advised.name == "none"
    assert "4 processes share 2 cores" in table.reason
    prices = by_name(costs(4, cores=2))
    assert prices["data"].step_s == pytest.approx(3.0 * 16 * LAYERS / 2)


def test_split_that_does_not_fit_is_not_advised() -> None:
    table = price_splits(costs(4, workers=workers(4, memory_bytes=3 * PARAMETERS - 1)))
    fits = {price.name: price.fits for price in table.prices}
    assert not fits["none"]
    assert not fits["data"]
    assert fits["shard-3"]
    assert table.advised.fits
    assert table.reason.startswith("one worker alone has too little memory")
    nothing = price_splits(costs(2, workers=workers(2, memory_bytes=10)))
    assert nothing.reason.startswith("nothing fits the memory")
    assert nothing.advised.memory_bytes == min(
        price.memory_bytes for price in nothing.prices if price.step_s is not None
    )


def test_slow_worker_slows_equal_shares_and_gets_fewer_layers() -> None:
    prices = by_name(costs(2, workers=workers(2, speeds=(1.0, 1.0 / 3.0))))
    assert prices["data"].step_s == pytest.approx(3.0 * 8 * LAYERS * 3)
    assert prices["data"].balance == pytest.approx(2.0 / 3.0)
    placement = prices["network"].placement
    assert placement is not None
    assert sorted(len(part.nodes) for part in placement.parts) == [2, 6]
    assert prices["network"].balance == pytest.approx(1.0)


def test_too_few_samples_are_reported() -> None:
    prices = by_name(costs(4, batch_size=3, alone_s=9.0))
    assert prices["data"].step_s is None
    assert prices["data"].why == "3 samples are fewer than 4 workers"
    assert prices["network"].why == "3 samples cannot be 4 equal micro-batches; 3 are possible"
