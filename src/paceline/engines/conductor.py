"""What every engine runs: events in, the coordinator asked, orders out, the trace written.

    engine.events -> message -> handler -> fact -> run (coordinator, trace) -> engine.carry_out

Here are the borders of a run: the description and the plan, epochs, ends; what lies between them
is in ``pushes.py``, ``peers.py`` and ``calls.py``. This module must not know processes, sockets,
tensors or terminals.
"""

import math
import time
from collections.abc import Callable
from typing import Any, Protocol

from ..config import RunSettings
from ..errors import ConfigError, WorkerError
from ..events import Ticket
from ..protocols.base import SyncProtocol
from ..report.live import Observer
from ..report.logs import MetricsLog
from ..resumption import Origin
from ..sessions.base import Totals
from ..sessions.lane import Message
from ..trace import Trace
from .base import Engine, Event
from .calls import Calls
from .describe import Description, make_plan
from .newcomers import Newcomers
from .peers import Peers
from .pushes import Pushes
from .run import Run
from .snapshots import Snapshots
from .stalls import Stalls
from .strikes import Strikes

_TICK_S = 0.1
_LONGEST_STEP_S = 2.0
"""So long a stop waits for the border of a step; then what still computes is called off."""
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
        origin: Origin,
    ) -> None:
        self.interruption = ""
        self._protocol = protocol
        self._output = output
        self._origin = origin
        self._run = Run(engine, settings, trace, observer, log, origin.resumption)
        self._peers = Peers(self._run, lambda number: self._snapshots.at_round(number))
        pushes = Pushes(self._run)
        self._calls = Calls(self._run, self._evaluated)
        self._descriptions: dict[int, Description] = {}
        self._arrived: dict[int, tuple[int, Any]] = {}
        self._newcomers = Newcomers(self._run, self._peers)
        self._stalls = Stalls(self._run, self._peers, self._is_resting)
        self._strikes = Strikes(self._run)
        self._words: dict[int, WorkerError | ConfigError] = {}
        """Last words of members that failed."""
        self._main = 0
        self._rested: dict[int, int] = {}
        self._snapshots: Snapshots
        self._stopped_at_s = math.inf
        self._has_opened = False
        self._handlers: dict[str, Callable[[int, Message], None]] = {
            "describe": self._described,
            "arrive": self._arrive,
            "push": pushes.pushed,
            "extend": pushes.extend,
            "giveback": pushes.give_back,
            "superseded": pushes.superseded,
            "rounds": self._peers.heard,
            "interrupted": self._peers.interrupted,
            "mended": self._peers.mended,
            "count": self._calls.count,
            "counted": self._calls.counted,
            "sum": self._calls.sum,
            "copied": self._copied,
            "rested": self._rest,
            "log": self._log,
            "scaled": self._scaled,
            "stop": lambda *_: self.stop("the script asked for it"),
            "done": self._done,
            "failed": self._failed,
            "left": self._left,
            "fault": self._strikes.heard,
            "settings": self._newcomers.note_settings,
            "born": self._newcomers.born,
            "stopped": self._stalls.stopped,
            "continued": self._stalls.continued,
            "stalled": self._set_aside,
        }

    # -- the loop -------------------------------------------------------------------------------

    def conduct(self, seats: dict[int, tuple[int, int]]) -> None:
        """Run to the end. ``seats``: member -> (seat, pid)."""
        run = self._run
        for number, (seat, pid) in seats.items():
            run.roster.join(number, seat, pid)
        try:
            self._hear_all()
        finally:
            self._strikes.close()
        if run.has_begun:
            self._snapshots.close()
        run.trace.end(run.now_s(), run.ending or "finished")
        if not self._descriptions:
            raise ConfigError(_FOUR_LINES)

    def _hear_all(self) -> None:
        run = self._run
        next_tick_s = 0.0
        while any(one.is_alive and not one.is_done for one in run.roster.members.values()):
            for event in run.engine.events(_TICK_S):
                self.handle(event)
            now_s = time.perf_counter()
            if now_s >= next_tick_s:
                next_tick_s = now_s + _TICK_S
                self._tick()

    def handle(self, event: Event) -> None:
        member, message = event
        self._handlers[message[0]](member, message)
        if message[0] == "left":
            self._newcomers.replace(member)

    def stop(self, reason: str) -> None:
        """End the run at the next step border."""
        run = self._run
        if run.ending:
            return
        run.ending = reason
        self._stopped_at_s = run.now_s()
        if run.are_express:
            run.engine.alarm()
        elif run.is_open:
            run.send_stop()
        else:  # between epochs nobody is torn out of an evaluation: the answers go on
            self._snapshots.at_stop()
            run.tell_all(("stop", run.coordinator.version))
            self._arrived.clear()

    def interrupt(self, reason: str) -> None:
        """The user asks for the end: stop at the next step border."""
        self.interruption = reason

    def fail(self, reason: str) -> None:
        """The run ends without having come to its end: say so in what was begun of it."""
        run = self._run
        if run.has_begun:
            run.trace.end(run.now_s(), reason)

    def close(self) -> None:
        """Write what is still to be written; may be called twice."""
        if self._run.has_begun:
            self._snapshots.close()

    def _tick(self) -> None:
        run = self._run
        run.trace.flush()
        self._output.show()
        if self.interruption:
            if not run.has_begun:
                raise KeyboardInterrupt
            self.stop(self.interruption)
        if not run.has_begun:
            return
        self._snapshots.tick()
        if run.are_express and run.now_s() - self._stopped_at_s > _LONGEST_STEP_S:
            run.engine.stop(run.live)
        seconds = run.settings.seconds
        if seconds is not None and run.is_open and run.now_s() - run.watch.opened_s >= seconds:
            self.stop(f"{seconds:g} seconds are over")
        self._strikes.tick(run.now_s())
        self._stalls.tick(run.now_s())
        self._newcomers.tick()
        run.watch.show(run.now_s())

    # -- before the first epoch -----------------------------------------------------------------

    def _described(self, member: int, message: Message) -> None:
        run = self._run
        if run.has_begun:
            first = self._descriptions[min(self._descriptions)]
            self._newcomers.described(member, Description.read(message[1]), first)
            return
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
        identity = first.identity(run.plan, self._protocol)
        if self._origin.resumption is not None:
            self._origin.resumption.refuse_another(identity)
        else:
            run.trace.header(**first.header(run.plan, run.settings))
        run.observer.plan(run.plan)
        if run.settings.dry_run:
            run.ending = "dry run"
            run.tell_all(("stop", 0))
            return
        run.begin(first, run.plan, self._protocol)
        self._snapshots = Snapshots(run, self._protocol, self._origin.about, identity)
        run.at_orders, run.at_stop = self._snapshots.at_orders, self._snapshots.at_stop
        is_difference = self._protocol.update_rule == "mean"
        is_error = run.settings.nonfinite == "error"
        limit = self._protocol.staleness.distance_limit
        for i, number in enumerate(run.live):
            words = (first.arena_bytes, i == 0, self._protocol.num_steps, is_difference, is_error)
            run.engine.tell(number, ("laid", *words, 0, limit, run.coordinator.version))

    # -- epochs ---------------------------------------------------------------------------------

    def _arrive(self, member: int, message: Message) -> None:
        run = self._run
        if run.ending:
            run.engine.tell(member, ("stop", run.coordinator.version))
            return
        if not run.roster[member].has_arrived and self._newcomers.arrived(member, message[1]):
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
        run.script_epoch = epoch
        if run.has_all_updates:  # of a run that goes on and has nothing left to do
            self.stop(f"{run.settings.updates} updates are done")
            return
        self._snapshots.between(epoch)
        if self._snapshots.is_waited_for:
            return
        self._arrived.clear()
        self._newcomers.join_all()
        if epoch == run.coordinator.epoch and not run.coordinator.is_cut_off:
            self._close_again(epoch)
            return
        position = run.coordinator.frontier() if run.coordinator.is_cut_off else 0
        run.is_open = True
        if not self._has_opened:
            self._has_opened = True
            run.engine.begun()
        run.watch.opened(run.now_s(), epoch)
        orders = run.coordinator.open_epoch(run.now_s(), batch_ends)
        is_whole = position is not None and len(live) == run.plan.workers
        is_express = run.plan.path == "peers" and is_whole
        run.go_by("peers" if is_express else "store")
        mode = "express" if is_express else "mediated"
        seats = [run.roster[number].seat for number in live]
        words = (run.updates_left, run.engine.calm(), seats, position or 0)
        run.tell_all(("open", epoch, mode, *words))
        if is_express:
            self._peers.begin()
            run.note(orders, run.now_s())
        else:
            run.carry_out(orders, None, None)

    def _close_again(self, epoch: int) -> None:
        """The checkpoint was taken after the last update of this epoch: its loop has no more."""
        version = self._run.coordinator.version
        self._run.tell_all(("open", epoch, "mediated", -1, self._run.engine.calm(), [], 0))
        self._run.tell_all(("end", epoch, version))

    def _left_early(self, member: int) -> ConfigError:
        seat, epoch = self._run.roster[member].seat, self._run.coordinator.epoch + 1
        return ConfigError(
            f"worker {seat} left the loader before epoch {epoch} was over, the others still train "
            "in it; leave a loop early in all workers at once by --updates, --seconds or "
            "pace.stop(), or use one worker"
        )

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

    def _scaled(self, member: int, message: Message) -> None:
        _, serial, version, scale = message
        self._run.trace.scaled(self._run.now_s(), Ticket(member, serial, version), scale)

    # -- ends -----------------------------------------------------------------------------------

    def _copied(self, member: int, message: Message) -> None:
        self._snapshots.copied(member, message)
        self._go_on_if_waiting()

    def _go_on_if_waiting(self) -> None:
        """A version was pinned, or somebody is gone: those who wait for that go on."""
        if not self._snapshots.is_waited_for:
            if self._arrived:
                self._open_if_all_arrived()
            if self._rested:
                self._end_if_all_rested()

    def _rest(self, member: int, message: Message) -> None:
        self._rested[member] = message[1]
        self._end_if_all_rested()

    def _end_if_all_rested(self) -> None:
        """The scripts have no more epochs: keep the end, so that more can be added later."""
        run = self._run
        live = [one.number for one in run.roster.live if not one.is_done]
        if not live or any(number not in self._rested for number in live):
            return
        if run.coordinator.is_between_epochs:
            run.script_epoch = max(self._rested.values())
            self._snapshots.at_stop()
        if not self._snapshots.is_waited_for:
            self._rested.clear()
            for number in live:
                run.engine.tell(number, ("goodbye",))

    def _done(self, member: int, message: Message) -> None:
        run = self._run
        run.roster[member].is_done = True
        if run.is_open and not run.ending and len(run.live) > 1:
            raise self._left_early(member)
        if self._rested:
            self._end_if_all_rested()

    def _failed(self, member: int, message: Message) -> None:
        run = self._run
        error = WorkerError(message[1]) if message[2] == "worker" else ConfigError(message[1])
        if run.settings.on_worker_error == "fail" or not run.has_begun:
            raise error
        self._words[member] = error  # its process ends now, and says so
        run.observer.note(message[1].replace("the other workers were ended; ", ""))

    def _is_resting(self, member: int) -> bool:
        """Whether this member waits for the others between epochs."""
        return member in self._arrived or self._calls.is_waiting(member)

    def _left(self, member: int, message: Message) -> None:
        run = self._run
        one = run.roster[member]
        if not one.is_alive:
            return
        one.is_alive, one.end = False, message[1]
        if one.is_starting:
            run.observer.note(f"worker {one.seat} did not come back ({message[1]}); see its log")
            return
        if member == self._main and not one.is_done:
            self._choose_main()
        self._calls.left(member)
        self._rested.pop(member, None)
        if run.has_begun:
            self._snapshots.left(member)
        if one.is_done or run.ending:
            one.is_done = True
            self._note_end(member)
            self._peers.take_over_if_all_interrupted()
            if run.has_begun:
                self._go_on_if_waiting()
            return
        if not run.live or not run.has_begun:
            self._note_end(member)
            general = WorkerError(f"worker {one.seat} ended: {message[1]}; see its log")
            raise self._words.get(member, general)
        run.observer.note(f"worker {one.seat} is gone ({message[1]}); the others go on")
        self._arrived.pop(member, None)
        if run.are_express:
            run.engine.alarm()
            self._peers.take_over_if_all_interrupted()
        else:
            if member in run.coordinator_members:
                run.hear_left(member)
            self._open_if_all_arrived()
            self._end_if_all_rested()

    def _note_end(self, member: int) -> None:
        """The end of a member from which nothing follows any more."""
        run = self._run
        if member in run.coordinator_members:
            run.trace.left(run.now_s(), member, run.roster[member].end)

    def _set_aside(self, member: int, message: Message) -> None:
        """An engine without shared memory says that a member is silent: it ends when it returns."""
        run = self._run
        if run.is_open and run.stalled(member):
            self.handle((member, ("left", "replaced after a stall", 0)))
            run.engine.tell(member, ("stop", run.coordinator.version))

    def _choose_main(self) -> None:
        """The main worker is gone: the one on the lowest live seat prints and saves from now on."""
        live = self._run.roster.live
        if live:
            main = min(live, key=lambda one: one.seat)
            self._main = main.number
            self._output.follow(main.seat)  # before it is told: what it prints then is shown
            self._run.engine.tell(main.number, ("main",))
