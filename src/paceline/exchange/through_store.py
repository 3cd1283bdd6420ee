"""An exchange through the store: every order comes from the coordinator, every protocol runs.

    send push -> [ jobs: add, finish ] -> grant -> wait for its version -> pull

Members execute the updates that the coordinator decides; a member that waits for its grant does
the jobs that arrive meanwhile. This module must not know protocols, processes or the loop.
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim import Optimizer

from ..conditions.faults import Fault, Kind
from ..events import Grant, Lease
from ..replica.replica import Replica
from ..store.applied import RhythmWords
from ..store.loss_scale import LossScale
from ..wire.channel import Channel
from ..wire.messages import (
    OK,
    Adopt,
    Arrive,
    AskStop,
    Clocks,
    Count,
    Describe,
    Done,
    EndEpoch,
    Extend,
    Extended,
    FaultComes,
    GiveBack,
    Goodbye,
    Laid,
    LeaveEpoch,
    LogValues,
    Note,
    OpenEpoch,
    Push,
    PushScaled,
    Rested,
    SentAway,
    SettingsNow,
    Snap,
    StepLeft,
    Stop,
    Summed,
    SumValues,
    Told,
    ToMember,
)
from .base import (
    Clock,
    EvaluationRanges,
    Exchange,
    Shape,
    Stopped,
    Superseded,
    Work,
)
from .carrier import Carrier
from .evaluation import SharedRanges
from .inbox import POLL_S, Inbox, JobQueue
from .model_copy import ModelCopy
from .snapshot import Snapshot
from .turns import Beginning, State, Turns
from .unedited import Unedited


class StoreExchange(Exchange):
    """One member that talks to a coordinator over a lane.

    Args:
        lane: both ways to the coordinator.
        carrier: of words and bytes between members.
        seat, member: the worker's place, and this life on it.
        is_newcomer: whether it joins a run under way, whose main worker is another by now.
    """

    def __init__(
        self,
        lane: Channel,
        carrier: Carrier,
        *,
        seat: int,
        member: int,
        is_newcomer: bool = False,
    ) -> None:
        self._lane = lane
        self._began_s = time.perf_counter()
        self._carrier = carrier
        self._control = control = carrier.control
        self.seat = seat
        self.member = member
        self._cancelled = control.cancelled[seat]
        self._beats = control.beats[seat]
        self._drops_next = self._has_copy = False
        self.num_workers = control.num_seats
        self._epoch = 0
        self._told = 0  # position in the epoch up to which ``upcoming`` has told
        self._batch_ends: Sequence[int] | None = None
        self._clock = Clock()
        self.snapshots = Snapshot(lane)
        self._duties = JobQueue(
            control, seat, lambda version: self.advance_schedule(version), self._pin, self._clock
        )
        is_main = seat == 0 and not is_newcomer
        self._mail = Inbox(lane, self._duties, self._clock, is_main=is_main)
        self._mail.snap = self._snap
        self._mail.move = lambda message: self.snapshots.write_into(*message)
        self._turns = Turns(control, seat, lambda: self.is_main, self._look)
        self._grant: Grant | None = None
        self._serial = self._step = -1
        self._num_called_off = 0
        self.advance_schedule: Callable[[int], bool] = lambda version: False
        """Bring prepared schedulers to this version; whether members' rates may differ by then."""
        self.marks: Callable[[], object] = lambda: None
        """What of prepared schedulers must be the same in members that push into one update."""
        self.num_own_steps: Callable[[], int] = lambda: 0
        """Of an optimizer that steps here, in the whole run."""
        self.adopt: Callable[[str], None] = lambda text: None
        """Take over the settings of a worker that is there already."""
        self.order_digest: Callable[[], str] = lambda: ""
        """Of the epoch's order that was drawn last; all members' are compared."""
        self.unedited = Unedited()
        self.take_loaded: Callable[[], State | None] = lambda: None
        """The optimizer's state that the script has loaded since ``prepare``."""
        self.is_over = False
        """Whether the script has no more epochs."""
        self.has_opened = False
        """Whether its first epoch was opened."""
        self._is_between = False
        """Whether an epoch is over for this member, and no other has begun."""
        self._owes_stop = False
        """Whether it has asked for the end there, where a last checkpoint is taken with it."""
        self._first_skipped = 0
        self.first_scale: LossScale | None = None
        """Of a run that goes on; None: the scalers' own."""

    @property
    def shared(self) -> "StoreExchange":
        return self

    # -- before the first step ------------------------------------------------------------------

    def attach(
        self, replica: Replica, rule: Optimizer, shape: Shape, description: dict[str, object]
    ) -> None:
        """Describe the model, wait for the store's memory, and fill or read it.

        Args:
            rule: the optimizer that the store applies: the user's, or plain averaging.
        """
        self._shape = shape
        self._lane.send(Describe(json.dumps(description)))
        laid = self._mail.expect(Laid)
        self.num_steps, self.begins = laid.num_steps, (laid.first_epoch, laid.place)
        self.store = store = self._carrier.open_store(replica.layout, laid.arena_bytes)
        self._has_copy = True
        self._copy = ModelCopy(self.seat, replica, rule, store, laid, self.unedited, self.check)
        self._duties.begin(store, self._copy.updaters, rule)
        if limit := laid.distance_limit:
            self._duties.scale_own = lambda number: self._scale_own(number, limit)
        self.snapshots.begin(store)
        self._beginning = Beginning(
            self._control, self._mail, store, self._copy.updaters, laid.version, self.beat
        )
        self._beginning.lay_out(replica, rule, self.first_scale, self._first_skipped)
        self._copy.live_alone()

    # -- the verbs ------------------------------------------------------------------------------

    def open_epoch(self, epoch: int, batch_ends: Sequence[int] | None) -> bool:
        """Wait until every member is at this epoch; False: the run is over."""
        if self._mail.has_stopped:
            self.is_cut_short = True
            return False
        self._is_between = False
        own, is_first = self._settle_edits(), not self.has_opened
        self.has_opened = True
        self._epoch, self._batch_ends, self._told = epoch, batch_ends, 0
        ends = tuple(batch_ends) if batch_ends is not None else None
        digest = self.order_digest() if self.num_workers > 1 else ""
        self._lane.send(Arrive(epoch, ends, digest, self.place()))
        while isinstance(message := self._mail.next(), Adopt):
            self.adopt(message.text)
        if isinstance(message, EndEpoch):  # a newcomer that came too late for this epoch
            self._end_at(message.version)
        if isinstance(message, SentAway):
            raise Stopped
        if not isinstance(message, OpenEpoch):
            self.is_cut_short = isinstance(message, Stop)
            return False
        if is_first:
            self._settle_beginning()
        self._began_s = time.perf_counter() - message.began_for_s
        self._opened(message)
        if own is not None and self._grant is not None:
            self._copy.replica.layout.buffers.of(self._copy.home).copy_(own)
        return True

    def _settle_edits(self) -> torch.Tensor | None:
        """What the script changed since the last epoch; buffers of its own, as a pass leaves them.

        Before the first epoch the main worker's weights and state are written to the store: all
        stand still, and whatever another member holds is pulled over.
        """
        if self.has_opened:
            self.unedited.check_all(self.version)
            return self.unedited.buffers_to_keep(self._copy.home)
        self.unedited.take_all()
        self._loaded = self.take_loaded()
        if self._mail.is_main:
            self._settle_beginning()
        return None

    def _settle_beginning(self) -> None:
        self._beginning.settle(self._copy.replica, self._copy.rule, self._loaded)

    def _opened(self, opened: OpenEpoch) -> None:
        self._await_grant()

    def grant(self) -> Grant | None:
        """The work to do next; None: the epoch is over."""
        return self._grant

    def push(self, work: Work) -> None:
        """Hand in the gradient (or the difference) of the work that was granted."""
        start = time.perf_counter()
        clock = self._clock
        clock.compute_s = start - clock.begun_s
        fault, hyper = OK, 0
        self.unedited.check(-1 if self._copy.is_difference else self.version)
        if work.weight:
            fault = self._copy.fill(work, self._step)
            hyper = self._settings()
        told = Told(work.num_samples, work.loss, fault, work.weight, work.kept, work.unused)
        clocks = Clocks(clock.compute_s, clock.wait_s, clock.push_s, clock.add_s)
        self._duties.used_in = -1
        if not self._is_dropped():
            self._lane.send(Push(self._serial, self.version, told, clocks, hyper, work.clip))
        clock.wait_s = clock.add_s = 0.0
        self._await_grant()
        clock.push_s = time.perf_counter() - start - clock.wait_s
        self.last_norm = self.store.norms.of(self._duties.used_in)

    def extend(self) -> Lease | None:
        """One more mini-batch for the work in flight (gradient accumulation)."""
        self._lane.send(Extend(self._serial))
        return self._mail.answer(Extended).lease

    def give_back(self) -> None:
        """Return the work in flight undone."""
        self._lane.send(GiveBack(self._serial))
        self._await_grant()

    def leave_epoch(self, kept: Sequence[int], *, is_look: bool = False) -> None:
        """The loop was left early: wait for the epoch's end, which comes for all.

        Args:
            kept: ids of leases whose gradients ride on the next push.
            is_look: nothing was done with any of its batches.
        """
        self._lane.send(LeaveEpoch(tuple(kept), is_look))
        while isinstance(message := self._mail.next(), Grant):
            pass  # it was on its way
        self._end_at(_version_of(message))

    def check(self) -> None:
        self.beat()
        is_late = self.is_in_step and self._control[self._cancelled] > self._serial
        if is_late and self._grant is not None:  # else the epoch is over: no other work will come
            raise Superseded

    def beat(self) -> None:
        """A sign of life: this member gets on."""
        control, index = self._control, self._beats
        control[index] += 1

    def superseded(self) -> None:
        self._num_called_off += 1
        left_s = time.perf_counter()
        self._copy.replica.held.drop_parameters()  # it may be left with others in their place
        self._lane.hold(StepLeft(self._serial, left_s - self._clock.begun_s, left_s))
        self._await_grant()
        self._clock.push_s = 0.0

    def sleep(self, seconds: float) -> None:
        """Wait on this seat's cancelled word, so that a cancellation ends it at once."""
        control, serial = self._control, self._serial
        index = control.cancelled[self.seat]
        end_s = time.perf_counter() + seconds
        while (left_s := end_s - time.perf_counter()) > 0:
            if control.wait_while(index, lambda value: value <= serial, left_s, is_soon=False):
                raise Superseded

    def upcoming(self, depth: int) -> Sequence[Lease]:
        """Leases at work and up to ``depth`` after them, without those told before.

        The coordinator knows the depth and keeps so many.
        """
        grant = self._grant
        return self._news((*grant.leases, *grant.upcoming)) if grant is not None else ()

    def _news(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        """Those of this epoch that were not told before; from now on they are."""
        news = [one for one in leases if one.start >= self._told and one.epoch == self._epoch]
        if news:
            self._told = news[-1].stop
        return news

    def rhythm(self, number: int) -> RhythmWords:
        """What all members see of the prepared scheduler of this number."""
        return RhythmWords(self._control, number)

    def optimizer_state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """See ``ModelCopy.optimizer_state``."""
        return self._copy.optimizer_state()

    @property
    def trained_s(self) -> float:
        return time.perf_counter() - self._began_s

    def inject(self, fault: Fault) -> None:
        self._lane.send(FaultComes(str(fault)))
        if fault.kind is Kind.KILL:
            self._lane.die()
        elif fault.kind is Kind.STOP:
            self._lane.halt()
        elif fault.kind is Kind.RAISE:
            raise RuntimeError(f"it was to fail here: {fault}")
        elif fault.kind is Kind.DROP:
            self._drops_next = True
        elif fault.kind is Kind.DELAY:
            self.sleep(fault.for_s)

    def _is_dropped(self) -> bool:
        """Whether the push that comes now is lost on the way."""
        is_dropped, self._drops_next = self._drops_next, False
        return is_dropped

    def tell_settings(self, text: str) -> None:
        """The optimizer's settings at an epoch's beginning, for members that come later."""
        self._lane.send(SettingsNow(text))

    def ask_to_stop(self) -> None:
        self._owes_stop = self._is_between
        self._lane.send(AskStop())

    def hear_stop(self) -> None:
        if self._owes_stop and not self._mail.has_stopped:
            self._mail.answer(Stop)

    @property
    def is_main(self) -> bool:
        if not self._mail.is_main:
            self._mail.look()  # the one before may have died
        return self._mail.is_main

    @property
    def is_stopped(self) -> bool:
        return self._mail.is_stopped

    @property
    def version(self) -> int:
        return self._copy.version if self._has_copy else 0

    @property
    def serial(self) -> int:
        return self._serial + self._num_called_off

    def applied(self, version: int) -> int:
        return self.store.applied.of(version)

    @property
    def scale(self) -> LossScale | None:
        return self.store.scale

    def offer_scale(self, scale: LossScale) -> None:
        """The scale of this member's own GradScaler: the run's, if it has none yet."""
        self.store.scales.offer(self.seat, scale)

    def census(
        self, num_samples: int, batch_size: int, ends: Sequence[int] | None = None, digest: str = ""
    ) -> EvaluationRanges:
        own = tuple(ends) if ends is not None else None
        self._lane.send(Count(num_samples, batch_size, own, digest))
        return SharedRanges(self._lane, self._mail)

    def sum(self, values: Sequence[float]) -> list[float]:
        self._lane.send(SumValues(tuple(float(value) for value in values)))
        return list(self._mail.expect(Summed).values)

    def once(self) -> AbstractContextManager[bool]:
        return self._turns.once()

    def _look(self) -> None:
        """While this member waits for another one's block."""
        self.beat()
        self._mail.do_jobs()
        if self._is_between:
            self._mail.do_snaps()

    def copy_now(self) -> None:
        """The run ends, in the middle of the script's own code: copy what stands, if asked to."""
        self._mail.look()
        self._mail.do_snaps()

    def say(self, text: str) -> None:
        """Have the run say this, once for all workers."""
        self._lane.send(Note(text))

    def log(self, values: dict[str, float]) -> None:
        self._lane.send(LogValues(values))

    def close(self) -> None:
        self._lane.send(Done())

    def _scale_own(self, number: int, limit: float) -> float:
        """What distance leaves of this member's last push, in pass ``number``; it is told."""

        if self._serial < 0:  # the push of who sat here before
            return self.store.scale_once(number, lambda: 0.0)
        self.advance_schedule(self.store.version)
        scale = self.store.scale_once(number, lambda: self._copy.allowed_scale(limit))
        self._lane.hold(PushScaled(self._serial, self.version, scale))
        return scale

    # -- hearing --------------------------------------------------------------------------------

    def _await_grant(self) -> None:
        """Wait for the next grant, or the end of the epoch or the run, and pull its version."""
        message = self._mail.next()
        if isinstance(message, Grant):
            version = message.ticket.version
            self._mail.settle(lambda: self._control.wait_for_version(version, POLL_S))
            self._serial = self._step = message.ticket.serial
            self._pull(version)
            self._grant = message
        else:
            self._end_at(_version_of(message))
        self._clock.begun_s = time.perf_counter()
        self.beat()

    def _end_at(self, version: int) -> None:
        """The epoch or the run is over at this version."""
        self._mail.settle(lambda: self._control.wait_for_version(version, POLL_S))
        self._pull(version)
        self.unedited.end_epoch(self._copy.home)
        self._grant = None
        self._is_between = True

    def _pull(self, version: int) -> None:
        self._copy.pull(version)

    # -- checkpoints ----------------------------------------------------------------------------

    def rest(self, epoch: int) -> None:
        """The script has no more epochs: wait until the others have none, and the last is kept."""
        self.is_over = True
        self._lane.send(Rested(epoch, self.place()))
        self._mail.answer(Goodbye)

    def num_skipped(self) -> int:
        """Updates until the newest version that changed nothing."""
        version = self.store.version
        return version - self.store.applied.of(version)

    def begin_skipped(self, num_skipped: int) -> None:
        """The run goes on, and so many had changed nothing."""
        self._first_skipped = num_skipped

    def _pin(self, number: int) -> None:
        """A job among those of the updates: no other one changes a block meanwhile."""
        self.snapshots.take(number, self.store.version, self.store.blocks[self.store.current])

    def _snap(self, message: Snap) -> None:
        """All others wait or stop: this version stands, or is on its way."""
        number, version, is_first = message
        if not is_first:
            self.snapshots.add_own(number, version)
            return
        self._mail.settle(lambda: self._control.wait_for_version(version, POLL_S))
        self.snapshots.take(number, version, *self._standing())

    def _standing(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The block of the newest version, and the buffers where it holds none."""
        return self.store.blocks[self.store.current], None

    def _settings(self) -> int:
        """See ``settings_word``; 0: they may differ, since members are at different versions."""
        if self.advance_schedule(self.version):
            return 0
        return self._copy.settings(self.marks(), self.num_own_steps())


def _version_of(message: ToMember) -> int:
    """At which an epoch or the run is over. Stopped: it says nothing of that."""
    if not isinstance(message, EndEpoch | Stop):
        raise Stopped
    return message.version
