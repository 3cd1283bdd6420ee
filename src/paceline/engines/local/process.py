"""A member from its fork to its end: its output, its signals, its program, its last message.

This module must not know protocols or messages beyond ``Done`` and ``Failed``. Above 300 lines
because its last message describes many kinds of errors.
"""

import ctypes
import importlib
import multiprocessing.process
import os
import pickle
import runpy
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from ...context import Context
from ...errors import AllGone, BeginsAnew, ConfigError, PacelineError
from ...exchange import make_averaging
from ...exchange.base import Perished, Stopped
from ...exchange.member import MemoryCarrier
from ...exchange.through_store import StoreExchange
from ...program import Program, ScriptProgram, TaskProgram
from ...replica.seeding import without_form
from ...script import worker
from ...store.control import Control
from ...store.memory import SharedMemory
from ...system.files import OpenFolder
from ...system.interpreter import leave_as_python_does
from ...system.limits import describe_limits, is_out_of_memory
from ...system.signals import die_with_parent
from ...system.streams import Lasting
from ...wire.channel import Channel, HungUp, member_channel
from ...wire.messages import Done, Failed, Whose
from ..base import RENDEZVOUS, THREADS, MemberSpec
from .stack import (
    end_of_traceback,
    is_foreign,
    lacks_batches,
    look_when_hurried,
    show_standing,
)

_PR_SET_TIMERSLACK = 29
_MAX_LINES = 12
_NO_GROUP = ("MASTER_ADDR expected", "Default process group has not been initialized")
"""Torch's errors in a script that uses torch's default process group when there is none."""
_GROUP_HINT = (
    "paceline launch makes no torch.distributed process group: leave that line out, and use "
    "paceline.connect() instead (pace.worker, pace.num_workers, pace.is_main, pace.sum)"
)
_NEXT_HINT = (
    "next() on the prepared loader ends after this worker's mini-batches of the epoch, which may "
    "be fewer or more than len(loader), the updates of all workers: write for batch in loader, or "
    "restart the iterator at StopIteration"
)
_CUT_SHORT = "the run was stopped, so its loader had no more batches"

Leave = Callable[[], None]
MakeExchange = Callable[[Channel, list[int], MemberSpec, Context], StoreExchange]


def run_member(spec: MemberSpec, descriptors: list[int]) -> int:
    """Run the program on this seat; returns the exit code."""
    import torch

    os.setpgid(0, 0)
    _handle_signals()
    _redirect(spec)
    channel = member_channel(socket.socket(fileno=descriptors[0]))
    show_standing(descriptors[1])
    program = SharedMemory(descriptors[2])
    for name in THREADS:  # the fork server's, not for processes that the script starts
        os.environ.pop(name, None)
    os.environ.update(spec.environment)
    added = [entry for entry in spec.search_path if entry not in sys.path]
    sys.path[:] = [*added, *sys.path] if spec.is_path_first else [*sys.path, *added]
    torch.set_num_threads(spec.threads)
    context = replace(Context.read(spec.context), is_own_process=True)
    module, _, name = spec.exchange.partition(":")
    make: MakeExchange = getattr(importlib.import_module(module), name)
    exchange = make(channel, descriptors[3:], spec, context)
    worker.start_context(exchange, context)
    # The signal may arrive inside the script's own inference_mode.
    look_when_hurried(torch.inference_mode(mode=False)(_copy_now))
    return perform(
        lambda: run_program(load_program(program), context), channel, spec, leave_as_python_does
    )


def _copy_now() -> None:
    worker.current().copy_now()


def exchange_in_shared_memory(
    channel: Channel, descriptors: list[int], spec: MemberSpec, context: Context
) -> StoreExchange:
    """Return the exchange of a member that shares its control page and arena with all others."""
    control = Control(SharedMemory(descriptors[0]), spec.num_seats)
    carrier = MemoryCarrier(control, SharedMemory(descriptors[1]))
    rendezvous = str(Path(spec.log).parent / RENDEZVOUS)
    averaging = partial(make_averaging, context.path, rendezvous)
    exchange = StoreExchange(
        channel, carrier,
        seat=spec.seat, member=spec.member, averaging=averaging,
        is_main=False if context.is_newcomer else None,
    )  # fmt: skip
    exchange.is_newcomer = context.is_newcomer
    if context.compress != "none" and not (context.is_newcomer or context.dry_run):
        from ...exchange.group import start_group
        from ...exchange.priced import price_between

        exchange.price = lambda compressed: price_between(
            start_group(rendezvous, spec.seat, spec.num_seats, compressed.device), compressed
        )
    return exchange


