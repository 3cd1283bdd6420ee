"""What a model takes at each batch that a split has, on this machine.

    batch   2 4 8 ..      doubled until a step takes long: each piece, at two of these
            B, B / n ..   what workers compute at a time: the model as one

The pieces' costs of any batch are on a straight line through the two, and sum to what the whole
takes there: a line alone would carry what two short measurements differ by to a batch that is many
times as large. This module must not know what is split, nor how.
"""

import bisect
import functools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import psutil
import torch
from torch import Tensor, nn

from ..partition.graph import WorkGraph
from ..partition.pipeline import MICRO_BATCHES_EACH
from ..splits.clocks import TimedClock, step_once, threads
from ..splits.measuring import MeasuredModel, measure
from ..splits.tracing import TracedModel, trace, untouched
from .neighbours import MOST_NEIGHBOURS, Neighbours

_MEASURED_S = 0.4
"""About how long a step of the larger of the two batches may take whose pieces are measured."""
_WHOLE_S = 4.0
"""And of any batch that is measured as one."""
_LEAST = 2
"""Samples; batch norm wants two."""
_ROUNDS_S, _MOST_ROUNDS = 1.0, 15
_AT_ONCE = 1 + MOST_NEIGHBOURS
GraphAt = Callable[[float], WorkGraph]
"""The costs at any batch."""


def least_of(batch_size: int) -> int:
    """The smallest batch that is looked at."""
    return min(batch_size, _LEAST)


class MeasuredCosts(NamedTuple):
    """Of a model.

    Attributes:
        graph_at: its costs at any batch.
        alone_s: of the whole batch, by one process with all threads.
        turns: what it costs that workers are more than the cores: `Neighbours.taking_turns`.
    """

    traced: TracedModel
    graph_at: GraphAt
    alone_s: float
    turns: float = 1.0


class Counting:
    """A model without numbers, which takes no time.

    Args:
        inputs: of a batch.
    """

    def __init__(self, model: nn.Module, inputs: Callable[[int], tuple[Tensor, ...]]) -> None:
        self._model, self._inputs = model, inputs

    def all_of(
        self, traced: TracedModel, wanted: tuple[int, int], num_workers: int
    ) -> MeasuredCosts:
        """As `Measuring`'s; both batches as they are, since nothing takes too long."""
        found = []
        for size in wanted:
            traced = _traced_for(traced, self._model, self._inputs(size))
            found.append(measure(traced, self._inputs(size)))
        return MeasuredCosts(traced, _between(*found), found[1].forward_s + found[1].backward_s)


