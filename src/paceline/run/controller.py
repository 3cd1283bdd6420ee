"""What every engine runs: events in, facts to the coordinator, orders out, the trace written.

    engine.events -> message -> handler -> fact -> run (coordinator, trace) -> dispatch

A run begins here, with the description and the plan, and is monitored here. The borders of its
epochs are in ``epochs.py``, the ends of its members in ``departures.py``, the rest in
``pushes.py``, ``peers.py`` and ``calls.py``. Above 300 lines because the table of handlers, the
beginning and the refusals need the same parts. This module must not know processes, sockets,
tensors or terminals.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from ..checkpoints.resumption import Origin
from ..checkpoints.writer import WriteQueue
from ..config import RunSettings
from ..engines import base
from ..engines.base import Engine, Event, HelperWoken, MemberStalled, ProcessLeft
from ..errors import AllGone, ConfigError, LinkError
from ..events import Ticket
from ..passes import START
from ..protocols.base import SyncProtocol
from ..report.live import Observer
from ..report.logs import MetricsLog
from ..report.one_worker import OneWorker
from ..store.memory import Memory
from ..trace import FILE_NAME, Trace, read_trace
from ..trace.records import Evaluated
from ..wire import messages
from ..wire.messages import (
    AskAnew,
    Copied,
    Describe,
    EvaluatedAlone,
    LogValues,
    Note,
    PushScaled,
    Stop,
    StopWhen,
    Totals,
    TrialFails,
)
from .calls import Calls
from .checkpointing import Checkpointing
from .collective import measured_for
from .departures import Departures, Output
from .describe import Description, check_size, make_plan
from .epochs import HAS_NO_MORE, EpochBorders
from .faults import OuterFaults
from .liveness import Liveness
from .peers import Peers
from .pushes import Pushes
from .respawn import Beginners, Newcomers
from .roster import RosterEntry
from .shutdown import EarlyStop, Shutdown
from .state import RunState
from .trials import CarryOut, TrialBook, TrialOutcome

_TICK_S = 0.1
FindOneWorker: TypeAlias = Callable[[Mapping[str, Any]], OneWorker | None]
_FOUR_LINES = """\
the script ended without paceline.connect() and prepare(): it trained nothing that Paceline could \
distribute. Add these four lines:
    pace = paceline.connect()
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for epoch in pace.epochs(10): ...
        with pace.step(): ...
