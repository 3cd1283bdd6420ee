"""The time that a machine takes besides injected delays: exchange, computing, shared cores.

    granted --apply--> ... --a core is free--> exchange, work --injected delay--> the push arrives
       |  only after an update: the new       |  holds the core                |  holds none
       |  version has to be written first     |

    pushed --add--> ... --apply--> the version is there       there is one sum: simultaneous pushes
       |   unless it is the only push of its update           are added one after the other

Workers that share cores take turns: the one that has waited longest gets the next time slice.

    wants a core --free--> turn --the slice ends--> the next worker's turn, and to the queue's end
                 `--none--> queue               `--nothing is left to do--> done

A worker that computes for less than a slice keeps its core until it is done, as processes on a
machine do; one that computes for far longer gets an equal share of the cores all the time. So two
workers that begin together on one core end at about the same time, and cancelling one, which frees
its core, makes the other faster. It must not know protocols, nor where the numbers were measured.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple

from .delays import Delay

Draw = Callable[[], float]
SLICE_S = 3e-3
"""How long Linux lets a process compute while others wait (EEVDF, 2.8 ms on 8 or more cores)."""
_MOST_TURNS = 20
"""Limit of turns for the shortest ticket: more would cost events and change nothing."""
NUM_STRETCHES, _FEWEST_IN_A_STRETCH = 8, 5
_LASTING = 4
"""Stretches of 2.5 s after which the autocorrelation of a shared machine's speed has fallen to one
third: measured over nine minutes of LeNet on both of two cores."""
_GRAIN = 1e-6
"""Share of a slice; less than this left to compute is a rounding error."""


class Drift(NamedTuple):
    """How much a machine's speed changed while it was measured, over `NUM_STRETCHES` stretches.

    Attributes:
        relative: standard deviation of its speed between stretches, relative to the mean.
        stretch_s: length of each stretch.
    """

    relative: float = 0.0
    stretch_s: float = 0.0

    def error(self, run_s: float) -> float:
        """Return the relative standard error of the measured times for a run of ``run_s``.

        The measurement and the run are means over stretches, of which about `_LASTING` in a row
        are alike.
        """
        of_measured, of_run = _LASTING / NUM_STRETCHES, min(1.0, _LASTING * self.stretch_s / run_s)
        return self.relative * math.sqrt(of_measured + of_run)


STEADY = Drift()


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The times of a machine, measured or assumed.

    Args:
        text: where they come from, for people.
        work: time to compute a mini-batch, by worker.
        exchange: a worker's other time from a grant to the next push, by worker.
        add_s: time to add a push to the sum of its update.
        apply_s: time from there until the update's new version can be pulled.
        pause_s: time from the end of an epoch to the first work of the next: evaluation.
        cores: cores that the workers share; None: each has its own.
        threads: threads of each worker, which hold as many cores while it computes.
        drift: how much the machine's speed changed while it was measured.
        mini_batch_size: samples of the measured mini-batches; 0: unknown.
        batch_size: samples that an update averaged then (per local step); 0: unknown.
    """

    text: str
    work: tuple[Delay, ...]
    exchange: tuple[Delay, ...]
    add_s: float = 0.0
    apply_s: float = 0.0
    pause_s: float = 0.0
    cores: int | None = None
    threads: int = 1
    drift: Drift = STEADY
    mini_batch_size: int = 0
    batch_size: int = 0

    def stretched(self, factor: float) -> "Machine":
        """Return this machine with all of its times multiplied by ``factor``."""
        return replace(
            self, work=tuple(times.stretched(factor) for times in self.work),
            exchange=tuple(times.stretched(factor) for times in self.exchange),
            add_s=factor * self.add_s, apply_s=factor * self.apply_s,
            pause_s=factor * self.pause_s,
        )  # fmt: skip


