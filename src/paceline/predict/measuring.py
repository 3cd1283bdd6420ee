"""Measures what a model costs at each batch that a split uses, on this machine.

    batch   2 4 8 ..      doubled until a step takes long: each piece, at two of these
            B / n         what each of n workers computes: the whole model, then all workers at once
            B             what a worker computes if layers are split over channels, or one alone

At any batch, the pieces' costs are on a straight line through those two batches, scaled by the time
of the whole model where it is measured: the line alone would carry the error of two short
measurements to a batch that is many times as large. Batches on one line are measured in turns
unless their steps are long: a machine that is slow for a while is slow to all batches, and not to
one. While rounds differ and take little time, there are more. Pieces, shares and one process alone
have several sittings, one after the other, of which all rounds count: a shared machine can be half
as fast for some seconds, in which all rounds agree. The parts of a network are not scaled: they run
as the pieces do, with late gradients, and their micro-batches are near what was measured. How much
updates differ says how long workers wait for the slowest. This module must not know how a split is
priced. Above 300 lines, since all that is timed of a model and its loop is read together.
"""

import bisect
import functools
import gc
import itertools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import psutil
import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..exports.subject import Subject
from ..partition.graph import ChannelPair, WorkGraph
from ..splits.clocks import TimedClock, step_once, threads
from ..splits.measuring import ROUNDS, MeasuredModel, Measurement, measure
from ..splits.tracing import TracedModel, trace, untouched
from ..spread.columns import columns_of, divisible_pairs, shares_of, single_pairs
from ..spread.modes import modes_kept
from ..system.processors import num_cores
from ..system.reasons import reason
from ..trainer import make_loader
from ..workloads.base import Task
from .neighbours import MOST_NEIGHBOURS, Neighbours, make_step

_MEASURED_S = 0.4
"""Limit of a step's time, about, for the larger of the two batches at which pieces are measured."""
_LONG_S, _FAR_APART = 1.0, 4
"""The same limit while that batch is less than so many times as large as the smallest."""
_MOST_S = 20.0
"""The same limit for twice the smallest, if a shorter one allows no other: a line needs two points.
"""
_WHOLE_S = 4.0
"""The same for a batch at which the whole model is measured."""
_ROUNDS_WORTH_S = 1.0
"""The longest step of such a batch with which all are measured in several rounds."""
_SITTINGS = 3
"""How often pieces, shares and one process alone are measured."""
_ROUNDS_EACH, _SHORT_S = 2, 0.1
"""Rounds of a sitting, unless they differ; the longest step for which pieces have more than one."""
_ENOUGH_ROUNDS, _ENOUGH_S, _CLOSE = 15, 3.0, 0.02
"""Where rounds differ there are more, until a median's relative standard error is small, or there
are many, or no further one begins after this time: the speed of a shared machine moves by a sixth
within a second, and by a twelfth within eight."""
_LEAST = 2
"""Fewest samples of a batch: batch norm needs two."""
_ROUNDS_S, _MOST_ROUNDS = 1.0, 15
_SCRIPT_RUNS = 5
_STEPS, _EVICTING_BYTES = 6, 1 << 26
"""Steps of the optimizer, of which the first creates its state, and bytes written before each."""
_MODEL = "the model"
_NUM_PROCESSES = 1 + MOST_NEIGHBOURS
GraphAt = Callable[[float], WorkGraph]
"""Returns the costs at any batch."""


def least_of(batch_size: int) -> int:
    """Return the smallest batch that is measured."""
    return min(batch_size, _LEAST)


def _nothing_s(batch: float) -> float:
    return 0.0


def _tell_nobody(what: str) -> None:
    return


class MeasuredColumns(NamedTuple):
    """Layers that can be split over channels, and what workers take if they are.

    Attributes:
        pairs, seconds, why: as ``pairs``, ``columns_s`` and ``undivided`` of `SplitCosts`.
    """

    pairs: tuple[ChannelPair, ...] = ()
    seconds: tuple[float, ...] = ()
    why: str = ""


