"""One run from its settings to its summary: the folder, the engine, the members, the end.

    settings + program -> folder -> engine, members -> controller -> trace -> summary

Above 300 lines, since a run is started and ended in one place. This module must not know how
decisions are carried out or how a summary is computed.
"""

import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import cloudpickle  # type: ignore[import-untyped]  # it ships no types

from ..checkpoints.due import parse_every
from ..checkpoints.resumption import Origin, adopt, differences, locate, read, refuse
from ..conditions.delays import parse_delays
from ..conditions.faults import FaultPlan
from ..conditions.slowness import parse_slowness
from ..config import MOST_PROCESSES, RunSettings, resolve
from ..data.fetch import choose
from ..engines import make_engine
from ..engines.base import RENDEZVOUS, Engine
from ..engines.local.preload import check_modules
from ..errors import (
    AllGone,
    BeginsAnew,
    ConfigError,
    FileError,
    Interrupted,
    LinkError,
    ScriptLost,
    WorkerError,
)  # fmt: skip
from ..partition.names import read_split
from ..program import Program, TaskProgram
from ..protocols import protocol_of
from ..report.files import write_report
from ..report.live import Observer
from ..report.logs import MetricsLog, open_log
from ..report.one_worker import find_one_worker
from ..report.summary import Summary, summarize
from ..report.trials import TrialsSummary
from ..run.collective import path_of
from ..run.controller import Controller
from ..run.describe import check_compression
from ..run_dir import RunFolder
from ..system.files import OpenFolder
from ..system.signals import REASONS, SignalInterrupt, ended_by_signals
from ..system.streams import Tail
from ..trace import FILE_NAME, Trace
from ..workloads import find_task
from .lives import WRITTEN, Lives, claim, ending, member_specs
from .trials import TrialRuns

if TYPE_CHECKING:  # it knows torch, the launcher starts without
    from ..workloads.base import Task

AllLost: TypeAlias = tuple[AllGone, int, Sequence[str]]
"""A life that lost all workers: the error, the version reached, the faults that have happened."""


