"""Rounds between peers: no message, no server on the way of the bytes, two barriers a round.

    fill | barrier 1 | update | barrier 2 | settle -> the next round in which there is a lease

Who pushed what is shown in lines that all read (rounds.py), so all come to the same; how a mean is
made of the pushes, and what becomes of the parameters, is the averaging's (averaging.py). Where a
member has died, where the run stops, or where one needs what peers cannot give (gradient
accumulation), all leave at the same barrier and go on through the store (``through_store.py``),
where the coordinator decides. Which leases are whose is `PeerLeases`' (core/batches.py).
Above 300 lines, since a round and every way out of it are read together. This module must not know
protocols.
"""

import time
from collections.abc import Sequence

from ..errors import AllGone, ConfigError
from ..events import Grant, Lease, Ticket
from ..store.control import ALARM, SNAPSHOT, VERSION
from ..store.versions import NO_OVERFLOW
from ..wire import messages
from . import Route
from .averaging import Averaging, MakeAveraging
from .base import Stopped, Work
from .lockstep import DIED_TOGETHER, Lockstep, Stage
from .member import MemberSide
from .rounds import GivenUp, Line, RoundsTold

_NEVER_CANCELLED = 2**62
"""A serial between peers: they never call each other off, only the run's end does."""


class PeerRounds:
    """The rounds of the epochs that one member goes through among its peers.

    Args:
        make: the averaging; None: this run has no epochs between peers.
    """

    def __init__(self, member: MemberSide, make: MakeAveraging | None) -> None:
        self._member, self._make = member, make
        self._barrier = member.barrier
        self._newest = -1
        self.lockstep = Lockstep(member, self._barrier)

    @property
    def are_on(self) -> bool:
        """Whether peers run now, or between two such epochs."""
        return self._member.averaging is not None

    @property
    def _averaging(self) -> Averaging:
        averaging = self._member.averaging
        assert averaging is not None
        return averaging

    @property
    def _has_moved(self) -> bool:
        """Whether the version lies in another block: weights were published between epochs."""
        return self._averaging.block != self._member.store.current

    def open(self, opened: messages.OpenEpoch) -> None:
        """An epoch begins; the first grant of its rounds."""
        member = self._member
        self._seats, updates_left = opened.seats, opened.updates_left
        self._leases = member.leases_of_peers(opened)
        num_rounds = self._leases.num_rounds
        self._num_rounds = num_rounds if updates_left < 0 else min(num_rounds, updates_left)
        self._round = 0
        self._first_version = member.store.version
        telling = opened.seats if member.are_words_shared else (member.seat,)
        self._told = RoundsTold(
            member.channel, member.control, self._first_version, telling, member.seat
        )
        if self.are_on and (opened.newest != self._newest or self._has_moved):
            self.close()  # one has died since, and another joined: they have to meet
        self._barrier.begin(opened.phase)
        if self.are_on:
            self._averaging.come_back()
        elif not self._meet(opened):
            return
        member.opened(opened)
        self._advance()
        member.clock.begin()

    def _meet(self, opened: messages.OpenEpoch) -> bool:
        """Begin to average with the peers; False where one has died before all had met."""
        member = self._member
        member.copy.pull(0)  # the first member may have loaded other weights since
        assert self._make is not None, "the coordinator opens such epochs where members can"
        route = Route("", member.collective, opened.newest)
        try:
            member.averaging = self._make(member.copy, self._barrier, member.hooks, route)
        except GivenUp:
            member.opened(opened)
            has_lease = self._begin_round()
            self._wait_for_others(None, (), needs_store=False)
            if not has_lease:
                member.await_grant()
            member.clock.begin()
            return False
        self._newest = opened.newest
        return True

    def _own(self, number: int) -> list[Lease]:
        """This member's leases in a round: what the coordinator will cut.

        It hands out in member order, and who joined later sits wherever a seat was free.
        """
        return self._leases.of(number, self._seats.index(self._member.seat))

    def close(self) -> None:
        """An epoch through the store begins: back to private parameters, which are pulled then."""
        if self.are_on:
            self._averaging.hand_over()
            self._member.averaging = None
            self._member.copy.live_alone()

    def _advance(self) -> None:
        """The grant of the next round in which this member has a lease."""
        while self._round < self._num_rounds:
            if self._begin_round() or not self._exchange(Work()):
                return
        self._let_stand()
        self._told.end(self._round)
        self._member.await_grant()
        if self.are_on:
            self._averaging.step_aside()

    def _begin_round(self) -> bool:
        """The grant of this round, which nobody sends; whether this member has a lease in it."""
        member, copy, leases = self._member, self._member.copy, self._own(self._round)
        is_last = self._round + 1 == self._leases.num_rounds
        copy.own.turn_to(self._first_version + self._round, is_last=is_last)
        if leases:
            copy.version = self._first_version + self._round
            member.serial, member.step = _NEVER_CANCELLED, copy.version
            ticket = Ticket(member.number, copy.version, copy.version)
            member.grant = Grant(ticket, tuple(leases))
            # Nobody else tells who reads a stream before the rounds are over.
            done = self._leases.begins_at(self._round)
            member.hooks.hear_stream(messages.StreamDone(member.epoch, done, ()))
            member.beat()
        return bool(leases)

    def upcoming(self, depth: int) -> Sequence[Lease]:
        """Nobody is asked: the rounds of the epoch are known."""
        num_now, own = len(self._own(self._round)), list[Lease]()
        for number in range(self._round, self._num_rounds):
            own += self._own(number)
            if len(own) >= num_now + depth:
                break
        return own[: num_now + depth]

    def push(self, work: Work) -> float:
        """Go through a round, to the next grant; the norm of the averaged gradient, or nan."""
        member, clock = self._member, self._member.clock
        start = time.perf_counter()
        clock.compute_s = start - clock.begun_s
        if member.is_dropped():
            member.mail.next()  # it believes to have pushed, and nobody has heard of it
            raise Stopped
        if self._exchange(work):
            clock.push_s = time.perf_counter() - start - clock.wait_s
            norm = self._averaging.norm
            self._advance()  # there may be rounds without a lease of its own
        else:
            norm = member.store.norms.of(member.jobs.used_in)
        clock.begin()
        return norm

    # -- one round ------------------------------------------------------------------------------

    def _exchange(self, work: Work) -> bool:
        """Average with the peers; False when they were left instead."""
        averaging, is_updating = self._averaging, False
        self._member.jobs.used_in = -1
        try:
            lines = self.lockstep.meet(lambda: self._show(work), has_part=work.num_samples > 0)
            leaves = any(line.leaves for line in lines)
            if leaves and not self.lockstep.can_finish(lines):
                raise GivenUp
            is_updating = True
            averaging.update(lines)
            self._barrier.wait()
            fault = averaging.settle()
        except GivenUp:
            if is_updating and self._member.copy.is_lockstep:
                raise AllGone(DIED_TOGETHER) from None
            self._interrupted(work, is_updating=is_updating)
            return False
        self._conclude(lines, fault)
        if leaves and self._round < self._num_rounds:
            self._interrupted(Work(), is_updating=False)
            return False
        return True

    def _show(self, work: Work, stage: Stage = Stage.FOLLOWS) -> None:
        """Fill this seat's slot and its line; what is wrong with the gradient is found later."""
        member, clock, control = self._member, self._member.clock, self._member.control
        self._averaging.fill(work)
        self._barrier.show(Line(
            num_samples=work.num_samples, weight=work.weight, loss=work.loss,
            fault=messages.FOUND_INF if work.found_inf else messages.OK,
            compute_s=clock.compute_s, wait_s=clock.wait_s, push_s=clock.push_s,
            input_s=clock.input_s, squared_norm=0.0,
            max_norm=work.clip.max_norm, max_value=work.clip.max_value,
            hyper=member.settings() if work.weight or member.copy.is_lockstep else 0,
            bad_version=-1.0,
            leaves=control[ALARM], snapshot=control[SNAPSHOT],
            stage=Stage.PUSHES if work.num_samples else stage,
        ))  # fmt: skip
        clock.wait_s = 0.0

    def _conclude(self, lines: list[Line], fault: int) -> None:
        """The version is there: note what made it."""
        member, store = self._member, self._member.store
        control, version = member.control, member.copy.version
        has_overflowed = any(line.fault for line in lines)
        store.scale = store.bring(
            version + 1,
            is_update=not has_overflowed and not fault,
            overflow_version=version if has_overflowed else NO_OVERFLOW,
        )
        if member.copy.is_difference:
            self._averaging.begin_again()
        if member.writes_version:
            control[VERSION] = 2 * (version + 1) + self._averaging.block
        told = [lines[seat].entry(int(lines[seat].fault) or fault) for seat in self._seats]
        self._round += 1
        member.copy.version += 1
        asked = self._asked(lines)
        self._told.note(self._round - 1, told, asked)
        if asked:
            self._take_snapshot(asked)

    def _asked(self, lines: list[Line]) -> int:
        """The number of the checkpoint that all take now, after the same round; 0: none.

        At the end of an epoch none is taken here: one may be taken before the next begins.
        """
        asked = int(max(line.snapshot for line in lines))
        is_new = asked > self._member.snapshots.newest and self._round < self._num_rounds
        return asked if is_new else 0

    def _take_snapshot(self, number: int) -> None:
        """The block stands until all have arrived at the next barrier."""
        member, snapshots = self._member, self._member.snapshots
        member.mail.look()  # it may go to another folder than the last one
        if member.seat == 0:
            snapshots.take(number, member.version, *self._averaging.standing())
        elif member.copy.is_difference or member.hooks.compressed is not None:
            self._averaging.standing()  # what is under way has come: its rest is this member's own
            snapshots.add_own(number, member.version)
        else:
            snapshots.newest = number

    # -- the way out ----------------------------------------------------------------------------

    def leave(self, what: str = "", *, is_over: bool = False) -> None:
        """This member needs the coordinator: all leave their peers at the next barrier.

        Args:
            what: cannot be done between peers, nor elsewhere if ``Averaging.refuse`` says so;
                "": the run stops.
            is_over: whether this member's loop is over, so that it needs no work from elsewhere.
        """
        if not self.are_on:
            return
        member = self._member
        if what:
            self._averaging.refuse(what, is_over=is_over)
            if not is_over:
                self.refuse_in_lockstep(what)
        member.copy.unedited.check()  # what is on the block goes along
        member.control[ALARM] = 1
        self._show(Work(), Stage.LEFT_LOOP if is_over else Stage.LEFT)
        self._barrier.arrive()
        self._report_interruption(None, (), needs_store=bool(what))
        self._leave_with_work()

    def refuse_in_lockstep(self, what: str) -> None:
        """Raise ConfigError where members make their steps together: ``what`` needs the store."""
        if self._member.hooks.follow is not None:
            raise ConfigError(
                f"{what} is not carried where the optimizer is stepped with a closure by all "
                "workers together (LBFGS, closures=True): step once on each mini-batch, or use "
                "--protocol local-sgd"
            )

    def leave_if_alarmed(self) -> None:
        """Leave the peers in the midst of a round, where a member is gone or the run ends."""
        if self.are_on and self._member.grant is not None and self._member.control[ALARM]:
            self.leave()

    def _interrupted(self, work: Work, *, is_updating: bool) -> None:
        """Put the share back, tell where this member stands, and go on through the store."""
        self._averaging.give_up(work, is_updating=is_updating)
        entries: tuple[messages.Entry, ...] = ()
        if is_updating:
            lines = self._barrier.lines()
            entries = tuple(
                lines[seat].entry(self._fault(seat, lines[seat].fault)) for seat in self._seats
            )
        clock, mine = self._member.clock, None
        if work.num_samples:
            fault = self._fault(
                self._member.seat, messages.FOUND_INF if work.found_inf else messages.OK
            )
            clocks = (clock.compute_s, clock.wait_s, clock.push_s, clock.input_s)
            mine = messages.Entry(
                work.num_samples, work.loss, fault, work.weight, *clocks, *work.clip
            )
        self._report_interruption(mine, entries)
        self._leave_with_work()
        self._member.await_grant()

    def _fault(self, seat: int, fault: float) -> int:
        """What is wrong with a push that no update has looked at yet."""
        return int(fault) or (
            messages.OK if self._member.store.is_finite(seat) else messages.NOT_FINITE
        )

    def _report_interruption(
        self,
        mine: messages.Entry | None,
        entries: tuple[messages.Entry, ...],
        *,
        needs_store: bool = False,
    ) -> None:
        """Tell of this member's push and those it saw; wait until all live ones have.

        From then on the others may make updates, so nothing that they share is written after it.
        """
        self._averaging.hand_over()
        self._let_stand()
        self._told.tell()
        self._wait_for_others(mine, entries, needs_store=needs_store)

    def _wait_for_others(
        self, mine: messages.Entry | None, entries: tuple[messages.Entry, ...], *, needs_store: bool
    ) -> None:
        """The same, where nothing more is to be put in order; the work in hand is kept."""
        channel, mail = self._member.channel, self._member.mail
        channel.send(messages.PeersLeft(mine, entries, needs_store))
        while isinstance(message := mail.next(), messages.Mend):
            if self.are_on:
                self._averaging.restore_the_dead()
            channel.send(messages.Mended())
        if not isinstance(message, messages.Resume):
            raise Stopped
        self._member.serial = message.serial

    def _leave_with_work(self) -> None:
        """Private memory again, with the parameters of the version that stands."""
        self._member.averaging = None
        copy = self._member.copy
        grads = [parameter.grad for parameter in copy.replica.parameters]
        copy.home = copy.replica.live_alone()
        copy.unedited.watch(copy.home)
        copy.unedited.mark()
        for parameter, gradient in zip(copy.replica.parameters, grads, strict=True):
            parameter.grad = gradient

    def _let_stand(self) -> None:
        """The version that peers came to is the store's, with its buffers, which no block held.

        All write the same.
        """
        member, averaging = self._member, self._averaging
        member.control[VERSION] = 2 * member.copy.version + averaging.block
        buffers = member.copy.replica.layout.buffers.of(member.store.blocks[averaging.block])
        buffers.copy_(averaging.kept_buffers)