def perform(
    run: Callable[[], None], channel: Channel, spec: MemberSpec, leave: Leave = lambda: None
) -> int:
    """Run the program and report its end to the coordinator; returns the exit code.

    Args:
        leave: called after the script, before the end is reported.
    """
    try:
        _run_to_its_end(run)
    except BaseException as error:  # the user's code may raise anything; the end is reported
        return tell_end(error, channel, spec, worker.current(), leave)
    leave()
    channel.send(Done())
    return 0


def tell_end(
    error: BaseException,
    channel: Channel,
    spec: MemberSpec,
    exchange: StoreExchange,
    leave: Leave = lambda: None,
) -> int:
    """Report to the coordinator what a member's program raised; returns the exit code.

    Code that needs batches fails when a stop has left a pass over the loader empty: this is no
    failure of the run.
    """
    if isinstance(error, Stopped):
        if not spec.exchange:  # a rank's process, whose end no fork server reports
            channel.send(Done())
        return 0
    if isinstance(error, BeginsAnew):
        channel.send(Done())
        return 0
    if isinstance(error, SystemExit):
        channel.send(Failed(_exit_message(error, spec)))
        return 1
    if isinstance(error, HungUp):
        return 1
    if isinstance(error, Perished):
        raise error
    if exchange.is_cut_short and isinstance(error, Exception):
        if lacks_batches(error):
            exchange.say(_cut_short_message(error, spec.seat))
            leave()
            channel.send(Done())
            return 0
        error.add_note(f"before that {_CUT_SHORT}")
    report = Path(spec.log).with_suffix(".error")
    with suppress(OSError), _logs_of(spec) as logs:  # the launcher gets the message as well
        text = "".join(traceback.format_exception(error))
        logs.write(report.name, text.encode(errors="replace"))
    owners = {ConfigError: Whose.USER, AllGone: Whose.ALL}
    whose = next((owner for kind, owner in owners.items() if isinstance(error, kind)), Whose.WORKER)
    channel.send(Failed(failure_message(error, spec.seat, report), whose))
    return 1


def _run_to_its_end(run: Callable[[], None]) -> None:
    """Run the program; an exit with code 0 or None is an ordinary end."""
    try:
        run()
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    worker.finish()


def run_program(program: Program, context: Context) -> None:
    """Run the user's script as ``__main__``, or train a task with the standard loop."""
    if isinstance(program, TaskProgram):
        from ...trainer import train_here

        train_here(program.task, context)
        return
    assert isinstance(program, ScriptProgram)
    sys.argv = [program.path, *program.args]
    # Processes that the script spawns look for it here, not in the fork server's first folder.
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]  # it exists
    if program.is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program.path, run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, str(Path(program.path).resolve().parent))
    runpy.run_path(program.path, run_name="__main__")


def load_program(memory: SharedMemory) -> Program:
    """Return the program that this run's launcher put there; nobody else can write to it."""
    program: Program = pickle.loads(memory.buffer)
    memory.close()
    return program


def _cut_short_message(error: Exception, seat: int) -> str:
    last = _own_frames(error)[-1]
    return (
        f"worker {seat} ended in {last.name} at {Path(last.filename).name}:{last.lineno} "
        f"({type(error).__name__}): {_CUT_SHORT}"
    )


