"""A member's incoming messages: jobs are done in turn, all others are returned in order.

    channel -> [ jobs: JobQueue ] -> queue -> next

Jobs are the member's part in the updates of the store. All members together do them one by one, in
the order of their numbers: a member waits for the job before its own. If a job's holder died, the
job goes to another member, which continues where the first one stopped, or finds it done. A member
that waits, for a message or for a version, does the jobs that arrive meanwhile. Above 300 lines,
since all ways to wait are read together. This module must not know what a message leads to, nor who
decided a job.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch.optim import Optimizer

from ..errors import BeginsAnew
from ..events import Grant
from ..store.control import Control
from ..store.optimizer import Updater
from ..store.parameter_store import SharedStore
from ..wire.channel import Channel
from ..wire.messages import (
    Add,
    BeMain,
    CheckpointsMoved,
    Copy,
    CountTotals,
    EndEpoch,
    Ending,
    Finish,
    Job,
    OfStream,
    Range,
    Skip,
    Snap,
    Stop,
    Summed,
    ToMember,
    WritePublished,
)
from .base import Clock, ScriptHooks, Stopped

POLL_S = 0.05
"""How often a member that waits for another's job looks for a message that hands it that job."""


class JobQueue:
    """The jobs of one member.

    Args:
        control: the run's shared words.
        seat: of this member.
        hooks: brings prepared schedules to a version, before the update that makes the next one.
        copy: pins the newest version for the checkpoint of this number.
        clock: the time for adding is added to its ``add_s``.
    """

    def __init__(
        self,
        control: Control,
        seat: int,
        hooks: ScriptHooks,
        copy: Callable[[int], None],
        clock: Clock,
    ) -> None:
        self._control = control
        self._seat = seat
        self._hooks = hooks
        self._copy = copy
        self._clock = clock
        self._jobs: list[Job] = []
        """Jobs to do, lowest number first."""
        self.used_in = -1
        """Version of the update that uses this member's last push; -1: none has it yet."""
        self.scale_own: Callable[[int], float] | None = None
        """Returns the factor that distance leaves of this member's push; None: no limit is set."""

    def begin(self, store: SharedStore, updaters: Sequence[Updater], rule: Optimizer) -> None:
        """The store is laid out; there is one updater per block."""
        self._store, self._updaters, self._rule = store, updaters, rule

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def take(self, job: Job) -> None:
        self._jobs.append(job)
        self._jobs.sort(key=lambda pending: pending.job)

    def wait(self) -> bool:
        """Wait a moment; return whether the next job's turn has come or there is none."""
        return not self._jobs or self._control.wait_for_job(self._jobs[0].job - 1, POLL_S)

    def do_due(self) -> None:
        """Do the jobs whose turn it is."""
        while self._jobs and self._control.wait_for_job(self._jobs[0].job - 1, 0):
            self._do(self._jobs.pop(0))

    def _do(self, job: Job) -> None:
        number = job.job
        if self._control.wait_for_job(number, 0):
            return  # the member that had it before has done it
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
        self._hooks.advance_schedule(job.version - 1)
        groups, seat, scale = self._rule.param_groups, job.seat, job.scale
        if seat >= 0:
            scale *= self._scale(2 * job.job + 1, seat)
        if seat == self._seat:
            self.used_in = job.version
        self._store.finish(
            job.job, self._updaters, groups, seat=seat, scale=scale, clip=job.clip,
            factors=job.factors,
        )  # fmt: skip

    def _scale(self, number: int, seat: int) -> float:
        """Return the factor that distance leaves of a push; 0 for a dead member's, unless known."""
        if self.scale_own is None:
            return 1.0
        if seat == self._seat:
            return self.scale_own(number)
        # The dead member's weights are lost, so its distance cannot be computed.
        return self._store.scale_once(number, lambda: 0.0)


T = TypeVar("T", bound=ToMember)
_ANSWERS = (Range, CountTotals, Summed)
"""Answered even after the run was stopped, or after a new member was too late for an epoch."""


