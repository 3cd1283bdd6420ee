"""The state of one run, and the only way from a fact to orders that are carried out.

    fact -> coordinator.hear -> orders -> trace -> dispatch -> engine

Which messages become facts is decided elsewhere: pushes in ``pushes.py``, epochs in ``epochs.py``,
rounds between peers in ``peers.py``, calls that all members make together in ``calls.py``. Above
300 lines because the consequences of an order pass through all of it. This module must not know
processes or terminals, nor how a message travels.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..checkpoints.resumption import Resumption, state_for
from ..config import RunSettings
from ..core.coordinator import Coordinator
from ..core.jobs import Payload
from ..core.ledger import Ledger
from ..core.stats import Patience
from ..engines.base import Engine, Processes
from ..events import (
    Apply,
    Cancel,
    EpochEnd,
    Fact,
    Grant,
    Joined,
    Left,
    Order,
    Pushed,
    Stalled,
    Ticket,
)
from ..passes import START, ScriptPlace
from ..plan import Plan
from ..protocols.base import SyncProtocol
from ..report.live import Observer
from ..report.logs import MetricsLog
from ..trace import Trace
from ..wire.messages import OK, Clocks, EndEpoch, Laid, OpenEpoch, Told, ToMember
from .describe import Description
from .dispatch import Dispatch
from .progress import Notes, ProgressMeter
from .roster import Roster
from .streams import Streams


class RunState:
    """One run, from its first member to its end.

    Attributes:
        is_open: whether an epoch is open.
        has_opened: whether one has been since this run began or was resumed.
        has_said_goodbye: whether the scripts were told that all epochs are over.
        ending: why the run ends; empty while it goes on.
        begins_anew: whether only this life of the run ends.
        steps_apart: whether each of several optimizers makes an update of all workers by itself.
        is_sticky: whether each worker keeps its part of every batch.
        steps_together: whether all members make each step together, see ``Description``.
        update_rule: what a push is.
        is_mid_batch: whether the newest version is of a step after which others of its batch come:
            a run resumed here would do the batch again, and that step twice.
        owes_stop: whether the run ends as soon as the batches in work have made all their steps,
            or the local steps in work their average.
        trained_in: the newest finished epoch whose samples an update has used; -1: none.
    """

    coordinator: Coordinator
    plan: Plan
    steps_apart = steps_together = is_sticky = is_mid_batch = owes_stop = False
    update_rule = "optimizer"
    trained_in = -1
    opened: OpenEpoch | None = None
    """What members were told when the last epoch opened."""
    watch: ProgressMeter
    at_orders: Callable[[list[Order]], None]
    """Called with orders before they are carried out: a checkpoint may be taken here."""
    end_here: Callable[[], None]
    """Called when all work has returned: keep the last version, and tell members to stop."""
    liveliest: Callable[[Sequence[int]], int]
    """Returns the one of these members that will probably answer soonest."""

    def __init__(
        self,
        engine: Engine,
        settings: RunSettings,
        trace: Trace,
        observer: Observer,
        log: MetricsLog | None,
        resumption: Resumption | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.engine, self.settings, self.trace, self.observer = engine, settings, trace, observer
        self.clock = clock
        """The machine's; its zero is arbitrary."""
        self.roster = Roster()
        self.dispatch = Dispatch(engine, self.roster)
        self.has_begun = self.is_open = False
        self.has_opened = self.has_said_goodbye = False
        self.began_s = 0.0
        """When its first epoch opened."""
        self.ending, self.begins_anew = "", False
        self.patience = Patience(settings.stall_after)
        self.happened: list[str] = []
        """Injected faults that have happened."""
        self.by_peers = False
        self.needs_store = False
        """Whether the script did what peers cannot, as accumulating, since an epoch opened last."""
        self.script_epoch = 0 if resumption is None else resumption.epoch
        """The epoch that the script is in, including its code after the loop."""
        self._place = START if resumption is None else resumption.place
        self._passes_each = 0
        """Epochs that the previous value of ``pace.epochs`` took; 0: not known."""
        self.notes = Notes(observer, trace, log, self.now_s)
        self._path = ""
        self.resumption = resumption
        self.token = secrets.token_hex(8) if resumption is None else resumption.token
        """The run's unique token, in its trace and checkpoints; None: it began without one."""
        self._start_s = clock()
        self.streams = Streams(
            self.dispatch.tell, self._who_can_read, lambda: self.coordinator.done_with()
        )

    def _who_can_read(self) -> list[int]:
        """Members that work, or wait for work."""
        members = self.coordinator_members
        return [
            entry.number
            for entry in self.roster.live
            if entry.number in members and not entry.is_done
        ]

    def now_s(self, monotonic_s: float | None = None) -> float:
        """Seconds since the run's start, now or at a reading of the machine's clock."""
        reading = self.clock() if monotonic_s is None else monotonic_s
        return max(0.0, reading - self._start_s)

    @property
    def processes(self) -> Processes:
        """The processes of members, in an engine that can lose them."""
        assert self.engine.processes is not None
        return self.engine.processes

    @property
    def began_for_s(self) -> float:
        """Seconds since its first epoch opened."""
        return self.now_s() - self.began_s

    @property
    def live(self) -> list[int]:
        """Members that are alive, in member order."""
        return [entry.number for entry in self.roster.live]

    @property
    def crew(self) -> list[int]:
        """Live members that take part in this epoch or have for longer, in member order, without
        those whose scripts are over.

        Before its first epoch a newcomer is at another place in the script than all others.
        """
        epoch = self.coordinator.epoch
        return [
            entry.number
            for entry in self.roster.live
            if entry.first_epoch <= max(epoch, 0)
            and (self.has_opened or entry.has_joined)
            and not entry.is_done
        ]

    def come_to(self, epoch: int, place: ScriptPlace) -> None:
        """All scripts are at this epoch, and at this place in ``pace.epochs``."""
        if place.position > self._place.position >= 0:
            self._passes_each = place.began - self._place.began
        self.script_epoch, self._place = epoch, place

    @property
    def place(self) -> ScriptPlace:
        """Where in ``pace.epochs`` the scripts are; an unused epoch was only a look."""
        coordinator_epoch = self.coordinator.epoch if self.has_begun else -1
        if coordinator_epoch == self.script_epoch and self.coordinator.has_used_nothing:
            return self._place.with_look(self.script_epoch)
        return self._place

    def begins_with(self) -> tuple[int, ScriptPlace]:
        """The epoch that a newcomer begins with, the open one or the next, and its place."""
        if not self.has_opened:
            return self.script_epoch, self.place
        if self.is_open:
            return self.coordinator.epoch, self.place
        epoch = self.coordinator.epoch + 1
        return epoch, self.place.after(epoch, self._passes_each)

    @property
    def updates_left(self) -> int:
        """Updates until the number asked for; -1: no number was set."""
        updates = self.settings.updates
        return -1 if updates is None else updates - self.coordinator.version

    @property
    def has_all_updates(self) -> bool:
        return self.settings.updates is not None and self.updates_left <= 0

    @property
    def is_at_end(self) -> bool:
        """Whether scripts only have to finish."""
        has_one = self.has_begun and not self.is_open and self.roster.has_ended_one
        return bool(self.ending) or has_one

    @property
    def coordinator_members(self) -> list[int]:
        """Members that the coordinator counts on."""
        return self.coordinator.live_members if self.has_begun else []

    def begin(self, first: Description, plan: Plan, protocol: SyncProtocol) -> None:
        """All descriptions agree: make the ledger, the coordinator and the store."""
        ledger = Ledger(
            first.num_samples, first.batch_size, protocol.num_pushes,
            keep_remainder=not first.drop_last, dropped=self.settings.dropped,
            is_sticky=first.is_sticky,
        )  # fmt: skip
        self.coordinator = Coordinator(protocol, ledger)
        self.protocol = protocol
        self.steps_apart = (
            first.num_optimizers > 1 and protocol.is_spmd and protocol.update_rule == "optimizer"
        )
        self.is_sticky = first.is_sticky
        self.steps_together, self.update_rule = first.steps_together, first.update_rule(protocol)
        self.streams.is_on = first.order == "stream"
        self.watch = ProgressMeter(plan, self.settings, self.roster, self.observer)
        self.dispatch.begin(first.arena_bytes, plan.samples_per_update, protocol.staleness)
        if self.resumption is not None:
            is_sized = first.order not in ("stream", "numbers")
            state = state_for(self.resumption, ledger, protocol, is_sized=is_sized)
            self._go_on(self.resumption, state, self.header(first, plan))
        for entry in self.roster.live:
            self.trace.joined(self.now_s(), entry.number, entry.seat, entry.pid)
            self.coordinator.hear(Joined(entry.number, self.now_s()))
            if first.lookahead:
                self.coordinator.set_lookahead(entry.number, first.lookahead)
        self.has_begun = True
        self.notes.begin()

    def header(self, first: Description, plan: Plan) -> dict[str, Any]:
        """The first line of the trace."""
        return {**first.header(plan, self.settings), "token": self.token}

    def go_by(self, path: str) -> None:
        """From here on gradients go between ``peers``, by a ``collective``, or by the ``store``."""
        if path != self._path:
            self._path = path
            self.trace.rerouted(self.now_s(), path)

    def _go_on(self, resumption: Resumption, state: dict[str, Any], header: dict[str, Any]) -> None:
        """Set coordinator, store, clock and trace to the state of the checkpoint."""
        saved, version = resumption.saved, resumption.version
        # The run's clock continues now: the time for the restart does not count.
        self._start_s = self.clock() - saved["elapsed_s"]
        self.coordinator.resume(state)
        self.dispatch.jump(version)
        self.streams.go_on(saved.get("stream"))
        self.watch.go_on(version, saved["opened_s"], saved["trained_s"])
        lost = self.trace.go_on(
            saved["trace_bytes"], self.now_s(), version, len(self.roster.live), header
        )
        repeated = f"; {lost} updates after it are repeated" if lost else ""
        self.observer.note(f"going on with {resumption.folder} at version {version}{repeated}")

    def laid(self, arena_bytes: int, first_epoch: int, place: ScriptPlace) -> Laid:
        """What a member is told of the store, once it has described itself."""
        protocol = self.protocol
        return Laid(
            arena_bytes, protocol.long_steps, self.update_rule == "mean",
            self.settings.nonfinite == "error", first_epoch, protocol.staleness.distance_limit,
            self.coordinator.version, place, self.plan.collective,
            protocol.streaming.num_fragments, protocol.streaming.overlap_steps,
        )  # fmt: skip

    def tell_all(self, message: ToMember) -> None:
        for number in self.live:
            self.dispatch.tell(number, message)

    def hear_push(
        self, ticket: Ticket, told: Told, clocks: Clocks, at_s: float
    ) -> tuple[Pushed, list[Order]]:
        """A member pushed: count it, trace it, and ask the coordinator."""
        num_samples, loss, fault, weight, kept, unused, _ = told
        weighs_otherwise = None if weight == num_samples > 0 else weight
        fact = Pushed(ticket, num_samples, loss, fault == OK, at_s, weighs_otherwise, kept, unused)
        entry = self.roster[ticket.member]
        entry.count(num_samples, clocks.compute_s, clocks.wait_s, clocks.push_s, clocks.input_s)
        if weight:
            self.watch.loss = loss
            self.patience.add(clocks.compute_s)
            self.watch.service.add(entry.seat, clocks.compute_s, clocks.input_s)
        self.trace.pushed(fact, *clocks)
        return fact, self.coordinator.hear(fact)

    def hear_left(self, member: int) -> None:
        """Tell the coordinator of a death; while peers ran by themselves it could not be told."""
        fact = Left(member, self.now_s())
        self.trace.left(fact.at_s, member, self.roster[member].end)
        self.carry_out(self.coordinator.hear(fact), fact, None)
        self.streams.left(member)

    def hand_on(self, member: int) -> None:
        """Hand this member's jobs for the store to another; without other consequences."""
        if self.has_begun:
            self.dispatch.hand_on(member)

    def stalled(self, member: int) -> bool:
        """A member is silent; returns whether its work was cancelled and handed on."""
        fact = Stalled(member, self.now_s())
        self.trace.stalled(fact.at_s, member)
        orders = self.coordinator.hear(fact)
        self.carry_out(orders, fact, None)
        self.streams.left(member)
        return Cancel(member) in orders

    def note(self, orders: Sequence[Order], at_s: float) -> None:
        """Write orders into the trace and note what each member works on."""
        for order in orders:
            self.trace.order(order, at_s)
            if isinstance(order, Grant):
                self.roster[order.ticket.member].ticket = order.ticket
            elif isinstance(order, Apply):
                self.watch.applied(order, self.coordinator.version)

    def carry_out(self, orders: list[Order], cause: Fact | None, payload: Payload | None) -> None:
        """Note the coordinator's answer to ``cause`` and send it to members."""
        self.note(orders, self.now_s())
        self.at_orders(orders)
        self.streams.pass_on(orders)
        if self.has_all_updates and not self.ending:
            self.ending = f"{self.settings.updates} updates are done"
            self.owes_stop = True
        ends_here = self.owes_stop and self._is_border(orders)
        if ends_here:
            # It would be cancelled, but local steps begun on it stay in the optimizers' state.
            orders = [order for order in orders if not isinstance(order, Grant)]
        self.dispatch.carry_out(orders, cause, payload)
        if ends_here:
            self.send_stop()  # members hear of one end, not of two
        for order in orders:
            if isinstance(order, EpochEnd) and not self.ending:
                self.end_epoch(order)

    def _is_border(self, orders: Sequence[Order]) -> bool:
        """Whether no work is begun that would be cancelled halfway."""
        is_new = any(isinstance(order, Apply) for order in orders)
        return not self.is_mid_batch and (is_new or not self._steps_locally)

    @property
    def can_stop_now(self) -> bool:
        """Whether work leaves nothing behind when it is cancelled."""
        return not (self.is_mid_batch or self._steps_locally)

    @property
    def _steps_locally(self) -> bool:
        """Whether each member's optimizer steps by itself, and keeps a state of it."""
        return self.update_rule == "mean" and not self.steps_together

    def end_stream(self) -> None:
        """Hand out nothing after the end of a stream, if that is known."""
        if (end := self.streams.end) is not None:
            epoch = self.coordinator.epoch
            self.trace.stream_ended(self.now_s(), epoch, end)
            self.carry_out(self.coordinator.end_stream(epoch, end, self.now_s()), None, None)

    def end_epoch(self, order: EpochEnd) -> None:
        self.is_open = False
        self.streams.close()
        self.watch.ended(self.now_s(), order)
        self.tell_all(EndEpoch(order.epoch, order.version))

    def send_stop(self) -> None:
        """End all work; members are told that the run is over when its last version is kept."""
        self.is_open = self.owes_stop = False
        self.streams.close()
        self.trace.stopped(self.now_s())
        self._place = self.place  # a look that only some have left counts: all will have soon
        self.coordinator.stop(self.now_s())
        self.dispatch.call_off(self.live)
        self.end_here()