paceline launch --check SCRIPT says where they go."""


class Controller:
    """One run from the first member's description to the last member's end.

    Args:
        clock: returns the time in seconds; its zero is arbitrary.
        make_queue: makes the queue of checkpoints to write, from the store's memory.
        carry_out: runs a trial inside this run; None: it can have none.
        trial: the trial's name; empty: this is no trial.
        find_one_worker: from the trace's header to what one worker alone took for such a step.

    Attributes:
        outcome: of a trial: what the run around it needs to know.
    """

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
        *,
        clock: Callable[[], float] = time.perf_counter,
        make_queue: Callable[[Memory], WriteQueue] = WriteQueue,
        carry_out: CarryOut | None = None,
        trial: str = "",
        find_one_worker: FindOneWorker = lambda header: None,
    ) -> None:
        self.interruption = ""
        self._interrupted_s = 0.0
        self.outcome, self._trial = TrialOutcome(), trial
        self._ends_early = ""
        """Why the run is to end as soon as it begins."""
        self._protocol = protocol
        self._output = output
        self._origin = origin
        self._find_one_worker = find_one_worker
        self._run = RunState(engine, settings, trace, observer, log, origin.resumption, clock)
        self._make_queue = make_queue
        self._peers = Peers(self._run, lambda number: self._checkpointing.at_round(number))
        self._calls = Calls(self._run, self._evaluated, self._peers.has_left)
        self._descriptions: dict[int, Description] = {}
        self._newcomers = Newcomers(self._run, self._peers)
        self._borders = EpochBorders(self._run, self._peers, self._newcomers, self.stop)
        self._beginners = Beginners(self._run)
        self._departures = Departures(
            self._run, self._borders, self._peers, self._calls, output, self._begin_again
        )
        self._trials = TrialBook(self._run, self._departures, carry_out)
        self._liveness = Liveness(self._run, self._peers, self._is_resting)
        self._run.liveliest = self._liveness.liveliest
        self._shutdown = Shutdown(self._run, self._peers, self._holds_up)
        self._faults = OuterFaults(self._run)
        self._early_stop = EarlyStop(settings, observer)
        self._last_measured = -1, -1
        """Version and member of the last evaluation inside an epoch."""
        self._checkpointing: Checkpointing
        self._handlers = self._make_table()

    # -- the loop -------------------------------------------------------------------------------

    def run(self, seats: dict[int, tuple[int, int]]) -> None:
        """Run to the end. ``seats``: member -> (seat, pid)."""
        run = self._run
        for number, (seat, pid) in seats.items():
            run.roster.join(number, seat, pid)
        try:
            self._hear_all()
        finally:
            self._faults.close()
        self.outcome.is_given_up = self._shutdown.is_over
        if not self._descriptions:
            if self._trial or self._trials.num_begun:
                return
            raise ConfigError(_FOUR_LINES)
        if run.has_begun:
            self._checkpointing.close(is_cut_off=self._shutdown.is_over)
        self._early_stop.close()
        run.trace.end(run.now_s(), run.ending or "finished")
        run.notes.look_at_output()
        if run.has_begun and (text := self._checkpointing.unsaved):
            raise LinkError(text)
        if not self._shutdown.is_asked:
            self._departures.refuse_lost_end()

    def _hear_all(self) -> None:
        run = self._run
        next_tick_s = 0.0
        while not self._shutdown.is_over and any(not entry.is_done for entry in run.roster.live):
            for event in run.engine.events(_TICK_S):
                self.handle(event)
            self._carry_out_trial()
            now_s = run.clock()
            if now_s >= next_tick_s:
                next_tick_s = now_s + _TICK_S
                self._tick()

    def go_on_without(self) -> None:
        """From now on no member that is gone before it has described itself is waited for."""
        self._departures.goes_on = True

    def _carry_out_trial(self) -> None:
        """Run a trial once all scripts have reached it; no event is handled here meanwhile."""
        reason = self.interruption or self._ends_early
        outcome = self._trials.carry_out_if_due(reason)
        if outcome is not None:
            self.go_on_without()
            self._shutdown.is_over |= outcome.is_given_up or self._run.settings.dry_run

    def handle(self, event: Event) -> None:
        member, message = event
        self.outcome.note(member, message)
        self._handlers[type(message)](member, message)
        if type(message) is ProcessLeft:
            self._left(member)
        if not self._run.has_begun:
            self._refuse_half()
        elif not self._run.is_open:
            self._refuse_to_wait_for_ever()

    def _left(self, member: int) -> None:
        """A process has ended, and the handlers of its end are done: replace it where asked."""
        self._trials.left(member)
        self._newcomers.replace(member)
        if not self._run.has_begun and self._departures.goes_on:
            self._descriptions.pop(member, None)
            self._begin_if_all_described()

    def _make_table(self) -> dict[type, Callable[[int, Any], None]]:
        """Returns the handler of each message from members and of each event from the engine."""
        pushes, ends = Pushes(self._run), self._departures
        return {
            messages.Describe: self._described,
            messages.Arrive: self._borders.arrive,
            messages.Push: pushes.pushed,
            messages.Extend: pushes.extend,
            messages.GiveBack: pushes.give_back,
            messages.LeaveEpoch: pushes.leave_epoch,
            messages.LoopLeft: ends.left_loop,
            messages.OutOfLoop: lambda member, _: self._calls.out_of_loop(member),
            messages.StepLeft: pushes.superseded,
            messages.Rounds: self._peers.heard,
            messages.PeersLeft: self._peer_left,
            messages.Mended: self._peers.mended,
            messages.Count: self._calls.count,
            messages.Counted: self._calls.counted,
            messages.SumValues: self._calls.sum,
            messages.AwaitsMain: self._calls.awaits_main,
            messages.Copied: self._copied,
            messages.Rested: self._borders.rest,
            messages.Published: self._borders.published,
            messages.LogValues: self._log,
            messages.EvaluatedAlone: self._measured,
            messages.StopWhen: self._stop_when,
            messages.Note: self._note,
            messages.PushScaled: self._scaled,
            messages.StreamServed: self._run.streams.served,
            messages.StreamState: self._run.streams.state,
            messages.StreamOver: pushes.stream_over,
            messages.AskStop: lambda *_: self.stop("the script asked for it"),
            messages.AskAnew: self._begin_anew,
            messages.TrialBegins: self._trials.begins,
            messages.TrialFails: self._trial_fails,
            messages.TrialEnds: lambda member, _: ends.ended_trial(member),
            messages.Done: ends.done,
            messages.Failed: ends.failed,
            base.ProcessLeft: ends.left,
            messages.FaultComes: self._faults.heard,
            messages.SettingsNow: self._newcomers.note_settings,
            base.ProcessStarted: self._newcomers.started,
            base.ProcessStopped: self._liveness.stopped,
            base.ProcessContinued: self._liveness.continued,
            base.MemberStalled: self._set_aside,
            base.HelperWoken: self._woken,
        }

    def stop(self, reason: str) -> None:
        """End the run at the next step border."""
        run = self._run
        if run.ending:
            return
        if not run.has_begun:
            self._ends_early = reason
            return
        run.ending = reason
        self._shutdown.stopped(run.now_s())
        if run.by_peers:
            run.dispatch.store.alarm()
        elif run.is_open and not run.can_stop_now:
            run.owes_stop = True
        elif run.is_open:
            run.send_stop()
        else:  # between epochs no evaluation is cut off: members still get their answers
            self._end_here()

    def _end_here(self) -> None:
        """No epoch opens any more, and members leave their loops one by one."""
        self._calls.stopped()
        self._borders.end_here()

    def _begin_anew(self, member: int, message: AskAnew) -> None:
        """Restart all processes from a checkpoint taken here, where that is possible and useful."""
        run = self._run
        can_save = self._checkpointing.is_on and not self._checkpointing.unsaved
        if run.ending or run.is_open or run.has_all_updates or not can_save:
            return
        run.notes.say(
            f"{message.text}: all workers restart, and the model is measured and cut again"
        )
        run.begins_anew = True
        self.stop("cut again")

    @property
    def begins_anew(self) -> bool:
        """Whether the run has ended only to continue in new processes."""
        return self._run.begins_anew

    def interrupt(self, reason: str) -> None:
        """The user asks for the end: stop at the next step border."""
        self.interruption, self._interrupted_s = reason, self._run.clock()

    def fail(self, reason: str) -> None:
        """The run fails: write the reason into its trace, if that has begun."""
        run = self._run
        if run.has_begun:
            run.trace.end(run.now_s(), reason)

    @property
    def version(self) -> int:
        """The newest version; -1: the run has not begun."""
        return self._run.coordinator.version if self._run.has_begun else -1

    @property
    def happened(self) -> list[str]:
        """The injected faults that have happened."""
        return self._run.happened

    def close(self) -> None:
        """Write what is still pending; may be called twice."""
        if self._run.has_begun:
            self._checkpointing.close()

    def _tick(self) -> None:
        run = self._run
        run.trace.flush()
        run.notes.look_at_output()
        self._output.show()
        if self.interruption:
            if not (run.has_begun or self._trial or self._trials.num_begun):
                raise KeyboardInterrupt
            self.stop(self.interruption)
            self._shutdown.asked(run.now_s(self._interrupted_s))
        self._liveness.tick(run.now_s())
        self._shutdown.tick(run.now_s())
        if not run.has_begun:
            return
        was_waited_for = self._checkpointing.is_waited_for
        self._checkpointing.tick(is_asked=self._shutdown.is_asked)
        if was_waited_for:  # perhaps for the main member, which is late
            self._borders.go_on_if_waiting()
        self._refuse_sums_in_vain()
        seconds = run.settings.seconds
        if seconds is not None and run.is_open and run.now_s() - run.watch.opened_s >= seconds:
            self.stop(f"{seconds:g} seconds are over")
        self._faults.tick(run.now_s())
        self._newcomers.tick()
        run.watch.show(run.now_s())

    # -- before the first epoch -----------------------------------------------------------------

    def _described(self, member: int, message: Describe) -> None:
        run = self._run
        if self.outcome.failure and not run.has_begun:
            run.dispatch.tell(member, Stop(0))
            return
        if run.has_begun:
            first = self._descriptions[min(self._descriptions)]
            self._newcomers.described(member, Description.read(message.text), first)
            return
        self._descriptions[member] = Description.read(message.text)
        self._refuse_half()
        check_size(self._descriptions[member], self._protocol.num_pushes)
        self._begin_if_all_described()

    def _begin_if_all_described(self) -> None:
        run = self._run
        if len(self._descriptions) < len(run.live) or not self._descriptions:
            return
        first = self._descriptions[min(self._descriptions)]
        for number, description in self._descriptions.items():
            if difference := first.difference(description):
                raise ConfigError(f"workers 0 and {run.roster[number].seat} have {difference}")
        self._refuse_too_few(first)
        traits = run.engine.traits
        measured = measured_for(run.settings, traits, first.device)
        run.plan = make_plan(first, self._protocol, run.settings, traits, measured)
        for number, description in self._descriptions.items():
            first.refuse_another_kind(description, run.roster[number].seat, run.plan.path)
        identity = first.identity(run.plan, self._protocol)
        if self._origin.resumption is not None:
            self._origin.resumption.refuse_another(identity)
        else:
            header = run.header(first, run.plan)
            alone = self._find_one_worker(header)
            run.trace.header(**header, **({} if alone is None else alone.header()))
        run.observer.plan(run.plan)
        if run.settings.dry_run:
            run.ending = "dry run"
            run.tell_all(Stop(0))
            return
        run.begin(first, run.plan, self._protocol)
        if self._origin.note:
            run.trace.note(run.now_s(), self._origin.note)
        self._checkpointing = Checkpointing(
            run, self._protocol, self._origin.about, identity, first.pinned,
            first.checkpoint_bytes, lambda: self._departures.main, self._make_queue,
        )  # fmt: skip
        self._borders.checkpointing = self._checkpointing
        run.at_orders, run.end_here = self._checkpointing.at_orders, self._end_here
        run.tell_all(run.laid(first.arena_bytes, 0, START))
        if self._ends_early:
            self.stop(self._ends_early)

    def _refuse_too_few(self, first: Description) -> None:
        """Raise AllGone if too few workers are left after earlier trials to make all steps."""
        run, num = self._run, len(self._run.live)
        is_apart = first.num_optimizers > 1 and self._protocol.is_spmd
        needs_all = first.is_sticky or first.steps_together or is_apart
        if needs_all and num < run.settings.workers and not run.settings.dry_run:
            raise AllGone(
                f"{num} of {run.settings.workers} workers are left after earlier trials, and what "
                f"trial {self._trial!r} does (sticky parts, closures, or several optimizers under "
                f"{run.settings.protocol}) needs all of them: start the search again"
            )

    def _refuse_half(self) -> None:
        """Raise ConfigError if one script has ended while another waits in ``prepare``."""
        run = self._run
        self._trials.refuse_half(len(self._descriptions))
        ended = [entry.seat for entry in run.roster.members.values() if entry.is_over]
        if ended and self._descriptions and not run.ending:
            waiting = run.roster[min(self._descriptions)].seat
            what = f"part of trial {self._trial!r}" if self._trial else "script"
            raise ConfigError(
                f"worker {ended[0]}'s {what} ended without prepare(), in which worker {waiting} "
                "waits for it: call paceline.connect() and prepare() in every worker"
            )

    def _refuse_to_wait_for_ever(self) -> None:
        """Raise ConfigError if all members wait, but not for the same thing.

        Those whose scripts are over are let go first. A member that waits in ``pace.once()`` may
        have been passed on by the main one since it said so: that is no error.
        """
        run, in_once = self._run, self._calls.in_once
        live = [entry.number for entry in run.roster.live if not entry.is_done]
        waiting = dict.fromkeys(in_once, "") | self._borders.waiting() | self._calls.waiting()
        if self._checkpointing.is_waited_for or not set(live) <= waiting.keys():
            return
        doing = {waiting[number]: run.roster[number].seat for number in sorted(live, reverse=True)}
        over = [entry.seat for entry in run.roster.live if entry.is_done]
        if over and not run.engine.traits.has_store:  # a rank that is over stays, and does nothing
            doing[HAS_NO_MORE] = over[0]
        if len(doing) < 2 or self._borders.part_from_those_over() or run.ending or "" in doing:
            return
        (what, seat), (other_what, other_seat) = sorted(doing.items())[:2]
        finding = f"worker {seat} {what} and worker {other_seat} {other_what}"
        if self._calls.are_inside:
            self._refuse_sums_without_the_lost(finding)
        raise ConfigError(
            f"{finding}: all workers must iterate the prepared "
            "loader equally often, and make the same calls of pace.evaluate() and pace.sum(); for "
            "what one worker does alone use the plain loader: loader.plain"
        )

    def _refuse_sums_in_vain(self) -> None:
        """Raise if some wait in a sum in their loops for others that wait for their pushes.

        This happens when one takes over the mini-batches of another that is gone, and so calls
        the sum more often.
        """
        run = self._run
        if not (self._calls.summing and run.is_open) or run.ending:
            return
        summing = [number for number in run.crew if number in self._calls.summing]
        others = [number for number in run.crew if number not in summing]
        if not (summing and others and all(self._waits_for(summing, number) for number in others)):
            return
        seat, other_seat = (run.roster[members[0]].seat for members in (summing, others))
        finding = (
            f"worker {seat} waits for worker {other_seat} in pace.sum() inside the loader's loop, "
            f"and worker {other_seat} for a push of worker {seat}"
        )
        self._refuse_sums_without_the_lost(finding)
        raise ConfigError(
            f"{finding}: not all call it equally often (the end of a stream, a loop that one of "
            "them leaves); move it between epochs"
        )

    def _waits_for(self, summing: Sequence[int], member: int) -> bool:
        """Whether a member in an epoch has nothing to do before one of these has pushed."""
        run = self._run
        if run.roster[member].is_done or self._liveness.is_given_up(member):
            return False  # once it is gone nobody waits for its sum
        if not self._peers.by_peers:
            return member in run.coordinator_members and not run.coordinator.is_at_work(member)
        if self._peers.has_left(member):
            return True
        if run.engine.processes is None:  # no process whose signs can be read
            return False
        arrived = [run.processes.signs(number).arrived for number in summing]
        return run.processes.signs(member).arrived > min(arrived)  # it stands at a barrier

    def _refuse_sums_without_the_lost(self, finding: str) -> None:
        """Raise AllGone if a worker has died: with all workers the script may be right."""
        lost = [entry for entry in self._run.roster.members.values() if not entry.is_alive]
        if lost:
            raise AllGone(
                f"worker {lost[-1].seat} ended: {lost[-1].end}; {finding}: a worker that takes "
                "over another's mini-batches calls it more often: --respawn continues from the "
                "newest checkpoint; with the sum between epochs the others go on by themselves"
            )

    # -- beside the pushes ----------------------------------------------------------------------

    def _peer_left(self, member: int, message: messages.PeersLeft) -> None:
        self._peers.interrupted(member, message)
        self._calls.left_peers()

    def _evaluated(self, totals: Totals) -> None:
        self._hear_metrics(self._run.coordinator.version, totals, is_inside=False)

    def _measured(self, member: int, message: EvaluatedAlone) -> None:
        """One worker evaluated alone; of several at one version the first counts."""
        version, last, by = message.version, *self._last_measured
        if version > last or (version, member) == (last, by):
            self._last_measured = version, member
            self._hear_metrics(version, message.totals, is_inside=True)

    def _hear_metrics(self, version: int, totals: Totals, *, is_inside: bool) -> None:
        run, epoch = self._run, self._run.coordinator.epoch
        run.trace.evaluated(run.now_s(), epoch, version, totals)
        metrics = {name: value / count for name, (value, count) in totals.items() if count}
        run.notes.record(version, {f"test_{name}": value for name, value in metrics.items()})
        run.watch.evaluated(epoch, metrics, version if is_inside else None)
        self._early_stop.look(metrics, self.stop)

    def _stop_when(self, member: int, message: StopWhen) -> None:
        """Add a rule of the script's; a resumed run counts its evaluations up to the checkpoint."""
        before, evaluations = self._run.resumption, list[Evaluated]()
        if before is not None and message.rule.patience:
            records = read_trace(before.folder / FILE_NAME)
            with suppress(ConfigError):  # damaged: the records before the damage count
                for record in records:
                    if isinstance(record, Evaluated) and record.version <= before.version:
                        evaluations.append(record)
        self._early_stop.add(message.rule, evaluations)

    def _note(self, member: int, message: Note) -> None:
        self._run.notes.say_once(message.text)

    def _woken(self, member: int, message: HelperWoken) -> None:
        self._run.notes.say(f"{message.what} was stopped; it was let go on")

    def _log(self, member: int, message: LogValues) -> None:
        if not self._run.has_begun:
            self._run.notes.say_once("pace.log() before prepare() is not recorded")
            return
        self._run.trace.log(self._run.now_s(), member, message.values)
        self._run.notes.record(self._run.coordinator.version, message.values)

    def _scaled(self, member: int, message: PushScaled) -> None:
        serial, version, scale = message
        self._run.trace.scaled(self._run.now_s(), Ticket(member, serial, version), scale)

    # -- ends -----------------------------------------------------------------------------------

    def _trial_fails(self, member: int, message: TrialFails) -> None:
        """The trial ends for all, at the next step border."""
        run = self._run
        if self.outcome.failure:
            return
        self.outcome.failure, self.outcome.kind = message
        run.notes.say(f"trial {self._trial!r} ends: {message.text}")
        reason = f"failed: {message.text}"
        self.stop(reason)
        if not run.has_begun:
            run.ending = reason
            for number in self._descriptions:
                run.dispatch.tell(number, Stop(0))

    def _copied(self, member: int, message: Copied) -> None:
        self._checkpointing.copied(member, message)
        self._borders.go_on_if_waiting()

    def _is_resting(self, member: int) -> bool:
        """Whether this member waits for the others, before the first epoch or between two."""
        if not self._run.has_begun:
            return member in self._descriptions or member in self._trials
        if self._checkpointing.wait_for(member):
            return False
        if self._borders.owes_stop:
            return not self._run.dispatch.holds_next_job(member)
        return member in self._borders or self._calls.is_waiting(member)

    def _holds_up(self, member: int) -> bool:
        """Whether the others cannot end cleanly before this member does something."""
        is_late = self._run.has_begun and self._checkpointing.is_late(member)
        return self._liveness.holds_up(member) or is_late

    def _begin_again(self, entry: RosterEntry) -> int | None:
        """Before the run has begun: replace a member; returns the new one's number, if any."""
        number = self._beginners.replace(entry)
        if number is not None:
            self._descriptions.pop(entry.number, None)
        return number

    def _set_aside(self, member: int, message: MemberStalled) -> None:
        """An engine without shared memory reports a silent member, which ends when it returns."""
        run = self._run
        if run.is_open and (run.is_sticky or run.stalled(member)):
            self.handle((member, ProcessLeft("replaced after a stall")))
            run.dispatch.tell(member, Stop(run.coordinator.version))
