"""Price all ways to split a model over n workers, and advise one.

              each worker has                              workers exchange
    none      (one worker) the whole batch                 nothing
    data      a share of the batch                         gradients, all-reduced
    network   some of the layers, M micro-batches          what crosses the borders, both ways
    layer     some of the channels of pairs of layers,     outputs of pairs and gradients of their
              the whole batch                              inputs, all-reduced; inputs of the model
                                                           and gradients of its outputs, to all
    shard-1   as data, but a share of the optimizer's      gradients reduce-scattered, parameters
              state                                        all-gathered: as many bytes as data
    shard-2   and of the gradients                         as shard-1
    shard-3   and of the parameters                        and gathered again: half as much more
    AxB       A parts of the network, B replicas           as network and as data

Seconds are per update: drawing the batch, all computing, all messages, the optimizer; whatever a
run overlaps with computing makes it faster. What workers with a copy or a shard compute at once is
measured as such, until all are done. Elsewhere, n processes of t threads share c cores: where
n t > c, what all do at once takes n t / c times longer, plus the measured cost of taking turns on a
core, and all wait for the slowest of those that compute at a time, by the spread of measured
updates. Memory-bound work (the optimizer, copies) was measured
in one process on all cores, and all workers at once take as long as one that moves all their bytes:
the worker with most bytes is done last, and is never faster than it would be alone. Whole copies on
one machine add up gradients in shared memory, each worker in its share; ranks of the other splits
send messages, and meet before each pass (spread/meeting.py). Sent bytes are those of the worker
that sends most if no memory is shared; memory is that of the worker that holds most (memory.py).
Above 300 lines, since the formulas are read beside one another.

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
from .pipeline import Pipeline, PipelineWorker
from .placement import Placement

NONE = "none"
_WHOLE_COPIES = (NONE, "data")
_MEETINGS = 5
"""Meetings of ranks per update: forward, backward, the step's end (spread/base.py), lines
(engines/torchrun/member.py), all parts' gradients: finite, and their norm (spread/averaging.py)."""
_TURNS = 2
"""Meetings right after computing: forward, after the optimizer and the loader; and backward."""
_PASSES = 3
"""Passes over a part's gradients before its optimizer: they are read and written where they are
averaged (replica/replica.py), and read to check that they are finite (spread/averaging.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPrice:
    """One row of the table.

    Args:
        name: ``none``, ``data``, ``network``, ``layer``, ``shard-1`` to 3, ``AxB``.
        step_s: seconds per update; None: the model cannot be split this way.
        sent_bytes: per update, by the worker that sends most.
        memory_bytes: of the worker that holds most, without ``process_bytes``.
        balance: mean computing of the workers over the largest; 1 is even.
        fits: whether it fits the memory of each worker.
        why: why the model cannot be split this way, or a remark.
        placement: the cut, where there is one.
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
        advised: the fastest of those that fit; if none fits, the one that needs least memory.
        reason: why it is advised, in one sentence.
    """

    prices: tuple[SplitPrice, ...]
    advised: SplitPrice
    reason: str


def price_splits(costs: SplitCosts) -> SplitTable:
    """Return the table of all ways to split."""
    prices = tuple(_prices(costs))
    possible = [price for price in prices if price.step_s is not None]
    fitting = [price for price in possible if price.fits]
    if not fitting:
        least = min(possible, key=lambda price: price.memory_bytes)
        reason = (
            "nothing fits the memory; this needs the least: use more workers, or a smaller batch"
        )
        return SplitTable(prices=prices, advised=least, reason=reason)
    dividing = [price for price in fitting if price.name not in _WHOLE_COPIES]
    if costs.num_parameters >= LARGE_MODEL and dividing:
        best = min(dividing, key=lambda price: price.step_s or 0.0)
        reason = f"from {LARGE_MODEL:,} parameters on no worker holds a whole copy with its state"
        return SplitTable(prices=prices, advised=best, reason=f"{reason}; this is the fastest")
    best = min(fitting, key=lambda price: price.step_s or 0.0)
    return SplitTable(prices=prices, advised=best, reason=_reason(best, prices, costs))


def _reason(best: SplitPrice, prices: tuple[SplitPrice, ...], costs: SplitCosts) -> str:
    alone = prices[0]
    assert best.step_s is not None
    assert alone.step_s is not None
    if best.name == NONE:
        others = [price for price in prices[1:] if price.step_s is not None and price.fits]
        if not others:
            return "do not split: nothing else fits"
        next_best = min(others, key=lambda price: price.step_s or 0.0)
        slower = (next_best.step_s or 0.0) / best.step_s
        why = ""
        if costs.num_workers * costs.threads > costs.cores:
            why = f", since {costs.num_workers} processes share {costs.cores:g} cores"
        return f"do not split: {next_best.name}, the next, takes {slower:.2f} times as long{why}"
    if not alone.fits:
        return "one worker alone has too little memory; of what fits, this is the fastest"
    return f"{alone.step_s / best.step_s:.2f} times as fast as one worker alone"


def _prices(costs: SplitCosts) -> Iterator[SplitPrice]:
    yield alone_price(costs)
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


def _price(
    costs: SplitCosts, name: str, step_s: float, sent_bytes: float, memory_bytes: float
) -> SplitPrice:
    """Return the row of a split in which all workers do the same."""
    speeds = [worker.speed for worker in costs.pipeline.workers]
    mean_s = sum(1.0 / speed for speed in speeds) / len(speeds)
    return SplitPrice(
        name=name,
        step_s=step_s,
        sent_bytes=round(sent_bytes),
        memory_bytes=round(memory_bytes),
        balance=1.0 if name == NONE else mean_s * costs.slowest,
        fits=_fits(costs, memory_bytes),
    )


def _too_few(name: str, costs: SplitCosts) -> SplitPrice:
    why = f"{costs.batch_size} samples are fewer than {costs.num_workers} workers"
    return SplitPrice(name=name, step_s=None, why=why)


def _fits(costs: SplitCosts, memory_bytes: float) -> bool:
    return costs.memory_bytes is None or memory_bytes <= costs.memory_bytes


def alone_price(costs: SplitCosts) -> SplitPrice:
    """Price one worker with the whole batch."""
    graph = costs.graph_at(costs.batch_size)
    fastest = max(worker.speed for worker in costs.pipeline.workers)
    step_s = (costs.alone_s + graph.parameter_bytes * costs.pipeline.update_s_per_byte) / fastest
    step_s += _shared_bytes(costs, 1) * costs.moved_s_per_byte + costs.script_s(costs.batch_size)
    return _price(costs, NONE, step_s, 0.0, _copy_bytes(costs, graph, 1))


def _copy_bytes(costs: SplitCosts, graph: WorkGraph, num_copies: int) -> float:
    """Return the memory of a worker with a whole copy, buffers and activations included."""
    size, state_copies = graph.parameter_bytes, costs.pipeline.state_copies
    parameter_bytes = copy_bytes(size, state_copies, num_copies, costs.largest_bytes)
    return parameter_bytes + graph.activation_bytes + _buffer_bytes(graph)


def _shared_bytes(costs: SplitCosts, num_copies: int) -> float:
    """Return the bytes that each copy reads and writes per update, where copies share memory.

    It copies its gradient to shared memory. Of its share it reads all gradients, whose mean stays
    in a cache (exchange/share_chunks.py), and saves parameters and state for an undo. A single copy
    touches only its own gradient.
    """
    size = costs.graph_at(costs.batch_size / num_copies).parameter_bytes
    if num_copies == 1:
        return size * 3.0
    undo_passes = 2 * (1 + costs.pipeline.state_copies)
    return size * (3 + undo_passes / num_copies)


def _buffer_bytes(graph: WorkGraph) -> int:
    return sum(node.buffer_bytes for node in graph.nodes)


def _update_s(costs: SplitCosts, parameter_bytes: float) -> float:
    """Seconds of the optimizer, in all workers at once."""
    return parameter_bytes * costs.pipeline.update_s_per_byte / costs.slowest * costs.at_once


def _moved_s(costs: SplitCosts, num_bytes: float) -> float:
    """Seconds for each worker to read or write memory, all at once."""
    return num_bytes * costs.moved_s_per_byte * costs.at_once


def _fresh_s(costs: SplitCosts, num_bytes: float) -> float:
    """Seconds for each worker to be given new memory, all at once."""
    return num_bytes * costs.fresh_s_per_byte * costs.sharing


def _script_s(costs: SplitCosts) -> float:
    """Seconds of a script outside the model: each worker draws its share and computes its loss."""
    return costs.script_s(costs.batch_size / costs.num_workers) * costs.sharing


def _meetings_s(costs: SplitCosts) -> float:
    return _MEETINGS * costs.exchanges.meeting_s + _TURNS * costs.exchanges.turn_s


def _data(costs: SplitCosts) -> SplitPrice:
    num = costs.num_workers
    if costs.batch_size < num:
        return _too_few("data", costs)
    graph = costs.graph_at(costs.batch_size / num)
    size = graph.parameter_bytes
    step_s = costs.computing_s() + _script_s(costs)
    step_s += _moved_s(costs, _shared_bytes(costs, num)) + _update_s(costs, size / num)
    step_s += costs.exchanges.met_s  # until all have updated their shares
    memory_bytes = _copy_bytes(costs, graph, num)
    return _price(costs, "data", step_s, 2 * (num - 1) / num * size, memory_bytes)


def _shard(costs: SplitCosts, stage: int) -> SplitPrice:
    """Price ZeRO 1, 2 or 3.

    An all-reduce is a reduce-scatter and an all-gather, each of which takes half of its time.
    """
    num, name = costs.num_workers, f"shard-{stage}"
    if costs.batch_size < num:
        return _too_few(name, costs)
    graph = costs.graph_at(costs.batch_size / num)
    size, copies = graph.parameter_bytes, costs.pipeline.state_copies
    gathers = 2 if stage == 3 else 1
    step_s = costs.computing_s() + _script_s(costs)
    step_s += _units_s(costs, stage, gathers) + _moved_s(costs, size / num)
    step_s += _meetings_s(costs) + costs.buffer_kinds * costs.exchanges.meeting_s
    step_s -= costs.exchanges.met_s  # of these, the one after the backward pass is counted above
    step_s += _fresh_s(costs, size * (3 if stage == 3 else 1)) + _update_s(costs, size / num)
    memory_bytes = shard_bytes(stage, size, copies, num, costs.largest_bytes)
    memory_bytes += graph.activation_bytes + _buffer_bytes(graph)
    return _price(costs, name, step_s, (gathers + 1) * (num - 1) / num * size, memory_bytes)


def _units_s(costs: SplitCosts, stage: int, gathers: int) -> float:
    """Seconds to gather parameters and reduce gradients, unit by unit (spread/shards.py).

    Shard-1 gathers all parameters before the forward pass and reduces all gradients after the
    backward pass. Shard-2 reduces the gradients of each unit after its backward pass. Shard-3 also
    gathers the parameters of each unit after the computing before it, and again for the backward
    pass. Each exchange right after computing costs a turn.
    """
    exchanges, units = costs.exchanges, costs.unit_bytes
    moved_s = sum(gathers * exchanges.gather_s(size) + exchanges.reduce_s(size) for size in units)
    return moved_s + exchanges.turn_s * {1: 1, 2: len(units), 3: 2 * len(units)}[stage]


def _layer(costs: SplitCosts) -> SplitPrice:
    if why := _undivided(costs):
        return SplitPrice(name="layer", step_s=None, why=why)
    num, graph = costs.num_workers, costs.graph_at(costs.batch_size)
    split = {node for pair in costs.pairs for node in pair.nodes}
    tied_bytes = sum(tie.num_bytes for tie in graph.ties)

    def each(cost: Callable[[int], float]) -> list[float]:
        return [cost(i) / (num if i in split else 1) for i in range(len(graph))]

    sums = [size for pair in costs.pairs for size in (pair.in_bytes, pair.out_bytes) if size]
    pieces = each(lambda i: graph.nodes[i].parameter_bytes)
    parameter_bytes = sum(pieces) + tied_bytes
    step_s = _script_s(costs)
    if costs.columns_s:
        step_s += costs.by_cores(costs.columns_s) / costs.slowest * costs.waiting
    else:
        work_s = each(lambda i: graph.nodes[i].work_s + graph.nodes[i].first_s)
        step_s += sum(work_s) / costs.slowest * costs.sharing
        step_s += _moved_s(costs, 2 * sum(pair.out_bytes for pair in costs.pairs))  # biases
    inputs = sum(edge.num_bytes for edge in graph.edges if edge.source == INPUT)
    outputs = sum(edge.gradient_bytes for edge in graph.edges if len(graph) in edge.targets)
    step_s += _sums_s(costs, sums, (inputs, outputs)) + _meetings_s(costs)
    step_s += _moved_s(costs, _PASSES * parameter_bytes)
    step_s += _fresh_s(costs, parameter_bytes) + _update_s(costs, parameter_bytes)
    memory_bytes = (2 + costs.pipeline.state_copies) * parameter_bytes + max(pieces)
    memory_bytes += sum(each(lambda i: graph.nodes[i].activation_bytes)) + _buffer_bytes(graph)
    sent_bytes = (num - 1) / num * (2 * sum(sums) + inputs + outputs)
    return _price(costs, "layer", step_s, sent_bytes, memory_bytes)


def _undivided(costs: SplitCosts) -> str:
    """Explain why no layers can be split over channels; empty: they can."""
    if costs.batch_norms:
        return f"batch norm looks at the whole batch ({costs.batch_norms[0]})"
    if costs.has_fixed_rows:
        return "torch.export traced the model, for one batch size"
    if costs.pairs or costs.undivided:
        return costs.undivided
    return (
        f"no two layers in a row, each called once, with channels for {costs.num_workers} workers"
    )


def _sums_s(costs: SplitCosts, sums: Sequence[int], ends: Sequence[int]) -> float:
    """Seconds of the exchanges of layers that are split over channels.

    Args:
        sums: bytes of each all-reduce, right after computing (spread/columns.py): the outputs of
            all columns, and the gradients of their inputs.
        ends: bytes of the model's inputs and of its outputs' gradients, which are gathered from all
            workers and then joined, that is read and written once more (spread/layered.py).
    """
    exchanges, num = costs.exchanges, costs.num_workers
    step_s = sum(exchanges.sum_s(size, num) + exchanges.turn_s for size in sums)
    return step_s + sum(exchanges.gather_s(size) for size in ends) + _moved_s(costs, 2 * sum(ends))


def network_price(costs: SplitCosts, name: str, num_parts: int, replicas: int) -> SplitPrice:
    """Price a network cut into parts, in one or more replicas of adjacent workers."""
    pipeline = costs.pipeline.of(_slowest_group(costs, num_parts))
    replica_batch = costs.batch_size / replicas
    counts = [each * num_parts for each in costs.micro_batches_each]
    if not counts:
        counts = [pipeline.micro_batches]
        if why := uneven(costs.batch_size, pipeline.micro_batches * replicas):
            return SplitPrice(name=name, step_s=None, why=why)
    choices = [_micro_batches(costs, replica_batch, num) for num in counts if num <= replica_batch]
    if not choices:
        return _too_few(name, costs)
    try:
        cut = fastest_cut(choices, pipeline, costs.places / replicas)
    except ConfigError as error:
        return SplitPrice(name=name, step_s=None, why=str(error))
    placement, parts = cut.placement, cut.placement.parts
    sizes = [part.parameter_bytes for part in parts]
    memory_s = [
        part.update_s + _PASSES * part.parameter_bytes * costs.moved_s_per_byte for part in parts
    ]
    step_s = cut.seconds * costs.waiting + costs.by_memory(memory_s * replicas)
    step_s += _meetings_s(costs) + _fresh_s(costs, max(sizes)) + _script_s(costs)
    ends = _end_bytes(costs.part_graph(replica_batch), pipeline)
    sent = [
        _sent_bytes(placement, number) * cut.micro_batches + ends[number]
        for number in range(num_parts)
    ]
    if replicas > 1:
        step_s += max(costs.exchanges.sum_s(size, replicas) for size in sizes)
        sent = [a + 2 * (replicas - 1) / replicas * b for a, b in zip(sent, sizes, strict=True)]
    return SplitPrice(
        name=name, step_s=step_s, sent_bytes=round(max(sent)), memory_bytes=placement.memory_bytes,
        balance=placement.balance, placement=placement, fits=_fits(costs, placement.memory_bytes),
    )  # fmt: skip


def _micro_batches(costs: SplitCosts, batch_size: float, num: int) -> MicroBatches:
    """Cut a replica's batch into micro-batches; a run may choose sizes that differ."""
    mean_size = batch_size / num

    def graph_at(size: float) -> WorkGraph:
        return costs.part_graph(mean_size * size)

    is_fixed = costs.has_fixed_rows or bool(costs.batch_norms)
    may_differ = costs.micro_batches_each and not is_fixed
    return MicroBatches(num, graph_at(1.0), graph_at if may_differ else None)