class MeasuredCosts(NamedTuple):
    """The costs of a model.

    Attributes:
        graph_at, parts_at: costs at any batch, as of `SplitCosts`.
        alone_s: seconds for the whole batch in one process with all threads.
        waiting: as of `SplitCosts`.
        together_s: as of `SplitCosts`.
        turns: factor by which sharing cores slows workers down: `Neighbours.taking_turns`.
        script_s: as of `SplitCosts`.
    """

    traced: TracedModel
    graph_at: GraphAt
    alone_s: float
    columns: MeasuredColumns = MeasuredColumns()
    waiting: float = 1.0
    turns: float = 1.0
    together_s: float | None = None
    script_s: Callable[[float], float] = _nothing_s
    parts_at: GraphAt | None = None


class Counting:
    """Counts the operations of a model on the meta device, which takes no time.

    Args:
        inputs: returns the inputs of a batch.
    """

    def __init__(self, model: nn.Module, inputs: Callable[[int], tuple[Tensor, ...]]) -> None:
        self._model, self._inputs = model, inputs

    def all_of(
        self,
        traced: TracedModel,
        wanted: tuple[int, int],
        num_workers: int,
        *,
        is_cut_only: bool = False,
    ) -> MeasuredCosts:
        """Do what `Measuring.all_of` does; no batch takes too long here."""
        models = []
        for size in wanted:
            traced = _traced_for(traced, self._model, self._inputs(size))
            models.append(measure(traced, self._inputs(size)))
        graph_at, alone_s = _line(*models), models[1].forward_s + models[1].backward_s
        pairs = single_pairs(traced, graph_at(wanted[1]), num_workers)
        return MeasuredCosts(traced, graph_at, alone_s, MeasuredColumns(pairs))


