"""stale-synchronous: every push is an update; nobody leads the slowest by more than s steps.

    finished     0   1   2   3   4              s = 2: worker 0 has finished 3 steps and the slowest
    worker 0     --- --- ---|wait               1, so it is 2 ahead and may take one more; with 4 it
    worker 1     --- ------ -                   would wait until worker 2 has finished its second
    worker 2     -------- ---

A worker that has finished step c may begin the next when the slowest live one has finished step
c - s. The slack s (`slack_steps`) bounds how stale a gradient can be, while short delays cost
nothing; s = 0 is bulk-synchronous, with one update a push.

Source: Q. Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server", NIPS 2013, section 3. Changed: a member that joins starts at the slowest clock, one that
leaves delays nobody, and all clocks are equal after an epoch.
"""

from typing import Any

from ..events import Apply, Decision, Exhausted, Fact, Joined, Left, Pushed, Release
from .arguments import Argument
from .base import SyncProtocol

_WHOLE = (1.0,)


class StaleSynchronous(SyncProtocol):
    """Apply every push; release its member unless it leads by more than the slack.

    Invariant: a waiting member has finished `slack_steps` + 1 more than the slowest, else it would
    have been released (tests/protocols/test_stale_synchronous.py).
    """

    name = "stale-synchronous"
    summary = "every push is an update; nobody leads the slowest by more than S steps"
    has_stale_pushes = True
    arguments = (Argument(symbol="S", meaning="steps of lead over the slowest", minimum=0),)

    def __init__(self, num_workers: int, slack_steps: int) -> None:
        super().__init__(num_workers, slack_steps)
        self._slack_steps = slack_steps
        self._finished_steps: dict[int, int] = {}  # of each live member
        self._waiting: set[int] = set()
        self._slowest_steps = 0  # finished by the slowest
        self._num_slowest = 0  # members that have finished no more than that

    def react(self, fact: Fact) -> list[Decision]:
        if isinstance(fact, Pushed):
            member = fact.ticket.member
            self._num_slowest -= self._finished_steps[member] == self._slowest_steps
            self._finished_steps[member] += 1
            self._waiting.add(member)
            return [Apply((fact.ticket,), _WHOLE), *self._release_allowed([member])]
        if isinstance(fact, Joined):
            self._finished_steps[fact.member] = self._slowest_steps
            self._num_slowest += 1
            return [Release(fact.member)]
        if isinstance(fact, Left):
            self._num_slowest -= self._finished_steps.pop(fact.member) == self._slowest_steps
            self._waiting.discard(fact.member)
            return self._release_allowed([])
        if isinstance(fact, Exhausted):
            return self._level()
        return []  # slow is not dead: a stalled member is still waited for

    def _release_allowed(self, candidates: list[int]) -> list[Decision]:
        """Release the candidates that may go on, or any waiting member if the slowest moved."""
        finished = self._finished_steps
        if not self._num_slowest and finished:
            self._slowest_steps = min(finished.values())
            self._num_slowest = sum(steps == self._slowest_steps for steps in finished.values())
            candidates = sorted(self._waiting)
        most_steps = self._slowest_steps + self._slack_steps
        allowed = [member for member in candidates if finished[member] <= most_steps]
        self._waiting.difference_update(allowed)
        return [Release(member) for member in allowed]

    def _level(self) -> list[Decision]:
        """Make all clocks equal at an epoch's end."""
        self._slowest_steps = max(self._finished_steps.values(), default=self._slowest_steps)
        self._finished_steps = dict.fromkeys(self._finished_steps, self._slowest_steps)
        self._num_slowest = len(self._finished_steps)
        return self._release_allowed(sorted(self._waiting))

    def state(self) -> dict[str, Any]:
        return {
            "finished_steps": sorted(map(list, self._finished_steps.items())),
            "waiting": sorted(self._waiting),
            "slowest_steps": self._slowest_steps,
        }

    def load(self, state: dict[str, Any]) -> None:
        self._finished_steps = dict(state["finished_steps"])
        self._waiting = set(state["waiting"])
        self._slowest_steps = state["slowest_steps"]
        steps = self._finished_steps.values()
        self._num_slowest = sum(finished == self._slowest_steps for finished in steps)
