"""The cut that is chosen: what was searched beside the even one, for one number of micro-batches or
the best of several.

    for each number M     find_placement, even_cut -> the shorter schedule -> seconds
    the least of these    what a run of parts takes (spread/cut.py), and what its price is of

This module must not know what else a split costs.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from ..errors import ConfigError
from .graph import INPUT, WorkGraph
from .pipeline import Pipeline
from .placement import Placement, even_cut, is_allowed, pipeline_step
from .search import FoundPlacement, find_placement


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


class FastestCut(NamedTuple):
    """Of several numbers of micro-batches the one with the shortest step."""

    seconds: float
    micro_batches: int
    placement: Placement
    graph: WorkGraph


def fastest_cut(
    graphs: Iterable[tuple[int, WorkGraph]], pipeline: Pipeline, cores: float
) -> FastestCut:
    """What a run of parts chooses: a number of micro-batches, and the cut for it.

    Args:
        graphs: each number, and the costs of a micro-batch then.

    Raises:
        ConfigError: there are more parts than nodes, or no cut fits the memory.
    """
    found = []
    for num, graph in graphs:
        setting = replace(pipeline, micro_batches=num)
        cut = _trained_cut(graph, setting, cores)
        seconds = pipeline_step(cut, setting, cores).seconds
        others = num * (pipeline.num_workers - 1) / pipeline.num_workers
        found.append(FastestCut(seconds + others * _ends_s(graph, setting), num, cut, graph))
    return min(found, key=lambda one: one.seconds)


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
