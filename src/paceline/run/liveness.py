"""Who gives no sign of life although it is awaited, and what is done about it.

    signs of life, ten times a second -> silent: what does it do? -> silence.py -> a verdict

    before prepare             stalled: it is given up
    between peers              everybody waits: it is given up
    through the store          given up if it holds the next job, if its work was handed on, if all
                               others wait, or if another can take its seat (--respawn);
                               else it is left alone and goes on when it can
    between epochs, at the end it is given up
    the only one that could    left alone, whatever it does

Only who is stopped stalls by itself, and who sleeps where the user said after how long; all others
are named and left alone (docs/design.md, "Faults"). To give a member up is to kill it before
anybody goes on: it shares memory with the others, and could wake up in the middle of writing. This
module must not know processes, signals or tensors.
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
"""Between two looks: more than that and the launcher itself did not run."""
_RECENT_S = 1.0
"""A sign of life that is younger was given by somebody who gets on."""


@dataclass(slots=True)
class Watched:
    """What is known of one member's signs of life."""

    signs: Signs
    silence: Silence
    is_told: bool = False
    """The coordinator knows that it has stalled."""
    is_given_up: bool = False
    busy: RosterEntry | None = None
    """For whom it may wait by itself."""
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
        """Whom the kernel holds; that may be told before anybody is watched."""
        self._last_s = 0.0

    def stopped(self, member: int, message: ProcessStopped) -> None:
        """The kernel has stopped this member."""
        self._stopped.add(member)

    def continued(self, member: int, message: ProcessContinued) -> None:
        """It goes on."""
        self._stopped.discard(member)

    def tick(self, now_s: float) -> None:
        """Look at everybody once."""
        if self._run.engine.processes is None:
            return  # one process: a debugger may hold it up for as long as it likes
        gap_s, self._last_s = now_s - self._last_s, now_s
        if gap_s > _GAP_S:  # this process did not run itself: nobody is to blame for that time
            for watched in self._watched.values():
                watched.silence.shift(gap_s)
        live, starting = self._run.roster.live, self._run.roster.starting
        awaited = [one for one in (*live, *starting) if self._look(one, now_s)]
        for one in awaited:
            self._excuse(one, awaited, now_s)
        silent = [one for one in awaited if self._watched[one.number].verdict.is_stalled]
        has_others = any(one not in silent for one in live)
        for one in awaited:
            if any(self._watched[one.number].verdict):
                self._judge(one, awaited, has_others=has_others, now_s=now_s)

    # -- for others who choose among members ----------------------------------------------------

    def liveliest(self, members: Sequence[int]) -> int:
        """The first of them that waits for others or gets on; else the one that did last.

        Where the store is each member's own, the one whose memory checkpoints are written from.
        """
        if not self._run.engine.traits.has_store:
            return members[0]
        waiting = [one for one in members if self._is_resting(one) and one not in self._stopped]
        members = waiting or members
        last = {number: self._last_sign_s(number) for number in members}
        newest_s = max(last.values())
        return next(number for number in members if last[number] > newest_s - _RECENT_S)

    def holds_up(self, member: int) -> bool:
        """Whether others cannot do what they have to before this member does something."""
        signs = self._run.processes.signs(member)
        if self._peers.by_peers:
            peers = self._peers.members
            return signs.arrived < max(self._run.processes.signs(one).arrived for one in peers)
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

    def _look(self, one: RosterEntry, now_s: float) -> bool:
        """Whether this member is awaited; its verdict is brought up to date."""
        run = self._run
        signs = run.processes.signs(one.number)
        watched = self._watched.get(one.number)
        if watched is None:
            watched = self._watched[one.number] = Watched(signs, Silence(now_s))
        silence = watched.silence
        is_moving = signs[:2] != watched.signs[:2]
        watched.signs = signs
        if is_moving and silence.was_named and not watched.is_given_up:
            silent_s = now_s - silence.since_s
            run.observer.note(f"worker {one.seat} goes on after {silent_s:.3g} s")
        is_awaited = self._is_awaited(one, watched)
        if is_moving or not is_awaited:
            silence.broken(now_s)
            watched.is_told, watched.verdict = False, Verdict()
            return is_awaited
        limits = self._limits(one, watched)
        is_held = one.number in self._stopped
        if is_held or silence.wants_look(now_s, limits):
            vitals = run.processes.vitals(one.number)
            watched.verdict = silence.look(now_s, vitals, limits, is_held=is_held)
        else:
            watched.verdict = silence.verdict()
        return True

    def _limits(self, one: RosterEntry, watched: Watched) -> Limits:
        return self._run.patience.limits(
            has_stepped=one.pushes > 0, may_sleep=watched.signs.is_first
        )

    def _is_awaited(self, one: RosterEntry, watched: Watched) -> bool:
        """Whether this member has something to do."""
        run = self._run
        if one.is_done or one.is_starting:
            return one.is_starting
        if run.has_begun and self._peers.by_peers:
            arrived = [run.processes.signs(number).arrived for number in self._peers.members]
            is_behind = watched.signs.arrived < max(arrived)
            return is_behind or one.number in self._stopped or min(arrived) == max(arrived)
        if run.has_begun and run.is_open:
            is_at_work = one.number in run.coordinator_members and run.coordinator.is_at_work(
                one.number
            )
            return is_at_work or run.dispatch.holds_next_job(one.number) or not one.has_arrived
        if self._is_resting(one.number):
            return False
        holds_job = run.dispatch.holds_next_job
        if holds_job(one.number):
            return True
        return not any(holds_job(other) for other in run.live)  # else it waits for that version

    def _excuse(self, one: RosterEntry, awaited: Sequence[RosterEntry], now_s: float) -> None:
        """Outside the loop who sleeps may wait for another one by itself, as for a file."""
        watched = self._watched[one.number]
        watched.busy = None
        if self._run.is_open or watched.silence.doing not in (Doing.SLEEPS, Doing.UNKNOWN):
            return
        for other in awaited:
            silence = self._watched[other.number].silence
            is_busy = silence.doing in (Doing.COMPUTES, Doing.TRACED)
            if other is not one and (is_busy or now_s - silence.since_s < _RECENT_S):
                watched.busy = other
                watched.silence.excused(now_s)
                watched.verdict = Verdict(is_due=watched.verdict.is_due)
                return

    # -- what is done ---------------------------------------------------------------------------

    def _judge(
        self, one: RosterEntry, awaited: Sequence[RosterEntry], *, has_others: bool, now_s: float
    ) -> None:
        watched = self._watched[one.number]
        if watched.is_given_up:
            return
        run = self._run
        case = Case(
            run=run, one=one, doing=watched.silence.doing, silent_s=now_s - watched.silence.since_s,
            waiting=[other for other in run.roster.live if other not in awaited],
            is_first=watched.signs.is_first, busy=watched.busy,
        )  # fmt: skip
        was_told = watched.is_told
        case.decision = self._decide(one, case, has_others=has_others)
        is_new = watched.is_told and not was_told
        if watched.verdict.is_due or is_new or watched.is_given_up:
            run.notes.say(explain(case))
        if watched.is_given_up:
            run.processes.end(one.number)

    def _decide(self, one: RosterEntry, case: Case, *, has_others: bool) -> str:
        """What becomes of it, in words."""
        watched = self._watched[one.number]
        if not watched.verdict.is_stalled:
            return case.left_alone()
        was_told, watched.is_told = watched.is_told, True
        if not has_others and not self._can_end_the_last():
            return "nobody is left to go on without it"
        if not self._must_go(one, watched, was_told):
            return "nobody waits for it: it is left alone"
        watched.is_given_up = True
        return case.given_up()

    def _can_end_the_last(self) -> bool:
        """Whether something is won where all that are left have stalled."""
        run = self._run
        if not run.has_begun:
            return run.settings.respawn
        return run.patience.given_s is not None and run.is_at_end

    def _must_go(self, one: RosterEntry, watched: Watched, was_told: bool) -> bool:
        run = self._run
        if one.is_starting:
            return True
        if not run.has_begun or self._peers.by_peers or not run.is_open or run.is_sticky:
            return True
        coordinator = run.coordinator
        if not one.has_arrived or one.number not in run.coordinator_members:
            return True
        is_handed_on = not was_told and run.stalled(one.number)
        others = [other for other in run.coordinator_members if other != one.number]
        all_wait = not any(coordinator.is_at_work(other) for other in others)
        is_awaited = is_handed_on or run.dispatch.holds_next_job(one.number)
        return is_awaited or all_wait or run.settings.respawn