def places(cores: int, threads: int) -> int:
    """Return how many workers with ``threads`` threads each compute at the same time."""
    return max(1, cores // threads)


def drift_of(steps: Sequence[tuple[int, float, float]]) -> Drift:
    """Return how much a machine's speed changed from stretch to stretch.

    The variance of single steps is subtracted: only what a whole stretch has in common counts.

    Args:
        steps: of each step its worker, its end, and its length, in seconds.

    Returns:
        `STEADY` if there are too few steps to tell.
    """
    lengths: dict[int, list[float]] = {}
    for worker, _, length_s in steps:
        lengths.setdefault(worker, []).append(length_s)
    means_s = {worker: statistics.fmean(row) or 1.0 for worker, row in lengths.items()}
    in_time = sorted(steps, key=itemgetter(1))
    ordered = [length_s / means_s[worker] for worker, _, length_s in in_time]
    size = len(ordered) // NUM_STRETCHES
    if size < _FEWEST_IN_A_STRETCH:
        return STEADY
    stretches = [ordered[i * size : (i + 1) * size] for i in range(NUM_STRETCHES)]
    between = statistics.variance(statistics.fmean(stretch) for stretch in stretches)
    within = statistics.fmean(statistics.variance(stretch) for stretch in stretches) / size
    stretch_s = (in_time[-1][1] - in_time[0][1]) / NUM_STRETCHES
    return Drift(math.sqrt(max(0.0, between - within)), stretch_s)


class CostSum:
    """The store's time: it adds the pushes of an update one by one, and writes the version.

    Args:
        add_s, apply_s: time of each addition, and of writing a version.
    """

    def __init__(self, add_s: float, apply_s: float) -> None:
        self._add_s, self._apply_s = add_s, apply_s
        self._free_s = 0.0
        self._pushed_s: list[float] = []  # times of pushes that are not added yet
        self._is_empty = True

    def push(self, at_s: float) -> None:
        """Note that a push has arrived."""
        if self._add_s:
            self._pushed_s.append(at_s)

    def refuse(self) -> None:
        """Remove the last push, which is not used."""
        if self._pushed_s:
            self._pushed_s.pop()

    def ready_s(self, at_s: float, *, is_updated: bool) -> float:
        """Return when the members that are granted work at ``at_s`` can begin.

        An update of a single push is made from that push: nothing is added.

        Args:
            is_updated: whether they begin with a version that is made at ``at_s``.
        """
        pushed_s, self._pushed_s = self._pushed_s, []
        if len(pushed_s) > 1 or not (is_updated and self._is_empty):
            for push_s in pushed_s:
                self._free_s = max(self._free_s, push_s) + self._add_s
        if is_updated:
            self._free_s = max(self._free_s, at_s) + self._apply_s
        self._is_empty = is_updated or (self._is_empty and not pushed_s)
        return max(at_s, self._free_s) if pushed_s or is_updated else at_s


class ServerQueue:
    """One worker on the machine: needs a core while it computes, then waits for its delay.

    Args:
        draws: return the seconds of an exchange, of a mini-batch's work, of its injected delay.
        stretch: returns the end of what begins at a time and takes so many seconds at full speed.
    """

    def __init__(
        self, draws: tuple[Draw, Draw, Draw], stretch: Callable[[float, float], float]
    ) -> None:
        self._exchange, self._work, self._delay = draws
        self._stretch = stretch
        self.exchange_s, self.busy_s = 0.0, 0.0
        self._steps: list[tuple[float, float]] = []

    def take(self, num_steps: int) -> float:
        """Begin a ticket; return the seconds of a core that it needs, for exchange and work."""
        self.exchange_s = self._exchange()
        self._steps = [(self._work(), self._delay()) for _ in range(num_steps)]
        self.busy_s = self.exchange_s + sum(work_s for work_s, _ in self._steps)
        return self.busy_s

    def finish(self, from_s: float, until_s: float) -> tuple[float, float]:
        """Return when the work began and when the last delay ends.

        If it had to share cores, everything took proportionally longer.

        Args:
            from_s, until_s: when the ticket began and ended to compute.
        """
        share = (until_s - from_s) / self.busy_s if self.busy_s else 1.0
        begun_s = done_s = from_s + share * self.exchange_s
        for work_s, delay_s in self._steps:
            done_s = self._stretch(done_s, share * work_s + delay_s)
        return begun_s, done_s


class Turn(NamedTuple):
    """A worker has a core for one slice."""

    member: int
    from_s: float
    until_s: float


class Cores:
    """The cores, the current turns, and the members that wait.

    Args:
        num_cores: number of cores; if workers have several threads, of `places`.
        slice_s: length of a turn while others wait.
    """

    def __init__(self, num_cores: int, slice_s: float = SLICE_S) -> None:
        self._num_free = num_cores
        self._slice_s = slice_s
        self._waiting: deque[int] = deque()
        self._turns: dict[int, Turn] = {}
        self._left_s: dict[int, float] = {}
        self._busy_s: dict[int, float] = {}
        self._least_s = math.inf  # the least of _busy_s

    def enter(self, member: int, at_s: float, busy_s: float) -> Turn | None:
        """Add a member that needs a core for ``busy_s``; return its turn, if a core is free."""
        self._left_s[member] = self._busy_s[member] = busy_s
        self._least_s = min(self._least_s, busy_s)
        self._waiting.append(member)
        if not self._num_free:
            return None
        self._num_free -= 1
        return self._next(at_s)

    def is_under_way(self, turn: Turn) -> bool:
        """Return whether the turn was not cancelled."""
        return self._turns.get(turn.member) is turn

    def pass_on(self, turn: Turn) -> tuple[bool, Turn | None]:
        """End a turn; return whether its member is done, and the next turn at this core."""
        member = turn.member
        del self._turns[member]
        self._left_s[member] -= turn.until_s - turn.from_s
        is_done = self._left_s[member] <= _GRAIN * self._slice_s
        if is_done:
            self._forget(member)
        else:
            self._waiting.append(member)
        return is_done, self._next(turn.until_s)

    def leave(self, member: int, at_s: float) -> Turn | None:
        """Remove a cancelled member; return the next turn at its core, if it had one."""
        self._forget(member)
        if self._turns.pop(member, None) is not None:
            return self._next(at_s)
        self._waiting.remove(member)
        return None

    def __contains__(self, member: object) -> bool:
        """Return whether this member computes or waits for a core."""
        return member in self._left_s

    def _forget(self, member: int) -> None:
        del self._left_s[member]
        if self._busy_s.pop(member) == self._least_s:
            self._least_s = min(self._busy_s.values(), default=math.inf)

    def _next(self, at_s: float) -> Turn | None:
        """Give a free core to the member that has waited longest; return its turn."""
        if not self._waiting:
            self._num_free += 1
            return None
        member = self._waiting.popleft()
        slice_s = max(self._slice_s, self._least_s / _MOST_TURNS)
        length_s = min(slice_s, self._left_s[member])
        turn = self._turns[member] = Turn(member, at_s, at_s + length_s)
        return turn
