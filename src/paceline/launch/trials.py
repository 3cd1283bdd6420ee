"""Runs the trials of a run, each in a folder of its own, from its name to its summary.

    all members wait -> folder, trace -> controller -> OpenTrial -> [ a run ] -> report -> TrialOver
                        the engine and its members stay; their shared state is cleared

The outer run waits meanwhile (``run/trials.py``). This module must not know how decisions are
carried out, or how a summary is computed.
"""

import json
from contextlib import ExitStack, closing
from dataclasses import replace

from ..checkpoints.resumption import Origin
from ..conditions.faults import FaultPlan
from ..context import Context
from ..engines.base import Engine
from ..errors import ConfigError
from ..program import Program
from ..protocols import protocol_of
from ..report.files import write_report
from ..report.live import Observer
from ..report.logs import open_log
from ..report.summary import summarize
from ..report.trials import TrialSummary, write_trials
from ..run.controller import Controller
from ..run.trials import Seats, TrialOutcome
from ..run_dir import TRIALS
from ..system.files import OpenFolder
from ..system.streams import Tail
from ..trace import FILE_NAME, Trace
from ..wire.messages import OpenTrial
from .lives import Lives, context_of, ending


class TrialRuns:
    """Carries out the trials of one run.

    Args:
        lives: of the run; holds its folder.
        tail: shows what the main worker prints.
    """

    def __init__(
        self,
        program: Program,
        lives: Lives,
        engine: Engine,
        observer: Observer,
        tail: Tail,
    ) -> None:
        self._program, self._lives = program, lives
        self._engine, self._observer, self._tail = engine, observer, tail
        self._settings = lives.settings
        self._current: Controller | None = None
        self._was_stopped = False

    def interrupt(self, reason: str) -> None:
        """Stop the current trial, since the user stops the run."""
        if self._current is not None:
            self._current.interrupt(reason)

    def carry_out(self, name: str, seats: Seats, stopped: str) -> TrialOutcome:
        """See ``CarryOut``.

        Raises:
            ConfigError: the trial's folder exists already, or a setting cannot work.
            WorkerError: no worker is left, or a script did not catch an exception.
        """
        root, observer = self._lives.place, self._observer
        if root.has(name):
            raise ConfigError(
                f"pace.trial({name!r}): {root.path} already has an entry of that name; give the "
                "trial another name"
            )
        if len(seats) < self._settings.workers and not self._settings.dry_run:
            left = f"{len(seats)} of {self._settings.workers}"
            observer.note(f"trial {name!r} begins with the {left} workers that are left")
        if stopped and not self._was_stopped:
            self._was_stopped = True
            observer.note(f"trial {name!r} and those after it do not train: {stopped}")
        if not self._lives.trials:  # marks the folder as a search, should this process be killed
            write_trials(root, ())
        with closing(root.make_inner(name)) as place:
            trace = Trace(place.path / FILE_NAME, place=place)
            try:
                return self._run(name, seats, stopped, place, trace)
            finally:
                self._current = None
                trace.close()
                if not trace.has_begun:
                    root.remove(name)
                if not self._lives.trials:
                    root.remove_file(TRIALS)

    def _run(
        self, name: str, seats: Seats, stopped: str, place: OpenFolder, trace: Trace
    ) -> TrialOutcome:
        settings, program = self._settings, self._program
        protocol = protocol_of(settings)  # a new one: it has state
        with ExitStack() as exits:
            log = None
            if settings.log and not settings.dry_run:
                log = exits.enter_context(closing(open_log(settings.log, place)))
            controller = self._current = Controller(
                self._engine, protocol, settings, trace, self._observer, log, self._tail,
                Origin(about=program.describe()), trial=name,
            )  # fmt: skip
            exits.enter_context(closing(controller))
            exits.push(lambda _, error, __: self._end(error, name, controller, place, trace))
            self._engine.clear()
            if self._lives.trials:
                controller.go_on_without()
            if stopped:
                controller.stop(stopped)
            self._open(name, seats, context_of(program, settings, protocol, place))
            try:
                controller.run(dict(seats))
            except BaseException as error:  # raised again, after the trace has its reason
                controller.fail(ending(error))
                raise
        return controller.outcome

    def _open(self, name: str, seats: Seats, context: Context) -> None:
        """Have the members begin the trial."""
        text = json.dumps(replace(context, name=f"{context.name} {name}").write())
        main = min(seats, key=lambda member: seats[member][0])
        self._engine.send([(member, OpenTrial(text, member == main)) for member in seats])

    def _end(
        self,
        error: BaseException | None,
        name: str,
        controller: Controller,
        place: OpenFolder,
        trace: Trace,
    ) -> None:
        """Write the trial's report, and drop the faults that have happened.

        Args:
            error: what the trial raised, if anything; it is raised even if the report raises, too.
        """
        settings = self._settings
        plan = FaultPlan.parse(settings.fault, settings.workers).without(controller.happened)
        self._settings = replace(settings, fault=tuple(map(str, plan.faults)))
        controller.close()
        trace.close()
        self._tail.show()
        if not trace.has_begun:
            return
        try:
            self._report(name, controller, place, trace)
        except ConfigError as damaged_trace:
            if error is None:
                raise
            self._observer.note(f"trial {name!r} has no report: {damaged_trace}")

    def _report(self, name: str, controller: Controller, place: OpenFolder, trace: Trace) -> None:
        lives = self._lives
        lives.has_begun = True
        try:
            summary = write_report(place.path, trace.within)
        except OSError as error:
            self._observer.note(f"the report cannot be written to {place.path}: {error.strerror}")
            summary = summarize(place.path)
        failure = controller.outcome.failure
        lives.trials.append(TrialSummary(name=name, failure=failure, summary=summary))
        write_trials(lives.place, lives.trials)
        self._observer.finished(summary)
