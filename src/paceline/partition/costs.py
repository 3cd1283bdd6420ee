"""What the prices of splits are made from.

This module must not know how any of it was measured.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .graph import ChannelPair, WorkGraph
from .pipeline import Pipeline

LARGE_MODEL = 500_000_000
"""Parameters from which on one copy for each worker is questioned."""


def _nothing_s(num_bytes: float) -> float:
    return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanges:
    """What all workers take for what they do together, at the same time.

    Args:
        sum_s: to sum so many bytes, which each has, over so many of them.
        gather_s: to put together so many bytes of parameters, of which each has its piece.
        reduce_s: to sum so many bytes of gradients, of which each gets its piece.
        meeting_s: to show a line each to all.
        turn_s: how much longer any of these takes behind computing: nobody is ready at the same
            time, and where workers share cores, who is may have to wait for one.
    """

    sum_s: Callable[[float, int], float]
    gather_s: Callable[[float], float] = _nothing_s
    reduce_s: Callable[[float], float] = _nothing_s
    meeting_s: float = 0.0
    turn_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCosts:
    """What prices are made from.

    Args:
        graph_at: the model's costs at a batch size, with ``threads``.
        alone_s: forward and backward of the whole batch, by one process on all cores.
        pipeline: the workers, what is between them, the micro-batches.
        exchanges: what they do together.
        moved_s_per_byte: of memory that is read or written, by one process on all cores.
        lone_factor: how many times as long as that it takes by one worker alone, with its threads.
        fresh_s_per_byte: of memory that a worker is given anew, in each update, where it keeps
            nothing that is freed (system/pages.py); 0: it does.
        buffer_kinds: types of numbers that the model's buffers have.
        micro_batches_each: that a worker's mini-batch can be, of which a run takes the fastest;
            empty: an update has those of ``pipeline``.
        has_fixed_rows: all micro-batches are of one size.
        cores, threads: that all share; of each worker.
        turns: how many times as long as that it takes where workers take turns on the cores.
        pairs: layers that can be split over channels.
        unit_bytes: of the parameters that shards gather at a time, of each such unit.
        largest_bytes: of a layer's parameters, the most.
        process_bytes: what a worker holds besides the model.
        num_parameters: of the whole; from `LARGE_MODEL` on none holds all of them.
    """

    graph_at: Callable[[float], WorkGraph]
    alone_s: float
    batch_size: int
    pipeline: Pipeline
    exchanges: Exchanges
    moved_s_per_byte: float = 0.0
    lone_factor: float = 1.0
    fresh_s_per_byte: float = 0.0
    buffer_kinds: int = 0
    micro_batches_each: tuple[int, ...] = ()
    has_fixed_rows: bool = False
    cores: float = float("inf")
    threads: int = 1
    turns: float = 1.0
    pairs: tuple[ChannelPair, ...] = ()
    unit_bytes: tuple[int, ...] = ()
    largest_bytes: int = 0
    process_bytes: int = 0
    num_parameters: int = 0

    @property
    def num_workers(self) -> int:
        return self.pipeline.num_parts

    @property
    def sharing(self) -> float:
        """How many times longer what all do at once takes than where each has its own cores."""
        return max(1.0, self.num_workers / self.places)

    @property
    def places(self) -> float:
        """How many workers' computing is done at a time, where all of them compute."""
        own = self.cores / self.threads
        return own / self.turns if self.num_workers > own else own

    @property
    def at_once(self) -> float:
        """How many times longer than one process on all cores each of them takes, all at once."""
        return self.num_workers if math.isfinite(self.cores) else 1.0

    def by_memory(self, each_s: Sequence[float]) -> float:
        """What memory limits, of workers that begin at once, until the last is done.

        Args:
            each_s: of each, by one process on all cores.
        """
        most = max(each_s)
        return max(sum(each_s), self.lone_factor * most) if math.isfinite(self.cores) else most

    def by_cores(self, each_s: Sequence[float]) -> float:
        """What computing limits, of workers that begin at once, until the last is done."""
        return max(sum(each_s) / self.places, *each_s)

    @property
    def slowest(self) -> float:
        """The least speed."""
        return min(one.speed for one in self.pipeline.workers)

    @property
    def memory_bytes(self) -> int | None:
        """What the smallest worker may hold for the model; None: no limit."""
        limits = [one.memory_bytes for one in self.pipeline.workers if one.memory_bytes is not None]
        return min(limits) if limits else None
