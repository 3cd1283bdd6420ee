"""A member from its fork to its end: its output, its signals, its program, its last message.

This module must not know protocols or messages beyond ``Done`` and ``Failed``. Above 300 lines
because of all the errors that its last message may describe.
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
"""Torch's errors where a script uses a process group of torch's own and there is none."""
_HINT_OF_GROUP = (
    "paceline launch makes no process group of torch's own: leave that line out where the script "
    "calls paceline.connect() (pace.worker, pace.num_workers, pace.is_main, pace.sum)"
)
_HINT_OF_END = (
    "next() of the prepared loader ends with this worker's mini-batches of the epoch, which may be "
    "fewer or more than len(loader), the updates of all: write for batch in loader, or begin anew "
    "at StopIteration"
)
_CUT = "the run was stopped, so its loader had nothing left to give"

Leave = Callable[[], None]
MakeExchange = Callable[[Channel, list[int], MemberSpec, Context], StoreExchange]


def run_member(spec: MemberSpec, descriptors: list[int]) -> int:
    """Run the program on this seat; the exit code."""
    import torch

    os.setpgid(0, 0)
    _be_a_member()
    _redirect(spec)
    channel = member_channel(socket.socket(fileno=descriptors[0]))
    show_standing(descriptors[1])
    program = SharedMemory(descriptors[2])
    for name in THREADS:  # the fork server's, for which what the script begins has no use
        os.environ.pop(name, None)
    os.environ.update(spec.environment)
    further = [entry for entry in spec.search_path if entry not in sys.path]
    sys.path[:] = [*further, *sys.path] if spec.is_path_first else [*sys.path, *further]
    torch.set_num_threads(spec.threads)
    context = replace(Context.read(spec.context), is_own_process=True)
    module, _, name = spec.exchange.partition(":")
    make: MakeExchange = getattr(importlib.import_module(module), name)
    exchange = make(channel, descriptors[3:], spec, context)
    worker.start_context(exchange, context)
    look_when_hurried(torch.inference_mode(mode=False)(_copy_now))  # not as where it is
    return perform(
        lambda: run_program(load_program(program), context), channel, spec, leave_as_python_does
    )


def _copy_now() -> None:
    worker.current().copy_now()


def exchange_in_shared_memory(
    channel: Channel, descriptors: list[int], spec: MemberSpec, context: Context
) -> StoreExchange:
    """A member that shares its control page and its arena with all others."""
    control = Control(SharedMemory(descriptors[0]), spec.num_seats)
    carrier = MemoryCarrier(control, SharedMemory(descriptors[1]))
    rendezvous = str(Path(spec.log).parent / RENDEZVOUS)
    averaging = partial(make_averaging, context.path, rendezvous)
    exchange = StoreExchange(
        channel, carrier,
        seat=spec.seat, member=spec.member, averaging=averaging,
        is_main=False if context.is_newcomer else None,
    )  # fmt: skip
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
    """Run, and tell the coordinator how it ended; the exit code.

    Args:
        leave: what is still to be done where a script is over: it is done after that.
    """
    try:
        _run_to_its_end(run)
    except BaseException as error:  # the user's code may raise anything, and its end is told
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
    """Tell the coordinator of what came out of a member's program; the exit code.

    Code that cannot do without batches fails where a stop has left a pass over the loader empty:
    that is no failure of the run.
    """
    if isinstance(error, Stopped):
        if not spec.exchange:  # a rank, which ends when all do: its process tells nobody
            channel.send(Done())
        return 0
    if isinstance(error, BeginsAnew):
        channel.send(Done())
        return 0
    if isinstance(error, SystemExit):
        channel.send(Failed(_exit_words(error, spec)))
        return 1
    if isinstance(error, HungUp):
        return 1
    if isinstance(error, Perished):
        raise error
    if exchange.is_cut_short and isinstance(error, Exception):
        if lacks_batches(error):
            exchange.say(_words_of_cut(error, spec.seat))
            leave()
            channel.send(Done())
            return 0
        error.add_note(f"before that {_CUT}")
    report = Path(spec.log).with_suffix(".error")
    with suppress(OSError), _logs_of(spec) as logs:  # what it says goes to the launcher, too
        text = "".join(traceback.format_exception(error))
        logs.write(report.name, text.encode(errors="replace"))
    kinds = {ConfigError: Whose.USER, AllGone: Whose.ALL}
    whose = next((one for kind, one in kinds.items() if isinstance(error, kind)), Whose.WORKER)
    channel.send(Failed(last_words(error, spec.seat, report), whose))
    return 1


def _run_to_its_end(run: Callable[[], None]) -> None:
    """An exit without a complaint is an end like any other."""
    try:
        run()
    except SystemExit as end:
        if end.code not in (None, 0):
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
    # What the script spawns looks for it here, and not where the fork server was begun.
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]  # it has it
    if program.is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program.path, run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, str(Path(program.path).resolve().parent))
    runpy.run_path(program.path, run_name="__main__")


def load_program(memory: SharedMemory) -> Program:
    """What the launcher of this very run laid there, where nobody else could."""
    program: Program = pickle.loads(memory.buffer)
    memory.close()
    return program


def _words_of_cut(error: Exception, seat: int) -> str:
    last = _own_frames(error)[-1]
    return (
        f"worker {seat} ended in {last.name} at {Path(last.filename).name}:{last.lineno} "
        f"({type(error).__name__}): {_CUT}"
    )


def last_words(error: BaseException, seat: int, report: Path) -> str:
    """At most 12 lines: the worker, where it was, the user's own frames, and where to read on."""
    if isinstance(error, PacelineError):
        return str(error)
    frames = _own_frames(error)
    last = frames[-1]
    if name := without_form(error):
        return (
            f"worker {seat}: {name}, at {last.filename}:{last.lineno} in {last.name}, has no form "
            "that gives the same bits each time: leave out --deterministic, or use another one"
        )
    lines = [f"worker {seat} failed at {last.filename}:{last.lineno} in {last.name}:"]
    for frame in frames[-3:]:
        lines.append(f"  {Path(frame.filename).name}:{frame.lineno} {frame.name}")
        if frame.line:  # a notebook's cell has no file to read it from
            lines.append(f"    {frame.line.strip()}")
    message = end_of_traceback(str(error)) or str(error).strip().splitlines()[:2] or [""]
    lines.append(f"{type(error).__name__}: {message[0]}")
    lines += [f"  {line}" for line in message[1:]]
    lines += [f"  {note}" for note in getattr(error, "__notes__", ())[:1]]
    if isinstance(error, StopIteration) or isinstance(error.__cause__, StopIteration):
        lines.append(_HINT_OF_END)
    if any(word in str(error) for word in _NO_GROUP):
        lines.append(_HINT_OF_GROUP)
    if is_out_of_memory(error):
        lines.append(f"memory that is allowed here: {describe_limits() or 'all that there is'}")
    lines.append(f"the other workers were ended; the whole traceback: {report}")
    return "\n".join(lines[:_MAX_LINES])