class Measuring:
    """Measures a model that runs here.

    Args:
        subject: the model, and its task if it has one.
        inputs: returns the inputs of a batch.
        own_threads: threads of a worker.
        beside: processes that compute meanwhile, as a run's other workers do.
        tell: called with what is measured next.
    """

    def __init__(
        self,
        subject: Subject,
        inputs: Callable[[int], tuple[Tensor, ...]],
        own_threads: int,
        beside: Neighbours | None,
        tell: Callable[[str], None] = _tell_nobody,
    ) -> None:
        self._model, self._task, self._inputs = subject.model, subject.task, inputs
        self._threads, self._beside, self._tell = own_threads, beside, tell
        self._batch_size = 1
        self._pieces: tuple[Measurement, ...] = ()  # at one batch or two
        self._larger_batch, self._larger_batch_s = 1, 0.0  # pieces are measured there
        self._activation_bytes = 0.0  # of a sample
        self._taken: defaultdict[str, defaultdict[int, list[float]]] = defaultdict(
            lambda: defaultdict(list)
        )  # seconds of updates: of what, at which batch
        self._ratios = list[float]()  # of a worker's updates to their median

    def all_of(
        self,
        traced: TracedModel,
        wanted: tuple[int, int],
        num_workers: int,
        *,
        is_cut_only: bool = False,
    ) -> MeasuredCosts:
        """Measure and return all costs of the model.

        Args:
            traced: the model, traced with a batch of `least_of`.
            wanted: a micro-batch and the whole batch.
            is_cut_only: whether layers split over channels are left out.
        """
        traced, parts_at = self.pieces(traced, wanted)
        share = -(-wanted[1] // num_workers)
        shares = self._shares(wanted[1], num_workers)
        for _ in range(_SITTINGS - 1):
            self._sit(shares, wanted[1])
            parts_at = self._pieces_again()
        turns, script_s = self._turns(share), self._script_s({share, wanted[1]})
        columns, sizes = MeasuredColumns(), set(shares)
        if not is_cut_only:
            columns = self._columns(traced, parts_at(wanted[1]), num_workers)
            if columns.pairs and not columns.seconds:
                sizes |= self._sizes_for(wanted[1])
        graph_at = self.as_one(parts_at, sizes)
        together_s = self._together(shares, wanted[1] / num_workers, num_workers)
        alone_s, waiting = self.alone_s(wanted[1]), self._waiting(num_workers)
        return MeasuredCosts(
            traced, graph_at, alone_s, columns, waiting, turns, together_s, script_s, parts_at
        )

    def _shares(self, batch_size: int, num_workers: int) -> set[int]:
        """Return the batches that are measured for the workers' shares, which may differ by one.

        With a core for each, all wait for a largest one.
        """
        most = -(-batch_size // num_workers)
        each = {most}
        if self._beside is None or num_workers * self._threads > num_cores():
            each.add(batch_size // num_workers)
        least = least_of(batch_size)
        return set().union(*(self._sizes_for(max(share, least)) for share in each))

    def _sit(self, shares: Collection[int], batch_size: int) -> None:
        """Measure once more what `all_of` measures at its end."""
        self._of_workers(_MODEL, self._whole_sizes(shares))
        self._together(shares, max(shares), 1)
        self.alone_s(batch_size)

    def pieces(self, traced: TracedModel, wanted: tuple[int, int]) -> tuple[TracedModel, GraphAt]:
        """Return the pieces and their costs with a worker's threads, while others compute, too.

        Args:
            traced: the model, traced with a batch of `least_of`.
            wanted: a micro-batch and the whole batch; smaller ones are measured if these take too
                long.
        """
        smallest = least_of(wanted[1])
        self._batch_size = wanted[1]
        larger = self._find_larger_batch(smallest)
        small = self._pieces_at(traced, max(smallest, min(wanted[0], larger // 2)))
        self._add_round(small)
        if larger == small.batch_size:
            larger = self._twice(small.result())
        is_one = larger == small.batch_size
        large = small if is_one else self._pieces_at(small.traced, larger)
        self._pieces = (small,) if is_one else (small, large)
        for number in _rounds(self._piece_rounds, self._rounds_each):
            if number:  # its first round is over
                self._add_round(small)
            if not is_one:
                self._add_round(large)
        self._activation_bytes = large.result().graph.activation_bytes / larger
        return large.traced, self._pieces_line()

    def _pieces_again(self) -> GraphAt:
        """Measure the pieces once more; return their costs by all rounds."""
        self._tell("each piece, once more")
        before = len(self._pieces[0].rounds_s)
        for _ in _rounds(
            lambda: [rounds_s[before:] for rounds_s in self._piece_rounds()], self._rounds_each
        ):
            for pieces in self._pieces:
                self._add_round(pieces)
        return self._pieces_line()

    @property
    def _rounds_each(self) -> int:
        """Rounds of a sitting of the pieces."""
        return 1 if self._larger_batch_s > _SHORT_S else _ROUNDS_EACH

    def _piece_rounds(self) -> list[list[float]]:
        return [pieces.rounds_s for pieces in self._pieces]

    def _pieces_line(self) -> GraphAt:
        return _line(self._pieces[0].result(), self._pieces[-1].result())

    def _pieces_at(self, traced: TracedModel, size: int) -> Measurement:
        self._tell(f"each piece, in batches of {size}")
        inputs = self._inputs(size)
        return Measurement(_traced_for(traced, self._model, inputs), inputs)

    def _add_round(self, pieces: Measurement) -> None:
        with self._as_a_worker(pieces.batch_size):
            pieces.add_round()

    def _in_turns(
        self, what: str, sizes: Collection[int], updates_s: Callable[[int, int], list[float]]
    ) -> dict[int, list[float]]:
        """Return the seconds of updates at each batch, of which each has its turn in every round.

        Long steps are measured in one round: each has a neighbour's step before it.

        Args:
            updates_s: returns the seconds of some updates at a batch, in one of so many rounds.
        """
        if not sizes:
            return {}
        self._tell(f"{what}, in batches of {', '.join(map(str, sorted(sizes)))}")
        if self._longest[1] > _ROUNDS_WORTH_S:
            return {size: updates_s(size, 1) for size in sorted(sizes)}
        rounds: dict[int, list[list[float]]] = {size: [] for size in sorted(sizes)}
        for _ in _rounds(
            lambda: [[*map(statistics.median, taken)] for taken in rounds.values()], _ROUNDS_EACH
        ):
            for size, taken in rounds.items():
                taken.append(updates_s(size, ROUNDS))
        return {size: [*itertools.chain(*taken)] for size, taken in rounds.items()}

    def _of_workers(
        self, what: str, sizes: Collection[int], of: nn.Module | None = None
    ) -> dict[int, float]:
        """Return a worker's median seconds at each batch; ``of`` as in `_updates_s`."""
        updates_s = self._in_turns(what, sizes, partial(self._worker_s, of=of))
        medians_s = _medians(updates_s)
        self._ratios += [
            s / (medians_s[size] or 1.0) for size, taken in updates_s.items() for s in taken
        ]
        return self._medians_so_far(what, updates_s)

    def _medians_so_far(
        self, what: str, updates_s: Mapping[int, Sequence[float]]
    ) -> dict[int, float]:
        """Return the median at each batch, of these updates and those of earlier sittings."""
        taken = self._taken[what]
        for size, seconds in updates_s.items():
            taken[size] += seconds
        return _medians({size: taken[size] for size in updates_s})

    def _waiting(self, num_workers: int) -> float:
        """Return how many times longer the slowest worker takes than the median one.

        Of k that compute at a time, the slowest takes as long as the quantile 0.5 ** (1 / k) of all
        updates in half of all steps.
        """
        at_once = min(num_workers, max(1, num_cores() // self._threads))
        ratios = sorted(self._ratios)
        return max(1.0, ratios[int(0.5 ** (1 / at_once) * len(ratios))]) if ratios else 1.0

    def _find_larger_batch(self, smallest: int) -> int:
        """Return the larger batch at which pieces are measured: doubled until a step takes long."""
        size, step_s = smallest, min(self._once_s(smallest) for _ in range(2))
        while size < self._batch_size:
            if 2 * step_s > (_MEASURED_S if size >= _FAR_APART * smallest else _LONG_S):
                break
            size = min(2 * size, self._batch_size)
            step_s = self._once_s(size)
        self._larger_batch, self._larger_batch_s = size, step_s
        return size

    def _twice(self, measured: MeasuredModel) -> int:
        """Return twice a measured batch; the same if that takes too long, or too much memory."""
        size = min(2 * measured.batch_size, self._batch_size)
        step_s = 2 * (measured.forward_s + measured.backward_s)
        num_bytes = size / measured.batch_size * measured.graph.activation_bytes
        if size == measured.batch_size or step_s > _MOST_S or num_bytes > _bytes_of_each():
            return measured.batch_size
        self._larger_batch, self._larger_batch_s = size, step_s
        return size

    @functools.cached_property
    def _longest(self) -> tuple[int, float]:
        """The largest batch at which the whole model is measured, and about the seconds of a step:
        doubled while time and memory allow.

        A line from batches of few samples would not predict it: weights take most of their time.
        """
        size, step_s = self._larger_batch, self._larger_batch_s
        most_bytes = _bytes_of_each()
        while size < self._batch_size and 2 * step_s <= _WHOLE_S:
            larger = min(2 * size, self._batch_size)
            if larger * self._activation_bytes > most_bytes:
                break
            size, step_s = larger, self._once_s(larger)
        return size, step_s

    def _once_s(self, size: int) -> float:
        """Return the seconds of one step."""
        inputs = self._inputs(size)
        with untouched(self._model), torch.random.fork_rng(devices=[]):
            start_s = time.perf_counter()
            step_once(lambda: self._model(*inputs), self._model)
            return time.perf_counter() - start_s

    def as_one(self, graph_at: GraphAt, sizes: Collection[int]) -> GraphAt:
        """Return costs by batch; at these batches the pieces sum to the whole model's time."""
        update_s = self._of_workers(_MODEL, self._whole_sizes(sizes))

        @functools.cache
        def scaled_at(batch: float) -> WorkGraph:
            graph = graph_at(batch)
            sum_s = graph.alone_s
            return graph.scaled(_on_lines(update_s, batch) / sum_s) if update_s and sum_s else graph

        return scaled_at

    def _whole_sizes(self, sizes: Collection[int]) -> set[int]:
        """Return the batches of these at which the whole model can be measured."""
        timed = {max(min(_LEAST, max(sizes)), batch) for batch in sizes}
        return {size for size in timed if size <= self._longest[0]}

    def alone_s(self, batch_size: int) -> float:
        """Return the seconds for the whole batch in one process with all threads.

        More threads are not always faster, but one process would have them all.
        """
        sizes = self._sizes_for(batch_size)
        what = "one process alone"
        updates_s = self._in_turns(what, sizes, self._updates_s)
        return _on_lines(self._medians_so_far(what, updates_s), batch_size)

    def _columns(self, traced: TracedModel, graph: WorkGraph, num_workers: int) -> MeasuredColumns:
        """Find the layers that can be split over channels, and measure workers if they are.

        Half of a layer's channels may take more than half of its time. The last worker has the most
        channels, and all wait for it; where workers share cores, the sum counts, too. Nothing is
        measured where the whole batch takes too long, or where a part of the model that branches on
        its data would see sums of one worker's columns: a share of the pieces' seconds is priced.
        """
        if num_workers == 1 or traced.batch_statistics or traced.how == "torch.export":
            return MeasuredColumns()
        self._tell("which layers can be split over channels")
        args = self._inputs(least_of(self._batch_size))
        try:
            pairs = divisible_pairs(traced, graph, args, num_workers)
        except Exception as error:  # the user's model may raise anything in its other mode
            return MeasuredColumns(why=f"it fails after .eval(): {reason(error)}")
        if not pairs or traced.kept or self._batch_size > self._longest[0]:
            return MeasuredColumns(pairs)
        least, *_, most = shares = shares_of(traced, pairs, num_workers)
        most_s = few_s = self._columns_s(traced, pairs, num_workers - 1, num_workers)
        if most > least and num_workers * self._threads > num_cores():
            few_s = self._columns_s(traced, pairs, 0, num_workers)
        slope_s = (most_s - few_s) / (most - least) if most > least else 0.0
        return MeasuredColumns(pairs, tuple(most_s - slope_s * (most - share) for share in shares))

    def _columns_s(
        self, traced: TracedModel, pairs: Sequence[ChannelPair], rank: int, num_workers: int
    ) -> float:
        """Return the seconds of a worker for the whole batch with its columns of layers."""
        columns, size = columns_of(traced, pairs, rank, num_workers), self._batch_size
        what = f"columns of worker {rank} of {num_workers}"
        update_s = self._of_workers(what, {size}, columns)
        del columns
        gc.collect()  # a traced module refers to itself, and its columns take memory
        return update_s[size]

    def _worker_s(self, size: int, num_rounds: int, of: nn.Module | None = None) -> list[float]:
        """Return the seconds of updates of a worker, as `_updates_s` does."""
        with self._as_a_worker(size):
            return self._updates_s(size, num_rounds, of)

    def _sizes_for(self, batch_size: int) -> set[int]:
        """Return the batches that are measured for this one: if it is too large, two smaller."""
        longest, least = self._longest[0], least_of(batch_size)
        return {batch_size} if batch_size <= longest else {max(least, longest // 2), longest}

    def _together(self, sizes: Collection[int], share: float, num_workers: int) -> float | None:
        """Return the seconds of a round, in which all workers compute a share and meet.

        Workers that are more than the processes measured here take as many times longer if they
        share cores; otherwise the slowest of them is slower.

        Args:
            sizes: batches that are measured for this share.
        """
        if self._beside is None:
            return None
        what, size = "all workers at once", self._beside.size
        updates_s = self._in_turns(what, sizes, self._together_s)
        places = num_cores() / self._threads
        if num_workers <= places:
            share = math.ceil(share)
        sharing = max(1.0, num_workers / places) / max(1.0, size / places)
        sharing *= self._waiting(num_workers) / self._waiting(size)
        return _on_lines(self._medians_so_far(what, updates_s), share) * sharing

    def _together_s(self, size: int, num_rounds: int) -> list[float]:
        """Return the typical seconds of a few rounds, in one of so many measurements."""
        assert self._beside is not None
        inputs = self._inputs(size)
        with untouched(self._model), torch.random.fork_rng(devices=[]), threads(self._threads):
            step = partial(make_step, partial(self._model, *inputs), self._model)
            start_s = time.perf_counter()
            step()
            num = round(_ROUNDS_S / num_rounds / (time.perf_counter() - start_s))
            return [self._beside.together_s(size, step, min(max(num, 1), _MOST_ROUNDS))]

    def _turns(self, size: int) -> float:
        if self._beside is None:
            return 1.0
        size = min(max(size, _LEAST), self._larger_batch)  # a longer step would tell no more
        self._tell(f"workers that take turns, in batches of {size}")
        inputs = self._inputs(size)
        with untouched(self._model), torch.random.fork_rng(devices=[]), threads(self._threads):
            step = partial(make_step, partial(self._model, *inputs), self._model)
            start_s = time.perf_counter()
            step()
            rounds = _ROUNDS_S / (time.perf_counter() - start_s)
            return self._beside.taking_turns(size, step, min(max(round(rounds), 4), _MOST_ROUNDS))

    def _script_s(self, sizes: Collection[int]) -> Callable[[float], float]:
        """Return the seconds of the standard loop's step outside the model, by batch size: to draw
        a mini-batch, and for its loss, forward and backward; 0 without a task."""
        if self._task is None:
            return _nothing_s
        self._tell("the data and the loss")
        with untouched(self._model), torch.random.fork_rng(devices=[]), threads(self._threads):
            return partial(
                _on_lines, {size: self._step_beside_s(self._task, size) for size in sizes}
            )

    def _step_beside_s(self, task: Task, size: int) -> float:
        batches = iter(make_loader(task.splits().train, size))
        drawn_s, losses_s = list[float](), list[float]()
        shape, outputs = None, torch.zeros(0)
        for _ in range(_SCRIPT_RUNS):
            start_s = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                break
            drawn_s.append(time.perf_counter() - start_s)
            inputs, targets = batch
            if inputs.shape != shape:  # the loss takes as long for the outputs of any batch
                with torch.no_grad(), modes_kept(self._model):
                    shape, outputs = inputs.shape, self._model.eval()(inputs)
            start_s = time.perf_counter()
            task.loss(outputs.detach().requires_grad_(), targets).backward()
            losses_s.append(time.perf_counter() - start_s)
        return statistics.median(drawn_s) + statistics.median(losses_s)

    def _updates_s(self, size: int, num_rounds: int, of: nn.Module | None = None) -> list[float]:
        """Return the seconds of updates, in one of so many rounds.

        Args:
            of: the columns of layers that are computed instead of the model; None: the model.
        """
        inputs, module = self._inputs(size), self._model if of is None else of
        with untouched(self._model), torch.random.fork_rng(devices=[]):
            return TimedClock(num_rounds).updates(partial(module, *inputs), module)

    @contextmanager
    def _as_a_worker(self, size: int) -> Iterator[None]:
        with threads(self._threads), self._beside.compute(size) if self._beside else nullcontext():
            yield


def update_costs(subject: Subject, is_counted: bool) -> tuple[float, int]:
    """Return the optimizer's seconds per byte of parameters, and its number of copies of them."""
    parameters = [parameter for parameter in subject.model.parameters() if parameter.requires_grad]
    size = sum(parameter.nbytes for parameter in parameters)
    if not size:
        return 0.0, 0
    if is_counted:
        parameters = [nn.Parameter(torch.zeros(1 << 20))]
        size = 1 << 22
    if subject.task is not None:
        optimizer = subject.task.optimizer(parameters, subject.task.learning_rate)
    else:
        optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    steps_s, others = [], torch.zeros(_EVICTING_BYTES, dtype=torch.uint8)
    try:
        for _ in range(_STEPS):
            others.add_(1)  # as a backward pass does, it leaves little of the parameters in caches
            start_s = time.perf_counter()
            optimizer.step()
            steps_s.append(time.perf_counter() - start_s)
    except Exception as error:  # the user's optimizer may raise anything
        raise ConfigError(
            f"the optimizer of {subject.name} cannot step: {reason(error)}"
        ) from error
    copies = [
        value for state in optimizer.state.values() for value in state.values()
        if isinstance(value, Tensor) and value.ndim
    ]  # fmt: skip
    for parameter in parameters:
        parameter.grad = None
    return statistics.median(steps_s[1:]) / size, round(sum(copy.nbytes for copy in copies) / size)


def _rounds(results: Callable[[], Sequence[Sequence[float]]], least: int) -> Iterator[int]:
    """Yield the number of each round of a measurement: of the usual ones, and more if they differ.

    Args:
        results: returns the seconds that each of several things has taken in all rounds so far.
        least: the number of usual rounds.
    """
    start_s = time.perf_counter()
    for number in range(_ENOUGH_ROUNDS):
        if number >= least and (
            max(map(_error, results())) <= _CLOSE or time.perf_counter() - start_s > _ENOUGH_S
        ):
            return
        yield number


def _error(rounds_s: Sequence[float]) -> float:
    """Return the relative standard error of the median: of a normal distribution by the median
    deviation, which one slow round does not change.

    Example:
        >>> _error([1.0, 1.0, 5.0]), round(_error([1.0, 1.1, 0.9, 1.0, 1.1]), 3)
        (0.0, 0.083)
    """
    median_s = statistics.median(rounds_s)
    deviation_s = statistics.median(abs(s - median_s) for s in rounds_s)
    if not median_s:
        return 0.0
    return math.sqrt(math.pi / 2) * 1.4826 * deviation_s / math.sqrt(len(rounds_s)) / median_s


def _medians(updates_s: Mapping[int, Sequence[float]]) -> dict[int, float]:
    return {size: statistics.median(taken_s) for size, taken_s in updates_s.items()}


def _on_lines(seconds: Mapping[int, float], batch: float) -> float:
    """Return the time of a batch from those of others: on the line through the nearest two, beyond
    the last on that of the last two; there it is at least the last time, and no longer per sample.

    Example:
        >>> _on_lines({2: 1.0, 4: 2.0, 8: 3.0}, 6), _on_lines({2: 1.0, 4: 2.0}, 8)
        (2.5, 4.0)
    """
    sizes = sorted(seconds)
    if len(sizes) == 1:
        return seconds[sizes[0]] * batch / sizes[0]
    at = min(max(bisect.bisect_left(sizes, batch), 1), len(sizes) - 1)
    low, high = sizes[at - 1], sizes[at]
    slope_s = (seconds[high] - seconds[low]) / (high - low)
    line_s = max(0.0, seconds[low] + slope_s * (batch - low))
    if batch > high:
        return min(max(line_s, seconds[high]), seconds[high] * batch / high)
    return line_s


def _bytes_of_each() -> float:
    """Return the bytes that each measuring process may take."""
    return psutil.virtual_memory().available / (2 * _NUM_PROCESSES)


def _line(small: MeasuredModel, large: MeasuredModel) -> GraphAt:
    """Return the costs at any batch, on the line through those at two.

    If only one could be measured, they are in proportion beyond it.
    """

    @functools.cache
    def graph_at(batch: float) -> WorkGraph:
        if small.batch_size == large.batch_size:
            beyond = max(batch, large.batch_size)
            return large.graph.at(beyond, large.batch_size, large.graph.without_costs(), 0.0)
        return small.graph.at(batch, small.batch_size, large.graph, large.batch_size)

    return graph_at


def _traced_for(traced: TracedModel, model: nn.Module, inputs: Sequence[Tensor]) -> TracedModel:
    """Return the model traced for these inputs: torch.export fixes the sizes that it saw, all other
    ways leave them open."""
    if traced.how != "torch.export":
        return traced
    retraced = trace(model, inputs)
    return retraced if len(retraced.pieces) == len(traced.pieces) else traced


def measuring_of(
    subject: Subject,
    inputs: Callable[[int], tuple[Tensor, ...]],
    own_threads: int,
    beside: Neighbours | None,
    tell: Callable[[str], None] = _tell_nobody,
) -> Measuring | Counting:
    """Return what measures this model, or counts it if it is on the meta device."""
    if any(parameter.is_meta for parameter in subject.model.parameters()):
        return Counting(subject.model, inputs)
    return Measuring(subject, inputs, own_threads, beside, tell)
