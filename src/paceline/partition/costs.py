"""Hold the measured costs that the prices of splits are computed from.

This module must not know how any of them was measured.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .graph import ChannelPair, WorkGraph
from .pipeline import Pipeline

LARGE_MODEL = 500_000_000
"""Number of parameters from which on a full copy per worker is questioned."""


def _nothing_s(size: float) -> float:
    return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanges:
    """Seconds of the collective operations, in which all workers take part at the same time.

    Args:
        sum_s: to all-reduce a number of bytes over a number of workers.
        gather_s: to all-gather a number of bytes of parameters, of which each worker has a piece.
        reduce_s: to reduce-scatter a number of bytes of gradients, of which each gets its piece.
        meeting_s: to show all workers one line of each.
        turn_s: how much longer any of these takes right after computing: workers do not arrive at
            the same time, and where they share cores, one that is ready may wait for a core.
    """

    sum_s: Callable[[float, int], float]
    gather_s: Callable[[float], float] = _nothing_s
    reduce_s: Callable[[float], float] = _nothing_s
    meeting_s: float = 0.0
    turn_s: float = 0.0

    @property
    def met_s(self) -> float:
        """Seconds of a meeting right after computing."""
        return self.meeting_s + self.turn_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCosts:
    """Everything that prices are computed from.

    Args:
        graph_at: returns the model's costs at a batch size, computed with ``threads``.
        parts_at: the same as parts of a network compute it, which make weights' gradients late
            (splits/late_weights.py); None: as ``graph_at``.
        alone_s: forward and backward of the whole batch, in one process on all cores.
        script_s: returns the seconds of a step outside the model, to draw a mini-batch of some
            size and to compute its loss.
        together_s: seconds until all workers have computed their shares of the batch at once and
            have met; None: not measured, ``graph_at`` and what sharing cores costs say it.
        batch_size: samples per update, of all workers together.
        pipeline: the workers, the link between them, the micro-batches.
        exchanges: seconds of the workers' collective operations.
        moved_s_per_byte: to read or write memory, in one process on all cores.
        lone_factor: how many times longer such memory-bound work takes in a single worker with its
            own threads.
        fresh_s_per_byte: of memory newly mapped for a worker in each update, where the allocator
            does not keep what is freed (system/pages.py); 0: it does.
        buffer_kinds: number of dtypes among the model's buffers.
        micro_batches_each: possible numbers of micro-batches per worker's mini-batch, of which a
            run takes the fastest; empty: an update has those of ``pipeline``.
        has_fixed_rows: whether all micro-batches must be of one size.
        batch_norms: names of batch norm layers in training, for which mini-batches stay whole.
        cores, threads: cores that all workers share; threads per worker.
        turns: how many times longer computing takes where workers take turns on the cores.
        waiting: how many times longer the slowest of the workers that compute at a time takes than
            the median one, where a machine's speed varies: all wait for it.
        pairs: layers that can be split over channels.
        undivided: why there are none, where it is not their number or size.
        columns_s: of each worker, forward and backward of the whole batch with its channels of
            ``pairs``, without sums; empty: not measured, a share of the pairs' own seconds.
        unit_bytes: parameter bytes of each unit, that is what shards gather at a time.
        largest_bytes: parameter bytes of the largest layer.
        process_bytes: memory that a worker holds besides the model.
        num_parameters: of the whole model; from `LARGE_MODEL` on no worker should hold all of them.
    """

    graph_at: Callable[[float], WorkGraph]
    alone_s: float
    batch_size: int
    pipeline: Pipeline
    exchanges: Exchanges
    parts_at: Callable[[float], WorkGraph] | None = None
    script_s: Callable[[float], float] = _nothing_s
    together_s: float | None = None
    moved_s_per_byte: float = 0.0
    lone_factor: float = 1.0
    fresh_s_per_byte: float = 0.0
    buffer_kinds: int = 0
    micro_batches_each: tuple[int, ...] = ()
    has_fixed_rows: bool = False
    batch_norms: tuple[str, ...] = ()
    cores: float = float("inf")
    threads: int = 1
    turns: float = 1.0
    waiting: float = 1.0
    pairs: tuple[ChannelPair, ...] = ()
    undivided: str = ""
    columns_s: tuple[float, ...] = ()
    unit_bytes: tuple[int, ...] = ()
    largest_bytes: int = 0
    process_bytes: int = 0
    num_parameters: int = 0

    def part_graph(self, batch: float) -> WorkGraph:
        """Return the costs of a batch as parts of a network compute it."""
        return (self.parts_at or self.graph_at)(batch)

    @property
    def num_workers(self) -> int:
        return self.pipeline.num_parts

    @property
    def sharing(self) -> float:
        """How many times longer computing takes than with own cores, if all compute at once, and
        wait for the slowest."""
        return self.waiting * max(1.0, self.num_workers / self.places)

    @property
    def places(self) -> float:
        """How many workers' computing the cores complete at a time, if all workers compute."""
        places = self.cores / self.threads
        return places / self.turns if self.num_workers > places else places

    @property
    def at_once(self) -> float:
        """How many times longer a task takes in all workers at once than in one process alone."""
        return self.num_workers if math.isfinite(self.cores) else 1.0

    def by_memory(self, each_s: Sequence[float]) -> float:
        """Seconds until the last worker is done, if all begin memory-bound work at once.

        Args:
            each_s: seconds of each worker's work in one process on all cores.
        """
        most = max(each_s)
        return max(sum(each_s), self.lone_factor * most) if math.isfinite(self.cores) else most

    def by_cores(self, each_s: Sequence[float]) -> float:
        """Seconds until the last worker is done, if all begin compute-bound work at once."""
        return max(sum(each_s) / self.places, *each_s)

    def computing_s(self) -> float:
        """Seconds until all workers, one of which may be slow, have computed their shares of the
        batch and have met."""
        if self.together_s is not None:
            return self.together_s / self.slowest
        graph = self.graph_at(self.batch_size / self.num_workers)
        return graph.alone_s * self.sharing / self.slowest + self.exchanges.met_s

    @property
    def slowest(self) -> float:
        """The speed of the slowest worker."""
        return min(worker.speed for worker in self.pipeline.workers)

    @property
    def memory_bytes(self) -> int | None:
        """The smallest limit on the memory of a worker; None: no limit."""
        limits = [
            worker.memory_bytes
            for worker in self.pipeline.workers
            if worker.memory_bytes is not None
        ]
        return min(limits) if limits else None
