"""An exchange between peers: no message, no server on the way of the bytes, two barriers a round.

    member 0   gradient -> slot 0 |   | share 0 of all slots -> mean -> optimizer |   | next step
    member 1   gradient -> slot 1 | 1 | share 1 of all slots -> mean -> optimizer | 2 | next step
                              barrier                                         barrier

The parameters exist once, in the store's current block; every member computes on them and updates
its own share of them. Before it does, it copies its share (parameters and state) into the other
block and sets a mark, so a death harms nothing: survivors put every share back and go on through
the store (``through_store.py``), where the coordinator decides. The same way out is taken when the
run stops or a member needs what peers cannot give (gradient accumulation). This module must not
know protocols; which leases are whose is the ledger's `express_rounds`.
"""

import math
import time
from collections.abc import Sequence

from torch import Tensor

from ..core.batches import express_rounds
from ..events import Grant, Lease, Ticket
from ..store.clip import Clip
from ..store.control import ALARM, SNAPSHOT, VERSION
from ..store.loss_scale import NO_OVERFLOW
from ..wire.messages import (
    FOUND_INF,
    NOT_FINITE,
    OK,
    Entry,
    Mend,
    Mended,
    OpenEpoch,
    PeersLeft,
    Resume,
)
from .base import Stopped, Work
from .rounds import Barrier, GivenUp, Line, RoundsTold, check_settings, common_clip
from .shares import Share
from .through_store import StoreExchange

_NEVER_CANCELLED = 2**62
"""A serial between peers: they never call each other off, only the run's end does."""


