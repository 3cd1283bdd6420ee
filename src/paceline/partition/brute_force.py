"""Try every cut of a small model, one by one: the reference for `search`.

The two share only the price of a part between two borders.

    tries = cuts x orders        orders of n workers: n! / product of (identical workers)!
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from ..errors import ConfigError
from .graph import WorkGraph
from .pipeline import Pipeline, PipelineWorker
from .placement import PartPrice, Placement, check_parts, is_allowed, part_between

MOST_NODES = 12
"""The largest model whose cuts are all tried."""
MOST_TRIES = 100_000
"""Pairs of a cut and an order of workers: as many as are priced in a few seconds."""
_ROUNDING = 1e-12


def is_too_many(graph: WorkGraph, pipeline: Pipeline) -> bool:
    """Whether there are more than `MOST_TRIES` cuts and orders; counting stops there."""
    alike = Counter(pipeline.workers).values()
    orders = math.factorial(pipeline.num_parts) // math.prod(map(math.factorial, alike))
    cuts = _cuts(graph.needs(), pipeline.num_parts)
    return any(tries > MOST_TRIES for tries in itertools.accumulate(orders for _ in cuts))


def try_all_cuts(graph: WorkGraph, pipeline: Pipeline) -> Placement | None:
    """Price every cut with every order of workers; return the best, or None if none is possible.

    Raises:
        ConfigError: the model has more than `MOST_NODES` nodes, or fewer nodes than parts.
    """
    check_parts(len(graph), pipeline.num_parts)
    if len(graph) > MOST_NODES:
        raise ConfigError(f"every cut can be tried up to {MOST_NODES} nodes, got {len(graph)}")

    @functools.cache
    def part(number: int, before: int, after: int, worker: int) -> PartPrice:
        return part_between(graph, pipeline, number, (before, after), worker)

    best: Placement | None = None
    orders = _orders(pipeline)
    for borders in _cuts(graph.needs(), pipeline.num_parts):
        for order in orders:
            ends = zip(itertools.pairwise(borders), order, strict=True)
            parts = tuple(part(i, *pair, worker) for i, (pair, worker) in enumerate(ends))
            cut = Placement(parts=parts, micro_batches=pipeline.micro_batches)
            if not is_allowed(cut, pipeline):
                continue
            if best is None or cut.step_s < best.step_s * (1.0 - _ROUNDING):
                best = cut
    return best


def _orders(pipeline: Pipeline) -> list[tuple[int, ...]]:
    """Return each part's worker in every order of workers; identical workers are not swapped."""
    kinds: dict[PipelineWorker, list[int]] = {}
    for number, worker in enumerate(pipeline.workers):
        kinds.setdefault(worker, []).append(number)

    def extend(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(order) == pipeline.num_parts:
            yield order
            return
        for alike in kinds.values():
            free = next((worker for worker in alike if worker not in order), None)
            if free is not None:
                yield from extend((*order, free))

    return list(extend(()))


def _cuts(needs: Sequence[int], num_parts: int) -> Iterator[tuple[int, ...]]:
    """Yield the borders of every assignment in which no node needs one of a later part."""

    def extend(parts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(parts) == len(needs):
            if len(set(parts)) == num_parts:
                yield tuple(
                    sum(1 << i for i, part in enumerate(parts) if part < border)
                    for border in range(num_parts + 1)
                )
            return
        if num_parts - len(set(parts)) > len(needs) - len(parts):  # some would stay empty
            return
        needed = needs[len(parts)]
        least = max((part for i, part in enumerate(parts) if needed >> i & 1), default=0)
        for part in range(least, num_parts):
            yield from extend((*parts, part))

    return extend(())
