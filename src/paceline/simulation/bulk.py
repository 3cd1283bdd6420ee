"""Many updates at once: the K family in virtual time, as arithmetic on arrays of step times.

    who has pushed     the rest is called off               the rest goes on undisturbed
    waits              a round: the K-th least of P steps   the first K of P running steps
    goes on at once    a round of P chains of steps         P chains of steps, in one order

The four are what a protocol says of itself as its `Rhythm`: between two changes of who is there
nothing else is decided, so nobody need be asked push by push. Every worker draws its steps in the
order in which it would live, and what comes out is what the events of timing.py give, to the last
bits of a sum. Only where no two pushes fall on one moment: where steps have a density, and nothing
else takes time. This module must not know events, leases or traces.
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
"""Step times that are held at once, about, and at most where somebody is faster than the others."""
_AHEAD = 32
"""Step times of a worker that are drawn at once, where they are used one by one."""
_FEW = 12
"""Steps of an update up to which its events cost less than calls on arrays."""


def bulk_driver(protocol: SyncProtocol, conditions: Conditions) -> "BulkDriver | None":
    """The driver for this protocol, or None where events have to be looked at one by one."""
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
    """So many times, of so many steps in a row each."""
    if num_steps == 1:
        return list(starmap(draw, repeat((), count)))
    return [sum(starmap(draw, repeat((), num_steps))) for _ in range(count)]


class BulkDriver(abc.ABC):
    """What the four share: P workers, K pushes an update, each worker's draws, and the counts."""

    def __init__(self, protocol: SyncProtocol, conditions: Conditions) -> None:
        self.counts = Counts()
        self._workers, self._pushes = conditions.num_workers, protocol.num_pushes
        self._draws = [conditions.step_drawer(worker) for worker in range(self._workers)]
        self._at_s = 0.0  # of the last update

    def advance(self, num_updates: int) -> None:
        """Go on until so many updates are made in all."""
        while (missing := num_updates - self.counts.updates) > 0:
            self._make(missing)

    @abc.abstractmethod
    def _make(self, num_updates: int) -> None:
        """At least one of so many updates."""

    def there_s(self, at_s: float) -> float:
        return self._workers * at_s

    def _count(self, times_s: _Floats, staleness: _Ints | None = None) -> None:
        """Updates at these times; ``staleness``: pushes by their lag, or all fresh."""
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
    """k-sync, full-sync, local-sgd: all begin together, the K-th to push ends the round for all."""

    def __init__(self, protocol: SyncProtocol, conditions: Conditions) -> None:
        super().__init__(protocol, conditions)
        self._steps = protocol.num_steps  # H, a push

    def _make(self, num_updates: int) -> None:
        num_workers, kept, num_steps = self._workers, self._pushes, self._steps
        count = min(num_updates, max(1, _CELLS // (num_workers * num_steps)))
        steps_s = np.empty((num_workers, count))
        for worker, draw in enumerate(self._draws):
            steps_s[worker] = _drawn(draw, count, num_steps)
        steps_s = np.partition(np.ascontiguousarray(steps_s.T), kept - 1, axis=1)
        took_s = steps_s[:, kept - 1]
        num_cancelled = num_workers - kept
        self.counts.used_s += float(steps_s[:, :kept].sum())
        self.counts.wasted_s += num_cancelled * float(took_s.sum())
        self.counts.cancelled += num_cancelled * count
        self._count(np.cumsum(np.concatenate(([self._at_s], took_s)))[1:])


class _Chains(BulkDriver):
    """k-batch-async and async: P chains that nothing disturbs; every K-th push is an update.

    A push is as stale as there were updates since the push before it in its own chain.
    """

    def __init__(self, protocol: SyncProtocol, conditions: Conditions) -> None:
        super().__init__(protocol, conditions)
        self._heard = 0  # pushes, in all
        self._begun_s = np.zeros(self._workers)  # of the work under way
        self._begun_at = np.zeros(self._workers, np.int64)  # its version
        self._ahead = [[draw()] for draw in self._draws]  # pushes to come, by worker, in order
        self._block = max(1, min(_AHEAD, _CELLS // self._workers))
        # Found by trying: where tails are heavy, most steps are far shorter than the mean.
        self._span_s = float(np.median([ahead[0] for ahead in self._ahead]))

    def _make(self, num_updates: int) -> None:
        wanted = min(num_updates * self._pushes, max(_CELLS, self._pushes))
        pushes_s, sizes = self._until(self._at_s + self._span_s)
        while len(pushes_s) < self._pushes:
            self._span_s *= 2.0
            pushes_s, sizes = self._until(self._at_s + self._span_s)
        self._span_s *= max(0.5, min(2.0, wanted / len(pushes_s)))
        order = np.argsort(pushes_s, kind="stable")
        self._hear(pushes_s, sizes, order[: min(wanted, len(order) // self._pushes * self._pushes)])

    def _until(self, end_s: float) -> tuple[_Floats, _Ints]:
        """All pushes up to ``end_s``, chain after chain, and how many each chain has."""
        found: list[float] = []
        sizes = []
        for ahead, draw in zip(self._ahead, self._draws, strict=True):
            while ahead[-1] <= end_s:
                ahead.extend(accumulate(_drawn(draw, self._block), initial=ahead.pop()))
            size = bisect_right(ahead, end_s)
            found += ahead[:size]
            sizes.append(size)
        return np.array(found), np.array(sizes)

    def _hear(self, pushes_s: _Floats, sizes: _Ints, heard: _Ints) -> None:
        """Count these pushes, which are whole updates, and keep what comes after."""
        num_pushes, count = self._pushes, len(heard)
        rank = np.full(len(pushes_s), count)  # of each push in the order of time
        rank[heard] = np.arange(count)
        starts = np.cumsum(sizes) - sizes
        versions = (self._heard + rank + 1) // num_pushes  # after each push
        begun_at = np.empty_like(versions)
        begun_at[1:] = versions[:-1]
        is_there = sizes > 0
        begun_at[starts[is_there]] = self._begun_at[is_there]
        lags = (self._heard + rank[heard]) // num_pushes - begun_at[heard]
        workers = np.repeat(np.arange(self._workers), sizes)
        used = np.bincount(workers[heard], minlength=self._workers)
        has_pushed = used > 0
        last = (starts + used - 1)[has_pushed]
        self.counts.used_s += float((pushes_s[last] - self._begun_s[has_pushed]).sum())
        self._begun_s[has_pushed] = pushes_s[last]
        self._begun_at[has_pushed] = versions[last]
        for worker in np.flatnonzero(has_pushed).tolist():
            del self._ahead[worker][: used[worker]]
        self._heard += count
        self._count(pushes_s[heard[num_pushes - 1 :: num_pushes]], np.bincount(lags))


class _Pool:
    """The next step times of every worker, in a row each, to be looked at before they are used."""

    def __init__(self, draws: list[Callable[[], float]]) -> None:
        self._draws = draws
        self._steps_s = np.empty((len(draws), _AHEAD))
        self._used = np.full(len(draws), _AHEAD)

    def look(self, workers: _Ints, depth: int = 0) -> _Floats:
        """The step of each of these workers that comes ``depth`` after its next one."""
        places = self._used[workers] + depth
        for worker in workers[places >= self._steps_s.shape[1]].tolist():
            self._refill(worker, depth)
        found: _Floats = self._steps_s[workers, self._used[workers] + depth]
        return found

    def use(self, workers: _Ints, counts: _Ints | int = 1) -> None:
        """So many steps of each of these workers are over."""
        self._used[workers] += counts

    def _refill(self, worker: int, depth: int) -> None:
        if depth >= self._steps_s.shape[1] // 2:  # it is much faster than the others
            more = [_drawn(draw, self._steps_s.shape[1]) for draw in self._draws]
            self._steps_s = np.concatenate((self._steps_s, np.array(more)), axis=1)
        row, used = self._steps_s[worker], int(self._used[worker])
        row[: len(row) - used] = row[used:].copy()
        row[len(row) - used :] = _drawn(self._draws[worker], used)
        self._used[worker] = 0


class _First(BulkDriver):
    """k-async: of P running steps the first K end, make an update and begin anew; no other does."""

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
        for now in range(version, version + num_updates):
            first = np.argpartition(self._ends_s, self._pushes - 1)[: self._pushes]
            ends_s = self._ends_s[first]
            at_s = ends_s.max()
            used_s += float((ends_s - self._begun_s[first]).sum())
            times_s.append(at_s)
            lags.append(now - self._begun_at[first])
            self._begun_s[first] = at_s
            self._begun_at[first] = now + 1
            self._ends_s[first] = at_s + self._pool.look(first)
            self._pool.use(first)
        self.counts.used_s += used_s
        self._count(np.array(times_s), np.bincount(np.concatenate(lags)))


class _ChainRounds(BulkDriver):
    """k-batch-sync: all begin together, who has pushed goes on; the K-th push ends the round."""

    def __init__(self, protocol: SyncProtocol, conditions: Conditions) -> None:
        super().__init__(protocol, conditions)
        self._pool = _Pool(self._draws)
        self._everybody = np.arange(self._workers)

    def _make(self, num_updates: int) -> None:
        times_s = np.empty(num_updates)
        at_s = self._at_s
        for now in range(num_updates):
            pushes_s, workers = self._chains()
            took_s = np.partition(pushes_s, self._pushes - 1)[self._pushes - 1]
            # Who pushed before the last one had begun again; all others began once.
            begun = 1 + np.bincount(workers[pushes_s < took_s], minlength=self._workers)
            self._pool.use(self._everybody, begun)
            used_s = self._used_s(pushes_s, workers, took_s)
            self.counts.used_s += used_s
            self.counts.wasted_s += self._workers * float(took_s) - used_s
            times_s[now] = at_s = at_s + took_s
        self.counts.cancelled += num_updates * (self._workers - 1)
        self._count(times_s)

    def _chains(self) -> tuple[_Floats, _Ints]:
        """Pushes of a round, from its begin, and whose they are: at least all that it may need."""
        workers, depth, limit_s = self._everybody, 0, np.inf
        ends_s = self._pool.look(workers)
        pushes_s, whose = [ends_s], [workers]
        count = len(ends_s)
        while True:
            if count >= self._pushes:
                together = np.concatenate(pushes_s)
                limit_s = np.partition(together, self._pushes - 1)[self._pushes - 1]
            goes_on = ends_s < limit_s
            if not goes_on.any():
                return np.concatenate(pushes_s), np.concatenate(whose)
            workers, depth = workers[goes_on], depth + 1
            ends_s = ends_s[goes_on] + self._pool.look(workers, depth)
            pushes_s.append(ends_s)
            whose.append(workers)
            count += len(ends_s)

    def _used_s(self, pushes_s: _Floats, workers: _Ints, took_s: float) -> float:
        """Seconds of this round that went into pushes: of each worker, until its last one."""
        last_s = np.zeros(self._workers)
        is_used = pushes_s <= took_s
        np.maximum.at(last_s, workers[is_used], pushes_s[is_used])
        return float(last_s.sum())