class Inbox:
    """The messages of one member.

    Args:
        copy_out: does what ``Snap`` or ``WritePublished`` asks for.
        hooks: receive the checkpoint folder and messages of streams.
        clock: the time spent waiting is added to its ``wait_s``.
        is_main: whether this member prints and saves from the start.
    """

    def __init__(
        self,
        channel: Channel,
        jobs: JobQueue,
        clock: Clock,
        copy_out: Callable[[Snap | WritePublished], None],
        hooks: ScriptHooks,
        *,
        is_main: bool,
    ) -> None:
        self._channel, self._jobs, self._clock = channel, jobs, clock
        self._copy_out, self._hooks = copy_out, hooks
        self._queue: deque[ToMember] = deque()
        self.is_main = is_main
        self.has_stopped = False
        """Whether a stop was returned."""
        self._is_ending = False
        """Whether a stop was announced."""

    @property
    def is_stopped(self) -> bool:
        """Whether a stop has arrived, even behind other messages.

        If one was announced, which comes once the end of the run is copied, this waits for it. The
        stop stays queued: a script may ask in the middle of an epoch, which the stop ends.

        Raises:
            BeginsAnew: the stop is a restart of all processes.
        """
        if not self.has_stopped:
            self.look()
            if self._is_ending:
                self.await_stop()
        stops = self._stops
        if any(stop.begins_anew for stop in stops):
            raise BeginsAnew
        return self.has_stopped or bool(stops)

    @property
    def is_at_next(self) -> bool:
        """Whether a stop is queued that others heard at the next epoch."""
        return any(stop.is_at_next for stop in self._stops)

    @property
    def _stops(self) -> list[Stop]:
        return [message for message in self._queue if isinstance(message, Stop)]

    def await_stop(self) -> None:
        """Wait for a stop, which stays queued."""
        self._queue.extendleft(reversed(self._take_to(Stop)))

    def next(self) -> ToMember:
        """Return the next message that is not a job, after the jobs that came before it.

        Raises:
            BeginsAnew: all processes of the run restart.
        """
        while True:
            while self._jobs:
                self.settle(self._jobs.wait)
                self._jobs.do_due()
            if self._queue:
                message = self._queue.popleft()
                if isinstance(message, Snap | WritePublished):
                    self._copy_out(message)
                    continue
                if isinstance(message, Stop):
                    self.has_stopped = True
                    if message.begins_anew:
                        raise BeginsAnew
                return message
            start = time.perf_counter()
            self._hear()
            self._clock.wait_s += time.perf_counter() - start

    def expect(self, kind: type[T]) -> T:
        """Return the next message; raise Stopped, as the run ends, if it is not of this kind.

        Questions are answered even if the run or an epoch has ended meanwhile.
        """
        if kind in _ANSWERS:
            return self.answer(kind)
        message = self.next()
        if not isinstance(message, kind):
            raise Stopped
        return message

    def answer(self, kind: type[T]) -> T:
        """Return the next message of this kind; those before it stay queued, in order."""
        *others, message = self._take_to(kind)
        self._queue.extendleft(reversed(others))
        assert isinstance(message, kind)
        return message

    def _take_to(self, kind: type[T]) -> list[ToMember]:
        """Return the messages up to and including the next one of this kind."""
        taken = [self.next()]
        while not isinstance(taken[-1], kind):
            taken.append(self.next())
        return taken

    def look(self) -> None:
        """Receive what has arrived, without waiting."""
        self._hear(is_blocking=False)

    def do_jobs(self) -> None:
        """Do the jobs whose turn it is; leave all other messages queued."""
        self.look()
        self._jobs.do_due()

    def do_snaps(self, *, is_inside: bool = False) -> None:
        """Between epochs: copy what is asked for; leave all other messages queued.

        Args:
            is_inside: whether the script is in its own code: what it keeps may be half changed, and
                to write that stays queued, unless it is held from the loop's end.
        """
        for message in [queued for queued in self._queue if isinstance(queued, Snap)]:
            place = self._queue.index(message)
            del self._queue[place]
            if is_inside and message.is_main and not self._hooks.is_held(message.behind):
                self._queue.insert(place, message._replace(is_first=False, has_own=False))
                message = message._replace(is_main=False)
            if message.is_first or message.has_own or message.is_main:
                self._copy_out(message)

    def has_other_work(self) -> bool:
        """Return whether this member's work is over, since a message that ends it has arrived."""
        return any(isinstance(message, Grant | EndEpoch | Stop) for message in self._queue)

    def wait_a_little(self) -> None:
        """Wait for the next message and do jobs meanwhile; leave all other messages queued."""
        if self._jobs:
            self.settle(self._jobs.wait)
            self._jobs.do_due()
        else:
            self._hear()

    def settle(self, is_there: Callable[[], bool]) -> None:
        """Wait until ``is_there()``, doing jobs that arrive meanwhile."""
        start = time.perf_counter()
        while not is_there():
            self.do_jobs()
        self._clock.wait_s += time.perf_counter() - start

    def _hear(self, is_blocking: bool = True) -> None:
        """Receive what has arrived: jobs by their number, all other messages in order."""
        for message in self._channel.receive(is_blocking):
            if isinstance(message, Job):
                self._jobs.take(message)
            elif isinstance(message, BeMain):
                self.is_main = True
            elif isinstance(message, Ending):
                self._is_ending = True
            elif isinstance(message, CheckpointsMoved):
                self._hooks.write_into(*message)
            elif isinstance(message, OfStream):
                self._hooks.hear_stream(message)
            else:
                self._queue.append(message)