def train(
    task: "str | Task",
    *,
    workers: int | None = None,
    protocol: str | None = None,
    **settings: Any,
) -> Summary | None:
    """Train ``task`` with ``workers`` processes on this machine and return its summary.

    A dry run returns None.

    Works in a script, a shell or a notebook, with functions that were defined in a cell, too: the
    calling process is never forked.

    Args:
        task: a built-in name, ``package.module:attribute``, or a ``Task``.
        workers: number of processes; None: 1, or as many as the run named by ``resume`` had.
        protocol: when gradients are combined: ``full-sync``, ``k-sync:3``, ...; None: full-sync,
            or what the run had.
        settings: any other setting of a run (``epochs=3``, ``batch_size=128``,
            ``resume="auto"``, ...).

    Raises:
        ConfigError: a setting is unknown or cannot work.
        WorkerError: a worker failed.
        Interrupted: the user ended it, by Ctrl-C or a notebook's stop button; its ``summary``
            covers the run until then.
    """
    from ..report.live import choose_observer  # here: the command chooses its own

    flags = {"workers": workers, "protocol": protocol, **settings}
    given = {name: value for name, value in flags.items() if value is not None}
    run_settings = adopt(resolve(given, is_call=True))
    observer = choose_observer(run_settings.json)
    try:
        summary = launch_run(TaskProgram(task=task), run_settings, observer)
    finally:
        observer.close()
    assert not isinstance(summary, TrialsSummary)  # the standard loop has none
    return summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Where a run happens: makes the engine by name and number of workers, and handles signals."""

    make: Callable[[str, int], Engine] = make_engine
    signals: Callable[[Callable[[int], bool]], AbstractContextManager[None]] = ended_by_signals


def launch_run(
    program: Program, settings: RunSettings, observer: Observer, host: Host | None = None
) -> Summary | TrialsSummary | None:
    """Run ``program`` and return its summary, None after a dry run.

    For a script that trains in trials, returns the summaries of all of them.

    Args:
        host: None: this process starts the workers and handles signals.

    Raises:
        ConfigError: a setting names something that does not exist, or cannot work.
        WorkerError: a worker failed; all others were ended.
        LinkError: the last checkpoint could not be written, or there is too little memory.
        KeyboardInterrupt: the user ended the run; its files are complete. ``Interrupted`` if it
            had begun. A run that had not, or was refused, leaves no folder.
        BeginsAnew: its processes must restart and continue from the newest checkpoint.
    """
    host = host or Host()
    if settings.workers > MOST_PROCESSES:
        raise ConfigError(
            f"{settings.workers:,} workers are more than one machine can run ({MOST_PROCESSES:,}); "
            "paceline simulate runs them in virtual time"
        )
    protocol = protocol_of(settings)
    path_of(settings, protocol)
    if settings.engine != "torchrun" and read_split(settings.split, settings.workers) is not None:
        raise ConfigError(
            f"split {settings.split!r} runs on ranks: paceline train TASK, or paceline launch "
            "SCRIPT, with --workers N --split starts them, and so does torchrun"
        )
    check_compression(settings, protocol)
    parse_delays(settings.delay, settings.workers)
    parse_slowness(settings.slow, settings.workers)
    FaultPlan.parse(settings.fault, settings.workers)
    parse_every(settings.checkpoint_every)
    _check_preload(settings)
    _find_data(program, observer)
    if settings.dry_run:
        origin = _origin(program, settings, observer, locate(settings))
        with (
            tempfile.TemporaryDirectory(prefix="paceline-") as scratch,
            closing(OpenFolder.open(Path(scratch))) as folder,
        ):
            _run(program, Lives(settings, origin, folder), observer, host)
        return None
    with closing(claim(settings, program.name, observer.note)) as folder:
        return _launch(program, settings, observer, folder, host)


def _launch(
    program: Program,
    settings: RunSettings,
    observer: Observer,
    folder: RunFolder,
    host: Host,
) -> Summary | TrialsSummary:
    """Run in a locked folder; a run that is refused leaves it as it was."""
    resumed_from = folder.path if folder.goes_on else None
    origin = _origin(program, settings, observer, resumed_from)
    lives = Lives(settings, origin, folder.place)
    try:
        _run_lives(program, lives, observer, host)
        if not lives.has_begun:
            raise ConfigError("no trial of the script called prepare(): there was nothing to train")
    except BaseException as error:  # raised again, whatever it is: the report comes first
        if not lives.has_begun:
            if resumed_from is None and not _explains(folder.path, error):
                folder.discard(WRITTEN)
            raise
        _report_of_failed(lives, error, observer)
        raise
    if lives.trials:
        return _report_of_trials(lives, observer)
    try:
        summary = _report(lives, observer)
    except ConfigError as error:
        raise LinkError(f"the run is complete, but {error}") from None
    observer.finished(summary)
    return summary


def _report_of_trials(lives: Lives, observer: Observer) -> TrialsSummary:
    """The summaries of all trials; removes the outer run's trace, since it cannot be resumed."""
    with suppress(FileError):
        lives.place.remove_file(FILE_NAME)
    summary = TrialsSummary(run_dir=str(lives.place.path), trials=tuple(lives.trials))
    observer.printed("".join(f"{line}\n" for line in ["", *summary.render()]))
    return summary


def _report(lives: Lives, observer: Observer) -> Summary:
    """The summary of a run, also written into its folder if possible."""
    folder = lives.place.path
    try:
        return write_report(folder, lives.within)
    except OSError as error:
        observer.note(f"the report cannot be written to {folder}: {error.strerror}")
        return summarize(folder)


def _report_of_failed(lives: Lives, error: BaseException, observer: Observer) -> None:
    """Report a run that ended with this error, without hiding the error if the report fails."""
    if lives.trials:
        trials = _report_of_trials(lives, observer)
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(trials, getattr(error, "signal", signal.SIGINT)) from None
        return
    try:
        summary = _report(lives, observer)
    except ConfigError as damaged_trace:
        observer.note(str(damaged_trace))
        return
    if isinstance(error, KeyboardInterrupt):
        observer.finished(summary)
        raise Interrupted(summary, getattr(error, "signal", signal.SIGINT)) from None
    if isinstance(error, LinkError | ScriptLost):  # the run itself is complete
        observer.finished(summary)


def _origin(
    program: Program, settings: RunSettings, observer: Observer, folder: Path | None
) -> Origin:
    """Where the run comes from; notes changed settings, and refuses those that must not change."""
    about = program.describe()
    if folder is None:
        return Origin(about=about)
    resumption = read(folder)
    refuse(resumption, settings, about)
    if resumption.checkpoint.note:
        observer.note(resumption.checkpoint.note)
    for difference in differences(resumption, settings, about):
        observer.note(f"changed: {difference}")
    return Origin(about=about, resumption=resumption)


def _explains(folder: Path, error: BaseException) -> bool:
    """Whether the folder of a run that never began may show why: then it is kept."""
    is_failure = isinstance(error, WorkerError)
    return is_failure or any(
        log.is_file() and log.stat().st_size for log in folder.glob("logs/*.log")
    )


