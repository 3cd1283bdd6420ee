"""Members that give no sign of life although others wait for them, and what is done about them.

    signs of life, ten times a second -> silent: what does it do? -> silence.py -> a verdict

    a member that has stalled
    before prepare              is given up
    between peers               is given up, since everybody waits
    through the store           is given up if it holds the next job, if its work was handed on, if
                                all others wait, or if another can take its seat (--respawn);
                                else it is left alone and continues when it can
    between epochs, at the end  is given up
    as the only one left        is left alone, whatever it does

Only a stopped member stalls without a setting, and a sleeping one after the time that the user set;
all others are reported and left alone (docs/design.md, "Faults"). A member that is given up is
killed before anybody continues: it shares memory with the others, and could wake up in the middle
of a write. This module must not know processes, signals or tensors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..core.stats import Limits
from ..engines.base import ProcessContinued, ProcessStopped, Signs
from .peers import Peers
from .roster import RosterEntry
from .silence import Case, Doing, Silence, Verdict, explain
from .state import RunState

_GAP_S = 1.0
"""Between two checks: after a longer gap the launcher itself did not run."""
_RECENT_S = 1.0
"""A member with a sign of life younger than this makes progress."""


@dataclass(slots=True)
class Watched:
    """One member's signs of life, and the verdict on its silence."""

    signs: Signs
    silence: Silence
    is_told: bool = False
    """Whether the coordinator knows that it has stalled."""
    is_given_up: bool = False
    busy: RosterEntry | None = None
    """The member that it may be waiting for."""
    verdict: Verdict = field(default_factory=Verdict)


