"""Simulates many updates of the K family of protocols at once, on arrays of step times.

    a member that      the rest is called off               the rest goes on undisturbed
    has pushed
    waits              a round: the K-th least of P steps   the first K of P running steps
    goes on at once    a round of P chains of steps         P chains of steps, in one order

A protocol declares one of the four as its `Rhythm`: as long as no worker comes or goes it decides
nothing else, so it need not be asked push by push. Every worker draws its step times in the order
of its steps, and the results equal those of the events in timing.py up to the last bits of a sum.
This holds only if no two pushes fall on one moment: if step times have a density and nothing else
takes time. This module must not know events, leases or traces.
"""

import abc
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate, repeat, starmap

import numpy as np
import numpy.typing as npt

from ..conditions.world import Conditions
from ..core.stats import Counts
from ..protocols.base import SyncProtocol

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]
_CELLS, _MOST_CELLS = 1 << 18, 1 << 21
"""About how many step times are held at once, and the most if a worker is faster than others."""
_AHEAD = 32
"""Step times of a worker that are drawn at once if they are used one by one."""
_FEW = 12
"""Steps of an update up to which single events cost less than calls on arrays."""


def bulk_driver(protocol: SyncProtocol, conditions: Conditions) -> "BulkDriver | None":
    """Return the driver for this protocol, or None if its events must be handled one by one."""
    rhythm = protocol.rhythm
    if rhythm is None or not conditions.is_plain or protocol.staleness.drops:
        return None
    num_workers, num_pushes = conditions.num_workers, protocol.num_pushes
    if protocol.num_workers != num_workers:
        return None
    if rhythm.waits and (rhythm.restarts or num_pushes == num_workers):
        return _Rounds(protocol, conditions)
    if rhythm.restarts:
        steps_s = [conditions.mean_step_s(worker) for worker in range(num_workers)]
        most = 1 + num_pushes / sum(min(steps_s) / step_s for step_s in steps_s)
        is_worth_it = num_workers + num_pushes > _FEW and num_workers * most < _MOST_CELLS
        return _ChainRounds(protocol, conditions) if is_worth_it else None
    if rhythm.waits:
        return _First(protocol, conditions) if num_pushes > _FEW else None
    return _Chains(protocol, conditions)


def _drawn(draw: Callable[[], float], count: int, num_steps: int = 1) -> list[float]:
    """Draw ``count`` times, each the sum of ``num_steps`` successive steps."""
    if num_steps == 1:
        return list(starmap(draw, repeat((), count)))
    return [sum(starmap(draw, repeat((), num_steps))) for _ in range(count)]


class BulkDriver(abc.ABC):
    """The base of the four drivers: P workers, K pushes per update, workers' draws, the counts."""

    def __init__(self, protocol: SyncProtocol, conditions: Conditions) -> None:
        self.counts = Counts()
        self._workers, self._pushes = conditions.num_workers, protocol.num_pushes
        self._draws = [conditions.step_drawer(worker) for worker in range(self._workers)]
        self._at_s = 0.0  # of the last update

    def advance(self, num_updates: int) -> None:
        """Go on until ``num_updates`` are made in all."""
        while (missing := num_updates - self.counts.updates) > 0:
            self._make(missing)

    @abc.abstractmethod
    def _make(self, num_updates: int) -> None:
        """Make at least one update, and at most ``num_updates``."""

    def there_s(self, at_s: float) -> float:
        return self._workers * at_s

    def _count(self, times_s: _Floats, staleness: _Ints | None = None) -> None:
        """Count updates at these times; ``staleness`` has the pushes by lag, None if none lags."""
        counts = self.counts
        num_pushes = len(times_s) * self._pushes
        counts.times_s.frombytes(np.ascontiguousarray(times_s).tobytes())
        counts.pushes += num_pushes
        if staleness is None:
            staleness = np.array([num_pushes])
        for lag in np.flatnonzero(staleness).tolist():
            counts.staleness[lag] = counts.staleness.get(lag, 0) + int(staleness[lag])
        self._at_s = float(times_s[-1])


