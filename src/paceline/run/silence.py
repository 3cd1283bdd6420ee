"""The rule of silence: from what a worker does to whether it is named, and whether it has stalled.

    no sign of life, and it ...      is named                             has stalled
    is traced, or computes           after named_s, and 2, 4, 8 times it  never
    sleeps, or nobody can tell       after named_s, and every again_s     after asleep_s
    is stopped                       when it has stalled, every again_s   after stopped_s

It computes where it, with all that it has begun, takes a twentieth of a core or more; the seconds
of `asleep_s` begin when it last did. Pure: readings and times in, verdicts out. This module must
not know processes, signals, or what is done about anybody.
"""

import enum
import math
from typing import NamedTuple

from ..core.stats import Limits
from ..system.vitals import ProcessState, Vitals

_SHARE = 0.05
"""Of a core: less than that is polling or a thread that reports on the side. A worker that computes
among twenty on one core has as much."""
_LEAST_CPU_S = 0.02
"""Two ticks of the clock that the kernel counts in."""
_SHORTEST_S, _LONGEST_S = 0.1, 5.0
"""Between two readings that are compared."""


class Doing(enum.Enum):
    """What a worker that gives no sign of life does."""

    COMPUTES = "computes"
    SLEEPS = "sleeps"
    STOPPED = "stopped"
    TRACED = "traced"
    UNKNOWN = "is"


class Verdict(NamedTuple):
    """
    Attributes:
        is_due: to be named now.
        is_stalled: it is to be given up, where somebody waits for it.
    """

    is_due: bool = False
    is_stalled: bool = False


_FINE = Verdict()


class Silence:
    """The silence of one worker.

    Args:
        now_s: of any clock that goes on; the same in all calls.

    Attributes:
        since_s: when it gave the last sign of life, or others began to wait for it.
    """

    def __init__(self, now_s: float) -> None:
        self.since_s = now_s
        self.doing = Doing.UNKNOWN
        self._begin(now_s)

    def _begin(self, now_s: float) -> None:
        self.since_s = self._idle_since_s = now_s
        self.doing = Doing.UNKNOWN
        self._mark: tuple[float, float] | None = None  # when, and the CPU seconds until then
        self._stopped_s = math.inf  # since when
        self._named_s = math.inf  # after how much silence it was named last
        self._next_look_s = now_s
        self._is_stalled = False

    @property
    def was_named(self) -> bool:
        """In this silence."""
        return self._named_s < math.inf

    def broken(self, now_s: float) -> None:
        """It gave a sign of life, or nobody waits for it."""
        self._begin(now_s)

    def shift(self, gap_s: float) -> None:
        """So much time does not count: whoever looks did not run."""
        self.since_s += gap_s
        self._idle_since_s += gap_s
        self._stopped_s += gap_s
        self._mark = None

    def excused(self, now_s: float) -> None:
        """It may wait for another that is busy: its own sleep does not count until now."""
        self._idle_since_s = now_s
        self._is_stalled = False

    def wants_look(self, now_s: float, limits: Limits) -> bool:
        """Whether a reading is worth its cost now."""
        return now_s >= self._next_look_s and now_s - self.since_s >= limits.least_s / 2

    def verdict(self) -> Verdict:
        """Where nobody has looked: as before."""
        return Verdict(is_stalled=self._is_stalled)

    def look(
        self, now_s: float, vitals: Vitals, limits: Limits, *, is_held: bool = False
    ) -> Verdict:
        """What follows from a reading.

        Args:
            is_held: its parent says that it is stopped, for where the reading knows nothing.
        """
        if vitals.state is ProcessState.ENDED:
            return _FINE  # its parent tells
        self._next_look_s = now_s + min(1.0, max(_SHORTEST_S, limits.least_s / 8))
        self._see(now_s, vitals, limits, is_held)
        silent_s = now_s - self.since_s
        self._is_stalled = self._has_stalled(now_s, limits)
        is_due = self._is_due(silent_s, limits)
        if is_due:
            self._named_s = silent_s
        return Verdict(is_due, self._is_stalled)

    def _see(self, now_s: float, vitals: Vitals, limits: Limits, is_held: bool) -> None:
        is_stopped = vitals.state is ProcessState.STOPPED or (
            is_held and vitals.state is ProcessState.UNKNOWN
        )
        self._stopped_s = min(self._stopped_s, now_s) if is_stopped else math.inf
        if is_stopped:
            self.doing = Doing.STOPPED
        elif vitals.state is ProcessState.TRACED:
            self.doing, self._idle_since_s = Doing.TRACED, now_s
        elif vitals.state is ProcessState.UNKNOWN:
            self.doing = Doing.UNKNOWN
        else:
            self._compare(now_s, vitals.cpu_s, limits)
            return
        self._mark = None

    def _compare(self, now_s: float, cpu_s: float, limits: Limits) -> None:
        """Whether it computes, by the seconds that it used since the last mark."""
        if self._mark is None:
            self._mark = (now_s, cpu_s)
            if self.doing in (Doing.STOPPED, Doing.TRACED):  # it has just been let go
                self.doing, self._idle_since_s = Doing.COMPUTES, now_s
            return
        passed_s, used_s = now_s - self._mark[0], cpu_s - self._mark[1]
        if passed_s < min(_LONGEST_S, max(_SHORTEST_S, limits.least_s / 8)):
            return
        self._mark = (now_s, cpu_s)
        # Less than before: somebody that it had begun has ended, whose time went with it.
        if used_s < 0 or used_s >= max(_SHARE * passed_s, _LEAST_CPU_S):
            self.doing, self._idle_since_s = Doing.COMPUTES, now_s
        else:
            self.doing = Doing.SLEEPS

    def _has_stalled(self, now_s: float, limits: Limits) -> bool:
        if self.doing is Doing.STOPPED:
            return now_s - max(self._stopped_s, self.since_s) >= limits.stopped_s
        if self.doing in (Doing.SLEEPS, Doing.UNKNOWN):
            is_known = self.doing is Doing.SLEEPS or self._mark is None
            return is_known and now_s - self._idle_since_s >= limits.asleep_s
        return False

    def _is_due(self, silent_s: float, limits: Limits) -> bool:
        if not self.was_named:
            is_held = self.doing is Doing.STOPPED
            return self._is_stalled or (silent_s >= limits.named_s and not is_held)
        if self.doing in (Doing.COMPUTES, Doing.TRACED):
            return silent_s >= 2.0 * self._named_s
        return silent_s - self._named_s >= limits.again_s
