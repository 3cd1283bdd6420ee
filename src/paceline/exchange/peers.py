"""Rounds between peers: no message and no server in the data path, two barriers a round.

    fill | barrier 1 | update | barrier 2 | settle -> the next round in which there is a lease

Each member shows its push in a line that all read (rounds.py), so all compute the same;
averaging.py makes a mean of the pushes and updates the parameters. If a member died, the run stops,
or a member needs what peers cannot do (gradient accumulation), all leave at the same barrier and go
on through the store (``through_store.py``), where the coordinator decides. `PeerLeases`
(core/batches.py) says which leases are whose. Above 300 lines, since a round and every way out of
it are read together. This module must not know protocols.
"""

import time
from collections.abc import Sequence

from ..errors import AllGone, ConfigError
from ..events import Grant, Lease, Ticket
from ..store.control import ALARM, MAIN, SNAPSHOT, VERSION
from ..store.versions import NO_OVERFLOW
from ..wire import messages
from . import Route
from .averaging import Averaging, MakeAveraging
from .base import Stopped, Work
from .lockstep import DIED_TOGETHER, Lockstep, Stage
from .member import MemberSide
from .rounds import DIED, GivenUp, Line, RoundsTold

_NEVER_CANCELLED = 2**62
"""The serial used between peers: only the run's end cancels their work."""


