"""One run from its settings to its summary: the folder, the engine, the members, the end.

    settings + program -> folder -> engine, members -> conductor -> trace -> summary

This module must not know how orders are carried out or how a summary is computed.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
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
from .errors import WorkerError
from .folder import make_folder
from .program import Program, TaskProgram
from .protocols import parse
from .protocols.base import SyncProtocol
from .report.files import write_report
from .report.live import Observer
from .report.logs import open_log
from .report.summary import Summary
from .trace import FILE_NAME, Trace, has_begun
from .workloads import find_task

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Of the nursery: one thread, so that it can be forked; members set their own number."""
_OURS = ("logs", FILE_NAME, "metrics.csv", "tensorboard")
"""What lies in the folder of a run that has not begun."""


class Interrupted(KeyboardInterrupt):
    """The user ended a run that had begun.

    Args:
        summary: what came of it until then.
    """

    def __init__(self, summary: Summary) -> None:
        super().__init__()
        self.summary = summary


def launch_run(program: Program, settings: RunSettings, observer: Observer) -> Summary | None:
    """Run ``program``; the summary of what came of it, None after a dry run.

    Raises:
        ConfigError: something asked for does not exist or cannot work.
        WorkerError: a worker failed; all others were ended.
        KeyboardInterrupt: the user ended the run; its files are whole. ``Interrupted`` where it
            had begun. One that had not, or was refused, leaves no folder.
    """
    protocol = parse(settings.protocol, settings.workers)
    parse_delays(settings.delay, settings.workers)
    parse_slow(settings.slow, settings.workers)
    _find_data(program, observer)
    if settings.dry_run:
        with tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
            _run(program, settings, protocol, observer, Path(scratch))
        return None
    folder = make_folder(settings, program.name)
    try:
        _run(program, settings, protocol, observer, folder.path)
    except BaseException as error:
        if not has_begun(folder.path / FILE_NAME):
            if not _has_words(folder.path, error):
                folder.discard(_OURS)
            raise
        summary = write_report(folder.path)
        if isinstance(error, KeyboardInterrupt):
            observer.finished(summary)
            raise Interrupted(summary) from None
        raise
    summary = write_report(folder.path)
    observer.finished(summary)
    return summary


def _has_words(folder: Path, error: BaseException) -> bool:
    """Whether somebody should look into the folder of a run that never began."""
    is_failure = isinstance(error, WorkerError)
    return is_failure or any(one.stat().st_size for one in folder.glob("logs/*.log"))


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
    seats: dict[int, tuple[int, int]] = {}
    conductor: Conductor | None = None

    def stop_softly() -> bool:
        if conductor is None or not seats or conductor.was_interrupted:
            return False
        conductor.interrupt()
        return True

    with ExitStack() as ends:
        ends.enter_context(_ended_by_signals(stop_softly))
        path = folder / "program.pkl"
        ends.callback(path.unlink, missing_ok=True)
        path.write_bytes(cloudpickle.dumps(program))
        path.chmod(0o600)
        births = list(_births(program, settings, protocol, folder))
        trace = ends.enter_context(closing(Trace(folder / FILE_NAME)))
        log = open_log(settings.log, folder) if settings.log else None
        if log is not None:
            ends.enter_context(closing(log))
        tail = _Tail([Path(birth.log) for birth in births], observer.printed)
        ends.callback(tail.show)  # after the engine's end, when nobody prints any more
        engine = ends.enter_context(closing(_make_engine(settings)))
        start_s = time.perf_counter()
        conductor = Conductor(engine, protocol, settings, trace, observer, log, tail)
        try:
            seats.update(engine.start(births))
            conductor.conduct(seats)
        except BaseException as error:
            if trace.has_begun:
                trace.end(time.perf_counter() - start_s, _ending(error))
            raise
    if conductor.was_interrupted:
        raise KeyboardInterrupt


def _ending(error: BaseException) -> str:
    """Why a run that did not come to its end ended."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    first = str(error).partition("\n")[0].rstrip(":") or type(error).__name__
    return f"failed: {first}"


def _make_engine(settings: RunSettings) -> Engine:
    if settings.engine == "inline":
        from .engines.inline import InlineEngine  # here: it needs torch, this process otherwise not

        return InlineEngine(settings.workers)
    return LocalEngine(settings.workers, _ENVIRONMENT)


def _births(
    program: Program, settings: RunSettings, protocol: SyncProtocol, folder: Path
) -> Iterator[Birth]:
    """What each member is told."""
    context = _context(program, settings, protocol, folder).write()
    for seat in range(1 if settings.dry_run else settings.workers):
        yield Birth(
            member=seat,
            seat=seat,
            num_seats=settings.workers,
            threads=settings.threads or max(1, num_cores() // settings.workers),
            program=str((folder / "program.pkl").resolve()),
            log=str((folder / "logs" / f"worker-{seat}.log").resolve()),
            context=context,
            search_path=tuple(str(Path(entry).resolve()) for entry in sys.path),
            environment={
                "RANK": str(seat),
                "LOCAL_RANK": str(seat),
                "WORLD_SIZE": str(settings.workers),
                "LOCAL_WORLD_SIZE": str(settings.workers),
            },
        )


def _context(
    program: Program, settings: RunSettings, protocol: SyncProtocol, folder: Path
) -> Context:
    """What ``connect`` finds in every member."""
    return Context(
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


def _choose_path(settings: RunSettings, protocol: SyncProtocol) -> str:
    """``collective`` where every worker of a protocol between peers has its own accelerator."""
    is_free = settings.path == "auto" and settings.engine == "local" and settings.workers > 1
    if is_free and protocol.is_spmd and count_accelerators(settings.device) >= settings.workers:
        return "collective"
    return settings.path


def num_cores() -> int:
    """Cores that this process may use, the container's quota included."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores or 1, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores or 1


class _Tail:
    """Shows what the main worker prints, from its log.

    Args:
        paths: each worker's log; the first one's is followed at first.
    """

    def __init__(self, paths: Sequence[Path], show: Callable[[str], None]) -> None:
        self._paths = paths
        self._path = paths[0]
        self._show = show
        self._seen = 0

    def follow(self, seat: int) -> None:
        """Show the end of what the last main worker printed, and from now on this one's words."""
        self.show(is_last=True)
        self._path = self._paths[seat]
        self._seen = self._path.stat().st_size if self._path.exists() else 0

    def show(self, is_last: bool = False) -> None:
        """Show the whole lines that are new; at the last, also one that was not ended."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._seen)
                data = file.read()
        except OSError:
            return
        whole = data if is_last else data[: data.rfind(b"\n") + 1]
        if whole:
            self._seen += len(whole)
            self._show(whole.decode(errors="replace"))


@contextmanager
def _ended_by_signals(stop_softly: Callable[[], bool]) -> Iterator[None]:
    """Ctrl-C or TERM asks for a soft stop; where there is none, it ends everything now.

    Args:
        stop_softly: stops at the next step border; False where that is asked for already, or
            nothing has started yet.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not stop_softly():
            raise KeyboardInterrupt

    old = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            old[number] = signal.signal(number, interrupt)
    except ValueError:  # not in the main thread: somebody else hears signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