class _Rounds(BulkDriver):
    """k-sync, full-sync, local-sgd: all begin together, and the K-th push ends the round."""

    def __init__(self, protocol: SyncProtocol, conditions: Conditions) -> None:
        super().__init__(protocol, conditions)
        self._steps = protocol.num_steps  # H, for each push

    def _make(self, num_updates: int) -> None:
        num_workers, num_kept, num_steps = self._workers, self._pushes, self._steps
        num_rounds = min(num_updates, max(1, _CELLS // (num_workers * num_steps)))
        steps_s = np.empty((num_workers, num_rounds))
        for worker, draw in enumerate(self._draws):
            steps_s[worker] = _drawn(draw, num_rounds, num_steps)
        steps_s = np.partition(np.ascontiguousarray(steps_s.T), num_kept - 1, axis=1)
        rounds_s = steps_s[:, num_kept - 1]
        num_cancelled = num_workers - num_kept
        self.counts.used_s += float(steps_s[:, :num_kept].sum())
        self.counts.wasted_s += num_cancelled * float(rounds_s.sum())
        self.counts.cancelled += num_cancelled * num_rounds
        self._count(np.cumsum(np.concatenate(([self._at_s], rounds_s)))[1:])


class _Chains(BulkDriver):
    """k-batch-async and async: P chains that nothing disturbs; every K-th push is an update.

    The staleness of a push is the number of updates since the previous push of its chain.
    """

    def __init__(self, protocol: SyncProtocol, conditions: Conditions) -> None:
        super().__init__(protocol, conditions)
        self._num_heard = 0  # pushes, in all
        self._begun_s = np.zeros(self._workers)  # when the work under way began
        self._begun_at = np.zeros(self._workers, np.int64)  # the version at which it began
        self._ahead = [[draw()] for draw in self._draws]  # times of pushes to come, by worker
        self._block = max(1, min(_AHEAD, _CELLS // self._workers))
        # Adjusted as it goes, since with heavy tails most steps are far shorter than the mean.
        self._span_s = float(np.median([ahead[0] for ahead in self._ahead]))

    def _make(self, num_updates: int) -> None:
        wanted = min(num_updates, max(1, _CELLS // self._pushes)) * self._pushes  # whole updates
        pushes_s, sizes = self._until(self._at_s + self._span_s)
        while len(pushes_s) < self._pushes:
            self._span_s *= 2.0
            pushes_s, sizes = self._until(self._at_s + self._span_s)
        self._span_s *= max(0.5, min(2.0, wanted / len(pushes_s)))
        order = np.argsort(pushes_s, kind="stable")
        self._hear(pushes_s, sizes, order[: min(wanted, len(order) // self._pushes * self._pushes)])

    def _until(self, end_s: float) -> tuple[_Floats, _Ints]:
        """Return the times of all pushes up to ``end_s``, chain by chain, and the chains' sizes."""
        pushes_s: list[float] = []
        sizes = []
        for ahead, draw in zip(self._ahead, self._draws, strict=True):
            while ahead[-1] <= end_s:
                ahead.extend(accumulate(_drawn(draw, self._block), initial=ahead.pop()))
            size = bisect_right(ahead, end_s)
            pushes_s += ahead[:size]
            sizes.append(size)
        return np.array(pushes_s), np.array(sizes)

    def _hear(self, pushes_s: _Floats, sizes: _Ints, counted: _Ints) -> None:
        """Count the pushes of whole updates, and keep those that come after them.

        Args:
            pushes_s: times of pushes, chain by chain.
            sizes: the number of pushes of each chain.
            counted: indices of the pushes to count, in the order of time.
        """
        num_pushes, count = self._pushes, len(counted)
        rank = np.full(len(pushes_s), count)  # the place of each push in the order of time
        rank[counted] = np.arange(count)
        chain_starts = np.cumsum(sizes) - sizes
        versions = (self._num_heard + rank + 1) // num_pushes  # after each push
        begun_at = np.empty_like(versions)
        begun_at[1:] = versions[:-1]
        has_any = sizes > 0
        begun_at[chain_starts[has_any]] = self._begun_at[has_any]
        lags = (self._num_heard + rank[counted]) // num_pushes - begun_at[counted]
        workers = np.repeat(np.arange(self._workers), sizes)
        num_used = np.bincount(workers[counted], minlength=self._workers)
        has_pushed = num_used > 0
        last_pushes = (chain_starts + num_used - 1)[has_pushed]
        self.counts.used_s += float((pushes_s[last_pushes] - self._begun_s[has_pushed]).sum())
        self._begun_s[has_pushed] = pushes_s[last_pushes]
        self._begun_at[has_pushed] = versions[last_pushes]
        for worker in np.flatnonzero(has_pushed).tolist():
            del self._ahead[worker][: num_used[worker]]
        self._num_heard += count
        self._count(pushes_s[counted[num_pushes - 1 :: num_pushes]], np.bincount(lags))


class _Pool:
    """The next step times of every worker, one row each, which can be read before they are used."""

    def __init__(self, draws: list[Callable[[], float]]) -> None:
        self._draws = draws
        self._steps_s = np.empty((len(draws), _AHEAD))
        self._used = np.full(len(draws), _AHEAD)

    def look(self, workers: _Ints, depth: int = 0) -> _Floats:
        """Return, for each of these workers, the step time ``depth`` steps after its next one."""
        indices = self._used[workers] + depth
        for worker in workers[indices >= self._steps_s.shape[1]].tolist():
            self._refill(worker, depth)
        steps_s: _Floats = self._steps_s[workers, self._used[workers] + depth]
        return steps_s

    def use(self, workers: _Ints, counts: _Ints | int = 1) -> None:
        """Mark the next ``counts`` steps of each of these workers as used."""
        self._used[workers] += counts

    def _refill(self, worker: int, depth: int) -> None:
        if depth >= self._steps_s.shape[1] // 2:  # the worker is much faster than the others
            more = [_drawn(draw, self._steps_s.shape[1]) for draw in self._draws]
            self._steps_s = np.concatenate((self._steps_s, np.array(more)), axis=1)
        row, used = self._steps_s[worker], int(self._used[worker])
        row[: len(row) - used] = row[used:].copy()
        row[len(row) - used :] = _drawn(self._draws[worker], used)
        self._used[worker] = 0


class _First(BulkDriver):
    """k-async: the first K of P running steps make an update and start again; the others go on."""

    def __init__(self, protocol: SyncProtocol, conditions: Conditions) -> None:
        super().__init__(protocol, conditions)
        self._pool = _Pool(self._draws)
        self._begun_s = np.zeros(self._workers)
        self._begun_at = np.zeros(self._workers, np.int64)
        everybody = np.arange(self._workers)
        self._ends_s = self._pool.look(everybody)
        self._pool.use(everybody)

    def _make(self, num_updates: int) -> None:
        version, used_s = self.counts.updates, 0.0
        times_s, lags = [], []
        for updates_made in range(version, version + num_updates):
            earliest = np.argpartition(self._ends_s, self._pushes - 1)[: self._pushes]
            ends_s = self._ends_s[earliest]
            at_s = ends_s.max()
            used_s += float((ends_s - self._begun_s[earliest]).sum())
            times_s.append(at_s)
            lags.append(updates_made - self._begun_at[earliest])
            self._begun_s[earliest] = at_s
            self._begun_at[earliest] = updates_made + 1
            self._ends_s[earliest] = at_s + self._pool.look(earliest)
            self._pool.use(earliest)
        self.counts.used_s += used_s
        self._count(np.array(times_s), np.bincount(np.concatenate(lags)))


class _ChainRounds(BulkDriver):
    """k-batch-sync: all begin together and go on after each push; the K-th push ends the round."""

    def __init__(self, protocol: SyncProtocol, conditions: Conditions) -> None:
        super().__init__(protocol, conditions)
        self._pool = _Pool(self._draws)
        self._everybody = np.arange(self._workers)

    def _make(self, num_updates: int) -> None:
        times_s = np.empty(num_updates)
        at_s = self._at_s
        for update in range(num_updates):
            pushes_s, workers = self._chains()
            round_s = np.partition(pushes_s, self._pushes - 1)[self._pushes - 1]
            # Workers that pushed before the last push had begun again; all others began once.
            num_begun = 1 + np.bincount(workers[pushes_s < round_s], minlength=self._workers)
            self._pool.use(self._everybody, num_begun)
            used_s = self._used_s(pushes_s, workers, round_s)
            self.counts.used_s += used_s
            self.counts.wasted_s += self._workers * float(round_s) - used_s
            times_s[update] = at_s = at_s + round_s
        self.counts.cancelled += num_updates * (self._workers - 1)
        self._count(times_s)

    def _chains(self) -> tuple[_Floats, _Ints]:
        """Return the times of a round's pushes, or of more than it needs, and their workers."""
        workers, depth, limit_s = self._everybody, 0, np.inf
        ends_s = self._pool.look(workers)
        all_ends_s, all_workers = [ends_s], [workers]
        count = len(ends_s)
        while True:
            if count >= self._pushes:
                so_far_s = np.concatenate(all_ends_s)
                limit_s = np.partition(so_far_s, self._pushes - 1)[self._pushes - 1]
            goes_on = ends_s < limit_s
            if not goes_on.any():
                return np.concatenate(all_ends_s), np.concatenate(all_workers)
            workers, depth = workers[goes_on], depth + 1
            ends_s = ends_s[goes_on] + self._pool.look(workers, depth)
            all_ends_s.append(ends_s)
            all_workers.append(workers)
            count += len(ends_s)

    def _used_s(self, pushes_s: _Floats, workers: _Ints, round_s: float) -> float:
        """The seconds of a round that went into its pushes: each worker's, up to its last push."""
        last_s = np.zeros(self._workers)
        is_used = pushes_s <= round_s
        np.maximum.at(last_s, workers[is_used], pushes_s[is_used])
        return float(last_s.sum())
