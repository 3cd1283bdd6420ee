"""One run from its settings to its summary: the folder, the engine, the members, the end.

    settings + program -> folder -> engine, members -> conductor -> trace -> summary

This module must not know how orders are carried out or how a summary is computed.
"""

import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

import cloudpickle  # type: ignore[import-untyped]

from .compute.accelerators import count_accelerators
from .conditions.delays import parse_delays, parse_slow
from .config import RunSettings
from .context import Context
from .data.choice import choose
from .engines.base import Birth, Engine
from .engines.conductor import Conductor
from .engines.local import LocalEngine
from .errors import ConfigError
from .program import Program, TaskProgram
from .protocols import parse
from .protocols.base import SyncProtocol
from .report.files import write_report
from .report.live import Observer
from .report.logs import open_log
from .report.summary import Summary
from .trace import Trace
from .workloads import find_task

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Of the nursery: one thread, so that it can be forked; members set their own number."""


def launch_run(program: Program, settings: RunSettings, observer: Observer) -> Summary | None:
    """Run ``program``; the summary of what came of it, None after a dry run.

    Raises:
        ConfigError: something asked for does not exist or cannot work.
        WorkerError: a worker failed; all others were ended.
        KeyboardInterrupt: the user ended the run; its files are whole.
    """
    protocol = parse(settings.protocol, settings.workers)
    parse_delays(settings.delay, settings.workers)
    parse_slow(settings.slow, settings.workers)
    _find_data(program, observer)
    if settings.dry_run:
        with tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
            _run(program, settings, protocol, observer, Path(scratch))
        return None
    folder = make_folder(settings, program)
    try:
        _run(program, settings, protocol, observer, folder)
    except KeyboardInterrupt:
        observer.finished(write_report(folder))
        raise
    summary = write_report(folder)
    observer.finished(summary)
    return summary


def _find_data(program: Program, observer: Observer) -> None:
    """Fetch a built-in task's data where it is not here; an unknown task ends here."""
    if isinstance(program, TaskProgram) and isinstance(program.task, str):
        entry = find_task(program.task)
        if entry is not None and entry.data_set:
            choose(entry.data_set, fetch_missing=True, say=observer.note)


def _run(
    program: Program,
    settings: RunSettings,
    protocol: SyncProtocol,
    observer: Observer,
    folder: Path,
) -> None:
    (folder / "logs").mkdir(exist_ok=True)
    path = folder / "program.pkl"
    path.write_bytes(cloudpickle.dumps(program))
    path.chmod(0o600)
    births = list(_births(program, settings, protocol, folder))
    engine = _make_engine(settings)
    trace = Trace(folder / "trace.jsonl")
    tail = _Tail(Path(births[0].log), observer.printed)
    log = open_log(settings.log, folder) if settings.log else None
    conductor = Conductor(engine, protocol, settings, trace, observer, log, tail.show)
    try:
        with _ended_by_signals(conductor):
            conductor.conduct(engine.start(births))
    finally:
        trace.close()
        if log is not None:
            log.close()
        path.unlink(missing_ok=True)
        engine.close()
        tail.show()
    if conductor.was_interrupted:
        raise KeyboardInterrupt


def _make_engine(settings: RunSettings) -> Engine:
    if settings.engine == "inline":
        from .engines.inline import InlineEngine  # here: it needs torch, this process otherwise not

        return InlineEngine(settings.workers)
    return LocalEngine(settings.workers, _ENVIRONMENT)


def _births(
    program: Program, settings: RunSettings, protocol: SyncProtocol, folder: Path
) -> Iterator[Birth]:
    """What each member is told."""
    count = 1 if settings.dry_run else settings.workers
    threads = settings.threads or max(1, _num_cores() // settings.workers)
    context = Context(
        name=program.name,
        seed=settings.seed,
        device=settings.device,
        parts=protocol.num_pushes,
        num_steps=protocol.num_steps,
        is_difference=protocol.update_rule == "mean",
        cancels=protocol.cancels,
        nonfinite=settings.nonfinite,
        path=_choose_path(settings, protocol),
        workers=settings.workers,
        delay=settings.delay,
        slow=settings.slow,
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        mini_batch_size=settings.mini_batch_size,
        lr=settings.lr,
        init=settings.init,
        run_dir=str(folder.resolve()),
        keep_best=settings.keep_best,
        source="the task's own" if isinstance(program, TaskProgram) else "the script's own",
    )
    for seat in range(count):
        yield Birth(
            member=seat,
            seat=seat,
            num_seats=settings.workers,
            threads=threads,
            program=str((folder / "program.pkl").resolve()),
            log=str((folder / "logs" / f"worker-{seat}.log").resolve()),
            context=replace(context).write(),
            search_path=tuple(str(Path(entry).resolve()) for entry in sys.path),
            environment={
                "RANK": str(seat),
                "LOCAL_RANK": str(seat),
                "WORLD_SIZE": str(settings.workers),
                "LOCAL_WORLD_SIZE": str(settings.workers),
            },
        )


def _choose_path(settings: RunSettings, protocol: SyncProtocol) -> str:
    """``collective`` where every worker of a protocol between peers has its own accelerator."""
    is_free = settings.path == "auto" and settings.engine == "local" and settings.workers > 1
    if is_free and protocol.is_spmd and count_accelerators(settings.device) >= settings.workers:
        return "collective"
    return settings.path


def _num_cores() -> int:
    """Cores that this process may use, the container's quota included."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores or 1, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores or 1


def make_folder(settings: RunSettings, program: Program) -> Path:
    """``runs/NAME``, and ``runs/latest`` that points to it."""
    if settings.run_dir is not None:
        folder = Path(settings.run_dir)
        if (folder / "trace.jsonl").exists():
            raise ConfigError(f"{folder} already holds a run; name another --run-dir")
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{program.name}-{settings.protocol}")
    name = settings.name or f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path("runs") / name
    number = 1
    while folder.exists():
        if settings.name:
            raise ConfigError(f"{folder} exists already; choose another --name")
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    folder.mkdir(parents=True)
    link = Path("runs") / "latest"
    if link.is_symlink() or not link.exists():
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
    return folder


class _Tail:
    """Shows what the main worker prints, from its log."""

    def __init__(self, path: Path, show: Callable[[str], None]) -> None:
        self._path = path
        self._show = show
        self._seen = 0

    def show(self) -> None:
        """Show the whole lines that are new."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._seen)
                data = file.read()
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        if whole:
            self._seen += len(whole)
            self._show(whole.decode(errors="replace"))


@contextmanager
def _ended_by_signals(conductor: Conductor) -> Iterator[None]:
    """The first Ctrl-C or TERM stops at the next step border, the second ends everything now."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        if conductor.was_interrupted:
            raise KeyboardInterrupt
        conductor.interrupt()

    try:
        old = signal.signal(signal.SIGINT, interrupt)
    except ValueError:  # not in the main thread: somebody else hears signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)
