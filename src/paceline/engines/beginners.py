"""New lives before the run has begun: a worker that died before `prepare` begins again.

    left -> spawn -> born -> describe, like all others -> the run begins

Nothing is shared out yet, so a new life is told what the first one was, and is counted on at once;
the main worker stays on its seat. This module must not know processes or tensors.
"""

from .roster import Member
from .run import Run

MOST_IN_VAIN = 3
"""Lives of a worker in a row that may end before the run begins."""


class Beginners:
    """The new lives of one run that has not begun."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._in_vain: dict[int, int] = {}

    def replace(self, one: Member) -> int | None:
        """The number of the member that begins in the place of this one; None: nobody does."""
        run = self._run
        if not run.settings.respawn or run.has_begun or run.ending:
            return None
        in_vain = self._in_vain[one.seat] = self._in_vain.get(one.seat, 0) + 1
        if in_vain >= MOST_IN_VAIN:
            run.say(f"worker {one.seat} ended {in_vain} times before prepare()")
            return None
        number = max(run.roster.members) + 1
        run.say(f"worker {one.seat} is gone ({one.end}); it begins again")
        run.roster.join(number, one.seat, 0)
        run.engine.spawn(number, one.seat, {})
        return number