def _check_preload(settings: RunSettings) -> None:
    """Raise ConfigError if modules cannot be imported before the workers start."""
    if settings.preload and settings.engine != "local":
        raise ConfigError(
            f"preload: engine {settings.engine!r} forks no workers, so each imports what it needs; "
            "leave it out, or use --engine local"
        )
    check_modules(settings.preload)


def _find_data(program: Program, observer: Observer) -> None:
    """Fetch a built-in task's data if it is missing. ConfigError: the task is unknown."""
    if isinstance(program, TaskProgram) and isinstance(program.task, str):
        entry = find_task(program.task)
        if entry is not None and entry.data_set:
            choose(entry.data_set, fetch_missing=True, say=observer.note)


def _run_lives(program: Program, lives: Lives, observer: Observer, host: Host) -> None:
    """Run, and run again when all workers are lost, if ``--respawn`` is set."""
    while (loss := _run(program, lives, observer, host)) is not None:
        observer.note(lives.go_on(*loss))


def _run(program: Program, lives: Lives, observer: Observer, host: Host) -> AllLost | None:
    """One life of a run; returns how it ended if it lost all workers."""
    settings, origin, place = lives.settings, lives.origin, lives.place
    protocol = protocol_of(settings)
    _make_logs(place, settings)
    seats: dict[int, tuple[int, int]] = {}
    controller: Controller | None = None
    trials: TrialRuns | None = None
    loss: AllLost | None = None
    signals: list[int] = []

    def stop_softly(number: int) -> bool:
        if controller is None or not seats or signals:
            return False
        signals.append(number)
        for run in (controller, trials):
            if run is not None:
                run.interrupt(REASONS[signal.Signals(number)])
        return True

    with ExitStack() as exits:
        exits.enter_context(host.signals(stop_softly))
        specs = list(member_specs(program, settings, protocol, place, origin.resumption))
        trace = exits.enter_context(closing(_open_trace(lives)))
        log = _open_log(lives, exits)
        tail = Tail([Path(spec.log) for spec in specs], observer.printed)
        exits.callback(tail.show)  # once the engine is closed, when no worker prints any more
        engine = exits.enter_context(closing(host.make(settings.engine, settings.workers)))
        trials = TrialRuns(program, lives, engine, observer, tail)
        controller = Controller(
            engine, protocol, settings, trace, observer, log, tail, origin,
            carry_out=trials.carry_out, find_one_worker=partial(find_one_worker, place.path),
        )  # fmt: skip
        exits.enter_context(closing(controller))
        exits.callback(lives.lived, trace)
        try:
            seats.update(engine.start(specs, cloudpickle.dumps(program)))
            controller.run(seats)
        except BaseException as error:  # raised again, after the trace has its reason
            controller.fail(ending(error))
            if signals and isinstance(error, _errors_after_signal(engine)):
                raise SignalInterrupt(getattr(error, "signal", signals[0])) from None
            if not isinstance(error, AllGone) or not settings.respawn or settings.dry_run:
                raise
            loss = error, controller.version, controller.happened
    if signals:  # perhaps while a life was closed that another would have followed
        raise SignalInterrupt(signals[0])
    if controller.begins_anew:
        raise BeginsAnew
    return loss


def _errors_after_signal(engine: Engine) -> tuple[type[BaseException], ...]:
    """Errors with which a run may end after a signal.

    With ranks, ``AllGone`` is not one: if a rank has died, torchrun signals the others.
    """
    return (AllGone, KeyboardInterrupt) if engine.traits.has_store else (KeyboardInterrupt,)


def _make_logs(place: OpenFolder, settings: RunSettings) -> None:
    """Make the files for what workers print, so that an error comes before they start."""
    with closing(place.make_inner("logs")) as logs:
        for name in logs.names():
            if name.startswith(RENDEZVOUS):  # of a life that was cut off: members would wait there
                logs.remove_file(name)
        for seat in range(settings.workers if settings.engine == "local" else 0):
            os.close(logs.append(f"worker-{seat}.log"))


def _open_trace(lives: Lives) -> Trace:
    goes_on = lives.origin.resumption is not None and not lives.settings.dry_run
    return Trace(lives.place.path / FILE_NAME, goes_on=goes_on, place=lives.place)


def _open_log(lives: Lives, exits: ExitStack) -> MetricsLog | None:
    if not lives.settings.log or lives.settings.dry_run:  # a client would start a run elsewhere
        return None
    resumption = lives.origin.resumption
    log = open_log(
        lives.settings.log, lives.place, None if resumption is None else resumption.version
    )
    return exits.enter_context(closing(log))