def failure_message(error: BaseException, seat: int, report: Path) -> str:
    """Return at most 12 lines: the worker, its place, the user's frames, and the report's path."""
    if isinstance(error, PacelineError):
        return str(error)
    frames = _own_frames(error)
    last = frames[-1]
    if name := without_form(error):
        return (
            f"worker {seat}: {name}, at {last.filename}:{last.lineno} in {last.name}, has no "
            "deterministic implementation: leave out --deterministic, or use another operation"
        )
    lines = [f"worker {seat} failed at {last.filename}:{last.lineno} in {last.name}:"]
    for frame in frames[-3:]:
        lines.append(f"  {Path(frame.filename).name}:{frame.lineno} {frame.name}")
        if frame.line:  # a notebook's cell has no source file
            lines.append(f"    {frame.line.strip()}")
    message = end_of_traceback(str(error)) or str(error).strip().splitlines()[:2] or [""]
    lines.append(f"{type(error).__name__}: {message[0]}")
    lines += [f"  {line}" for line in message[1:]]
    lines += [f"  {note}" for note in getattr(error, "__notes__", ())[:1]]
    if isinstance(error, StopIteration) or isinstance(error.__cause__, StopIteration):
        lines.append(_NEXT_HINT)
    if any(text in str(error) for text in _NO_GROUP):
        lines.append(_GROUP_HINT)
    if is_out_of_memory(error):
        lines.append(f"memory allowed here: {describe_limits() or 'all'}")
    lines.append(f"the other workers were ended; the whole traceback: {report}")
    return "\n".join(lines[:_MAX_LINES])


def _own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of the user's own code, outermost first; if none, the last two."""
    all_frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in all_frames if not is_foreign(frame.filename)]
    if isinstance(error, SyntaxError) and error.filename:
        place = traceback.FrameSummary(error.filename, error.lineno, "its text", line=error.text)
        frames.append(place)
    return frames or all_frames[-2:]


def _exit_message(error: SystemExit, spec: MemberSpec) -> str:
    """Return the message for a script that called ``sys.exit``: where, with which code, its log."""
    all_frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in all_frames if not is_foreign(frame.filename)]
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    reason = f"exit {error.code}" if isinstance(error.code, int) else str(error.code)
    return (
        f"worker {spec.seat}: the script exited{place}: {reason}\n"
        f"the other workers were ended; its log: {spec.log}"
    )


def _handle_signals() -> None:
    """Leave signals to the launcher, and on Linux let child processes die with this one.

    On Linux a member is killed with the fork server; elsewhere the closed channel ends it.
    """
    if sys.platform == "linux":
        # Sleeps end on time, not up to 50 us later.
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        _kill_forks_with(os.getpid())
    # A batch system sends these to every process: the launcher decides when the run ends. They get
    # an empty handler, since SIG_IGN would be inherited by processes that the script starts.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)  # else a library's read or wait fails with EINTR


def _kill_forks_with(member_pid: int) -> None:
    """Have the kernel kill a member's forks with it; a DataLoader's workers check only every 5 s.

    The kernel sends the signal when the forking *thread* ends, so it is set only for forks of the
    main thread: a thread of the script may end long before the process that it forked.
    """
    forking = threading.local()  # two threads may fork at once

    def before() -> None:
        forking.is_main = threading.get_native_id() == member_pid

    def after() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the process that forked it ends it
        sys.excepthook = _but_for_receivers_gone(sys.excepthook)
        if forking.is_main:
            die_with_parent()
            if os.getppid() != member_pid:  # the member died in between
                os._exit(1)

    os.register_at_fork(before=before, after_in_child=after)


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def _but_for_receivers_gone(hook: Hook) -> Hook:
    """Wrap an excepthook: silent when the receiver of a DataLoader worker's batch has died.

    ``multiprocessing.resource_sharer`` prints a traceback for that; the death itself is reported.
    """

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        files = {Path(frame.filename).name for frame in traceback.extract_tb(trace)}
        if not (isinstance(error, EOFError | OSError) and "resource_sharer.py" in files):
            hook(kind, error, trace)

    return report


@contextmanager
def _logs_of(spec: MemberSpec) -> Iterator[OpenFolder]:
    log = Path(spec.log)
    with closing(OpenFolder.open(log.parents[1], Context.read(spec.context).run_identity)) as run:
        logs = run.make_inner(log.parent.name)
    with closing(logs):
        yield logs


def _redirect(spec: MemberSpec) -> None:
    try:
        with _logs_of(spec) as logs:
            descriptor = logs.append(Path(spec.log).name)
    except OSError:  # the folder was removed or replaced during the run
        descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        stream.reconfigure(line_buffering=True)
        setattr(sys, name, Lasting(stream))  # printing to a full disk raises nothing