class PeerExchange(StoreExchange):
    """A member that talks to its peers through memory while an epoch runs express."""

    _is_express = False
    _loss = math.nan  # of the last push
    _round_norm = math.nan  # of the averaged gradient of the round, where it is clipped

    def _opened(self, opened: OpenEpoch) -> None:
        if not opened.is_express:
            if self._is_express:
                self._leave()
            self._await_grant()
            return
        self._seats, updates_left = opened.seats, opened.updates_left
        rounds = self._plan_rounds(opened.position, opened.first_id)
        self._rounds = rounds if updates_left < 0 else rounds[:updates_left]
        self._round = 0
        self._diary = RoundsTold(self._lane, self.num_workers)
        self._board = Barrier(self._control, self.seat, self._clock)
        self._first_version = self.store.version
        if not self._is_express:
            self._pull(0)  # the first member may have loaded other weights since
            self._enter()
        else:
            self._come_back()
        self._board.begin(opened.phase)
        self._advance()
        self._clock.begun_s = time.perf_counter()

    def _plan_rounds(self, position: int, first_id: int) -> list[list[list[Lease]]]:
        """The leases from ``position`` on, by round and seat: what the coordinator will cut.

        It hands out in member order, and who joined later sits wherever a seat was free.
        """
        leases = self._shape.batches(self._batch_ends).cut_all(self._epoch)
        rest = [one for one in leases if one.start >= position]
        rest = [one._replace(id=first_id + i) for i, one in enumerate(rest)]
        rounds = express_rounds(rest, self.num_workers, self.num_steps)
        places = [self._seats.index(seat) for seat in range(self.num_workers)]
        return [[row[place] for place in places] for row in rounds]

    def _enter(self) -> None:
        """The model on the shared block; this member's share and its optimizer."""
        self._is_express = True
        store, replica = self.store, self._copy.replica
        self._kept_buffers = replica.layout.buffers.of(self._copy.home).clone()
        """Of the version that stands: the model's own change with every forward pass."""
        self._block = store.current
        self._share = Share(store, replica, self._copy.rule, seat=self.seat, block=self._block)
        self._all_present = b"\1" * len(replica.parameters)
        self._come_back()

    def _come_back(self) -> None:
        """The weights on the shared block, where others read them."""
        if not self._copy.is_difference:
            self._copy.replica.live_in(self.store.blocks[self._block])
            self.unedited.watch(self.store.blocks[self._block], self._share.ranges)
            self.unedited.mark(self._copy.home)  # others may be at work already

    def _step_aside(self) -> None:
        """Between epochs the weights lie alone: what a script does with them is seen by nobody."""
        if self._is_express and not self._copy.is_difference:
            self._copy.replica.live_in(self._copy.home)
            self.unedited.watch(self._copy.home)
            self.unedited.mark()

    def _leave(self) -> None:
        """Back to private parameters; they are pulled with the next grant."""
        self._is_express = False
        self._copy.live_alone()

    def _advance(self) -> None:
        """The grant of the next round in which this member has a lease."""
        while self._round < len(self._rounds):
            leases = self._rounds[self._round][self.seat]
            if leases:
                self._copy.version = self._first_version + self._round
                self._serial, self._step = _NEVER_CANCELLED, self._copy.version
                ticket = Ticket(self.member, self._copy.version, self._copy.version)
                self._grant = Grant(ticket, tuple(leases))
                self.beat()
                return
            if not self._exchange(Work()):
                return
        self._let_stand()
        self._diary.tell()  # all do both: the first may have died by now
        self._await_grant()
        self._step_aside()

    def upcoming(self, depth: int) -> Sequence[Lease]:
        """Nobody is asked: the rounds of the epoch are known."""
        if not self._is_express:
            return super().upcoming(depth)
        end = self._round + 1 + -(-depth // self.num_steps)
        own = [one for row in self._rounds[self._round : end] for one in row[self.seat]]
        return self._news(own[: self.num_steps + depth])

    def push(self, work: Work) -> None:
        if not self._is_express:
            super().push(work)
            return
        start = time.perf_counter()
        clock = self._clock
        clock.compute_s = start - clock.begun_s
        if work.kept or work.unused or not work.weight:
            self._ask_to_leave()
            super().push(work)
            return
        if self._is_dropped():
            self._mail.next()  # it believes to have pushed, and nobody has heard of it
            raise Stopped
        if self._exchange(work):
            clock.push_s = time.perf_counter() - start - clock.wait_s
            norm = self._round_norm
            self._advance()  # there may be rounds without a lease of its own
            self.last_norm = norm
        else:
            self.last_norm = self.store.norms.of(self._duties.used_in)
        self._clock.begun_s = time.perf_counter()

    def extend(self) -> Lease | None:
        if self._is_express:
            self._ask_to_leave()
        return super().extend()

    def give_back(self) -> None:
        if self._is_express:
            self._ask_to_leave()
        super().give_back()

    def leave_epoch(self, kept: Sequence[int], *, is_look: bool = False) -> None:
        if self._is_express:
            self._ask_to_leave()
        super().leave_epoch(kept, is_look=is_look)

    # -- one round ------------------------------------------------------------------------------

    def _exchange(self, work: Work) -> bool:
        """Average with the peers; False when the express path was left instead."""
        phase = 1
        self._round_norm, self._duties.used_in = math.nan, -1
        try:
            self._tell(work)
            self._board.barrier()
            lines = self._board.lines()
            if any(line.leaves for line in lines):
                raise GivenUp
            phase = 2
            self._update(lines)
            self._board.barrier()
            fault = self._take_back_if_bad()
        except GivenUp:
            self._interrupted(phase, work)
            return False
        self._conclude(lines, fault)
        return True

    def _tell(self, work: Work) -> None:
        """Fill this seat's slot and its line; what is wrong with the gradient is found later."""
        clock, control = self._clock, self._control
        if work.num_samples:
            self._fill(work)
        self._board.show(Line(
            num_samples=work.num_samples, weight=work.weight, loss=work.loss,
            fault=FOUND_INF if work.found_inf else OK,
            compute_s=clock.compute_s, wait_s=clock.wait_s, push_s=clock.push_s,
            squared_norm=0.0, max_norm=work.clip.max_norm, max_value=work.clip.max_value,
            hyper=self._settings() if work.weight else 0, bad_version=-1.0,
            leaves=control[ALARM], snapshot=control[SNAPSHOT],
        ))  # fmt: skip
        self._loss = work.loss
        clock.wait_s = 0.0

    def _fill(self, work: Work) -> None:
        store = self.store
        if self._copy.is_difference:
            self.unedited.check()
            self._copy.fill(work, self._step)
            return
        if work.inv_scale != 1.0:
            self._copy.replica.scale_gradients(work.inv_scale)
        self._copy.replica.collect(store.present(self.seat))

    def _update(self, lines: list[Line]) -> None:
        """Mean of this member's share of all gradients, and the optimizer's step on it."""
        weights = [line.weight for line in lines]
        total = sum(weights)
        check_settings(lines)
        if not self._copy.is_difference:
            self.unedited.check()  # all are here: nobody changes weights after it was looked
        clip, share = common_clip(lines), self._share
        self._is_skipped = any(line.fault for line in lines)
        present = self._present_in_any(weights)
        if self._is_skipped:
            return
        norm = share.average([one / total for one in weights])
        if not math.isfinite(norm):
            self._board.show_bad(self._copy.version)
        if clip.has_norm:
            self._clip(clip)
        if clip.has_value:
            share.clamp(clip.max_value)
        share.keep(self._copy.version + 1)
        self.advance_schedule(self._copy.version)
        share.step(present, self._copy.rule.param_groups)
        share.average_buffers([one / total for one in weights])
        if not self._copy.is_difference:
            self.unedited.mark()

    def _present_in_any(self, weights: list[float]) -> Sequence[int]:
        """Per parameter: whether any member has a gradient for it."""
        masks = [bytes(self.store.present(seat)) for seat, one in enumerate(weights) if one]
        if all(mask == self._all_present for mask in masks):
            return self._all_present
        return [max(column) for column in zip(*masks, strict=True)]

    def _clip(self, clip: Clip) -> None:
        """Clip the mean gradient by its whole norm: one barrier more."""
        self._board.show_norm(self._share.squared_norm())
        self._board.barrier()
        self._round_norm = math.sqrt(sum(self._board.squared_norms()))
        if (factor := clip.factor(self._round_norm)) != 1.0:
            self._share.scale(factor)

    def _take_back_if_bad(self) -> int:
        """After the second barrier: an update that is not finite is undone; what was wrong."""
        is_bad = self._board.is_bad(self._copy.version)
        if is_bad and not self._is_skipped:
            self._share.restore(self._copy.version + 1)
            if not self._copy.is_difference:
                self.unedited.mark()
            self._raise_if_mine()
            self._board.barrier()
        mine = self._copy.replica.layout.buffers.of(self._copy.home)
        if is_bad or self._is_skipped:
            mine.copy_(self._kept_buffers)
        else:
            self._kept_buffers.copy_(mine)
        return NOT_FINITE if is_bad else OK

    def _conclude(self, lines: list[Line], fault: int) -> None:
        """The version is there: note what made it."""
        control, version = self._control, self._copy.version
        has_overflowed = any(line.fault for line in lines)
        is_update = not has_overflowed and not fault
        self.store.applied.bring(version + 1, is_update=is_update)
        self.store.scale = self.store.scales.bring(
            version + 1,
            is_update=is_update,
            overflow_version=version if has_overflowed else NO_OVERFLOW,
        )
        if self._copy.is_difference:
            self._pull_share()
        if self.seat == 0:
            control[VERSION] = 2 * (version + 1) + self._block
        told = [_entry(one, int(one.fault) or fault) for one in map(lines.__getitem__, self._seats)]
        self._round += 1
        self._copy.version += 1
        asked = self._asked(lines)
        is_time = self._diary.note(self._round - 1, told, asked)
        if (is_time or asked) and self.seat == 0:
            self._diary.tell()
        if asked:
            self._take_snapshot(asked)

    def _asked(self, lines: list[Line]) -> int:
        """The number of the checkpoint that all take now, after the same round; 0: none.

        At the end of an epoch none is taken here: one may be taken before the next begins.
        """
        asked = int(max(line.snapshot for line in lines))
        is_new = asked > self.snapshots.newest and self._round < len(self._rounds)
        return asked if is_new else 0

    def _take_snapshot(self, number: int) -> None:
        """The block stands until all have arrived at the next barrier."""
        self._mail.look()  # it may go to another folder than the last one
        if self.seat == 0:
            self.snapshots.take(number, self._copy.version, *self._standing())
        elif self._copy.is_difference:
            self.snapshots.add_own(number, self._copy.version)
        else:
            self.snapshots.newest = number

    def _standing(self) -> tuple[Tensor, Tensor | None]:
        if not self._is_express:
            return super()._standing()
        return self.store.blocks[self._block], self._kept_buffers

    def _pull_share(self) -> None:
        size = self._copy.replica.layout.parameters.stop
        self._copy.home[:size].copy_(self.store.blocks[self._block][:size])
        assert self._copy.base is not None
        self._copy.base.copy_(self._copy.home)
        self.unedited.mark()

    def _raise_if_mine(self) -> None:
        """The worker whose own gradient is not finite says so, with the parameter's name."""
        if not self.store.is_finite(self.seat):
            self._copy.refuse_not_finite(self._loss, self._step)

    # -- the way out ----------------------------------------------------------------------------

    def copy_now(self) -> None:
        if self._is_express and self._grant is not None and self._control[ALARM]:
            self._ask_to_leave()
        super().copy_now()

    def superseded(self) -> None:
        """Called off while peers run: the run stops, and this step took too long to wait for."""
        if self._is_express:
            self._ask_to_leave()
            self._await_grant()
        else:
            super().superseded()

    def _ask_to_leave(self) -> None:
        """This member needs the coordinator: all leave the express path at their next barrier."""
        self.unedited.check()  # what is on the block goes along
        self._control[ALARM] = 1
        self._tell(Work())
        self._board.arrive()
        self._report_interruption(None, (), needs_store=True)
        self._leave_with_work()

    def _interrupted(self, phase: int, work: Work) -> None:
        """Put the share back, tell where this member stands, and go on through the store."""
        entries: tuple[Entry, ...] = ()
        if phase == 1 and not self._copy.is_difference:
            self.unedited.check()  # what is on the block goes along
        if phase == 2:
            self._share.restore(self._copy.version + 1)
            lines = self._board.lines()
            entries = tuple(
                _entry(lines[seat], self._fault(seat, lines[seat].fault)) for seat in self._seats
            )
        clock, mine = self._clock, None
        if work.num_samples:
            if not work.found_inf:
                self._raise_if_mine()
            fault = self._fault(self.seat, FOUND_INF if work.found_inf else OK)
            clocks = (clock.compute_s, clock.wait_s, clock.push_s)
            mine = Entry(work.num_samples, work.loss, fault, work.weight, *clocks, *work.clip)
        self._report_interruption(mine, entries)
        self._leave_with_work()
        self._await_grant()

    def _fault(self, seat: int, fault: float) -> int:
        """What is wrong with a push that no update has looked at yet."""
        return int(fault) or (OK if self.store.is_finite(seat) else NOT_FINITE)

    def _report_interruption(
        self, mine: Entry | None, entries: tuple[Entry, ...], *, needs_store: bool = False
    ) -> None:
        """Tell of this member's push and those it saw; wait until all live ones have.

        From then on the others may make updates, so nothing that they share is written after it.
        """
        self._let_stand()
        self._diary.tell()
        self._lane.send(PeersLeft(mine, entries, needs_store))
        while isinstance(message := self._mail.next(), Mend):
            self._restore_the_dead()
            self._lane.send(Mended())
        if not isinstance(message, Resume):
            raise Stopped
        self._serial = message.serial

    def _restore_the_dead(self) -> None:
        """Put back the shares of members that died before they could; all others wait."""
        store, replica, rule = self.store, self._copy.replica, self._copy.rule
        for seat, gone in enumerate(self._control.gone):
            if self._control[gone]:
                share = Share(store, replica, rule, seat=seat, block=self._block)
                share.restore(self.version + 1)

    def _leave_with_work(self) -> None:
        """Private memory again, with the parameters of the version that stands."""
        self._is_express = False
        replica = self._copy.replica
        grads = [parameter.grad for parameter in replica.parameters]
        self._copy.home = replica.live_alone()
        self.unedited.watch(self._copy.home)
        self.unedited.mark()
        for parameter, gradient in zip(replica.parameters, grads, strict=True):
            parameter.grad = gradient

    def _let_stand(self) -> None:
        """The version that peers came to is the store's, with its buffers, which no block held.

        All write the same.
        """
        self._control[VERSION] = 2 * self._copy.version + self._block
        self._copy.replica.layout.buffers.of(self.store.blocks[self._block]).copy_(
            self._kept_buffers
        )


def _entry(line: Line, fault: int) -> Entry:
    """What the coordinator is told of this line, where this was wrong with its push."""
    return Entry(
        int(line.num_samples), line.loss, fault, line.weight,
        line.compute_s, line.wait_s, line.push_s, *line.clip,
    )  # fmt: skip
