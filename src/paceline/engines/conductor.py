"""What every engine runs: events in, the coordinator asked, orders out, the trace written.

    engine.events -> message -> handler -> fact -> run (coordinator, trace) -> engine.carry_out

Here are the borders of a run: the description and the plan, epochs, pushes, ends. This module
must not know processes, sockets, tensors or terminals.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..config import RunSettings
from ..errors import ConfigError, WorkerError
from ..events import Apply, Grant, Order, Ticket
from ..protocols.base import SyncProtocol
from ..report.live import Observer
from ..report.logs import MetricsLog
from ..sessions.base import Totals, conflict
from ..sessions.lane import Message
from ..trace import Trace
from .base import Engine, Event, Push
from .calls import Calls
from .describe import Description, make_plan
from .peers import Peers
from .run import Run

_TICK_S = 0.1
_FOUR_LINES = """\
the script ended without paceline.connect() and prepare(): it trained nothing that Paceline could \
share out. Add the four lines:
    pace = paceline.connect()
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for epoch in pace.epochs(10): ...
        with pace.step(): ..."""


class Output(Protocol):
    """What the main worker prints."""

    def show(self) -> None:
        """Show what is new."""

    def follow(self, seat: int) -> None:
        """From now on this worker is the main one."""


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
        output: Output,
    ) -> None:
        self.was_interrupted = False
        self._protocol = protocol
        self._output = output
        self._run = Run(engine, settings, trace, observer, log)
        self._peers = Peers(self._run)
        self._calls = Calls(self._run, self._evaluated)
        self._descriptions: dict[int, Description] = {}
        self._arrived: dict[int, tuple[int, Any]] = {}
        self._hypers: dict[int, int] = {}
        self._handlers: dict[str, Callable[[int, Message], None]] = {
            "describe": self._described,
            "arrive": self._arrive,
            "push": self._pushed,
            "extend": self._extend,
            "giveback": self._give_back,
            "superseded": self._superseded,
            "rounds": self._peers.heard,
            "interrupted": self._peers.interrupted,
            "mended": self._peers.mended,
            "count": self._calls.count,
            "counted": self._calls.counted,
            "sum": self._calls.sum,
            "log": self._log,
            "stop": lambda *_: self.stop("the script asked for it"),
            "done": self._done,
            "failed": self._failed,
            "left": self._left,
        }

    # -- the loop -------------------------------------------------------------------------------

    def conduct(self, seats: dict[int, tuple[int, int]]) -> None:
        """Run to the end. ``seats``: member -> (seat, pid)."""
        run = self._run
        for number, (seat, pid) in seats.items():
            run.roster.join(number, seat, pid)
        next_tick_s = 0.0
        while any(one.is_alive and not one.is_done for one in run.roster.members.values()):
            for event in run.engine.events(_TICK_S):
                self.handle(event)
            now_s = time.perf_counter()
            if now_s >= next_tick_s:
                next_tick_s = now_s + _TICK_S
                self._tick()
        run.trace.end(run.now_s(), run.ending or "finished")
        if not self._descriptions:
            raise ConfigError(_FOUR_LINES)

    def handle(self, event: Event) -> None:
        member, message = event
        self._handlers[message[0]](member, message)

    def stop(self, reason: str) -> None:
        """End the run at the next step border."""
        run = self._run
        if run.ending:
            return
        run.ending = reason
        if self._peers.are_express:
            run.engine.alarm()
        elif run.is_open:
            run.send_stop()
        else:  # between epochs nobody is torn out of an evaluation: the answers go on
            run.tell_all(("stop", run.coordinator.version))
            self._arrived.clear()

    def interrupt(self) -> None:
        """The user asks for the end: stop at the next step border."""
        self.was_interrupted = True

    def _tick(self) -> None:
        run = self._run
        run.trace.flush()
        self._output.show()
        if self.was_interrupted:
            if not run.has_begun:
                raise KeyboardInterrupt
            self.stop("interrupted")
        if not run.has_begun:
            return
        seconds = run.settings.seconds
        if seconds is not None and run.is_open and run.now_s() - run.watch.opened_s >= seconds:
            self.stop(f"{seconds:g} seconds are over")
        run.watch.show(run.now_s())

    # -- before the first epoch -----------------------------------------------------------------

    def _described(self, member: int, message: Message) -> None:
        run = self._run
        self._descriptions[member] = Description.read(message[1])
        if len(self._descriptions) < len(run.live):
            return
        first = self._descriptions[min(self._descriptions)]
        for number, other in self._descriptions.items():
            if other.digest != first.digest:
                raise ConfigError(
                    f"workers 0 and {run.roster[number].seat} prepared different models or data "
                    "(names, shapes or sizes differ); build them the same way in every worker"
                )
        run.plan = make_plan(first, self._protocol, run.settings, run.engine.traits)
        run.trace.header(**first.header(run.plan, run.settings))
        run.observer.plan(run.plan)
        if run.settings.dry_run:
            run.ending = "dry run"
            run.tell_all(("stop", 0))
            return
        run.begin(first, run.plan, self._protocol)
        is_difference = self._protocol.update_rule == "mean"
        is_error = run.settings.nonfinite == "error"
        for i, number in enumerate(run.live):
            words = (first.arena_bytes, i == 0, self._protocol.num_steps, is_difference, is_error)
            run.engine.tell(number, ("laid", *words))

    # -- epochs ---------------------------------------------------------------------------------

    def _arrive(self, member: int, message: Message) -> None:
        run = self._run
        if run.ending:
            run.engine.tell(member, ("stop", run.coordinator.version))
            return
        if run.is_open:
            raise self._left_early(member)
        self._arrived[member] = (message[1], message[2])
        self._open_if_all_arrived()

    def _open_if_all_arrived(self) -> None:
        run, live = self._run, self._run.live
        if not live or any(number not in self._arrived for number in live):
            return
        epochs = {self._arrived[number][0] for number in live}
        if len(epochs) > 1:
            raise ConfigError(f"workers are at different epochs {sorted(epochs)}")
        epoch, batch_ends = self._arrived[live[0]]
        self._arrived.clear()
        run.is_open = True
        run.watch.opened(run.now_s(), epoch)
        orders = run.coordinator.open_epoch(run.now_s(), batch_ends)
        is_express = run.plan.path == "peers" and len(live) == len(run.roster.members)
        mode = "express" if is_express else "mediated"
        updates = run.settings.updates
        left = -1 if updates is None else updates - run.coordinator.version
        run.tell_all(("open", epoch, mode, left, run.engine.calm()))
        if is_express:
            self._peers.begin()
            run.note(orders, run.now_s())
        else:
            run.carry_out(orders, None, None)

    def _left_early(self, member: int) -> ConfigError:
        seat, epoch = self._run.roster[member].seat, self._run.coordinator.epoch + 1
        return ConfigError(
            f"worker {seat} left the loader before epoch {epoch} was over, the others still train "
            "in it; leave a loop early in all workers at once by --updates, --seconds or "
            "pace.stop(), or use one worker"
        )

    # -- pushes ---------------------------------------------------------------------------------

    def _pushed(self, member: int, message: Message) -> None:
        _, serial, version, num_samples, loss, fault, clocks, hyper, max_norm = message
        run = self._run
        ticket = Ticket(member, serial, version)
        fact, orders = run.hear_push(ticket, (num_samples, loss, fault), clocks, run.now_s())
        if hyper:
            self._compare_hyper(member, hyper, orders)
        run.carry_out(orders, fact, Push(fault, hyper, max_norm))

    def _compare_hyper(self, member: int, hyper: int, orders: Sequence[Order]) -> None:
        """All pushes of one update must come with the same settings of the optimizer."""
        hypers = self._hypers
        hypers[member] = hyper
        if not any(type(order) is Apply for order in orders):
            return
        for other, value in hypers.items():
            if value != hyper:
                raise conflict(self._run.roster[other].seat, self._run.roster[member].seat)
        hypers.clear()

    def _extend(self, member: int, message: Message) -> None:
        run = self._run
        ticket = run.roster[member].ticket
        lease = None
        if ticket is not None and ticket.serial == message[1]:
            lease = run.coordinator.extend(ticket)
            if lease is not None:
                run.trace.order(Grant(ticket, (lease,)), run.now_s())
        run.engine.tell(member, ("extended", tuple(lease) if lease is not None else None))

    def _give_back(self, member: int, message: Message) -> None:
        run = self._run
        ticket = Ticket(member, message[1], run.coordinator.version)
        run.carry_out(run.coordinator.give_back(ticket, run.now_s()), None, None)

    def _superseded(self, member: int, message: Message) -> None:
        _, serial, wasted_s, left_s = message
        one = self._run.roster[member]
        one.superseded_s += wasted_s
        saved_s = max(0.0, one.usual_s - wasted_s) if one.pushes else 0.0
        self._run.trace.superseded(self._run.now_s(left_s), member, serial, wasted_s, saved_s)

    # -- beside the pushes ----------------------------------------------------------------------

    def _evaluated(self, totals: Totals) -> None:
        run = self._run
        epoch = run.coordinator.epoch
        run.trace.evaluated(run.now_s(), epoch, run.coordinator.version, totals)
        metrics = {name: value / count for name, (value, count) in totals.items() if count}
        run.record({f"test_{name}": value for name, value in metrics.items()})
        run.watch.evaluated(epoch, metrics)
        target = run.settings.target_accuracy
        if target is not None and metrics.get("acc", 0.0) >= target:
            self.stop(f"accuracy {metrics['acc']:.4f} reached {target:g}")

    def _log(self, member: int, message: Message) -> None:
        self._run.trace.log(self._run.now_s(), member, message[1])
        self._run.record(message[1])

    # -- ends -----------------------------------------------------------------------------------

    def _done(self, member: int, message: Message) -> None:
        run = self._run
        run.roster[member].is_done = True
        if run.is_open and not run.ending and len(run.live) > 1:
            raise self._left_early(member)

    def _failed(self, member: int, message: Message) -> None:
        raise WorkerError(message[1]) if message[2] == "worker" else ConfigError(message[1])

    def _left(self, member: int, message: Message) -> None:
        run = self._run
        one = run.roster[member]
        if not one.is_alive:
            return
        one.is_alive = False
        run.trace.left(run.now_s(), member, message[1])
        if not one.is_done:
            self._choose_main(one.seat)
        self._calls.left(member)
        if one.is_done or run.ending:
            one.is_done = True
            self._peers.take_over_if_all_interrupted()
            return
        if not run.live or not run.has_begun:
            raise WorkerError(f"worker {one.seat} ended: {message[1]}; see its log")
        run.observer.note(f"worker {one.seat} is gone ({message[1]}); the others go on")
        self._arrived.pop(member, None)
        if self._peers.are_express:
            run.engine.alarm()
            self._peers.take_over_if_all_interrupted()
        else:
            run.hear_left(member)
            self._open_if_all_arrived()

    def _choose_main(self, gone_seat: int) -> None:
        """The lowest live seat prints and saves: tell it when those below are gone."""
        live = self._run.roster.live
        if live and all(one.seat > gone_seat for one in live):
            main = min(live, key=lambda one: one.seat)
            self._output.follow(main.seat)  # before it is told: what it prints then is shown
            self._run.engine.tell(main.number, ("main",))