def _slowest_group(costs: SplitCosts, num_parts: int) -> tuple[PipelineWorker, ...]:
    """Return the workers of the replica that all others wait for."""
    workers = costs.pipeline.workers
    groups = [workers[i : i + num_parts] for i in range(0, len(workers), num_parts)]
    return min(groups, key=lambda group: sum(worker.speed for worker in group))


def _end_bytes(graph: WorkGraph, pipeline: Pipeline) -> list[float]:
    """Return the bytes of mini-batches that each part's worker sends in an update.

    Each has its share of the samples: their inputs go to the first part. With gpipe, outputs come
    back from the last one, and their gradients go there; else it computes the loss, and targets,
    which are not known here, go there.

    Args:
        graph: at the batch of all these workers.
    """
    num = pipeline.num_parts
    outputs = [edge for edge in graph.edges if len(graph) in edge.targets]
    if pipeline.schedule != "gpipe":
        outputs = []
    input_bytes = sum(edge.num_bytes for edge in graph.edges if edge.source == INPUT)
    output_bytes = sum(edge.num_bytes for edge in outputs)
    gradient_bytes = sum(edge.gradient_bytes for edge in outputs)
    sent = [(input_bytes * (part > 0) + gradient_bytes * (part < num - 1)) / num
            for part in range(num)]  # fmt: skip
    sent[-1] += (num - 1) / num * output_bytes
    return sent


def _sent_bytes(placement: Placement, number: int) -> float:
    """Return the bytes that a part sends per micro-batch: outputs forward and gradients back."""
    back = placement.parts[number - 1].gradient_bytes if number else 0
    return placement.parts[number].out_bytes + back
