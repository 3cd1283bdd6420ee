"""What a machine takes beside the delays that are ordered: the exchange, the computing, its cores.

    granted --apply--> ... --a core is free--> exchange, work --ordered delay--> the push is there
       |  only after an update: the new       |  holds the core               |  holds none
       |  version has to be written first     |

    pushed --add--> ... --apply--> the version is there       the sum is one: who pushes at the same
       |   unless it is the only push of its update           time adds one after the other

Workers that share cores take turns at them: who has waited longest computes next, a slice of time.

    wants a core --free--> turn --its slice is over--> the next one's turn, and to the queue's end
                 `--none--> queue                  `--nothing is left to do--> done

Who computes for less than a slice has a core until it is done, as processes on a machine do; who
computes for far longer gets an equal share of the cores, all the time. So two workers that begin
together on one core are done at about the same time, and calling one off, which gives its core
back, makes the other faster. It must not know protocols, nor where the numbers were measured.
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
"""What Linux lets a process compute while others wait (EEVDF, 2.8 ms on eight cores and more)."""
_MOST_TURNS = 20
"""For the ticket that takes least: more would cost events and change nothing."""
NUM_STRETCHES, _FEWEST_IN_A_STRETCH = 8, 5
_LASTING = 4
"""Stretches of 2.5 s after which a shared machine's speed has forgotten two thirds of what it was:
measured over nine minutes of LeNet on both of two cores."""
_GRAIN = 1e-6
"""Of a slice: what is less than this is what rounding left."""


class Drift(NamedTuple):
    """How much a machine's speed changed while it was measured, for `NUM_STRETCHES` stretches.

    Attributes:
        relative: standard deviation of its speed between stretches, of its mean.
        stretch_s: how long each was.
    """

    relative: float = 0.0
    stretch_s: float = 0.0

    def error(self, run_s: float) -> float:
        """Relative standard error of what was measured, for a run of so many seconds.

        Both are means over stretches, of those that were measured and of those that come, and
        about `_LASTING` in a row are alike.
        """
        measured, coming = _LASTING / NUM_STRETCHES, min(1.0, _LASTING * self.stretch_s / run_s)
        return self.relative * math.sqrt(measured + coming)


STEADY = Drift()


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was measured on a machine, or is assumed of one.

    Args:
        text: where it is from, for people.
        work: computing of a mini-batch, by worker.
        exchange: what a worker needs beside it from a grant to the next push, by worker.
        add_s: seconds that adding a push to the sum of its update takes.
        apply_s: seconds from there until the update's new version can be pulled.
        pause_s: seconds from the end of an epoch to the first work of the next: evaluation.
        cores: that the workers share; None: each has its own.
        threads: of each worker: while it computes it holds so many of the cores.
        drift: how much its speed changed while it was measured.
        mini_batch_size: samples that each was measured with; 0: nobody knows.
        batch_size: samples that an update averaged then (per local step); 0: nobody knows.
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
        """This machine with everything that it does ``factor`` times as long."""
        return replace(
            self, work=tuple(times.stretched(factor) for times in self.work),
            exchange=tuple(times.stretched(factor) for times in self.exchange),
            add_s=factor * self.add_s, apply_s=factor * self.apply_s,
            pause_s=factor * self.pause_s,
        )  # fmt: skip


def places(cores: int, threads: int) -> int:
    """How many workers of so many threads compute at a time."""
    return max(1, cores // threads)


def drift_of(steps: Sequence[tuple[int, float, float]]) -> Drift:
    """How much a machine's speed changed, from stretch to stretch.

    What single steps scatter is taken out: only what a whole stretch has in common counts.

    Args:
        steps: of which worker, when it ended, how long it took.

    Returns:
        A drift of nothing for too few steps to tell.
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
    """Where the pushes of an update are added, one after the other, and the version written.

    Args:
        add_s, apply_s: what each takes.
    """

    def __init__(self, add_s: float, apply_s: float) -> None:
        self._add_s, self._apply_s = add_s, apply_s
        self._free_s = 0.0
        self._pushed_s: list[float] = []  # and not added yet, as far as was asked
        self._is_empty = True

    def push(self, at_s: float) -> None:
        """A push is there."""
        if self._add_s:
            self._pushed_s.append(at_s)

    def refuse(self) -> None:
        """The last push is not used: it is not added."""
        if self._pushed_s:
            self._pushed_s.pop()

    def ready_s(self, at_s: float, *, is_updated: bool) -> float:
        """When those can begin who are granted now; ``is_updated``: with a version only now made.

        An update of one push alone is made from that push: nothing is added.
        """
        pushed_s, self._pushed_s = self._pushed_s, []
        if len(pushed_s) > 1 or not (is_updated and self._is_empty):
            for one_s in pushed_s:
                self._free_s = max(self._free_s, one_s) + self._add_s
        if is_updated:
            self._free_s = max(self._free_s, at_s) + self._apply_s
        self._is_empty = is_updated or (self._is_empty and not pushed_s)
        return max(at_s, self._free_s) if pushed_s or is_updated else at_s


