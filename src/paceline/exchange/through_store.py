"""An exchange through the store: the coordinator gives every order, and every protocol runs.

    send push -> [ jobs: add, finish ] -> grant -> wait for its version -> pull

Members execute the updates that the coordinator decides; a member that waits for its grant does
the jobs that arrive meanwhile. While an epoch runs among peers (peers.py), the verbs are forwarded
there; what peers cannot do is done here, after all members have left them. Longer than 300 lines:
all verbs of an exchange are here, most of them one message. This module must not know protocols,
processes or the loop.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from ..conditions.faults import Fault, Kind
from ..core.batches import Ends
from ..errors import ConfigError
from ..events import Grant, Lease
from ..plan import CompressionPrice
from ..replica.held import IN_THE_STEP
from ..replica.replica import Replica
from ..stopping import StopRule
from ..store.control import ALARM, KEEPS
from ..store.versions import LossScale, RhythmWords
from ..wire import messages
from ..wire.channel import Channel
from .averaging import MakeAveraging
from .base import End, Exchange, ScriptHooks, Shape, Stopped, Superseded, Work
from .compressed import CompressedGradient
from .evaluation import EvaluationRanges, SharedRanges
from .lockstep import Stage
from .member import Carrier, MemberSide
from .peers import PeerRounds
from .turns import THE_END, Beginning, Turns
from .unedited import Unedited

if TYPE_CHECKING:
    from ..spread.group import Ranks

_LOOK_S = 0.001


class StoreExchange(Exchange):
    """One member that talks to a coordinator over a channel.

    Args:
        channel: to and from the coordinator.
        carrier: carries words and bytes between members.
        seat, member: the worker's seat, and the number of this life on it.
        is_main: whether it prints and saves from the start; None: seat 0 does.
        averaging: how peers make updates; None: this member never runs among peers.
    """

    price_anew: Callable[[float], float] | None = None
    """Returns the seconds that a restart of all members costs, given how many seconds the first
    epoch has been open; None: they may not restart."""
    _has_told_of_cut = False

    def __init__(
        self,
        channel: Channel,
        carrier: Carrier,
        *,
        seat: int,
        member: int,
        is_main: bool | None = None,
        averaging: MakeAveraging | None = None,
    ) -> None:
        self._channel, self._control, self.seat = channel, carrier.control, seat
        self._began_s = time.perf_counter()
        is_main = seat == 0 if is_main is None else is_main
        self._carrier, self._averaging = carrier, averaging
        self._own = own = MemberSide(channel, carrier, seat=seat, number=member, is_main=is_main)
        self._mail, self.num_workers = own.mail, own.num_workers
        self._beat, self._cancelled = own.beat, self._control.cancelled[seat]
        self._peers = PeerRounds(own, averaging)
        self._turns = Turns(self._control, seat, lambda: self.is_main, self._look, self._await_main)
        self._num_called_off = self._num_trials = self._first_skipped = 0
        self.first_scale: LossScale | None = None
        """The loss scale of a resumed run."""
        self.is_newcomer = False
        """Whether it joins a run in progress."""
        self.is_over = False
        """Whether the script has no more epochs."""
        self.has_opened = False
        """Whether it has reached its first epoch."""
        self._are_alike = False
        """Whether the first epoch began, so that all hold the main member's weights."""
        self._is_published = False
        """Whether weights were published since the last epoch."""
        self.ranks: Ranks | None = None
        """How members of a split model reach each other; None: they do not."""
        self.price: Callable[[CompressedGradient], CompressionPrice] | None = None
        """Measures, together with all other members, what compression costs and saves; None: it
        cannot be measured."""
        self._owes_stop = self._is_last_epoch = False
        """Whether it asked for the end between epochs, where a last checkpoint is written; and
        whether it goes through an epoch only because others came to it before a stop."""

    @property
    def shared(self) -> "StoreExchange":
        return self

    @property
    def hooks(self) -> ScriptHooks:
        """Must be filled in before ``attach``."""
        return self._own.hooks

    @property
    def unedited(self) -> Unedited:
        """Finds out whether anything but the run changed this member's weights."""
        return self._own.copy.unedited

    # -- before the first step ------------------------------------------------------------------

    def attach(
        self, replica: Replica, rule: Optimizer, shape: Shape, description: dict[str, object]
    ) -> None:
        """Describe the model, wait for the store's memory, and fill or read it.

        Args:
            rule: the optimizer that the store applies: the user's, or plain averaging.
        """
        own = self._own
        self._carrier.is_split = own.hooks.spread is not None
        layout = own.describe(replica, rule, shape, description, self.check)
        self.num_steps, self.begins = layout.num_steps, (layout.first_epoch, layout.place)
        self.store = own.store
        self._beginning = Beginning(
            own.copy, self._mail, layout.version, self.beat, is_part=own.hooks.spread is not None
        )
        self._beginning.lay_out(self.first_scale, self._first_skipped)
        own.live_alone(layout.version)

    def standing(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``MemberSide.standing``."""
        return self._own.standing()

    @property
    def is_by_fragments(self) -> bool:
        """Whether an update may cover only a numbered part of the model."""
        return self._own.copy.own.are_by_parts

    def own_steps(self) -> Mapping[str, Any]:
        """Return what a checkpoint stores of this member's steps that were not exchanged yet."""
        return self._own.remember()

    def go_on_with(self, steps: Mapping[str, Any]) -> None:
        """Resume with what ``own_steps`` returned."""
        self._own.go_on_with(steps)

    # -- the verbs ------------------------------------------------------------------------------

    def open_epoch(self, epoch: int, ends: Ends | None) -> bool:
        """Wait until every member is at this epoch; return False if the run is over.

        Args:
            ends: where its batches end, if not as in the other epochs.
        """
        own = self._own
        self._turns.come_to(2 * epoch + 2)
        if self._mail.has_stopped:
            self.is_cut_short = True
            return False
        own.is_between = False
        self._end_epoch()
        kept_buffers, is_first, self.has_opened = self._settle_edits(), not self.has_opened, True
        own.begin_epoch(epoch, ends)
        batch_ends, last_end = (None, ends) if isinstance(ends, int | None) else (tuple(ends), None)
        digest = own.hooks.order_digest() if self.num_workers > 1 else ""
        published = self._publish_settled(is_first=is_first)
        report = digest, self.place(), published, own.hooks.between()
        self._channel.send(messages.Arrive(epoch, batch_ends, last_end, *report))
        while isinstance(message := self._mail.next(), messages.Adopt):
            own.hooks.adopt(message.text)
        self._catch_up(message, is_first=is_first)
        if isinstance(message, messages.SentAway):
            raise Stopped
        if not isinstance(message, messages.OpenEpoch):
            self.is_cut_short = isinstance(message, messages.Stop)
            return False
        self._are_alike = True
        if is_first:
            self._beginning.settle(self._loaded)
        if message.is_published:
            own.copy.pull(0)
        self._began_s = time.perf_counter() - message.began_for_s
        if message.by_peers:
            self._peers.open(message)
        else:
            self._peers.close()
            own.opened(message)
            own.await_grant()
        if kept_buffers is not None and own.grant is not None:
            own.copy.replica.layout.buffers.of(own.copy.home).copy_(kept_buffers)
        return True

    def _catch_up(self, message: messages.ToMember, *, is_first: bool) -> None:
        """A new member that is too late for its first epoch pulls what all others hold."""
        is_over = isinstance(message, messages.Stop) and is_first and self.is_newcomer
        if is_over or isinstance(message, messages.EndEpoch):
            self._own.end_at(message)
            self._are_alike = True

    def come_to_end(self, why: End) -> None:
        """Called before this member waits for a message: members of a split model may need it."""
        if (spread := self._own.hooks.spread) is not None:
            spread.come_to_end(why)

    def _end_epoch(self) -> None:
        """Called at an epoch's end or before the first: all members get here before any goes on."""
        self.come_to_end(End.EPOCH)
        spread = self._own.hooks.spread if self.has_opened else None
        if spread is not None and (better_cut := spread.passed()) is not None:
            self._cut_again(*better_cut)

    def _cut_again(self, text: str, lost_s: float) -> None:
        """Restart with a better cut of the model, once that would have cost less."""
        if self.price_anew is not None:
            if lost_s > self.price_anew(time.perf_counter() - self._began_s):
                self._channel.send(messages.AskAnew(text))
        elif not self._has_told_of_cut:
            self.say(f"{text}: a resumed run (--resume) measures and cuts the model again")
            self._has_told_of_cut = True

    def _settle_edits(self) -> torch.Tensor | None:
        """Check or accept what the script changed since the last epoch.

        Before the first epoch the main worker's weights and state are written to the store: all
        members wait, and what the others hold is overwritten by the pull.

        Returns:
            Buffers that the script changed, as a forward pass does, to keep; None: none.
        """
        self.hooks.check_given()
        if self.has_opened:
            if self._is_published:
                self.unedited.take_published()
            else:
                self.unedited.check_all(self.version)
            return self.unedited.buffers_to_keep(self._own.copy.home)
        self.unedited.take_all()
        self._loaded = self.hooks.take_loaded()
        if self._mail.is_main:
            self._beginning.settle(self._loaded)
        return None

    def publish(self, protocol: str) -> None:
        """Accept what the script changed in the weights; see ``Pace.publish``.

        Raises:
            ConfigError: others change the weights meanwhile, or hold other memory.
        """
        own, copy = self._own, self._own.copy
        if own.grant is None:
            if own.averaging is not None:
                own.averaging.refuse("pace.publish(model)")
            self._is_published = True
            return
        if self.num_workers > 1 and not copy.is_difference:
            raise ConfigError(
                f"pace.publish(model) is called inside the loop, and under {protocol} one worker's "
                "weights are not the others': publish between epochs, use --protocol local-sgd:H, "
                f"or {IN_THE_STEP}"
            )
        copy.unedited.take_published()
        if not (self._peers.are_on or copy.is_difference):  # else they are in the store already
            copy.publish()

    def _publish_settled(self, *, is_first: bool) -> int:
        """Return what ``Arrive`` says of published weights, which go to the store once all arrived.

        Before the first epoch of a new run the main member's weights go there anyway.
        """
        was_published, self._is_published = self._is_published, False
        if not was_published or (is_first and self.version == 0):
            return 0
        return messages.MAIN_PUBLISHED if self._mail.is_main else messages.OTHERS_PUBLISHED

    def grant(self) -> Grant | None:
        """Return the work to do next; None: the epoch is over."""
        return self._own.grant

    def push(self, work: Work) -> None:
        """Hand in the gradient (or the difference) of the work that was granted."""
        if self._peers.are_on:
            if work.weight and not (work.kept or work.unused):
                self.last_norm = self._peers.push(work)
                return
            self._peers.leave(
                "a mini-batch without a step of its own (skipped, accumulated, or stepped twice)"
            )
        self._push_to_store(work)

    def average_together(
        self, stage: Stage, part: int = 0, *, weight: float, loss: float = math.nan
    ) -> float:
        """See ``Lockstep.average``."""
        if not self._peers.are_on:
            self._peers.refuse_in_lockstep("a step when other workers have left theirs")
        return self._peers.lockstep.average(stage, part, weight=weight, loss=loss)

    def follow_evaluation(self) -> float:
        """See ``Lockstep.evaluate``."""
        return self._peers.lockstep.evaluate()

    def _push_to_store(self, work: Work) -> None:
        self._peers.refuse_in_lockstep("a push that no other worker makes")
        own, clock, start = self._own, self._own.clock, time.perf_counter()
        clock.compute_s = start - clock.begun_s
        fault, settings_word = messages.OK, 0
        self.unedited.check(-1 if own.copy.is_difference else self.version)
        if work.weight:
            fault = own.copy.fill(work, own.step)
            settings_word = own.settings()
        push_data = messages.Told(
            work.num_samples, work.loss, fault, work.weight, work.kept, work.unused, work.stepped
        )
        clocks = messages.Clocks(
            clock.compute_s, clock.wait_s, clock.push_s, clock.add_s, clock.input_s
        )
        own.jobs.used_in = -1
        if not own.is_dropped():
            self._channel.send(
                messages.Push(own.serial, self.version, push_data, clocks, settings_word, work.clip)
            )
        clock.wait_s = clock.add_s = 0.0
        own.await_grant()
        clock.push_s = time.perf_counter() - start - clock.wait_s
        self.last_norm = self.store.norms.of(own.jobs.used_in)

    def extend(self) -> Lease | None:
        """Ask for one more mini-batch for the work in flight (gradient accumulation)."""
        self._peers.leave("gradient accumulation")
        self._channel.send(messages.Extend(self._own.serial))
        return self._mail.answer(messages.Extended).lease

    def give_back(self) -> None:
        """Return the work in flight undone."""
        self._peers.leave("step.skip()")
        self._own.copy.own.forget()  # local steps cannot be undone beyond this
        self._channel.send(messages.GiveBack(self._own.serial))
        self._own.await_grant()

    def leave_epoch(self, kept: Sequence[int], *, is_look: bool = False) -> None:
        """The loop was left early: wait for the epoch's end, which ends it for all.

        Args:
            kept: ids of leases whose gradients go with the next push.
            is_look: whether the script used none of the epoch's batches.
        """
        self._peers.leave("leaving the loop early", is_over=True)
        self._channel.send(messages.LeaveEpoch(tuple(kept), is_look))
        while isinstance(message := self._mail.next(), Grant):
            pass  # it was already in flight
        self._own.end_at(message)

    def out_of_loop(self) -> None:
        """The script has left its loop over the epoch."""
        self._channel.send(messages.OutOfLoop())

    def check(self) -> None:
        self._beat()
        if self._own.hooks.spread is not None:
            return  # a member that left its step alone would leave the others waiting in theirs
        is_at_work = self.is_in_step and not self.has_pushed
        is_late = is_at_work and self._control[self._cancelled] > self._own.serial
        if is_late and self._own.grant is not None:  # else the epoch is over: no work follows
            raise Superseded

    def stepped(self) -> None:
        """The user's optimizer has stepped on this member's own weights."""
        self.unedited.stepped()
        self._own.copy.own.stepped()

    def beat(self) -> None:
        self._beat()

    def superseded(self) -> None:
        own = self._own
        if self._peers.are_on:  # the run stops, and this step took too long
            self._peers.leave()
            own.await_grant()
            return
        self._num_called_off += 1
        left_s = time.perf_counter()
        own.copy.own.forget()
        own.copy.replica.held.drop_parameters()  # the step may have replaced them
        self._channel.hold(messages.StepLeft(own.serial, left_s - own.clock.begun_s, left_s))
        own.await_grant()
        own.clock.push_s = 0.0

    def sleep(self, seconds: float) -> None:
        """Wait on this seat's cancelled word, so that a cancellation ends it at once.

        In a split model it then only returns early, as ``check`` does.
        """
        control, index, serial = self._control, self._cancelled, self._own.serial
        end_s = time.perf_counter() + seconds
        while (left_s := end_s - time.perf_counter()) > 0:
            if control.wait_while(index, lambda now: now <= serial, left_s, is_soon=False):
                if self._own.hooks.spread is not None:
                    return  # the others would wait in their step for ever
                raise Superseded

    def upcoming(self, depth: int) -> Sequence[Lease]:
        """Return the leases at work and up to ``depth`` after them that were not returned before.

        The coordinator knows the depth and reserves as many.
        """
        if self._peers.are_on:
            return self._own.news(self._peers.upcoming(depth))
        grant = self._own.grant
        return self._own.news((*grant.leases, *grant.upcoming)) if grant is not None else ()

    def rhythm(self, number: int) -> RhythmWords:
        """Return what all members see of the prepared scheduler of this number."""
        return RhythmWords(self._control, number)

    def fewest_samples(self, lease: Lease) -> int:
        """Return the fewest samples of the batch that this lease is a part of, and of the next.

        A member without a part of the next batch enters its round after the step on this one.
        """
        batches = self._own.shape.batches(self._own.batch_ends)
        first = batches.batch_at(lease.start)
        bounds = map(batches.bounds, range(first, min(first + 2, batches.num_batches)))
        return min(stop - start for start, stop in bounds)

    def optimizer_state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """See ``ModelCopy.optimizer_state``."""
        averaging = self._own.averaging
        return self._own.copy.optimizer_state(None if averaging is None else averaging.own_updater)

    @property
    def trained_s(self) -> float:
        return time.perf_counter() - self._began_s

    def inject(self, fault: Fault) -> None:
        self._channel.send(messages.FaultComes(str(fault)))
        if fault.kind is Kind.KILL:
            self._channel.die()
        elif fault.kind is Kind.STOP:
            self._channel.halt()
        elif fault.kind is Kind.RAISE:
            raise RuntimeError(f"injected fault: {fault}")
        elif fault.kind is Kind.DROP:
            self._own.drops_next = True
        elif fault.kind is Kind.DELAY:
            self.sleep(fault.for_s)

    def tell_settings(self, text: str) -> None:
        """Send the optimizer's settings at an epoch's start, for members that join later."""
        self._channel.send(messages.SettingsNow(text))

    def ask_to_stop(self) -> None:
        own = self._own
        self._owes_stop = own.is_between
        self._channel.send(messages.AskStop())
        if self._peers.are_on and own.grant is not None:
            self._control[ALARM] = 1  # no round follows, however late the coordinator reads this

    def goes_on(self) -> bool:
        if self._owes_stop and not self.is_stopped:
            self._mail.await_stop()
        if not self.is_stopped:
            return True
        was_last, self._is_last_epoch = self._is_last_epoch, True
        return self._mail.is_at_next and not was_last

    def leave_epochs(self) -> None:
        if self._owes_stop and not self._mail.has_stopped:
            self._mail.answer(messages.Stop)
        if self.is_stopped:
            self._turns.come_to(THE_END)

    def settle_stop(self) -> None:
        """Wait, at the script's end, for the stop that it asked for: the end is copied first.

        Ranks do not wait: rank 0 copies for all, and its script may be over.
        """
        is_owed = self._owes_stop and not (self.is_over or self._mail.has_stopped)
        if is_owed and self._carrier.is_shared:
            self._mail.answer(messages.Stop)

    @property
    def is_main(self) -> bool:
        if not self._mail.is_main:
            self._mail.look()  # the main member may have died
        return self._mail.is_main

    @property
    def is_stopped(self) -> bool:
        return self._mail.is_stopped

    @property
    def version(self) -> int:
        return self._own.version

    @property
    def serial(self) -> int:
        return self._own.serial + self._num_called_off

    def applied(self, version: int) -> int:
        return self.store.applied.of(version)

    @property
    def scale(self) -> LossScale | None:
        return self.store.scale

    def note_kept(self) -> None:
        self._control[KEEPS] = 1

    def offer_scale(self, scale: LossScale) -> None:
        """Offer the scale of this member's GradScaler; it becomes the run's if there is none."""
        self.store.scales.offer(self.seat, scale)

    def census(
        self,
        num_samples: int,
        batch_size: int,
        ends: Sequence[int] | None = None,
        digest: str = "",
        ahead: int = 0,
    ) -> EvaluationRanges:
        own_ends = tuple(ends) if ends is not None else None
        may_differ = self.num_workers > 1 and (self._is_published or not self._are_alike)
        weights = self._own.copy.replica.digest() if may_differ else 0
        self._channel.send(
            messages.Count(num_samples, batch_size, own_ends, digest, weights, ahead)
        )
        return SharedRanges(self._channel, self._mail)

    def sum(self, values: Sequence[float]) -> list[float]:
        self.come_to_end(End.SUM)
        self._channel.send(messages.SumValues(tuple(float(value) for value in values)))
        return list(self._mail.expect(messages.Summed).values)

    @contextmanager
    def once(self) -> Iterator[bool]:
        spread = self._own.hooks.spread
        with self._turns.once() as is_first:
            if spread is not None:
                spread.is_alone = is_first
            try:
                yield is_first
            finally:
                if spread is not None:
                    spread.is_alone = False

    def _look(self) -> None:
        """Called while this member waits for another member's block."""
        self.beat()
        self._mail.do_jobs()
        if self._own.is_between:
            self._mail.do_snaps()

    def _await_main(self, is_waiting: bool) -> None:
        """Tell that this member waits for the main one, or no longer."""
        self._channel.send(messages.AwaitsMain(is_waiting))

    def copy_now(self) -> None:
        """The run ends inside the script's own code: copy the newest version if asked to."""
        self._peers.leave_if_alarmed()
        self._mail.look()
        self._mail.do_snaps(is_inside=True)

    def say(self, text: str) -> None:
        """Have the run print this, once for all workers."""
        self._channel.send(messages.Note(text))

    def tell(self, message: messages.FromMember) -> None:
        """Send a message about a stream that is read."""
        self._channel.send(message)

    def waited_for_input(self, seconds: float) -> None:
        """Count the seconds that a batch of the work in flight was waited for."""
        self._own.clock.input_s += seconds

    def look_for_stream(self, *, is_blocking: bool) -> bool:
        """Read what has arrived, or wait for the next message.

        Returns:
            False if this work is over or went to another member.
        """
        self._beat()
        self._peers.leave_if_alarmed()  # the reader may be gone, and another is chosen afterwards
        if self._peers.are_on:
            self._mail.look()
            if is_blocking:
                time.sleep(_LOOK_S)  # a message or an alarm may come: both are polled
        elif is_blocking and not self._mail.has_other_work():
            self._mail.wait_a_little()
        else:
            self._mail.do_jobs()
        return not self._mail.has_other_work()

    def log(self, values: dict[str, float]) -> None:
        self._channel.send(messages.LogValues(values))

    def stop_when(self, rule: StopRule) -> None:
        self._channel.send(messages.StopWhen(rule))

    def measured(self, totals: messages.Totals) -> None:
        self._channel.send(messages.EvaluatedAlone(self.version, totals))

    def rest(self, epoch: int, *, is_over: bool = False) -> None:
        """The script has no more epochs: wait until the others have none and the end is saved.

        Args:
            is_over: whether it left its loop before the last one, as others may not do.
        """
        self.is_over = True
        self.come_to_end(End.OVER)
        published = 0
        if self._is_published:
            self.unedited.take_published()
            published = self._publish_settled(is_first=False)
        self._channel.send(messages.Rested(epoch, self.place(), published, is_over))
        self._mail.answer(messages.Goodbye)
        self._turns.come_to(THE_END if self.is_stopped else 2 * epoch + 1)

    # -- trials ---------------------------------------------------------------------------------

    def begin_trial(self, name: str) -> tuple["StoreExchange", str]:
        """Wait until all members are at this trial.

        Returns:
            This member's exchange for the trial, and the trial's context.

        Raises:
            Stopped: the run is over.
        """
        self._channel.send(messages.TrialBegins(name))
        opened = self._mail.expect(messages.OpenTrial)
        exchange = StoreExchange(
            self._channel, self._carrier, seat=self.seat, member=self._own.number,
            is_main=opened.is_main, averaging=self._averaging,
        )  # fmt: skip
        return exchange, opened.context

    def fail_trial(self, text: str, kind: str) -> None:
        """Report that an exception of this class left this trial, which ends it in all members."""
        self._channel.send(messages.TrialFails(text, kind))
        if self._peers.are_on and self._own.grant is not None:
            self._control[ALARM] = 1

    def end_trial(self) -> messages.TrialOver:
        """Leave this trial and wait until all members have.

        Messages that still arrive for it, jobs of the store included, are dropped.
        """
        self._channel.send(messages.TrialEnds())
        while True:
            for message in self._channel.receive():
                if isinstance(message, messages.TrialOver):
                    return message

    def come_back(self, *, is_main: bool) -> None:
        """A trial that this exchange began is over."""
        self._mail.is_main = is_main
        self._num_trials += 1  # its blocks were counted in the same word
        self._turns.come_to(THE_END + self._num_trials)

    def fail(self, text: str, *, is_yours: bool) -> None:
        """Report that this member fails, which ends the run."""
        self._channel.send(
            messages.Failed(text, messages.Whose.USER if is_yours else messages.Whose.WORKER)
        )

    def num_skipped(self) -> int:
        """Return how many updates up to the newest version changed nothing."""
        version = self.store.version
        return version - self.store.applied.of(version)

    def begin_skipped(self, num_skipped: int) -> None:
        """The run is resumed, and this many of its updates changed nothing."""
        self._first_skipped = num_skipped
