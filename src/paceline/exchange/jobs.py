"""The jobs that a member was given: its part in the updates of the store.

Jobs are done one after the other over all members, in the order of their numbers: a member waits
for the job before its own. One whose holder died is handed to another, which goes on where the
dead one stopped, or finds it done. This module must not know messages beyond jobs, nor who decided.
"""

import time
from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from ..store.control import Control
from ..store.optimizer import Updater
from ..store.parameter_store import SharedStore
from ..wire.messages import Add, Copy, Finish, Job, Skip
from .base import Clock

POLL_S = 0.05
"""How often a member that waits for another's job looks for a message that hands it over."""


class JobQueue:
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
        self._jobs: list[Job] = []
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

    def take(self, job: Job) -> None:
        self._jobs.append(job)
        self._jobs.sort(key=_number)

    def wait(self) -> bool:
        """Whether it is the turn of the next job or there is none, after waiting for a moment."""
        return not self._jobs or self._control.wait_for_job(_number(self._jobs[0]) - 1, POLL_S)

    def do_due(self) -> None:
        """Do the jobs whose turn it is."""
        while self._jobs and self._control.wait_for_job(_number(self._jobs[0]) - 1, 0):
            self._do(self._jobs.pop(0))

    def _do(self, job: Job) -> None:
        number = job.job
        if self._control.wait_for_job(number, 0):
            return  # whoever had it before has done it
        if isinstance(job, Add):
            self._add(job)
        elif isinstance(job, Copy):
            self._copy(job.number)
            self._store.finished(number)
        elif self._store.version >= job.version:
            self._store.finished(number)
        elif isinstance(job, Skip):
            self._store.skip(number, job.overflow_version)
        else:
            self._finish(job)

    def _add(self, job: Add) -> None:
        scale = job.scale * self._scale(2 * job.job, job.seat)
        if job.seat == self._seat:
            self.used_in = self._store.version + 1
        start_s = time.perf_counter()
        self._store.add(job.job, job.seat, job.weight, job.is_first, scale)
        self._clock.add_s += time.perf_counter() - start_s

    def _finish(self, job: Finish) -> None:
        self._advance(job.version - 1)
        groups, seat, scale = self._rule.param_groups, job.seat, job.scale
        if seat >= 0:
            scale *= self._scale(2 * job.job + 1, seat)
        if seat == self._seat:
            self.used_in = job.version
        self._store.finish(job.job, self._updaters, groups, seat=seat, scale=scale, clip=job.clip)

    def _scale(self, number: int, seat: int) -> float:
        """What distance leaves of a push; of a dead member's nothing that is not known already."""
        if self.scale_own is None:
            return 1.0
        if seat == self._seat:
            return self.scale_own(number)
        # What the dead member held is gone with it, so nobody can say how far it was behind.
        return self._store.scale_once(number, lambda: 0.0)


def _number(job: Job) -> int:
    return job.job
