"""The cut that is chosen: what was searched beside the even one, for one number of micro-batches or
the best of several.

    for each number M     find_placement, even_cut -> the shorter schedule -> seconds
                          all of one size, or the first and last smaller: the pipeline fills with
                          these, and empties, while other parts wait
    the least of these    what a run of parts takes (spread/cut.py), and what its price is of

This module must not know what else a split costs.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from ..errors import ConfigError
from .graph import INPUT, WorkGraph
from .pipeline import ALIKE, EndSizes, Pipeline, micro_batch_shares
from .placement import Placement, even_cut, is_allowed, pipeline_step, place
from .search import FoundPlacement, find_placement

_ENDS = [EndSizes(first, last) for first in (1.0, 0.5, 0.33) for last in (1.0, 0.67, 0.5)]
"""What the first and last micro-batches may be beside others."""
_WORTH = 0.98
"""Of the step of equal ones, theirs at most: costs are not known better."""


def uneven(batch_size: int, micro_batches: int) -> str:
    """Why a batch cannot be so many micro-batches of one size; empty: it can.

    Example:
        >>> uneven(100, 8)
        '100 samples cannot be 8 equal micro-batches; 5 are possible'
    """
    if batch_size % micro_batches == 0:
        return ""
    fewer = next(num for num in range(micro_batches, 0, -1) if batch_size % num == 0)
    return (
        f"{batch_size} samples cannot be {micro_batches} equal micro-batches; {fewer} are possible"
    )


def best_cut(graph: WorkGraph, pipeline: Pipeline, cores: float) -> FoundPlacement:
    """The cut that was searched; or the even one, where its schedule happens to be shorter.

    Raises:
        ConfigError: there are more parts than nodes, or no cut fits the memory.
    """
    found = find_placement(graph, pipeline)
    even = even_cut(graph, pipeline)
    if is_allowed(even, pipeline):
        cuts = (found.placement, even)
        best = min(cuts, key=lambda one: pipeline_step(one, pipeline, cores).seconds)
        return replace(found, placement=best)
    return found


class MicroBatches(NamedTuple):
    """So many, and what one costs.

    Attributes:
        graph: where all are of one size.
        graph_at: where it is so many times as large as the mean; None: they cannot differ.
    """

    num: int
    graph: WorkGraph
    graph_at: Callable[[float], WorkGraph] | None = None


class FastestCut(NamedTuple):
    """Of several numbers of micro-batches the one with the shortest step.

    Attributes:
        ends: where not all are of one size.
    """

    seconds: float
    micro_batches: int
    placement: Placement
    graph: WorkGraph
    ends: EndSizes = ALIKE


def fastest_cut(choices: Iterable[MicroBatches], pipeline: Pipeline, cores: float) -> FastestCut:
    """What a run of parts chooses: a number of micro-batches, the cut for it, and their sizes.

    Raises:
        ConfigError: there are more parts than nodes, or no cut fits the memory.
    """
    found = []
    for one in choices:
        setting = replace(pipeline, micro_batches=one.num)
        cut = _trained_cut(one.graph, setting, cores)
        others = one.num * (pipeline.num_workers - 1) / pipeline.num_workers
        sent_s = others * _ends_s(one.graph, setting)
        even_s = pipeline_step(cut, setting, cores).seconds
        found.append(FastestCut(even_s + sent_s, one.num, cut, one.graph))
        for ends in _ENDS[1:]:
            seconds, placement = _with_ends(ends, one, cut, setting, cores)
            if seconds < _WORTH * even_s and is_allowed(placement, setting):
                found.append(FastestCut(seconds + sent_s, one.num, placement, one.graph, ends))
    return min(found, key=lambda one: one.seconds)


def _with_ends(
    ends: EndSizes, choice: MicroBatches, cut: Placement, setting: Pipeline, cores: float
) -> tuple[float, Placement]:
    """A cut whose first and last micro-batches are of another size: its seconds and its price."""
    each, rest = divmod(choice.num, setting.num_workers)
    if choice.graph_at is None or rest or setting.schedule == "gpipe":
        return float("inf"), cut
    shares = micro_batch_shares(setting.num_workers, each, ends)
    sizes = [each * one for own in shares for one in own]
    part_of, order = cut.part_of(), [one.worker for one in cut.parts]
    nodes = [part_of[node] for node in range(len(choice.graph))]
    priced = {one: place(choice.graph_at(one), setting, nodes, order) for one in set(sizes)}
    run = pipeline_step(cut, setting, cores, each=[priced[one] for one in sizes])
    largest = sorted(sizes, reverse=True)
    parts = tuple(
        replace(
            one,
            memory_bytes=one.memory_bytes
            + round(one.activation_bytes * (sum(largest[: one.live]) - one.live)),
        )
        for one in cut.parts
    )
    return run.seconds, replace(cut, parts=parts)


def _trained_cut(graph: WorkGraph, pipeline: Pipeline, cores: float) -> Placement:
    """The best cut in which every worker has something to train; where there is none the even."""
    found = best_cut(graph, pipeline, cores).placement
    if all(one.parameter_bytes for one in found.parts) or not graph.parameter_bytes:
        return found
    try:
        return best_cut(graph, replace(pipeline, trains_each=True), cores).placement
    except ConfigError:
        even = even_cut(graph, pipeline)
        return even if is_allowed(even, pipeline) else found


def _ends_s(graph: WorkGraph, setting: Pipeline) -> float:
    """Of a micro-batch of another worker than the first or last: inputs, outputs and back.

    Where the last part computes losses, outputs stay there (gpipe: a script's loss).
    """
    inputs = [one for one in graph.edges if one.source == INPUT]
    outputs = [one for one in graph.edges if len(graph) in one.targets]
    if setting.schedule != "gpipe":
        outputs = []
    sizes = [*(one.num_bytes for one in (*inputs, *outputs)), *(o.gradient_bytes for o in outputs)]
    return sum(setting.message_s(one) for one in sizes)
