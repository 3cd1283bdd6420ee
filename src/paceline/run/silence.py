"""The rule for silent workers: from what a worker does to whether it has stalled, and the message.

    no sign of life, and it ...      is named                             has stalled
    is traced, or computes           after named_s, and 2, 4, 8 times it  never
    sleeps, or that is not known     after named_s, and every again_s     after asleep_s
    is stopped                       when it has stalled, every again_s   after stopped_s

It computes if it, with all its processes, uses a twentieth of a core or more, or is runnable twice
in a row, as on a machine too busy to run it; the seconds of `asleep_s` begin when it last computed.
Readings and times in, verdicts out (`Silence`). The message says how long, where it is, what it
does, who waits, and what follows (`explain`):

    worker 3 has not pushed for 62 s (usual: 0.4 s): it sleeps at data.py:88 in __getitem__; the
    others wait for update 41; it is left alone (--stall-after SECONDS would end it)

This module must not know processes, signals, who decides, or how it is carried out.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..core.stats import Limits
from ..system.vitals import ProcessState, Vitals
from .roster import RosterEntry
from .state import RunState

_SHARE = 0.05
"""Of a core: less is polling, or a background thread. A worker that computes among twenty on one
core has as much."""
_LEAST_CPU_S = 0.02
"""Two ticks of the clock that the kernel counts in."""
_SHORTEST_S, _LONGEST_S = 0.1, 5.0
"""Between two readings that are compared."""


class Doing(enum.Enum):
    """What a worker without signs of life does."""

    COMPUTES = "computes"
    SLEEPS = "sleeps"
    STOPPED = "stopped"
    TRACED = "traced"
    UNKNOWN = "is"


class Verdict(NamedTuple):
    """
    Attributes:
        is_due: whether to report it now.
        is_stalled: whether it is to be given up, if others wait for it.
    """

    is_due: bool = False
    is_stalled: bool = False


_FINE = Verdict()


class Silence:
    """The silence of one worker.

    Args:
        now_s: of any monotonic clock; the same clock in all calls.

    Attributes:
        since_s: when it gave its last sign of life, or others began to wait for it.
    """

    def __init__(self, now_s: float) -> None:
        self.since_s = now_s
        self.doing = Doing.UNKNOWN
        self._begin(now_s)

    def _begin(self, now_s: float) -> None:
        self.since_s = self._idle_since_s = now_s
        self.doing = Doing.UNKNOWN
        self._mark: tuple[float, Vitals] | None = None  # the reading that the next is compared with
        self._stopped_s = math.inf  # since when
        self._named_s = math.inf  # after how much silence it was named last
        self._next_look_s = now_s
        self._is_stalled = False

    @property
    def was_named(self) -> bool:
        """Whether it was reported in this silence."""
        return self._named_s < math.inf

    def broken(self, now_s: float) -> None:
        """It gave a sign of life, or is not waited for."""
        self._begin(now_s)

    def shift(self, gap_s: float) -> None:
        """So much time does not count: the launcher itself did not run."""
        self.since_s += gap_s
        self._idle_since_s += gap_s
        self._stopped_s += gap_s
        self._mark = None

    def excused(self, now_s: float) -> None:
        """It may wait for another busy worker: its sleep until now does not count."""
        self._idle_since_s = now_s
        self._is_stalled = False

    def wants_look(self, now_s: float, limits: Limits) -> bool:
        """Whether a reading is worth its cost now."""
        return now_s >= self._next_look_s and now_s - self.since_s >= limits.least_s / 2

    def verdict(self) -> Verdict:
        """The verdict without a new reading: as before."""
        return Verdict(is_stalled=self._is_stalled)

    def look(
        self, now_s: float, vitals: Vitals, limits: Limits, *, is_held: bool = False
    ) -> Verdict:
        """The verdict after a reading.

        Args:
            is_held: whether its parent reports it as stopped, for readings without a state.
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
            self._compare(now_s, vitals, limits)
            return
        self._mark = None

    def _compare(self, now_s: float, vitals: Vitals, limits: Limits) -> None:
        """Whether it computes, by the processor time since the last reading."""
        if self._mark is None:
            self._mark = (now_s, vitals)
            if self.doing in (Doing.STOPPED, Doing.TRACED):  # it has just been let go
                self.doing, self._idle_since_s = Doing.COMPUTES, now_s
            return
        before_s, before = self._mark
        passed_s, used_s = now_s - before_s, vitals.cpu_s - before.cpu_s
        if passed_s < min(_LONGEST_S, max(_SHORTEST_S, limits.least_s / 8)):
            return
        self._mark = (now_s, vitals)
        # Less than before: a child process has ended, and its time no longer counts.
        is_busy = used_s < 0 or used_s >= max(_SHARE * passed_s, _LEAST_CPU_S)
        if is_busy or (before.is_running and vitals.is_running):
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