def _own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of the user's own code, outermost first; if there are none, the last two."""
    traced = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in traced if not is_foreign(frame.filename)]
    if isinstance(error, SyntaxError) and error.filename:
        where = traceback.FrameSummary(error.filename, error.lineno, "its text", line=error.text)
        frames.append(where)
    return frames or traced[-2:]


def _exit_words(end: SystemExit, spec: MemberSpec) -> str:
    """A script that ended itself: its message or exit code, where, and its log."""
    frames = [one for one in traceback.extract_tb(end.__traceback__) if not is_foreign(one[0])]
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    how = f"exit {end.code}" if isinstance(end.code, int) else str(end.code)
    return (
        f"worker {spec.seat}: the script ended itself{place}: {how}\n"
        f"the other workers were ended; its log: {spec.log}"
    )


def _be_a_member() -> None:
    """On Linux it is killed with the fork server by now; elsewhere the closed channel ends it."""
    if sys.platform == "linux":
        # A sleep ends when it is over, not up to 50 us later.
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        _let_forks_die_too(os.getpid())
    # A batch system sends them to every process: the launcher decides when the run ends. A handler
    # that does nothing, since what a script begins would inherit that they are ignored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)  # else a library's read or wait fails with EINTR


def _let_forks_die_too(member: int) -> None:
    """What a member forks, as a DataLoader does, is killed with it; by itself it looks every 5 s.

    The kernel sends the signal when the forking *thread* ends, so only forks of the main thread
    set it: a thread of the user's may end long before what it forked.
    """
    own = threading.local()  # two threads may fork at once

    def before() -> None:
        own.is_main = threading.get_native_id() == member

    def after() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # it is ended by whoever forked it
        sys.excepthook = _but_for_receivers_gone(sys.excepthook)
        if own.is_main:
            die_with_parent()
            if os.getppid() != member:  # it died in between
                os._exit(1)

    os.register_at_fork(before=before, after_in_child=after)


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def _but_for_receivers_gone(hook: Hook) -> Hook:
    """What says a failure, but for one: who was to have a batch of a DataLoader's worker has died.

    ``multiprocessing.resource_sharer`` has a traceback for that; the death itself is told.
    """

    def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        files = {Path(one.filename).name for one in traceback.extract_tb(trace)}
        if not (isinstance(error, EOFError | OSError) and "resource_sharer.py" in files):
            hook(kind, error, trace)

    return say


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
    except OSError:  # the folder was taken away, or exchanged, while the run goes on
        descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        stream.reconfigure(line_buffering=True)
        setattr(sys, name, Lasting(stream))  # a full disk does not end who prints