class PeerRounds:
    """One member's rounds in the epochs that run among peers.

    Args:
        make: makes the averaging; None: this run has no epochs between peers.
    """

    def __init__(self, member: MemberSide, make: MakeAveraging | None) -> None:
        self._member, self._make = member, make
        self._barrier = member.barrier
        self._newest = -1
        self.lockstep = Lockstep(member, self._barrier)

    @property
    def are_on(self) -> bool:
        """Whether this member runs among peers, or is between two such epochs."""
        return self._member.averaging is not None

    @property
    def _averaging(self) -> Averaging:
        averaging = self._member.averaging
        assert averaging is not None
        return averaging

    @property
    def _has_moved(self) -> bool:
        """Whether the version is in another block: weights were published between epochs."""
        return self._averaging.block != self._member.store.current

    def open(self, opened: messages.OpenEpoch) -> None:
        """Begin an epoch, up to the first grant of its rounds."""
        member = self._member
        self._seats, updates_left = opened.seats, opened.updates_left
        self._leases = member.leases_of_peers(opened)
        num_rounds = self._leases.num_rounds
        self._num_rounds = num_rounds if updates_left < 0 else min(num_rounds, updates_left)
        self._round = 0
        self._first_version = member.store.version
        reporting_seats = opened.seats if member.are_words_shared else (member.seat,)
        self._told = RoundsTold(
            member.channel, member.control, self._first_version, reporting_seats, member.seat
        )
        if self.are_on and (opened.newest != self._newest or self._has_moved):
            self.close()  # a member died and another joined: they have to meet
        self._barrier.begin(opened.phase)
        if self.are_on:
            self._averaging.come_back()
        elif not self._meet(opened):
            return
        member.opened(opened)
        member.copy.own.catch_up()
        self._advance()
        member.clock.begin()

    def _meet(self, opened: messages.OpenEpoch) -> bool:
        """Begin to average with the peers; return False if one died before all had met."""
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
        """Return this member's leases in a round, as the coordinator will cut them.

        It hands them out in member order, and a later member takes any seat that is free.
        """
        return self._leases.of(number, self._seats.index(self._member.seat))

    def close(self) -> None:
        """Before an epoch through the store: back to private parameters, which are pulled then."""
        if self.are_on:
            self._averaging.hand_over()
            self._member.averaging = None
            self._member.copy.live_alone()

    def _advance(self) -> None:
        """Go to the grant of the next round in which this member has a lease."""
        while self._round < self._num_rounds:
            if self._begin_round() or not self._exchange(Work()):
                return
        self._commit_version()
        self._told.end(self._round)
        self._member.await_grant()
        if self.are_on:
            self._averaging.step_aside()

    def _begin_round(self) -> bool:
        """Make the grant of this round, which nobody sends.

        Returns:
            Whether this member has a lease in the round.
        """
        member, copy, leases = self._member, self._member.copy, self._own(self._round)
        is_last = self._round + 1 == self._leases.num_rounds
        copy.own.turn_to(self._first_version + self._round, is_last=is_last)
        if leases:
            copy.version = self._first_version + self._round
            member.serial, member.step = _NEVER_CANCELLED, copy.version
            ticket = Ticket(member.number, copy.version, copy.version)
            member.grant = Grant(ticket, tuple(leases))
            # The stream's reader hears of it from nobody else before the rounds are over.
            done = self._leases.begins_at(self._round)
            member.hooks.hear_stream(messages.StreamDone(member.epoch, done, ()))
            member.beat()
        return bool(leases)

    def upcoming(self, depth: int) -> Sequence[Lease]:
        """Return the leases of this round and up to ``depth`` after them: the rounds are known."""
        num_now, leases = len(self._own(self._round)), list[Lease]()
        for number in range(self._round, self._num_rounds):
            leases += self._own(number)
            if len(leases) >= num_now + depth:
                break
        return leases[: num_now + depth]

    def push(self, work: Work) -> float:
        """Go through a round to the next grant; return the averaged gradient's norm, or nan."""
        member, clock = self._member, self._member.clock
        start = time.perf_counter()
        clock.compute_s = start - clock.begun_s
        if member.is_dropped():
            member.mail.next()  # it believes that it pushed, and nobody received the push
            raise Stopped
        if self._exchange(work):
            clock.push_s = time.perf_counter() - start - clock.wait_s
            norm = self._averaging.norm
            self._advance()  # this member may have no lease in some rounds
        else:
            norm = member.store.norms.of(member.jobs.used_in)
        clock.begin()
        return norm

    # -- one round ------------------------------------------------------------------------------

    def _exchange(self, work: Work) -> bool:
        """Average with the peers; return False if this member left them instead."""
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
        """Fill this seat's slot and its line; the gradient is checked later."""
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
            leaves=self._leaves(), snapshot=control[SNAPSHOT],
            stage=Stage.PUSHES if work.num_samples else stage,
        ))  # fmt: skip
        clock.wait_s = 0.0

    def _leaves(self) -> int:
        """Return 0, or whether the run stops or a member died, as all others see it, too."""
        control = self._member.control
        if not control[ALARM]:
            return 0
        return DIED if any(control[word] for word in control.gone) else 1

    def _conclude(self, lines: list[Line], fault: int) -> None:
        """The update is made: record the pushes that it used."""
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
        entries = [lines[seat].entry(int(lines[seat].fault) or fault) for seat in self._seats]
        self._round += 1
        member.copy.version += 1
        snapshot = self._requested_snapshot(lines)
        self._told.note(self._round - 1, entries, snapshot)
        if snapshot:
            self._take_snapshot(snapshot)

    def _requested_snapshot(self, lines: list[Line]) -> int:
        """Return the number of the checkpoint that all take now, after the same round; 0: none.

        At an epoch's end none is taken here: one may be taken before the next begins.
        """
        number = int(max(line.snapshot for line in lines))
        is_new = number > self._member.snapshots.newest and self._round < self._num_rounds
        return number if is_new else 0

    def _take_snapshot(self, number: int) -> None:
        """Take part in a checkpoint; the block stays as it is until all are at the next barrier."""
        member, snapshots, version = self._member, self._member.snapshots, self._member.version
        member.mail.look()  # the folder of checkpoints may have changed
        is_main = member.seat + 1 == member.control[MAIN]
        has_own = member.copy.is_difference or member.hooks.compressed is not None
        if member.seat == 0:
            snapshots.take(number, version, *self._averaging.standing(), is_main=is_main)
            return
        if has_own:
            self._averaging.standing()  # finishes what is in flight; the rest is this member's own
        if has_own or is_main:
            snapshots.add(number, version, has_own=has_own, is_main=is_main)
        snapshots.newest = number

    # -- the way out ----------------------------------------------------------------------------

    def leave(self, what: str = "", *, is_over: bool = False) -> None:
        """This member needs the coordinator: all leave their peers at the next barrier.

        Args:
            what: what cannot be done between peers, nor in the store if ``Averaging.refuse``
                raises; "": the run stops.
            is_over: whether this member's loop is over, so that it needs no work from elsewhere.
        """
        if not self.are_on:
            return
        member = self._member
        if what:
            self._averaging.refuse(what, is_over=is_over)
            if not is_over:
                self.refuse_in_lockstep(what)
        member.copy.unedited.check()  # the store takes over the block as it is
        member.control[ALARM] = 1
        self._show(Work(), Stage.LEFT_LOOP if is_over else Stage.LEFT)
        self._barrier.arrive()
        self._report_interruption(None, (), needs_store=bool(what))
        self._leave_with_work()

    def refuse_in_lockstep(self, what: str) -> None:
        """Raise ConfigError if members make their steps together: ``what`` needs the store."""
        if self._member.hooks.follow is not None:
            raise ConfigError(
                f"{what} is not supported where all workers step the optimizer together with a "
                "closure (LBFGS, closures=True): step once on each mini-batch, or use "
                "--protocol local-sgd"
            )

    def leave_if_alarmed(self) -> None:
        """Leave the peers in the middle of a round if a member is gone or the run ends."""
        if self.are_on and self._member.grant is not None and self._member.control[ALARM]:
            self.leave()

    def _interrupted(self, work: Work, *, is_updating: bool) -> None:
        """Undo the share, report where this member is, and go on through the store."""
        self._averaging.give_up(work, is_updating=is_updating)
        entries: tuple[messages.Entry, ...] = ()
        if is_updating:
            lines = self._barrier.lines()
            entries = tuple(
                lines[seat].entry(self._fault(seat, lines[seat].fault)) for seat in self._seats
            )
        clock, own_entry = self._member.clock, None
        if work.num_samples:
            fault = self._fault(
                self._member.seat, messages.FOUND_INF if work.found_inf else messages.OK
            )
            clocks = (clock.compute_s, clock.wait_s, clock.push_s, clock.input_s)
            own_entry = messages.Entry(
                work.num_samples, work.loss, fault, work.weight, *clocks, *work.clip
            )
        self._report_interruption(own_entry, entries)
        self._leave_with_work()
        self._member.await_grant()

    def _fault(self, seat: int, fault: float) -> int:
        """Return the fault of a push that no update has checked yet."""
        return int(fault) or (
            messages.OK if self._member.store.is_finite(seat) else messages.NOT_FINITE
        )

    def _report_interruption(
        self,
        own_entry: messages.Entry | None,
        entries: tuple[messages.Entry, ...],
        *,
        needs_store: bool = False,
    ) -> None:
        """Report this member's push and those it saw; wait until all live members have.

        From then on the others may make updates, so shared memory is not written after it.
        """
        self._averaging.hand_over()
        self._commit_version()
        self._told.tell()
        self._wait_for_others(own_entry, entries, needs_store=needs_store)

    def _wait_for_others(
        self,
        own_entry: messages.Entry | None,
        entries: tuple[messages.Entry, ...],
        *,
        needs_store: bool,
    ) -> None:
        """The same without handing over anything; the work in hand is kept."""
        channel, mail = self._member.channel, self._member.mail
        channel.send(messages.PeersLeft(own_entry, entries, needs_store))
        while isinstance(message := mail.next(), messages.Mend):
            if self.are_on:
                self._averaging.restore_the_dead()
            channel.send(messages.Mended())
        if not isinstance(message, messages.Resume):
            raise Stopped
        self._member.serial = message.serial

    def _leave_with_work(self) -> None:
        """Go back to private memory, with the parameters of the newest version."""
        self._member.averaging = None
        copy = self._member.copy
        grads = [parameter.grad for parameter in copy.replica.parameters]
        copy.home = copy.replica.live_alone()
        copy.unedited.watch(copy.home)
        copy.unedited.mark()
        for parameter, gradient in zip(copy.replica.parameters, grads, strict=True):
            parameter.grad = gradient

    def _commit_version(self) -> None:
        """Make the peers' version the store's, with its buffers, which no block held.

        All members write the same.
        """
        member, averaging = self._member, self._averaging
        member.control[VERSION] = 2 * member.copy.version + averaging.block
        buffers = member.copy.replica.layout.buffers.of(member.store.blocks[averaging.block])
        buffers.copy_(averaging.kept_buffers)
