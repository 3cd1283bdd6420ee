"""Every cut of a small model, tried one by one: the reference for `search`.

It shares with it only what a part between two borders costs.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence

from ..errors import ConfigError
from .graph import WorkGraph
from .pipeline import Pipeline
from .placement import PartPrice, Placement, check_parts, is_allowed, part_between

MOST_NODES = 12
"""Up to which every cut is tried."""
_ROUNDING = 1e-12


def try_all_cuts(graph: WorkGraph, pipeline: Pipeline) -> Placement | None:
    """The best of all cuts and all orders of workers, by trying each; None: none is possible.

    Raises:
        ConfigError: it has more than `MOST_NODES` nodes, or there are more parts than nodes.
    """
    check_parts(graph, pipeline.num_parts)
    if len(graph) > MOST_NODES:
        raise ConfigError(f"every cut is tried up to {MOST_NODES} nodes, got {len(graph)}")

    @functools.cache
    def part(number: int, before: int, after: int, worker: int) -> PartPrice:
        return part_between(graph, pipeline, number, (before, after), worker)

    best: Placement | None = None
    orders = _orders(pipeline)
    for borders in _cuts(graph.needs(), pipeline.num_parts):
        for order in orders:
            ends = zip(itertools.pairwise(borders), order, strict=True)
            parts = tuple(part(i, *pair, worker) for i, (pair, worker) in enumerate(ends))
            found = Placement(parts=parts, micro_batches=pipeline.micro_batches)
            if not is_allowed(found, pipeline):
                continue
            if best is None or found.step_s < best.step_s * (1.0 - _ROUNDING):
                best = found
    return best


def _orders(pipeline: Pipeline) -> list[tuple[int, ...]]:
    """Each part's worker; of alike workers one order."""
    seen: dict[tuple[object, ...], tuple[int, ...]] = {}
    for order in itertools.permutations(range(pipeline.num_parts)):
        seen.setdefault(tuple(pipeline.workers[i] for i in order), order)
    return list(seen.values())


def _cuts(needs: Sequence[int], num_parts: int) -> Iterator[tuple[int, ...]]:
    """The borders of all ways to give nodes to parts so that no node needs one of a later part."""

    def longer(parts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(parts) == len(needs):
            if len(set(parts)) == num_parts:
                yield tuple(
                    sum(1 << i for i, part in enumerate(parts) if part < border)
                    for border in range(num_parts + 1)
                )
            return
        needed = needs[len(parts)]
        least = max((part for i, part in enumerate(parts) if needed >> i & 1), default=0)
        for part in range(least, num_parts):
            yield from longer((*parts, part))

    return longer(())