@dataclass(slots=True, kw_only=True)
class Case:
    """One silent member.

    Attributes:
        waiting: members that only wait.
        is_first: whether it goes through ``pace.once()`` before the others.
        busy: the worker that it may be waiting for.
        decision: what becomes of it.
    """

    run: RunState
    one: RosterEntry
    doing: Doing
    silent_s: float
    waiting: Sequence[RosterEntry]
    is_first: bool
    busy: RosterEntry | None
    decision: str = ""

    def left_alone(self) -> str:
        """It has not stalled: why it is not ended, and how it could be."""
        is_given = self.run.patience.given_s is not None
        if self.doing is Doing.TRACED:
            return "a debugger looks at it: it is left alone"
        if self.is_first:
            how = f"also with --stall-after (kill -9 {self.one.pid} ends it)"
            return f"it is left alone in pace.once(), {how}"
        if self.doing is Doing.COMPUTES:
            hint = "" if is_given else "; --stall-after SECONDS ends who sleeps, not who computes"
            return f"it is left alone, since it computes (kill -9 {self.one.pid} ends it{hint})"
        if is_given and self.busy is not None:
            return f"it may wait for worker {self.busy.seat}, which is busy: it is left alone"
        if is_given:
            return "it is left alone until it has slept so long"
        return "it is left alone (--stall-after SECONDS would end it after so long)"

    def given_up(self) -> str:
        """It is ended: what becomes of its work."""
        run = self.run
        if run.is_at_end:
            return "it is ended"
        if run.settings.respawn:
            return "it is ended, and a new worker takes its place"
        if not run.has_begun:
            return "it is ended, and the run with it (--respawn would begin a new one)"
        return "it is ended, and the others do its work (--respawn would begin a new one)"


def explain(case: Case) -> str:
    """The whole message."""
    run, seat = case.run, case.one.seat
    where = run.processes.whereabouts(case.one.number, case.doing.value)
    parts = [f"worker {seat} {_silence(case)}: {where}", _waits(case), case.decision]
    return "; ".join(part for part in parts if part)


def _silence(case: Case) -> str:
    run, silent = case.run, f"for {case.silent_s:.3g} s"
    if not run.has_begun or case.one.is_starting:
        return f"has not come to prepare() {silent}"
    if run.is_at_end:
        return f"has not come to its end {silent}"
    if not run.is_open:
        which = "its first" if run.coordinator.epoch < 0 else "the next"
        return f"has not come to {which} epoch {silent}"
    usual_s = run.patience.usual_s
    usual = f" (usual: {usual_s:.2g} s)" if usual_s == usual_s else ""
    return f"has not pushed {silent}{usual}"


def _waits(case: Case) -> str:
    """``the others wait for update 41``, ``worker 0 waits for it``; empty: none waits yet."""
    run = case.run
    seats = sorted(one.seat for one in case.waiting if one is not case.one)
    if not seats or case.one.is_starting:
        return ""
    num_others = len(run.roster.live) - 1
    what = "it"
    if run.has_begun and run.is_open:
        version = max(run.coordinator.version, run.dispatch.store.version)
        what = f"update {version + 1}"
    if len(seats) == num_others > 1 or (num_others == 1 and what != "it"):
        return f"the others wait for {what}"
    if len(seats) == 1:
        return f"worker {seats[0]} waits for {what}"
    return f"workers {', '.join(map(str, seats[:-1]))} and {seats[-1]} wait for {what}"
