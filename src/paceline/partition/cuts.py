"""Choose the cut that a run uses, searched or even, and its number of micro-batches.

    for each number M     find_placement, even_cut -> the shorter schedule -> seconds
                          all of one size, or the first and last smaller: the pipeline fills and
                          empties with these, while other parts wait
    the fastest of these  what a run of parts uses (spread/cut.py), and what is priced

This module must not know what else a split costs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..errors import ConfigError
from .graph import INPUT, WorkGraph
from .pipeline import ALIKE, EndSizes, Pipeline, micro_batch_shares
from .placement import Placement, even_cut, is_allowed, pipeline_step, place
from .search import FoundPlacement, find_placement

_END_SIZES = [EndSizes(first, last) for first in (1.0, 0.5, 0.33) for last in (1.0, 0.67, 0.5)]
"""The sizes of the first and last micro-batch that are tried, relative to the others."""
_WORTHWHILE = 0.98
"""Uneven sizes, and more micro-batches, must take at most this share of the step of even sizes, and
of fewer: costs are no more precise."""


def uneven(batch_size: int, micro_batches: int) -> str:
    """Explain why a batch cannot be cut into equal micro-batches; empty: it can.

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
    """Return the searched cut, or the even one where its schedule happens to be shorter.

    Raises:
        ConfigError: there are more parts than nodes, or no cut fits the memory.
    """
    searched = find_placement(graph, pipeline)
    cuts = [searched.placement]
    if is_allowed(even := even_cut(graph, pipeline), pipeline):
        cuts.append(even)
    return replace(searched, placement=shortest(cuts, pipeline, cores))


def shortest(cuts: Sequence[Placement], pipeline: Pipeline, cores: float) -> Placement:
    """Return the cut with the shortest schedule and update; of equal ones the first."""

    def step_s(cut: Placement) -> float:
        update_s = max(part.update_s for part in cut.parts)
        return pipeline_step(cut, pipeline, cores).seconds + update_s

    return min(cuts, key=step_s)


class MicroBatches(NamedTuple):
    """A number of micro-batches, and the costs of one.

    Attributes:
        graph: costs of one, where all are of one size.
        graph_at: costs of one whose size is a multiple of the mean; None: sizes cannot differ.
    """

    num: int
    graph: WorkGraph
    graph_at: Callable[[float], WorkGraph] | None = None


class FastestCut(NamedTuple):
    """The cut and number of micro-batches with the shortest step.

    Attributes:
        micro_batches: of the size that ``graph`` is for.
        ends: relative sizes of the first and last micro-batch.
    """

    seconds: float
    micro_batches: int
    placement: Placement
    graph: WorkGraph
    ends: EndSizes = ALIKE


def fastest_cut(choices: Iterable[MicroBatches], pipeline: Pipeline, cores: float) -> FastestCut:
    """Choose a number of micro-batches, the cut for it, and their sizes, as a run of parts does.

    Args:
        choices: from the fewest micro-batches to the most; more must be worthwhile, since each may
            wait for a core, which costs do not include.

    Raises:
        ConfigError: there are more parts than nodes, or no cut fits the memory.
    """
    best: FastestCut | None = None
    for choice in choices:
        fastest = min(_cuts_for(choice, pipeline, cores), key=lambda cut: cut.seconds)
        if best is None or fastest.seconds < _WORTHWHILE * best.seconds:
            best = fastest
    if best is None:
        raise ConfigError("a cut needs at least one number of micro-batches")
    return best


def _cuts_for(choice: MicroBatches, pipeline: Pipeline, cores: float) -> Iterator[FastestCut]:
    """Yield the best cut for a number of micro-batches, with each of the sizes that are worthwhile.

    The first has micro-batches of one size.
    """
    setting = replace(pipeline, micro_batches=choice.num)
    cut = _trained_cut(choice.graph, setting, cores)
    num_remote = choice.num * (pipeline.num_workers - 1) / pipeline.num_workers
    sent_s = num_remote * _ends_s(choice.graph, setting)
    even_s = pipeline_step(cut, setting, cores).seconds
    yield FastestCut(even_s + sent_s, choice.num, cut, choice.graph)
    for ends in _END_SIZES[1:]:
        seconds, placement = _with_ends(ends, choice, cut, setting, cores)
        if seconds < _WORTHWHILE * even_s and is_allowed(placement, setting):
            yield FastestCut(seconds + sent_s, choice.num, placement, choice.graph, ends)


def _with_ends(
    ends: EndSizes, choice: MicroBatches, cut: Placement, setting: Pipeline, cores: float
) -> tuple[float, Placement]:
    """Return the seconds and the price of a cut whose first and last micro-batch differ in size."""
    each, rest = divmod(choice.num, setting.num_workers)
    may_differ = setting.schedule == "1f1b" or (setting.schedule == "interleaved" and each > 1)
    if choice.graph_at is None or rest or not may_differ:
        return float("inf"), cut
    rank_shares = micro_batch_shares(setting.num_workers, each, ends)
    sizes = [each * share for shares in rank_shares for share in shares]
    part_of, order = cut.part_of(), [part.worker for part in cut.parts]
    node_parts = [part_of[node] for node in range(len(choice.graph))]
    prices = {size: place(choice.graph_at(size), setting, node_parts, order) for size in set(sizes)}
    scheduled = replace(setting, micro_batches=len(sizes))
    run = pipeline_step(cut, scheduled, cores, each=[prices[size] for size in sizes])
    largest = sorted(sizes, reverse=True)
    parts = tuple(
        replace(
            part,
            memory_bytes=part.memory_bytes
            + round(part.activation_bytes * (sum(largest[: part.live]) - part.live)),
        )
        for part in cut.parts
    )
    return run.seconds, replace(cut, parts=parts)


def _trained_cut(graph: WorkGraph, pipeline: Pipeline, cores: float) -> Placement:
    """Return the best cut in which every worker has parameters; if there is none, the even cut."""
    best = best_cut(graph, pipeline, cores).placement
    if all(part.parameter_bytes for part in best.parts) or not graph.parameter_bytes:
        return best
    try:
        return best_cut(graph, replace(pipeline, trains_each=True), cores).placement
    except ConfigError:
        even = even_cut(graph, pipeline)
        return even if is_allowed(even, pipeline) else best


def _ends_s(graph: WorkGraph, setting: Pipeline) -> float:
    """Seconds to send the ends of a micro-batch whose rank is neither the first nor the last.

    These are its inputs and, with gpipe, its outputs and their gradients: the script computes the
    loss. With other schedules the last part does, and outputs stay there.
    """
    inputs = [edge for edge in graph.edges if edge.source == INPUT]
    outputs = [edge for edge in graph.edges if len(graph) in edge.targets]
    if setting.schedule != "gpipe":
        outputs = []
    sizes = [
        *(edge.num_bytes for edge in (*inputs, *outputs)),
        *(edge.gradient_bytes for edge in outputs),
    ]
    return sum(setting.message_s(size) for size in sizes)
