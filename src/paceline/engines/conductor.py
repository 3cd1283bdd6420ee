"""What every engine runs: events in, the coordinator asked, orders out, the trace written.

    engine.events -> fact -> coordinator.hear -> orders -> trace, engine.carry_out

It also keeps what is no decision of a protocol: the plan, the borders of epochs, evaluations,
the end of the run. This module must not know processes, sockets, tensors or terminals.
"""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..config import RunSettings
from ..coordinator import Coordinator
from ..errors import ConfigError, LinkError, PacelineError, ProtocolError, WorkerError
from ..events import Apply, EpochEnd, Fact, Grant, Joined, Left, Order, Pushed, Ticket
from ..ledger import Ledger
from ..plan import Plan
from ..protocols.base import SyncProtocol
from ..report.live import Observer
from ..report.logs import MetricsLog
from ..sessions.base import OK, conflict
from ..sessions.lane import Message
from ..trace import Trace
from .base import Engine, Event, Push
from .census import CensusBook
from .describe import Description, make_plan
from .roster import Roster
from .rounds import RoundsBook, Row
from .watch import Watch

_TICK_S = 0.1


class Conductor:
    """One run from the first member's description to the last member's end."""

    def __init__(
        self,
        engine: Engine,
        protocol: SyncProtocol,
        settings: RunSettings,
        trace: Trace,
        observer: Observer,
        log: MetricsLog | None,
        on_tick: Callable[[], None],
    ) -> None:
        self._metrics_log = log
        self._on_tick = on_tick
        self.was_interrupted = False
        self._engine = engine
        self._protocol = protocol
        self._settings = settings
        self._trace = trace
        self._observer = observer
        self._start_s = time.perf_counter()
        self._roster = Roster()
        self._descriptions: dict[int, Description] = {}
        self._arrived: dict[int, tuple[int, Any]] = {}
        self._census: CensusBook | None = None
        self._sums: dict[int, list[float]] = {}
        self._rounds: RoundsBook | None = None
        self._hypers: dict[int, int] = {}
        self._is_open = False
        self._last_metrics: dict[str, float] = {}
        self.ending = ""
        """Why the run ends; empty while it goes on."""
        self._handlers: dict[str, Callable[[int, Message], None]] = {
            "describe": self._described,
            "arrive": self._arrive,
            "push": self._pushed,
            "extend": self._extend,
            "giveback": self._give_back,
            "superseded": self._superseded,
            "rounds": self._heard_rounds,
            "interrupted": self._interrupted,
            "mended": self._mended,
            "count": self._count,
            "counted": self._counted,
            "sum": self._sum,
            "log": self._log,
            "stop": lambda *_: self.stop("the script asked for it"),
            "done": self._done,
            "failed": self._failed,
            "left": self._left,
        }

    # -- the loop -------------------------------------------------------------------------------

    def conduct(self, seats: dict[int, tuple[int, int]]) -> None:
        """Run to the end. ``seats``: member -> (seat, pid)."""
        for number, (seat, pid) in seats.items():
            self._roster.join(number, seat, pid)
        next_tick_s = 0.0
        while any(not one.is_done and one.is_alive for one in self._roster.live):
            for event in self._engine.events(_TICK_S):
                self.handle(event)
            now_s = time.perf_counter()
            if now_s >= next_tick_s:
                next_tick_s = now_s + _TICK_S
                self._tick()
        self._trace.end(self._now(), self.ending or "finished")
        if not self._descriptions:
            raise ConfigError(
                "the script ended without paceline.connect() and prepare(): it trained nothing "
                "that Paceline could share out. Add the four lines:\n"
                "    pace = paceline.connect()\n"
                "    model, optimizer, loader = pace.prepare(model, optimizer, loader)\n"
                "    for epoch in pace.epochs(10): ...\n"
                "        with pace.step(): ..."
            )

    def handle(self, event: Event) -> None:
        member, message = event
        self._handlers[message[0]](member, message)

    def stop(self, reason: str) -> None:
        """End the run at the next step border."""
        if self.ending:
            return
        self.ending = reason
        if self._rounds is not None:
            self._engine.alarm()
        elif self._is_open:
            self._send_stop()
        else:  # between epochs nobody is torn out of an evaluation: the answers go on
            for one in self._roster.live:
                self._engine.tell(one.number, ("stop", self._coordinator.version))
            self._arrived.clear()

    def interrupt(self) -> None:
        """The user asks for the end: stop at the next step border."""
        self.was_interrupted = True

    def _tick(self) -> None:
        self._trace.flush()
        self._on_tick()
        if self.was_interrupted:
            if not hasattr(self, "_watch"):
                raise KeyboardInterrupt
            self.stop("interrupted")
        seconds = self._settings.seconds
        is_running = seconds is not None and self._is_open and not self.ending
        if is_running and self._now() - self._watch.opened_s >= (seconds or 0.0):
            self.stop(f"{seconds:g} seconds are over")
        if self._descriptions and hasattr(self, "_watch"):
            self._watch.show(self._now())

    def _now(self) -> float:
        return time.perf_counter() - self._start_s

    # -- before the first epoch -----------------------------------------------------------------

    def _described(self, member: int, message: Message) -> None:
        self._descriptions[member] = Description.read(message[1])
        if len(self._descriptions) < len(self._roster.live):
            return
        first = self._descriptions[min(self._descriptions)]
        for number, other in self._descriptions.items():
            if other.digest != first.digest:
                raise ConfigError(
                    f"workers 0 and {self._roster[number].seat} prepared different models or "
                    "data (names, shapes or sizes differ); build them the same way in every worker"
                )
        plan = make_plan(first, self._protocol, self._settings, self._engine.traits)
        self._begin(first, plan)

    def _begin(self, first: Description, plan: Plan) -> None:
        self._plan = plan
        self._trace.header(**first.header(plan, self._settings))
        self._observer.plan(plan)
        if self._settings.dry_run:
            self.ending = "dry run"
            for one in self._roster.live:
                self._engine.tell(one.number, ("stop", 0))
            return
        self._ledger = Ledger(
            first.num_samples,
            plan.samples_per_update,
            self._protocol.num_pushes,
            keep_remainder=not first.drop_last,
            dropped=self._settings.dropped,
        )
        self._coordinator = Coordinator(self._protocol, self._ledger)
        self._watch = Watch(plan, self._settings, self._roster, self._observer)
        self._engine.lay_out(first.arena_bytes)
        self._engine.prepare_jobs(plan.samples_per_update)
        for one in self._roster.live:
            self._trace.joined(self._now(), one.number, one.seat, one.pid)
            self._coordinator.hear(Joined(one.number, self._now()))
            if first.lookahead:
                self._coordinator.set_lookahead(one.number, first.lookahead)
        for i, one in enumerate(self._roster.live):
            self._engine.tell(
                one.number,
                ("laid", first.arena_bytes, i == 0, self._protocol.num_steps,
                 self._protocol.update_rule == "mean", self._settings.nonfinite == "error"),
            )  # fmt: skip

    # -- epochs ---------------------------------------------------------------------------------

    def _arrive(self, member: int, message: Message) -> None:
        if self.ending:
            self._engine.tell(member, ("stop", self._coordinator.version))
            return
        if self._is_open:
            raise self._left_early(member)
        self._arrived[member] = (message[1], message[2])
        self._open_if_all_arrived()

    def _open_if_all_arrived(self) -> None:
        live = [one.number for one in self._roster.live]
        if not live or any(number not in self._arrived for number in live):
            return
        epochs = {self._arrived[number][0] for number in live}
        if len(epochs) > 1:
            raise ConfigError(f"workers are at different epochs {sorted(epochs)}")
        epoch, batch_ends = self._arrived[live[0]]
        self._arrived.clear()
        self._is_open = True
        self._watch.opened(self._now(), epoch)
        orders = self._coordinator.open_epoch(self._now(), batch_ends)
        is_express = self._can_run_express()
        mode = "express" if is_express else "mediated"
        phase = self._engine.calm()
        for number in live:
            self._engine.tell(number, ("open", epoch, mode, self._updates_left(), phase))
        if is_express:
            self._rounds = RoundsBook(live)
            self._note_orders(orders)
        else:
            self._carry_out(orders, None, None)

    def _can_run_express(self) -> bool:
        return self._plan.path == "peers" and len(
            self._roster.live
        ) == self._settings.workers == len(self._roster.members)

    def _updates_left(self) -> int:
        if self._settings.updates is None:
            return -1
        return self._settings.updates - self._coordinator.version

    def _left_early(self, member: int) -> ConfigError:
        seat, epoch = self._roster[member].seat, self._coordinator.epoch + 1
        return ConfigError(
            f"worker {seat} left the loader before epoch {epoch} was over, the others still train "
            "in it; leave a loop early in all workers at once by --updates, --seconds or "
            "pace.stop(), or use one worker"
        )

    # -- pushes ---------------------------------------------------------------------------------

    def _pushed(self, member: int, message: Message) -> None:
        _, serial, version, num_samples, loss, fault, clock, hyper, max_norm = message
        ticket = Ticket(member, serial, version)
        fact = Pushed(ticket, num_samples, loss, fault == OK, self._now())
        self._watch.loss = loss
        self._roster[member].count(num_samples, clock)
        self._trace.pushed(fact, *clock)
        orders = self._coordinator.hear(fact)
        if hyper:
            self._compare_hyper(member, hyper, orders)
        self._carry_out(orders, fact, Push(fault, hyper, max_norm))

    def _compare_hyper(self, member: int, hyper: int, orders: Sequence[Order]) -> None:
        """All pushes of one update must come with the same settings of the optimizer."""
        hypers = self._hypers
        hypers[member] = hyper
        if not any(type(order) is Apply for order in orders):
            return
        for other, value in hypers.items():
            if value != hyper:
                raise conflict(self._roster[other].seat, self._roster[member].seat)
        hypers.clear()

    def _carry_out(self, orders: Sequence[Order], cause: Fact | None, push: Push | None) -> None:
        self._note_orders(orders)
        self._engine.carry_out(orders, cause, push)
        updates = self._settings.updates
        if updates is not None and self._coordinator.version >= updates:
            self.stop(f"{updates} updates are done")  # members hear of one end, not of two
        for order in orders:
            if type(order) is EpochEnd and not self.ending:
                self._end_epoch(order)

    def _note_orders(self, orders: Sequence[Order], at_s: float | None = None) -> None:
        now_s = self._now() if at_s is None else at_s
        for order in orders:
            self._trace.order(order, now_s)
            kind = type(order)
            if kind is Grant:
                member = self._roster[order.ticket.member]  # type: ignore[union-attr]
                member.ticket = order.ticket  # type: ignore[union-attr]
                member.granted_s = now_s
            elif kind is Apply:
                self._watch.applied(order, self._coordinator.version)  # type: ignore[arg-type]

    def _end_epoch(self, order: EpochEnd) -> None:
        self._is_open = False
        self._rounds = None
        self._watch.ended(self._now(), order)
        for one in self._roster.live:
            self._engine.tell(one.number, ("end", order.epoch, order.version))

    def _extend(self, member: int, message: Message) -> None:
        ticket = self._roster[member].ticket
        is_current = ticket is not None and ticket.serial == message[1]
        lease = self._coordinator.extend(ticket) if ticket is not None and is_current else None
        if ticket is not None and lease is not None:
            self._trace.order(Grant(ticket, (lease,)), self._now())
        self._engine.tell(member, ("extended", tuple(lease) if lease is not None else None))

    def _give_back(self, member: int, message: Message) -> None:
        ticket = Ticket(member, message[1], self._coordinator.version)
        self._carry_out(self._coordinator.give_back(ticket, self._now()), None, None)

    def _superseded(self, member: int, message: Message) -> None:
        _, serial, wasted_s = message
        one = self._roster[member]
        one.superseded_s += wasted_s
        saved_s = max(0.0, one.usual_s - wasted_s) if one.pushes else 0.0
        self._trace.superseded(self._now(), member, serial, wasted_s, saved_s)

    # -- rounds between peers -------------------------------------------------------------------

    def _heard_rounds(self, member: int, message: Message) -> None:
        if self._rounds is not None:  # else another member has told it all
            for row in self._rounds.take(message[1], message[2]):
                self._hear_round(row)

    def _hear_round(self, row: Row) -> None:
        """One round: the pushes of all members in member order; nothing is carried out."""
        assert self._rounds is not None
        ended = None
        at_s, entries = row
        now_s = max(at_s - self._start_s, 0.0)
        for number, (num_samples, loss, fault, clock) in zip(
            self._rounds.members, entries, strict=True
        ):
            ticket = self._roster[number].ticket
            if num_samples == 0 or ticket is None:
                continue
            fact = Pushed(ticket, num_samples, loss, fault == OK, now_s)
            self._watch.loss = loss
            self._roster[number].count(num_samples, clock)
            self._trace.pushed(fact, *clock)
            orders = self._coordinator.hear(fact)
            self._note_orders(orders, now_s)
            ended = next((one for one in orders if type(one) is EpochEnd), ended)
        self._engine.jump(self._coordinator.version)
        updates = self._settings.updates
        if updates is not None and self._coordinator.version >= updates and not self.ending:
            self.ending = f"{updates} updates are done"
            self._rounds = None
            self._send_stop()
        elif ended is not None and self.ending:
            self._rounds = None
            self._send_stop()
        elif ended is not None:
            self._end_epoch(ended)
            self._hear_the_dead()

    def _interrupted(self, member: int, message: Message) -> None:
        """The peers left the express path; when all have, the coordinator takes over."""
        if self._rounds is None:
            return
        self._rounds.interrupted(member, message)
        self._take_over_if_all_interrupted()

    def _take_over_if_all_interrupted(self) -> None:
        rounds = self._rounds
        live = [one.number for one in self._roster.live]
        if rounds is None or not rounds.all_interrupted(live):
            return
        if len(live) < len(self._roster.members):
            self._engine.tell(live[0], ("mend",))
        else:
            self._take_over()

    def _mended(self, member: int, message: Message) -> None:
        if self._rounds is not None:  # it may have been asked twice
            self._take_over()

    def _take_over(self) -> None:
        """Every member waits and every share is whole: from here on through the store."""
        rounds = self._rounds
        assert rounds is not None
        self._rounds = None
        self._trace.note(self._now(), "the express path was left")
        for number in [one.number for one in self._roster.live]:
            ticket = self._roster[number].ticket
            self._engine.tell(number, ("resume", ticket.serial if ticket else -1))
        if self.ending:
            self._send_stop()
            return
        pushes = rounds.pending()
        for number, (num_samples, loss, fault, clock, max_norm) in pushes:
            ticket = self._roster[number].ticket
            assert ticket is not None
            fact = Pushed(ticket, num_samples, loss, fault == OK, self._now())
            self._roster[number].count(num_samples, clock)
            self._trace.pushed(fact, *clock)
            self._carry_out(self._coordinator.hear(fact), fact, Push(fault, 0, max_norm))
        self._hear_the_dead()

    def _hear_the_dead(self) -> None:
        """Who died while peers ran by themselves; until now nothing could follow from it."""
        for one in self._roster.members.values():
            if not one.is_alive and one.number in self._coordinator.live_members:
                self._hear_left(one.number)

    # -- collective calls -----------------------------------------------------------------------

    def _count(self, member: int, message: Message) -> None:
        shape = (message[1], message[2])
        if self._census is None:
            self._census = CensusBook(*shape)
        if self._census.shape != shape:
            raise ConfigError(
                f"workers evaluate different data: {self._census.shape[0]} and {shape[0]} samples"
            )
        self._next_range(member)

    def _counted(self, member: int, message: Message) -> None:
        assert self._census is not None
        self._census.counted(member, message[1], message[2])
        self._next_range(member)

    def _next_range(self, member: int) -> None:
        census = self._census
        assert census is not None
        one = census.take(member)
        if one is not None:
            self._engine.tell(member, ("range", *one))
            return
        census.waiting.append(member)
        self._close_census()

    def _close_census(self) -> None:
        census = self._census
        if census is None:
            return
        while census.waiting and (one := census.take(census.waiting[0])) is not None:
            self._engine.tell(census.waiting.pop(0), ("range", *one))
        live = {one.number for one in self._roster.live}
        if not census.is_complete or not live <= set(census.waiting):
            return
        totals = census.totals()
        for number in census.waiting:
            self._engine.tell(number, ("range", -1, -1))
            self._engine.tell(number, ("totals", totals))
        self._census = None
        self._evaluated(totals)

    def _evaluated(self, totals: dict[str, tuple[float, float]]) -> None:
        epoch = self._coordinator.epoch
        self._trace.evaluated(self._now(), epoch, self._coordinator.version, totals)
        metrics = {name: value / count for name, (value, count) in totals.items() if count}
        self._record({f"test_{name}": value for name, value in metrics.items()})
        self._watch.evaluated(epoch, metrics)
        target = self._settings.target_accuracy
        if target is not None and metrics.get("acc", 0.0) >= target:
            self.stop(f"accuracy {metrics['acc']:.4f} reached {target:g}")

    def _sum(self, member: int, message: Message) -> None:
        self._sums[member] = message[1]
        self._close_sums()

    def _close_sums(self) -> None:
        live = [one.number for one in self._roster.live]
        if self._sums and all(number in self._sums for number in live):
            columns = zip(*(self._sums[number] for number in sorted(self._sums)), strict=True)
            total = [sum(column) for column in columns]
            self._sums.clear()
            for number in live:
                self._engine.tell(number, ("summed", total))

    def _log(self, member: int, message: Message) -> None:
        self._trace.log(self._now(), member, message[1])
        self._record(message[1])

    def _record(self, values: dict[str, float]) -> None:
        if self._metrics_log is not None:
            self._metrics_log.write(self._coordinator.version, self._now(), values)

    # -- ends -----------------------------------------------------------------------------------

    def _send_stop(self) -> None:
        self._is_open = False
        self._coordinator.stop(self._now())
        live = [one.number for one in self._roster.live]
        self._engine.stop(live)
        for number in live:
            self._engine.tell(number, ("stop", self._coordinator.version))

    def _done(self, member: int, message: Message) -> None:
        self._roster[member].is_done = True
        if self._is_open and not self.ending and len(self._roster.live) > 1:
            raise self._left_early(member)

    def _failed(self, member: int, message: Message) -> None:
        raise WorkerError(message[1]) if message[2] == "worker" else ConfigError(message[1])

    def _left(self, member: int, message: Message) -> None:
        one = self._roster[member]
        if not one.is_alive:
            return
        one.is_alive = False
        self._trace.left(self._now(), member, message[1])
        if not one.is_done:
            self._choose_main(one.seat)
        if self._census is not None:
            self._census.left(member)
            self._close_census()
        self._close_sums()
        if one.is_done or self.ending:
            one.is_done = True
            self._take_over_if_all_interrupted()
            return
        if not self._roster.live or not self._descriptions or not hasattr(self, "_coordinator"):
            raise WorkerError(f"worker {one.seat} ended: {message[1]}; see its log")
        self._observer.note(f"worker {one.seat} is gone ({message[1]}); the others go on")
        self._arrived.pop(member, None)
        if self._rounds is not None:
            self._engine.alarm()
            self._take_over_if_all_interrupted()
        else:
            self._hear_left(member)
            self._open_if_all_arrived()

    def _choose_main(self, gone_seat: int) -> None:
        """The lowest live seat prints and saves: tell it when those below are gone."""
        live = self._roster.live
        if live and all(one.seat > gone_seat for one in live):
            self._engine.tell(min(live, key=lambda one: one.seat).number, ("main",))

    def _hear_left(self, member: int) -> None:
        fact = Left(member, self._now())
        self._carry_out(self._coordinator.hear(fact), fact, None)


__all__ = ["Conductor", "LinkError", "PacelineError", "ProtocolError", "json"]
