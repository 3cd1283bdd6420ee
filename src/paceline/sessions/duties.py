"""The jobs that a member was given: its part in the updates of the store.

Jobs are done one after the other over all members, in the order of their numbers: a member waits
for the job before its own. One whose holder died is handed to another, which goes on where the
dead one stopped, or finds it done. This module must not know messages beyond jobs, nor who decided.
"""

import time
from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from ..store.clip import Clip
from ..store.control import Control
from ..store.shared import SharedStore
from ..store.update import Updater
from .base import Clock
from .lane import Message

JOBS = frozenset(("add", "finish", "skip", "copy"))
"""Kinds of messages that are jobs."""
POLL_S = 0.05
"""How often a member that waits for another's job looks for a message that hands it over."""


class Duties:
    """The jobs of one member.

    Args:
        control: the run's words.
        seat: of this member.
        advance: brings prepared schedules to a version, before the update that makes the next one.
        copy: pins the newest version for the checkpoint of this number.
        clock: the seconds that adding takes are added to its ``add_s``.
    """

    def __init__(
        self,
        control: Control,
        seat: int,
        advance: Callable[[int], bool],
        copy: Callable[[int], None],
        clock: Clock,
    ) -> None:
        self._control = control
        self._seat = seat
        self._advance = advance
        self._copy = copy
        self._clock = clock
        self._jobs: list[Message] = []
        """Jobs to do, lowest number first."""
        self.used_in = -1
        """Version of the update that uses this member's last push; -1: none has it yet."""
        self.scale_own: Callable[[int], float] | None = None
        """What distance leaves of this member's own push, for a pass; None: it is not asked."""

    def begin(self, store: SharedStore, updaters: Sequence[Updater], rule: Optimizer) -> None:
        """The store is laid out; ``updaters`` are of its blocks."""
        self._store, self._updaters, self._rule = store, updaters, rule

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def take(self, message: Message) -> None:
        self._jobs.append(message)
        self._jobs.sort(key=_number)

    def wait(self) -> bool:
        """Whether it is the turn of the next job or there is none, after waiting for a moment."""
        return not self._jobs or self._control.wait_for_job(_number(self._jobs[0]) - 1, POLL_S)

    def do_due(self) -> None:
        """Do the jobs whose turn it is."""
        while self._jobs and self._control.wait_for_job(_number(self._jobs[0]) - 1, 0):
            self._do(self._jobs.pop(0))

    def _do(self, message: Message) -> None:
        kind, job = message[:2]
        if self._control.wait_for_job(job, 0):
            return  # whoever had it before has done it
        if kind == "add":
            _, _, seat, weight, scale, is_first = message
            scale *= self._scale(2 * job, seat)
            if seat == self._seat:
                self.used_in = self._store.version + 1
            start_s = time.perf_counter()
            self._store.add(job, seat, weight, is_first, scale)
            self._clock.add_s += time.perf_counter() - start_s
            return
        if kind == "copy":
            self._copy(message[2])
            self._store.finished(job)
            return
        version = message[2]
        if self._store.version >= version:
            self._store.finished(job)
        elif kind == "skip":
            self._store.skip(job, message[3])
        else:
            self._finish(*message[1:])

    def _finish(
        self, job: int, version: int, seat: int, scale: float, clip: tuple[float, float]
    ) -> None:
        self._advance(version - 1)
        groups = self._rule.param_groups
        if seat >= 0:
            scale *= self._scale(2 * job + 1, seat)
        if seat == self._seat:
            self.used_in = version
        self._store.finish(job, self._updaters, groups, seat=seat, scale=scale, clip=Clip(*clip))

    def _scale(self, number: int, seat: int) -> float:
        """What distance leaves of a push; of a dead member's nothing that is not known already."""
        if self.scale_own is None:
            return 1.0
        if seat == self._seat:
            return self.scale_own(number)
        # What the dead member held is gone with it, so nobody can say how far it was behind.
        return self._store.scale_once(number, lambda: 0.0)


def _number(message: Message) -> int:
    number: int = message[1]
    return number
