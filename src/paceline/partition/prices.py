"""All ways to split a model over n workers, each with its price, and the advised one.

    none      one worker, the whole batch                  no bytes
    data      each a share of the batch                    gradients, all-reduced
    network   each some of the layers, M micro-batches     what crosses the borders, both ways
    layer     each some of the channels of pairs of        sums of what pairs give, and of the
              layers, the whole batch                      gradients of what they take; inputs, and
                                                           outputs' gradients, to all
    shard-1   data, and each a share of the optimizer's    gradients reduce-scattered, parameters
              state                                        all-gathered: as many bytes as data
    shard-2   and of the gradients                         likewise
    shard-3   and of the parameters                        and gathered again: half as much more
    AxB       A parts of the network, B replicas           both

Seconds are of an update: all computing, then what is sent, then the optimizer; what a run hides
behind computing makes it shorter. n processes of t threads on c cores share them: where n t > c
everything that all do at once takes n t / c times as long, and longer by what turns on a core cost,
which is measured. What memory limits (the optimizer, copies) was measured by one process on all
cores, and all at once take as long as one that has all their bytes: whoever has most is done last,
and is never faster than one alone. Whole copies on one machine add up gradients in memory
that all see, each in its share; ranks send messages, and meet before each pass (spread/meeting.py).
Bytes are what the worker that sends most sends where nothing is shared; memory is that of the
worker that holds most (memory.py). Above 300 lines, since one formula stands beside the others.

Sources: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", SC 2020 (shards 1, 2, 3 and their bytes); M. Shoeybi et al., "Megatron-LM", arXiv
1909.08053, 2019 (pairs of layers over channels); A. Krizhevsky, "One weird trick for parallelizing
convolutional neural networks", arXiv 1404.5997, 2014 (each split where it is worth it).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from .costs import LARGE_MODEL, SplitCosts
from .cuts import MicroBatches, fastest_cut, uneven
from .graph import INPUT, WorkGraph
from .memory import copy_bytes, shard_bytes
from .pipeline import PipelineWorker
from .placement import Placement

NONE = "none"
_WHOLE_COPIES = (NONE, "data")
_MEETINGS = 5
"""Of ranks, an update: forward, backward, the step's end (spread/base.py), lines
(engines/torchrun/member.py), what the gradients of all parts are (spread/averaging.py)."""
_TURNS = 2
"""Of these, behind computing: forward, behind the optimizer and the loader; backward."""
_PASSES = 3
"""Of a part's gradients before its optimizer: read and written to where they are averaged
(replica/replica.py), and read to see if they are finite (spread/averaging.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPrice:
    """One row of the table.

    Args:
        name: ``none``, ``data``, ``network``, ``layer``, ``shard-1`` to 3, ``AxB``.
        step_s: of an update; None: it cannot be split so.
        sent_bytes: an update, by the worker that sends most.
        memory_bytes: of the worker that holds most, without ``process_bytes``.
        balance: the mean of what workers compute over the most; 1 is even.
        fits: into the memory of each.
        why: why it cannot, or what is to be known.
        placement: its cut.
    """

    name: str
    step_s: float | None
    sent_bytes: int = 0
    memory_bytes: int = 0
    balance: float = 1.0
    fits: bool = True
    why: str = ""
    placement: Placement | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTable:
    """All prices, and the advised one.

    Args:
        advised: the fastest of those that fit; the smallest where none does.
        reason: why, in one sentence.
    """

    prices: tuple[SplitPrice, ...]
    advised: SplitPrice
    reason: str


def price_splits(costs: SplitCosts) -> SplitTable:
    """The table of all ways."""
    prices = tuple(_prices(costs))
    possible = [one for one in prices if one.step_s is not None]
    fitting = [one for one in possible if one.fits]
    if not fitting:
        least = min(possible, key=lambda one: one.memory_bytes)
        reason = (
            "nothing fits the memory; this comes nearest: give more workers, or a smaller batch"
        )
        return SplitTable(prices=prices, advised=least, reason=reason)
    dividing = [one for one in fitting if one.name not in _WHOLE_COPIES]
    if costs.num_parameters >= LARGE_MODEL and dividing:
        best = min(dividing, key=lambda one: one.step_s or 0.0)
        reason = f"from {LARGE_MODEL:,} parameters on no worker holds a whole copy with its state"
        return SplitTable(prices=prices, advised=best, reason=f"{reason}; this is the fastest so")
    best = min(fitting, key=lambda one: one.step_s or 0.0)
    return SplitTable(prices=prices, advised=best, reason=_reason(best, prices, costs))


def _reason(best: SplitPrice, prices: tuple[SplitPrice, ...], costs: SplitCosts) -> str:
    alone = prices[0]
    assert best.step_s is not None
    assert alone.step_s is not None
    if best.name == NONE:
        others = [one for one in prices[1:] if one.step_s is not None and one.fits]
        if not others:
            return "do not split: nothing else fits"
        next_best = min(others, key=lambda one: one.step_s or 0.0)
        slower = (next_best.step_s or 0.0) / best.step_s
        why = ""
        if costs.num_workers * costs.threads > costs.cores:
            why = f", since {costs.num_workers} processes share {costs.cores:g} cores"
        return f"do not split: {next_best.name}, the next, takes {slower:.2f} times as long{why}"
    if not alone.fits:
        return "one worker alone has too little memory; of what fits, this is the fastest"
    return f"{alone.step_s / best.step_s:.2f} times as fast as one worker alone"


def _prices(costs: SplitCosts) -> Iterator[SplitPrice]:
    yield _alone(costs)
    if costs.num_workers == 1:
        return
    yield _data(costs)
    yield network_price(costs, "network", costs.num_workers, 1)
    yield _layer(costs)
    yield from (_shard(costs, stage) for stage in (1, 2, 3))
    for parts in range(2, costs.num_workers):
        replicas, rest = divmod(costs.num_workers, parts)
        if not rest:
            yield network_price(costs, f"{parts}x{replicas}", parts, replicas)


def _priced(costs: SplitCosts, name: str, step_s: float, sent: float, held: float) -> SplitPrice:
    """A split in which all workers do the same."""
    speeds = [one.speed for one in costs.pipeline.workers]
    mean_s = sum(1.0 / speed for speed in speeds) / len(speeds)
    return SplitPrice(
        name=name,
        step_s=step_s,
        sent_bytes=round(sent),
        memory_bytes=round(held),
        balance=1.0 if name == NONE else mean_s * costs.slowest,
        fits=_fits(costs, held),
    )


def _too_few(name: str, costs: SplitCosts) -> SplitPrice:
    why = f"{costs.batch_size} samples are fewer than {costs.num_workers} workers"
    return SplitPrice(name=name, step_s=None, why=why)


def _fits(costs: SplitCosts, held: float) -> bool:
    return costs.memory_bytes is None or held <= costs.memory_bytes


def _alone(costs: SplitCosts) -> SplitPrice:
    graph = costs.graph_at(costs.batch_size)
    fastest = max(one.speed for one in costs.pipeline.workers)
    step_s = (costs.alone_s + graph.parameter_bytes * costs.pipeline.update_s_per_byte) / fastest
    step_s += _shared_bytes(costs, 1) * costs.moved_s_per_byte
    return _priced(costs, NONE, step_s, 0.0, _copy_bytes(costs, graph, 1))


def _copy_bytes(costs: SplitCosts, graph: WorkGraph, num: int) -> float:
    size, copies = graph.parameter_bytes, costs.pipeline.state_copies
    held = copy_bytes(size, copies, num, costs.largest_bytes)
    return held + graph.activation_bytes + _buffers(graph)


def _shared_bytes(costs: SplitCosts, num: int) -> float:
    """Read and written an update by each of so many copies that see each other's memory.

    Its own gradient to where all see it; of its share all gradients, whose mean stays in a cache
    (exchange/share_chunks.py), and parameters and state to where they are kept meanwhile. One alone
    looks at its own.
    """
    size = costs.graph_at(costs.batch_size / num).parameter_bytes
    if num == 1:
        return size * 3.0
    kept = 2 * (1 + costs.pipeline.state_copies)
    return size * (3 + kept / num)


def _buffers(graph: WorkGraph) -> int:
    return sum(node.buffer_bytes for node in graph.nodes)


def _update_s(costs: SplitCosts, parameter_bytes: float) -> float:
    return parameter_bytes * costs.pipeline.update_s_per_byte / costs.slowest * costs.at_once


def _moved_s(costs: SplitCosts, num_bytes: float) -> float:
    """Of memory that each worker reads or writes, all at once."""
    return num_bytes * costs.moved_s_per_byte * costs.at_once


def _fresh_s(costs: SplitCosts, num_bytes: float) -> float:
    """Of memory that each worker is given anew, all at once."""
    return num_bytes * costs.fresh_s_per_byte * costs.sharing


def _meetings_s(costs: SplitCosts) -> float:
    return _MEETINGS * costs.exchanges.meeting_s + _TURNS * costs.exchanges.turn_s


def _data(costs: SplitCosts) -> SplitPrice:
    num = costs.num_workers
    if costs.batch_size < num:
        return _too_few("data", costs)
    graph = costs.graph_at(costs.batch_size / num)
    size = graph.parameter_bytes
    step_s = graph.alone_s / costs.slowest * costs.sharing
    step_s += _moved_s(costs, _shared_bytes(costs, num)) + _update_s(costs, size / num)
    held = _copy_bytes(costs, graph, num)
    return _priced(costs, "data", step_s, 2 * (num - 1) / num * size, held)


def _shard(costs: SplitCosts, stage: int) -> SplitPrice:
    """ZeRO 1, 2, 3: an all-reduce is a reduce-scatter and an all-gather, each half of its time."""
    num, name = costs.num_workers, f"shard-{stage}"
    if costs.batch_size < num:
        return _too_few(name, costs)
    graph = costs.graph_at(costs.batch_size / num)
    size, copies = graph.parameter_bytes, costs.pipeline.state_copies
    gathers = 2 if stage == 3 else 1
    step_s = graph.alone_s / costs.slowest * costs.sharing
    step_s += _units_s(costs, stage, gathers) + _moved_s(costs, size / num)
    step_s += _meetings_s(costs) + costs.buffer_kinds * costs.exchanges.meeting_s
    step_s += _fresh_s(costs, size * (3 if stage == 3 else 1)) + _update_s(costs, size / num)
    held = shard_bytes(stage, size, copies, num, costs.largest_bytes)
    held += graph.activation_bytes + _buffers(graph)
    return _priced(costs, name, step_s, (gathers + 1) * (num - 1) / num * size, held)


def _units_s(costs: SplitCosts, stage: int, gathers: int) -> float:
    """Unit by unit (spread/shards.py): parameters put together, by shard-3 for the backward pass
    once more; gradients sent to whose they are, and added up.

    By shard-1 all of the one before the forward pass, and of the other behind the backward pass; by
    shard-2 gradients of a unit behind its backward pass; by shard-3 parameters, too, behind what
    computes before.
    """
    taken, units = costs.exchanges, costs.unit_bytes
    moved_s = sum(gathers * taken.gather_s(size) + taken.reduce_s(size) for size in units)
    return moved_s + taken.turn_s * {1: 1, 2: len(units), 3: 2 * len(units)}[stage]


def _layer(costs: SplitCosts) -> SplitPrice:
    if not costs.pairs:
        return SplitPrice(name="layer", step_s=None, why="no two layers in a row to split")
    num, graph = costs.num_workers, costs.graph_at(costs.batch_size)
    split = {node for pair in costs.pairs for node in pair.nodes}
    tied = sum(tie.num_bytes for tie in graph.ties)

    def held(value: Callable[[int], float]) -> float:
        return sum(value(i) / (num if i in split else 1) for i in range(len(graph)))

    sums = [size for pair in costs.pairs for size in (pair.in_bytes, pair.out_bytes) if size]
    parameter_bytes = held(lambda i: graph.nodes[i].parameter_bytes) + tied
    work_s = held(lambda i: graph.nodes[i].work_s + graph.nodes[i].first_s)
    step_s = work_s / costs.slowest * costs.sharing
    inputs = sum(edge.num_bytes for edge in graph.edges if edge.source == INPUT)
    outputs = sum(edge.gradient_bytes for edge in graph.edges if len(graph) in edge.targets)
    step_s += _sums_s(costs, sums, (inputs, outputs)) + _meetings_s(costs)
    biased = sum(pair.out_bytes for pair in costs.pairs)
    step_s += _moved_s(costs, _PASSES * parameter_bytes + 2 * biased)
    step_s += _fresh_s(costs, parameter_bytes) + _update_s(costs, parameter_bytes)
    memory = (2 + costs.pipeline.state_copies) * parameter_bytes
    memory += held(lambda i: graph.nodes[i].activation_bytes) + _buffers(graph)
    sent = (num - 1) / num * (2 * sum(sums) + inputs + outputs)
    return _priced(costs, "layer", step_s, sent, memory)


def _sums_s(costs: SplitCosts, sums: Sequence[int], ends: Sequence[int]) -> float:
    """What all columns give, and the gradients of what they take, summed, each behind computing
    (spread/columns.py); inputs, and the gradients of outputs, of all workers to each, where they
    are joined: read and written (spread/layered.py)."""
    taken, num = costs.exchanges, costs.num_workers
    step_s = sum(taken.sum_s(size, num) + taken.turn_s for size in sums)
    return step_s + sum(taken.gather_s(size) for size in ends) + _moved_s(costs, 2 * sum(ends))


def network_price(costs: SplitCosts, name: str, num_parts: int, replicas: int) -> SplitPrice:
    """So many parts, in so many replicas; workers of a replica stand side by side."""
    pipeline = costs.pipeline.of(_slowest_group(costs, num_parts))
    each = costs.batch_size / replicas
    counts = [most * num_parts for most in costs.micro_batches_each]
    if not counts:
        counts = [pipeline.micro_batches]
        if why := uneven(costs.batch_size, pipeline.micro_batches * replicas):
            return SplitPrice(name=name, step_s=None, why=why)
    choices = [_micro_batches(costs, each, num) for num in counts if num <= each]
    if not choices:
        return _too_few(name, costs)
    try:
        cut = fastest_cut(choices, pipeline, costs.places / replicas)
    except ConfigError as error:
        return SplitPrice(name=name, step_s=None, why=str(error))
    num, found = cut.micro_batches, cut.placement
    sizes = [one.parameter_bytes for one in found.parts]
    in_memory = [
        one.update_s + _PASSES * one.parameter_bytes * costs.moved_s_per_byte for one in found.parts
    ]
    step_s = cut.seconds + costs.by_memory(in_memory * replicas)
    step_s += costs.by_cores([one.first_s for one in found.parts] * replicas)
    step_s += _meetings_s(costs) + _fresh_s(costs, max(sizes))
    sent = [_sent(found, number) * num for number in range(num_parts)]
    if replicas > 1:
        step_s += max(costs.exchanges.sum_s(size, replicas) for size in sizes)
        sent = [a + 2 * (replicas - 1) / replicas * b for a, b in zip(sent, sizes, strict=True)]
    return SplitPrice(
        name=name, step_s=step_s, sent_bytes=round(max(sent)), memory_bytes=found.memory_bytes,
        balance=found.balance, placement=found, fits=_fits(costs, found.memory_bytes),
    )  # fmt: skip


def _micro_batches(costs: SplitCosts, batch_size: float, num: int) -> MicroBatches:
    """So many of a replica's batch; they may differ where a run chooses."""
    mean = batch_size / num

    def graph_at(size: float) -> WorkGraph:
        return costs.graph_at(mean * size)

    may_differ = costs.micro_batches_each and not costs.has_fixed_rows
    return MicroBatches(num, graph_at(1.0), graph_at if may_differ else None)


def _slowest_group(costs: SplitCosts, num_parts: int) -> tuple[PipelineWorker, ...]:
    """The replica that all others wait for."""
    workers = costs.pipeline.workers
    groups = [workers[i : i + num_parts] for i in range(0, len(workers), num_parts)]
    return min(groups, key=lambda group: sum(one.speed for one in group))


def _sent(placement: Placement, number: int) -> float:
    """By a part, of a micro-batch: over the border behind it forward, before it back."""
    back = placement.parts[number - 1].gradient_bytes if number else 0
    return placement.parts[number].out_bytes + back
