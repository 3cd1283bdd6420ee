"""A simulated member: the messages and store operations of a real one, without process or tensor.

    Describe -> Laid -> [ Arrive -> OpenEpoch -> Grant -> Push ... -> EndEpoch ] -> Rested -> Done

It is a generator that stops wherever a real member could wait or die, and says there what it waits
for: ``yield Turn(place, is_ready)``. Its verbs are those of exchange/through_store.py and
inbox.py, by the same names. It must not know who lets it go on, nor in which order.
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from paceline.events import Grant, Lease
from paceline.passes import Passes
from paceline.store.clip import UNCLIPPED
from paceline.wire import messages
from paceline.wire.messages import (
    FromMember,
    Job,
    Snap,
    Stop,
    ToMember,
)

A = TypeVar("A")
T = TypeVar("T", bound=ToMember)

PLACES = (
    "describe", "laid", "arrive", "compute", "pushed", "job", "version", "wait", "copy", "between",
    "rest", "end", "barrier", "leaving", "mend",
)  # fmt: skip
"""The places of a member at which a fault can occur."""
STEP = messages.Clocks(compute_s=0.01)


class Turn(NamedTuple):
    """The place of a member, and whether it can continue there."""

    place: str
    is_ready: Callable[[], bool] = lambda: True


Doing: TypeAlias = Generator[Turn, None, A]


class Stopped(Exception):
    """The run ends in the middle of a script."""


class Superseded(Exception):
    """The work in flight was cancelled."""


class PaperStore(Protocol):
    """The shared store: here the samples of each version."""

    layout: int
    """Stage of what the run begins with."""

    @property
    def num_done(self) -> int:
        """Number of jobs done."""

    @property
    def version(self) -> int:
        """The newest version."""

    def cancelled(self, seat: int) -> int:
        """The serial below which this seat's work is cancelled."""

    def fill(self, seat: int, leases: Sequence[Lease]) -> None:
        """Put the gradient of these leases into this seat's slot."""

    def do(self, job: Job) -> None:
        """Do the next job."""

    def pin(self, number: int) -> int:
        """Copy the newest version for this checkpoint; return its number."""


class Script(NamedTuple):
    """The actions of the user's script; all counts are per member and epoch.

    Attributes:
        calls: what follows each epoch: "count", "sum".
        stops_at: (epoch, step) at which it asks for the end; step -1: after that epoch's loop.
        leaves_at: likewise, where it leaves its loop.
        looks_at: steps at which it looks whether the run has been stopped.
        extends_at, gives_back_at: steps at which it asks for one mini-batch more, or skips its own.
        sums: whether it sums in each step: "before" its push or "after" it.
        breaks_at: (epoch, workers): so many workers, from the first on, end after that epoch.
    """

    epochs: int = 1
    calls: tuple[str, ...] = ()
    stops_at: tuple[int, int] | None = None
    leaves_at: tuple[int, int] | None = None
    looks_at: tuple[int, ...] = ()
    extends_at: tuple[int, ...] = ()
    gives_back_at: tuple[int, ...] = ()
    sums: str = ""
    breaks_at: tuple[int, int] | None = None