class Liveness:
    """The silent members of one run.

    Args:
        is_resting: whether a member has done its part and waits for others, outside of epochs.
    """

    def __init__(self, run: RunState, peers: Peers, is_resting: Callable[[int], bool]) -> None:
        self._run = run
        self._peers = peers
        self._is_resting = is_resting
        self._watched: dict[int, Watched] = {}
        self._stopped: set[int] = set()
        """Members that the kernel has stopped, also those that are not watched yet."""
        self._last_s = 0.0
        self._signs: dict[int, Signs] = {}
        """Of all members, at the last check."""
        self._arrived = (0, 0)
        """Fewest and most barriers that a peer has reached, at the last check."""
        self._is_job_held = False
        """Whether any member held the next job at the last check."""

    def stopped(self, member: int, message: ProcessStopped) -> None:
        """The kernel has stopped this member."""
        self._stopped.add(member)

    def continued(self, member: int, message: ProcessContinued) -> None:
        """This member runs again."""
        self._stopped.discard(member)

    def tick(self, now_s: float) -> None:
        """Check every member once."""
        if self._run.engine.processes is None:
            return  # one process: a debugger may hold it up for as long as it likes
        gap_s, self._last_s = now_s - self._last_s, now_s
        if gap_s > _GAP_S:  # this process did not run itself: that time does not count
            for watched in self._watched.values():
                watched.silence.shift(gap_s)
        live, starting = self._run.roster.live, self._run.roster.starting
        self._read_signs((*live, *starting))
        awaited = [entry for entry in (*live, *starting) if self._look(entry, now_s)]
        for entry in awaited:
            self._excuse(entry, awaited, now_s)
        stalled = [entry for entry in awaited if self._watched[entry.number].verdict.is_stalled]
        has_others = any(entry not in stalled for entry in live)
        for entry in awaited:
            if any(self._watched[entry.number].verdict):
                self._judge(entry, awaited, has_others=has_others, now_s=now_s)

    # -- for others who choose among members ----------------------------------------------------

    def liveliest(self, members: Sequence[int]) -> int:
        """The first of them that waits for others or makes progress; else the latest that did.

        If each member has a store of its own, the one that checkpoints are written from.
        """
        if not self._run.engine.traits.has_store:
            return members[0]
        waiting = [
            number for number in members if self._is_resting(number) and number not in self._stopped
        ]
        members = waiting or members
        last_signs_s = {number: self._last_sign_s(number) for number in members}
        newest_s = max(last_signs_s.values())
        return next(number for number in members if last_signs_s[number] > newest_s - _RECENT_S)

    def holds_up(self, member: int) -> bool:
        """Whether others cannot proceed before this member does something, by the last check."""
        if self._peers.by_peers:
            return member in self._signs and self._signs[member].arrived < self._arrived[1]
        return self._run.dispatch.holds_next_job(member) or member in self._stopped

    def is_given_up(self, member: int) -> bool:
        """Whether this member is being ended."""
        watched = self._watched.get(member)
        return watched is not None and watched.is_given_up

    def _last_sign_s(self, member: int) -> float:
        watched = self._watched.get(member)
        if watched is None or member in self._stopped:
            return 0.0
        return watched.silence.since_s

    # -- signs of life --------------------------------------------------------------------------

    def _read_signs(self, members: Sequence[RosterEntry]) -> None:
        """Read every member's signs once, and what is judged over all of them."""
        run = self._run
        self._signs = {entry.number: run.processes.signs(entry.number) for entry in members}
        if self._peers.by_peers:
            arrived = [self._signs[number].arrived for number in self._peers.members]
            self._arrived = min(arrived, default=0), max(arrived, default=0)
        self._is_job_held = any(map(run.dispatch.holds_next_job, run.live))

    def _look(self, entry: RosterEntry, now_s: float) -> bool:
        """Whether this member is awaited; updates its verdict."""
        run = self._run
        signs = self._signs[entry.number]
        watched = self._watched.get(entry.number)
        if watched is None:
            watched = self._watched[entry.number] = Watched(signs, Silence(now_s))
        silence = watched.silence
        is_moving = signs[:2] != watched.signs[:2]
        watched.signs = signs
        if is_moving and silence.was_named and not watched.is_given_up:
            silent_s = now_s - silence.since_s
            run.observer.note(f"worker {entry.seat} goes on after {silent_s:.3g} s")
        is_awaited = self._is_awaited(entry, watched)
        if is_moving or not is_awaited:
            silence.broken(now_s)
            watched.is_told, watched.verdict = False, Verdict()
            return is_awaited
        limits = self._limits(entry, watched)
        is_held = entry.number in self._stopped
        if is_held or silence.wants_look(now_s, limits):
            vitals = run.processes.vitals(entry.number)
            watched.verdict = silence.look(now_s, vitals, limits, is_held=is_held)
        else:
            watched.verdict = silence.verdict()
        return True

    def _limits(self, entry: RosterEntry, watched: Watched) -> Limits:
        return self._run.patience.limits(
            has_stepped=entry.pushes > 0, may_sleep=watched.signs.is_first
        )

    def _is_awaited(self, entry: RosterEntry, watched: Watched) -> bool:
        """Whether this member has something to do."""
        run = self._run
        if entry.is_done or entry.is_starting:
            return entry.is_starting
        if run.has_begun and self._peers.by_peers:
            fewest, most = self._arrived
            is_behind = watched.signs.arrived < most
            return is_behind or entry.number in self._stopped or fewest == most
        if run.has_begun and run.is_open:
            is_at_work = entry.number in run.coordinator_members and run.coordinator.is_at_work(
                entry.number
            )
            return is_at_work or run.dispatch.holds_next_job(entry.number) or not entry.has_arrived
        if self._is_resting(entry.number):
            return False
        # A member without the next job waits for the version that comes of it.
        return run.dispatch.holds_next_job(entry.number) or not self._is_job_held

    def _excuse(self, entry: RosterEntry, awaited: Sequence[RosterEntry], now_s: float) -> None:
        """Excuse a member that sleeps outside the loop: it may wait for another, as for a file."""
        watched = self._watched[entry.number]
        watched.busy = None
        if self._run.is_open or watched.silence.doing not in (Doing.SLEEPS, Doing.UNKNOWN):
            return
        for other in awaited:
            silence = self._watched[other.number].silence
            is_busy = silence.doing in (Doing.COMPUTES, Doing.TRACED)
            if other is not entry and (is_busy or now_s - silence.since_s < _RECENT_S):
                watched.busy = other
                watched.silence.excused(now_s)
                watched.verdict = Verdict(is_due=watched.verdict.is_due)
                return

    # -- what is done ---------------------------------------------------------------------------

    def _judge(
        self, entry: RosterEntry, awaited: Sequence[RosterEntry], *, has_others: bool, now_s: float
    ) -> None:
        watched = self._watched[entry.number]
        if watched.is_given_up:
            return
        run = self._run
        case = Case(
            run=run, one=entry, doing=watched.silence.doing,
            silent_s=now_s - watched.silence.since_s,
            waiting=[other for other in run.roster.live if other not in awaited],
            is_first=watched.signs.is_first, busy=watched.busy,
        )  # fmt: skip
        was_told = watched.is_told
        case.decision = self._decide(entry, case, has_others=has_others)
        is_new = watched.is_told and not was_told
        if watched.verdict.is_due or is_new or watched.is_given_up:
            run.notes.say(explain(case))
        if watched.is_given_up:
            run.processes.end(entry.number)

    def _decide(self, entry: RosterEntry, case: Case, *, has_others: bool) -> str:
        """Decide what becomes of a silent member; returns it in words."""
        watched = self._watched[entry.number]
        if not watched.verdict.is_stalled:
            return case.left_alone()
        was_told, watched.is_told = watched.is_told, True
        if not has_others and not self._can_end_the_last():
            return "nobody is left to go on without it"
        if not self._must_go(entry, watched, was_told):
            return "nobody waits for it: it is left alone"
        watched.is_given_up = True
        return case.given_up()

    def _can_end_the_last(self) -> bool:
        """Whether ending a member helps when all that are left have stalled."""
        run = self._run
        if not run.has_begun:
            return run.settings.respawn
        return run.patience.given_s is not None and run.is_at_end

    def _must_go(self, entry: RosterEntry, watched: Watched, was_told: bool) -> bool:
        """Whether the run cannot continue while this stalled member is alive."""
        run = self._run
        if entry.is_starting:
            return True
        if not run.has_begun or self._peers.by_peers or not run.is_open or run.is_sticky:
            return True
        coordinator = run.coordinator
        if not entry.has_arrived or entry.number not in run.coordinator_members:
            return True
        is_handed_on = not was_told and run.stalled(entry.number)
        others = [other for other in run.coordinator_members if other != entry.number]
        all_wait = not any(coordinator.is_at_work(other) for other in others)
        is_awaited = is_handed_on or run.dispatch.holds_next_job(entry.number)
        return is_awaited or all_wait or run.settings.respawn