class Measuring:
    """A model that runs here.

    Args:
        inputs: of a batch.
        own_threads: of a worker.
        beside: processes that compute meanwhile, as a run's other workers do.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Callable[[int], tuple[Tensor, ...]],
        own_threads: int,
        beside: Neighbours | None,
    ) -> None:
        self._model, self._inputs = model, inputs
        self._threads, self._beside = own_threads, beside
        self._batch_size = 1
        self._most, self._most_s = 1, 0.0  # the largest of the two, and what it took
        self._activation_bytes = 0.0  # of a sample

    def all_of(
        self, traced: TracedModel, wanted: tuple[int, int], num_workers: int
    ) -> MeasuredCosts:
        """All that is measured of it.

        Args:
            traced: of a batch of `least_of`.
            wanted: a micro-batch and the whole batch.
        """
        traced, graph_at = self.pieces(traced, wanted)
        shares = {-(-wanted[1] // (num_workers * most)) for most in MICRO_BATCHES_EACH}
        graph_at = self.as_one(graph_at, {*wanted, *shares})
        turns = self._turns(-(-wanted[1] // num_workers))
        return MeasuredCosts(traced, graph_at, self.alone_s(wanted[1]), turns)

    def pieces(self, traced: TracedModel, wanted: tuple[int, int]) -> tuple[TracedModel, GraphAt]:
        """The operations, and what each takes with a worker's threads, while others compute, too.

        Args:
            traced: of a batch of `least_of`.
            wanted: a micro-batch and the whole batch; smaller ones where these take too long.
        """
        least = least_of(wanted[1])
        self._batch_size = wanted[1]
        most = self._grown(least)
        found = []
        for size in (max(least, min(wanted[0], most // 2)), most):
            traced = _traced_for(traced, self._model, self._inputs(size))
            with self._as_a_worker(size):
                found.append(measure(traced, self._inputs(size)))
        self._activation_bytes = found[1].graph.activation_bytes / most
        return traced, _between(*found)

    def _grown(self, least: int) -> int:
        """The batch whose pieces are measured: doubled until a step takes long."""
        size, took_s = least, min(self._once_s(least) for _ in range(2))
        while size < self._batch_size and 2 * took_s <= _MEASURED_S:
            size = min(2 * size, self._batch_size)
            took_s = self._once_s(size)
        self._most, self._most_s = size, took_s
        return size

    @functools.cached_property
    def _longest(self) -> int:
        """The largest batch that is measured as one: doubled on while there is time and memory.

        From a batch of few samples, most of whose time is spent on weights, no line leads there.
        """
        size, took_s = self._most, self._most_s
        room = psutil.virtual_memory().available / (2 * _AT_ONCE)
        while size < self._batch_size and 2 * took_s <= _WHOLE_S:
            larger = min(2 * size, self._batch_size)
            if larger * self._activation_bytes > room:
                break
            size, took_s = larger, self._once_s(larger)
        return size

    def _once_s(self, size: int) -> float:
        given = self._inputs(size)
        with untouched(self._model), torch.random.fork_rng(devices=[]):
            start_s = time.perf_counter()
            step_once(lambda: self._model(*given), self._model)
            return time.perf_counter() - start_s

    def as_one(self, graph_at: GraphAt, sizes: Collection[int]) -> GraphAt:
        """Graphs by batch; at each of these batches the pieces sum to what the model takes."""
        taken = dict[int, float]()
        for size in sorted({max(min(_LEAST, max(sizes)), one) for one in sizes}):
            if size <= self._longest:
                with self._as_a_worker(size):
                    taken[size] = self._update_s(size)

        @functools.cache
        def scaled_at(batch: float) -> WorkGraph:
            graph = graph_at(batch)
            found_s = graph.alone_s
            return graph.scaled(_on_lines(taken, batch) / found_s) if taken and found_s else graph

        return scaled_at

    def alone_s(self, batch_size: int) -> float:
        """Of the whole batch, by one process with all threads; more of them are not always faster,
        but are what it has."""
        longest = self._longest
        sizes = {longest} if batch_size <= longest else {max(1, longest // 2), longest}
        return _on_lines({size: self._update_s(size) for size in sizes}, batch_size)

    def _turns(self, size: int) -> float:
        if self._beside is None:
            return 1.0
        size = min(max(size, _LEAST), self._longest)
        given = self._inputs(size)
        with untouched(self._model), torch.random.fork_rng(devices=[]), threads(self._threads):
            step = partial(step_once, partial(self._model, *given), self._model)
            start_s = time.perf_counter()
            step()
            times = _ROUNDS_S / (time.perf_counter() - start_s)
            return self._beside.taking_turns(size, step, min(max(round(times), 4), _MOST_ROUNDS))

    def _update_s(self, size: int) -> float:
        given = self._inputs(size)
        with untouched(self._model), torch.random.fork_rng(devices=[]):
            return TimedClock().update(lambda: self._model(*given), self._model)

    @contextmanager
    def _as_a_worker(self, size: int) -> Iterator[None]:
        with threads(self._threads), self._beside.compute(size) if self._beside else nullcontext():
            yield


def _on_lines(taken: Mapping[int, float], batch: float) -> float:
    """Between the two that are nearest, and beyond the last two; there more samples take longer
    than fewer, and no longer each.

    Example:
        >>> _on_lines({2: 1.0, 4: 2.0, 8: 3.0}, 6), _on_lines({2: 1.0, 4: 2.0}, 8)
        (2.5, 4.0)
    """
    sizes = sorted(taken)
    if len(sizes) == 1:
        return taken[sizes[0]] * batch / sizes[0]
    at = min(max(bisect.bisect_left(sizes, batch), 1), len(sizes) - 1)
    low, high = sizes[at - 1], sizes[at]
    slope_s = (taken[high] - taken[low]) / (high - low)
    found_s = max(0.0, taken[low] + slope_s * (batch - low))
    if batch > high:
        return min(max(found_s, taken[high]), taken[high] * batch / high)
    return found_s


def _between(small: MeasuredModel, large: MeasuredModel) -> GraphAt:
    """The costs at any batch, from those at two."""

    @functools.cache
    def graph_at(batch: float) -> WorkGraph:
        if small.batch_size == large.batch_size:
            return large.graph
        return small.graph.at(batch, small.batch_size, large.graph, large.batch_size)

    return graph_at


def _traced_for(traced: TracedModel, model: nn.Module, inputs: Sequence[Tensor]) -> TracedModel:
    """torch.export fixes the sizes that it has seen; all other ways leave them open."""
    if traced.how != "torch.export":
        return traced
    again = trace(model, inputs)
    return again if len(again.pieces) == len(traced.pieces) else traced


def measuring_of(
    model: nn.Module,
    inputs: Callable[[int], tuple[Tensor, ...]],
    own_threads: int,
    beside: Neighbours | None,
) -> Measuring | Counting:
    """The one that suits where the model is."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return Counting(model, inputs)
    return Measuring(model, inputs, own_threads, beside)