class ServerQueue:
    """One worker at the machine: needs a core while it computes, and then waits out its delay.

    Args:
        draws: seconds of an exchange, of computing a mini-batch, of its ordered delay.
        stretch: when something is done that begins then and takes so long at full speed.
    """

    def __init__(
        self, draws: tuple[Draw, Draw, Draw], stretch: Callable[[float, float], float]
    ) -> None:
        self._exchange, self._work, self._delay = draws
        self._stretch = stretch
        self.exchange_s, self.busy_s = 0.0, 0.0
        self._steps: list[tuple[float, float]] = []

    def take(self, num_steps: int) -> float:
        """Take up a ticket: seconds of a core that it needs, for exchange and computing."""
        self.exchange_s = self._exchange()
        self._steps = [(self._work(), self._delay()) for _ in range(num_steps)]
        self.busy_s = self.exchange_s + sum(work_s for work_s, _ in self._steps)
        return self.busy_s

    def finish(self, from_s: float, until_s: float) -> tuple[float, float]:
        """It computed from then to then: when the work began, and when the last delay is over.

        Where it had to share cores, everything took as many times longer.
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
    """The cores, whose turn it is, and who waits.

    Args:
        num_cores: how many there are; of workers of several threads, how many `places`.
        slice_s: how long a turn lasts where others wait.
    """

    def __init__(self, num_cores: int, slice_s: float = SLICE_S) -> None:
        self._num_free = num_cores
        self._slice_s = slice_s
        self._waiting: deque[int] = deque()
        self._turns: dict[int, Turn] = {}
        self._left_s: dict[int, float] = {}
        self._busy_s: dict[int, float] = {}
        self._least_s = math.inf  # of them

    def enter(self, member: int, at_s: float, busy_s: float) -> Turn | None:
        """A member wants a core for so long; its first turn, if a core is free."""
        self._left_s[member] = self._busy_s[member] = busy_s
        self._least_s = min(self._least_s, busy_s)
        self._waiting.append(member)
        if not self._num_free:
            return None
        self._num_free -= 1
        return self._next(at_s)

    def is_under_way(self, turn: Turn) -> bool:
        """Whether nobody called it off."""
        return self._turns.get(turn.member) is turn

    def pass_on(self, turn: Turn) -> tuple[bool, Turn | None]:
        """A turn is over: whether its member is done, and whose turn it is now at this core."""
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
        """A member that is not done is called off; whose turn it is if it had a core."""
        self._forget(member)
        if self._turns.pop(member, None) is not None:
            return self._next(at_s)
        self._waiting.remove(member)
        return None

    def __contains__(self, member: object) -> bool:
        """Whether this member computes, or waits for a core."""
        return member in self._left_s

    def _forget(self, member: int) -> None:
        del self._left_s[member]
        if self._busy_s.pop(member) == self._least_s:
            self._least_s = min(self._busy_s.values(), default=math.inf)

    def _next(self, at_s: float) -> Turn | None:
        """The turn of whoever has waited longest, at a core that is free."""
        if not self._waiting:
            self._num_free += 1
            return None
        member = self._waiting.popleft()
        slice_s = max(self._slice_s, self._least_s / _MOST_TURNS)
        length_s = min(slice_s, self._left_s[member])
        turn = self._turns[member] = Turn(member, at_s, at_s + length_s)
        return turn
