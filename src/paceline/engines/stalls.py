"""Who gives no sign of life although others wait for it, and what is done about it.

    signs of life, ten times a second -> silent for how long -> explained -> given up, or left alone

    between peers              everybody waits: it is given up
    through the store          given up if it holds the next job, if its work was handed on, if all
                               others wait, or if another can take its seat (--respawn);
                               else it is left alone and goes on when it can
    between epochs             given up if it is stopped, or was silent before the epoch ended
    the only one that could    left alone, whatever it does

To give a member up is to kill it before anybody goes on: it shares memory with the others, and
could wake up in the middle of writing (docs/design.md, "Faults"). How long silence may last is
`Patience`. This module must not know processes, signals or tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ..sessions.lane import Message
from .base import Signs
from .peers import Peers
from .roster import Member
from .run import Run

_FIRST_STEP_S = 120.0
"""A member that never pushed may compile, or read its data for the first time."""
_GAP_S = 1.0
"""Between two looks: more than that and the launcher itself did not run."""


@dataclass(slots=True)
class Watched:
    """What is known of one member's signs of life."""

    signs: Signs
    since_s: float
    """When it last gave one, or when others began to wait for it."""
    is_stalled: bool = False
    """The silence counts, and was explained."""
    is_given_up: bool = False


class Stalls:
    """The silent members of one run.

    Args:
        is_resting: whether a member waits for the others between epochs.
    """

    def __init__(self, run: Run, peers: Peers, is_resting: Callable[[int], bool]) -> None:
        self._run = run
        self._peers = peers
        self._is_resting = is_resting
        self._watched: dict[int, Watched] = {}
        self._stopped: set[int] = set()
        """Whom the kernel holds; that may be told before anybody is watched."""
        self._last_s = 0.0

    def stopped(self, member: int, message: Message) -> None:
        """The kernel has stopped this member."""
        self._stopped.add(member)

    def continued(self, member: int, message: Message) -> None:
        """It goes on."""
        self._stopped.discard(member)

    def tick(self, now_s: float) -> None:
        """Look at everybody once."""
        if not self._run.engine.traits.loses_members or not self._run.has_begun:
            return  # one process: a debugger may hold it up for as long as it likes
        gap_s, self._last_s = now_s - self._last_s, now_s
        live = self._run.roster.live
        if gap_s > _GAP_S:  # this process did not run itself: nobody is to blame for that time
            for watched in self._watched.values():
                watched.since_s += gap_s
        overdue = [one for one in live if self._look(one, now_s)]
        for one in overdue:
            if not one.is_done and not self._run.ending:
                self._judge(one, has_others=len(overdue) < len(live), now_s=now_s)

    # -- signs of life --------------------------------------------------------------------------

    def _look(self, one: Member, now_s: float) -> bool:
        """Whether this member has been silent for too long."""
        signs = self._run.engine.signs(one.number)
        watched = self._watched.get(one.number)
        if watched is None:
            watched = self._watched[one.number] = Watched(signs, now_s)
        is_moving = signs[:2] != watched.signs[:2]
        watched.signs = signs
        if is_moving and watched.is_stalled and not watched.is_given_up:
            self._run.observer.note(
                f"worker {one.seat} goes on after {now_s - watched.since_s:.1f} s"
            )
        if is_moving or not self._is_awaited(one):
            watched.since_s, watched.is_stalled = now_s, False
            return False
        return now_s - watched.since_s > self._patience_s(one, watched)

    def _patience_s(self, one: Member, watched: Watched) -> float:
        patience = self._run.patience
        if one.number in self._stopped:
            return patience.stopped_s
        if one.pushes == 0 and patience.given_s is None:
            return max(_FIRST_STEP_S, patience.silent_s)
        return patience.silent_s

    def _is_awaited(self, one: Member) -> bool:
        """Whether this member has something to do."""
        run, watched = self._run, self._watched[one.number]
        if watched.signs.is_first and one.number not in self._stopped:
            return False  # a download takes its time, and the script wants it waited for
        if self._peers.are_express:
            arrived = [run.engine.signs(number).arrived for number in self._peers.members]
            is_behind = watched.signs.arrived < max(arrived)
            return is_behind or one.number in self._stopped or min(arrived) == max(arrived)
        if run.is_open:
            is_at_work = one.number in run.coordinator_members and run.coordinator.is_at_work(
                one.number
            )
            return is_at_work or watched.signs.has_job or not one.has_arrived
        return not self._is_resting(one.number)

    # -- what is done ---------------------------------------------------------------------------

    def _judge(self, one: Member, *, has_others: bool, now_s: float) -> None:
        watched = self._watched[one.number]
        if watched.is_given_up:
            return
        was_stalled, watched.is_stalled = watched.is_stalled, True
        where = "" if was_stalled else self._explain(one, now_s - watched.since_s)
        if not has_others:
            decision = "nobody is left to go on without it"
        elif self._must_go(one, watched, was_stalled):
            decision = self._give_up(one, watched)
        else:
            decision = "nobody waits for it: it is left alone"
        if where or watched.is_given_up:
            run = self._run
            text = f"{where or f'worker {one.seat} is still silent'}; {decision}"
            run.observer.note(text)
            run.trace.note(run.now_s(), text)

    def _must_go(self, one: Member, watched: Watched, was_stalled: bool) -> bool:
        run = self._run
        if self._peers.are_express:
            return True
        if not run.is_open:
            return one.number in self._stopped or was_stalled
        coordinator = run.coordinator
        if not one.has_arrived or one.number not in run.coordinator_members:
            return True
        is_handed_on = not was_stalled and run.stalled(one.number)
        others = [other for other in run.coordinator_members if other != one.number]
        all_wait = not any(coordinator.is_at_work(other) for other in others)
        return is_handed_on or watched.signs.has_job or all_wait or run.settings.respawn

    def _give_up(self, one: Member, watched: Watched) -> str:
        watched.is_given_up = True
        self._run.engine.end(one.number)
        if self._run.settings.respawn:
            return "it is ended, and a new worker takes its place"
        return "it is ended, and the others do its work (--respawn would begin a new one)"

    def _explain(self, one: Member, silent_s: float) -> str:
        """``worker 3 has not pushed for 62 s (usual: 0.4 s): it is at data.py:88 in ...``"""
        run = self._run
        usual_s = run.patience.usual_s
        version = max(run.coordinator.version, self._watched[one.number].signs.version)
        usual = f" (usual: {usual_s:.2g} s)" if usual_s == usual_s else ""
        where = run.engine.whereabouts(one.number)
        text = f"worker {one.seat} has not pushed for {silent_s:.3g} s{usual}: {where}"
        if not run.is_open:
            return f"{text}; the others wait for it between two epochs"
        return f"{text}; the others wait for update {version + 1}"