class PaperMember:
    """One life of one worker.

    Args:
        send: to the coordinator.
        description: text of what it describes.
    """

    def __init__(
        self,
        member: int,
        seat: int,
        store: PaperStore,
        send: Callable[[FromMember], None],
        description: str,
        script: Script,
        *,
        is_newcomer: bool = False,
    ) -> None:
        self.member, self.seat = member, seat
        self.inbox: deque[ToMember] = deque()
        self.is_main = seat == 0 and not is_newcomer
        self.beats = 0
        self._store = store
        self._tell = send
        self._held: list[FromMember] = []
        self._description = description
        self._script = script
        self._jobs: list[Job] = []
        self._queue: deque[ToMember] = deque()
        self._has_stopped = self._is_ending = self._is_last_epoch = False
        self._grant: Grant | None = None
        self._serial = -1
        self.num_steps, self.is_difference = 1, False
        self._doing = self._live()
        self.turn = next(self._doing)

    @property
    def is_ready(self) -> bool:
        """Whether it can continue."""
        return self.turn.is_ready()

    def go_on(self) -> bool:
        """Run it until it could wait again; False: it has ended."""
        self.beats += 1
        try:
            self.turn = next(self._doing)
        except StopIteration:
            return False
        return True

    # -- the script -----------------------------------------------------------------------------

    def _live(self) -> Doing[None]:
        yield Turn("describe")
        with suppress(Stopped):  # as a real script, which ends normally or is interrupted
            yield from self._run_script()
        yield Turn("end")
        self._send(messages.Done())

    def _run_script(self) -> Doing[None]:
        self._send(messages.Describe(self._description))
        laid = yield from self._expect(messages.Laid)
        self.num_steps, self.is_difference = laid.num_steps, laid.is_difference
        yield Turn("laid")
        yield from self._reach(1)
        first, place = laid.first_epoch, laid.place
        passes = Passes(first, place) if first else Passes()
        for position in range(passes.first_position, self._script.epochs):
            if (yield from self._is_stopped()):
                was_last, self._is_last_epoch = self._is_last_epoch, True
                if was_last or not self._is_at_next:
                    return
            passes.arrive(position)
            epoch = passes.take()
            if not passes.is_behind(epoch):
                yield from self._run_epoch(epoch, passes)
            yield from self._make_calls(epoch)
            if (at := self._script.breaks_at) and epoch >= at[0] and self.seat < at[1]:
                if not (yield from self._is_stopped()):
                    yield from self._rest(passes, is_over=True)
                return
        passes.arrive(self._script.epochs)
        yield from self._rest(passes)

    def _rest(self, passes: Passes, *, is_over: bool = False) -> Doing[None]:
        yield Turn("rest")
        self._send(messages.Rested(passes.next, passes.place, is_over=is_over))
        yield from self._answer(messages.Goodbye)

    def _run_epoch(self, epoch: int, passes: Passes) -> Doing[None]:
        self._send(messages.SettingsNow("{}"))
        if not (yield from self._open_epoch(epoch, passes)):
            return
        step = -1
        while (grant := self._grant) is not None:
            step += 1
            yield Turn("compute")
            if self._script.stops_at == (epoch, step):
                self._send(messages.AskStop())
            if step in self._script.looks_at:
                yield from self._is_stopped()
            if self._script.leaves_at == (epoch, step):
                yield from self._leave_epoch()
                self._send(messages.OutOfLoop())
                return
            yield from self._sum("before")
            try:
                yield from self._step(grant, step)
            except Superseded:
                yield from self._superseded()
            yield from self._sum("after")
        self._send(messages.OutOfLoop())

    def _step(self, grant: Grant, step: int) -> Doing[None]:
        self._check()
        leases = list(grant.leases)
        if step in self._script.gives_back_at:
            yield from self._give_back()
            return
        if step in self._script.extends_at:
            more = yield from self._extend()
            leases += [] if more is None else [more]
        yield Turn("compute")
        self._check()
        yield from self._push(leases)

    def _sum(self, when: str) -> Doing[None]:
        if self._script.sums == when:
            self._send(messages.SumValues((1.0,)))
            yield from self._answer(messages.Summed)

    def _make_calls(self, epoch: int) -> Doing[None]:
        yield Turn("between")
        if self._script.stops_at == (epoch, -1):
            self._send(messages.AskStop())
        for call in self._script.calls:
            if call == "count":
                yield from self._count()
            else:
                self._send(messages.SumValues((1.0,)))
                yield from self._answer(messages.Summed)
        yield Turn("between")

    def _count(self) -> Doing[None]:
        self._send(messages.Count(7, 3, None, ""))
        while (one := (yield from self._answer(messages.Range))).start >= 0:
            yield Turn("between")
            size = float(one.stop - one.start)
            self._send(messages.Counted(one.start, {"n": (size, size)}))
        totals = (yield from self._answer(messages.CountTotals)).totals
        assert totals == {"n": (7.0, 7.0)}, f"of 7 samples were evaluated {totals}"

    # -- the verbs ------------------------------------------------------------------------------

    def _open_epoch(self, epoch: int, passes: Passes) -> Doing[bool]:
        if self._has_stopped:
            return False
        if self.is_main:
            yield from self._reach(2)
        yield Turn("arrive")
        self._send(messages.Arrive(epoch, None, None, "", passes.place))
        while isinstance(message := (yield from self._next()), messages.Adopt):
            pass
        if isinstance(message, messages.EndEpoch):  # a new member that came too late for this epoch
            yield from self._end_at(message.version)
        if not isinstance(message, messages.OpenEpoch):
            return False
        yield from self._reach(2)
        yield from self._opened(message)
        return True

    def _opened(self, opened: messages.OpenEpoch) -> Doing[None]:
        yield from self._await_grant()

    def _extend(self) -> Doing[Lease | None]:
        self._send(messages.Extend(self._serial))
        return (yield from self._answer(messages.Extended)).lease

    def _give_back(self) -> Doing[None]:
        self._send(messages.GiveBack(self._serial))
        yield from self._await_grant()

    def _superseded(self) -> Doing[None]:
        self._held.append(messages.StepLeft(self._serial, 0.01, 0.0))
        yield from self._await_grant()

    def _push(self, leases: Sequence[Lease]) -> Doing[None]:
        assert self._grant is not None
        num_samples = sum(lease.num_samples for lease in leases)
        self._store.fill(self.seat, leases)
        told = messages.Told(num_samples, 1.0, messages.OK, float(num_samples))
        version = self._grant.ticket.version
        self._send(messages.Push(self._serial, version, told, STEP, 0, UNCLIPPED))
        yield Turn("pushed")
        yield from self._await_grant()

    def _leave_epoch(self) -> Doing[None]:
        self._send(messages.LeaveEpoch((), False))
        while isinstance(message := (yield from self._next()), Grant):
            pass  # it was already in transit
        yield from self._end_at(_version_of(message))

    def _check(self) -> None:
        if self._store.cancelled(self.seat) > self._serial:
            raise Superseded

    def _await_grant(self) -> Doing[None]:
        message = yield from self._next()
        if isinstance(message, Grant):
            version = message.ticket.version
            yield from self._settle(lambda: self._store.version >= version)
            self._serial, self._grant = message.ticket.serial, message
        else:
            yield from self._end_at(_version_of(message))

    def _end_at(self, version: int) -> Doing[None]:
        yield from self._settle(lambda: self._store.version >= version)
        self._grant = None
        self._send(messages.LoopLeft(version))

    def _reach(self, stage: int) -> Doing[None]:
        """The start of the run: the main worker does it, all others wait."""
        store = self._store
        while store.layout < stage:
            if self.is_main:
                store.layout = stage
                return
            yield Turn("wait", lambda: store.layout >= stage or bool(self.inbox))
            self._do_jobs()

    # -- received messages ----------------------------------------------------------------------

    def _next(self) -> Doing[ToMember]:
        """The next message that is not a job; jobs that came before it are done first."""
        while True:
            while self._jobs:
                yield Turn("job", lambda: self._is_due or bool(self.inbox))
                self._do_jobs()
            if not self._queue:
                yield Turn("wait", lambda: bool(self.inbox))
                self._hear()
                continue
            message = self._queue.popleft()
            if isinstance(message, Snap):
                yield from self._snap(message)
                continue
            self._has_stopped |= isinstance(message, Stop)
            return message

    def _expect(self, kind: type[T]) -> Doing[T]:
        message = yield from self._next()
        if not isinstance(message, kind):
            raise Stopped
        return message

    def _answer(self, kind: type[T]) -> Doing[T]:
        """The next message of this kind; those before it stay, in order."""
        *others, message = yield from self._take_to(kind)
        self._queue.extendleft(reversed(others))
        assert isinstance(message, kind)
        return message

    def _take_to(self, kind: type[T]) -> Doing[list[ToMember]]:
        """The messages up to the next one of this kind, with it."""
        taken = [(yield from self._next())]
        while not isinstance(taken[-1], kind):
            taken.append((yield from self._next()))
        return taken

    def _is_stopped(self) -> Doing[bool]:
        if not self._has_stopped:
            self._hear()
            if self._is_ending:
                taken = yield from self._take_to(Stop)
                self._queue.extendleft(reversed(taken))
        return self._has_stopped or any(isinstance(one, Stop) for one in self._queue)

    @property
    def _is_at_next(self) -> bool:
        stops = [one for one in self._queue if isinstance(one, Stop)]
        return any(stop.is_at_next for stop in stops)

    def _settle(self, is_there: Callable[[], bool]) -> Doing[None]:
        while not is_there():
            yield Turn("version", lambda: is_there() or self._is_due or bool(self.inbox))
            self._do_jobs()

    def _snap(self, message: Snap) -> Doing[None]:
        number, version, is_first, _, is_main, _ = message
        if is_first:
            yield from self._settle(lambda: self._store.version >= version)
        yield Turn("copy")
        pinned = self._store.pin(number) if is_first else version
        assert pinned == version, f"version {version} was to be pinned, and {pinned} was"
        self._send(messages.Copied(number, version, is_first, "", 0.0, is_main))

    @property
    def _is_due(self) -> bool:
        return bool(self._jobs) and self._store.num_done >= self._jobs[0].job - 1

    def _hear(self) -> None:
        while self.inbox:
            message = self.inbox.popleft()
            if isinstance(message, Job):
                self._jobs.append(message)
                self._jobs.sort(key=lambda job: job.job)
            elif isinstance(message, messages.BeMain):
                self.is_main = True
            elif isinstance(message, messages.Ending):
                self._is_ending = True
            elif not isinstance(message, messages.CheckpointsMoved):
                self._queue.append(message)

    def _do_jobs(self) -> None:
        """Do the next job if it is its turn, leave every other message for later."""
        self._hear()
        if not self._is_due:
            return
        job = self._jobs.pop(0)
        if job.job <= self._store.num_done:
            return  # its previous owner has done it
        self._store.do(job)
        if isinstance(job, messages.Copy):
            self._send(messages.Copied(job.number, self._store.pin(job.number), True, ""))

    def _send(self, message: FromMember) -> None:
        for one in (*self._held, message):
            self._tell(one)
        self._held.clear()


def _version_of(message: ToMember) -> int:
    """At which an epoch or the run is over."""
    if not isinstance(message, messages.EndEpoch | Stop):
        raise Stopped
    return message.version
