"""What is said of a silent worker: how long, where it is, what it does, who waits, what follows.

    worker 3 has not pushed for 62 s (usual: 0.4 s): it sleeps at data.py:88 in __getitem__; the
    others wait for update 41; it is left alone (--stall-after SECONDS would end it)

This module must not know who decides, or how it is carried out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .roster import RosterEntry
from .silence import Doing
from .state import RunState


@dataclass(slots=True, kw_only=True)
class Case:
    """One silent member.

    Attributes:
        waiting: members that have nothing to do but wait.
        is_first: whether it goes through ``pace.once()`` before the others.
        busy: for whom it may wait by itself.
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
        """It has not stalled: why nobody ends it, and who could."""
        is_given = self.run.patience.given_s is not None
        if self.doing is Doing.TRACED:
            return "a debugger looks at it: it is left alone"
        if self.doing is Doing.COMPUTES:
            hint = "" if is_given else "; --stall-after SECONDS ends who sleeps, not who computes"
            return f"it is left alone, since it computes (kill -9 {self.one.pid} ends it{hint})"
        if self.is_first:
            return f"it is left alone in pace.once() (kill -9 {self.one.pid} ends it)"
        if is_given and self.busy is not None:
            return f"it may wait for worker {self.busy.seat}, which is busy: it is left alone"
        if is_given:
            return "it is left alone until it has slept so long"
        return "it is left alone (--stall-after SECONDS would end it after so long)"

    def given_up(self) -> str:
        """It is ended: who does its work."""
        run = self.run
        if run.is_at_end:
            return "it is ended"
        if run.settings.respawn:
            return "it is ended, and a new worker takes its place"
        if not run.has_begun:
            return "it is ended, and the run with it (--respawn would begin a new one)"
        return "it is ended, and the others do its work (--respawn would begin a new one)"


def explain(case: Case) -> str:
    """The whole sentence."""
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
    """``the others wait for update 41``, ``worker 0 waits for it``; empty: nobody waits yet."""
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
