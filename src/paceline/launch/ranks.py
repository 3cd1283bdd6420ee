"""A run among the ranks that torchrun, srun or mpirun started.

    every rank   connect: environment -> settings -> meeting place -> Hello | Meet | Begin -> Pace
    rank 0       a thread: compare Hellos -> launch_run over the engine -> report -> RunOver

Settings come from a file and the environment, since the command line belongs to the other launcher
(job.py). Above 300 lines, since all that ranks are compared by is here. This module must not know
how ranks reach each other, or what a script does.
"""

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NoReturn, TypeAlias

from ..config import PREFIX, Resolved, resolve
from ..context import Context
from ..engines.base import Engine
from ..engines.torchrun.engine import RankZero, TorchrunEngine
from ..engines.torchrun.life import ANEW, RankLife, say, unseeded
from ..engines.torchrun.place import kept_at
from ..engines.torchrun.post import ControllerPost, EndAsked, Hello, Lost, Meet, RunOver
from ..engines.torchrun.world import RankOfWorld
from ..errors import (
    BeginsAnew,
    ConfigError,
    Interrupted,
    LinkError,
    PacelineError,
    WorkerError,
    from_os_error,
)
from ..exchange.mapped import open_at
from ..program import Program, ScriptProgram, TaskProgram
from ..report.live import choose_observer
from ..system.signals import SignalInterrupt
from ..wire.messages import Failed, Whose
from .job import JobFolder, refuse_of_tasks, settings_json, settings_of_ranks
from .launcher import Host, launch_run

_NOTE_S, _GIVE_UP_S = 30.0, 600.0
"""Time until a note names a rank that has not called ``connect``; until the run fails."""
_BYE_S = 5.0
"""Time for ranks to confirm the end of the run."""

ReadSettings: TypeAlias = Callable[[], Resolved]

_lives: list[RankLife] = []
"""This process's life as a rank; empty before ``join``."""


def join_once(rank: RankOfWorld) -> None:
    """Make this script one of the members.

    Raises:
        ConfigError: ``connect`` was called in another thread, or a setting is invalid.
        LinkError: the other ranks cannot be reached.
    """
    if _lives:
        raise ConfigError(
            "paceline.connect() was called in two threads; call it once, and pass pace on"
        )
    join(rank, _this_script(), lambda: resolve({}))


def run_as_rank(
    rank: RankOfWorld, program: Program, read: ReadSettings, run: Callable[[Context], None]
) -> NoReturn:
    """Run the program in a process that was started as a rank; ends the process."""
    context = join(rank, program, read)
    if isinstance(program, TaskProgram):  # a script would lose its state
        _lives[0].may_begin_anew()
    _lives[0].perform(lambda: run(context))


def join(rank: RankOfWorld, program: Program, read: ReadSettings) -> Context:
    """Become one of the members; return the context of the run.

    Errors in a rank's settings are reported by the one controller, once.

    Args:
        program: what runs, for the trace and for a resume.
        read: returns the settings that this rank was started with.
    """
    life = RankLife(rank)
    rank = life.rank  # which knows its life of the job
    _lives.append(life)
    life.begin_to_talk()
    if rank.rank == 0:
        life.controller = RunThread(life, program, read)
        life.controller.start()
    life.meet(settings_json(settings_of_ranks(read(), rank)))
    return life.begin()


def refuse_left_alone(rank: RankOfWorld) -> None:
    """Raise ConfigError if this is the only worker left of a run, which it would not continue.

    Args:
        rank: the only one that torchrun has restarted.

    Raises:
        LinkError: torchrun's store cannot be reached.
    """
    if folder := kept_at(rank):
        raise ConfigError(
            f"1 worker is left of the run in {folder}, and alone it would train from the "
            "beginning: let torchrun wait until there are 2 (--nnodes 2:4), or go on with one: "
            f"paceline launch --workers 1 --resume {folder} SCRIPT"
        )


def _this_script() -> ScriptProgram:
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    path = spec.name if spec is not None else getattr(main, "__file__", None) or "script"
    return ScriptProgram(path=path, args=tuple(sys.argv[1:]), is_module=spec is not None)


class RunThread(threading.Thread):
    """The controller of the run, in a thread of rank 0.

    Args:
        read: returns the settings and their sources; a resumed run fills in the rest.
    """

    def __init__(self, life: RankLife, program: Program, read: ReadSettings) -> None:
        super().__init__(name="paceline-controller", daemon=True)
        self._life, self._program, self._read = life, program, read
        self._is_json = False
        self._post = ControllerPost(life.place, life.rank.size)
        self._stop_softly: Callable[[int], bool] = lambda number: False
        self._signal: int | None = None
        self._processes: dict[int, tuple[str, int]] = {}
        """Rank -> its process and machine in words, and its process id."""
        self._num_machines = 0
        self._why_unmapped = ""
        self._lost: set[int] = set()
        self._folder = JobFolder(life.rank, life.place if life.rank.is_hosted else None)

    def run(self) -> None:
        code = 1
        try:
            code = self._run_to_its_end()
        except PacelineError as error:
            code = self._print_error(error)
        except OSError as error:
            code = self._print_error(from_os_error(error))
        except BeginsAnew:
            code = ANEW
        except KeyboardInterrupt as end:
            say("interrupted")
            code = 128 + getattr(end, "signal", 2)
        except BaseException:  # the command ends here, and all ranks must, too
            traceback.print_exc()
        finally:
            self._end_all(code)

    def _print_error(self, error: PacelineError) -> int:
        """Print the error as the command does; return the exit code."""
        say(f"error: {error}")
        if self._is_json:
            error_json = {"kind": type(error).__name__, "message": str(error)}
            print(json.dumps({"error": error_json}), flush=True)  # noqa: T201  rank 0 speaks for the command
        return 2 if isinstance(error, ConfigError) else 1

    def _run_to_its_end(self) -> int:
        resolved = self._read()
        self._is_json = resolved.settings.json
        refuse_of_tasks(self._program, resolved)
        settings = settings_of_ranks(resolved, self._life.rank)
        observer = choose_observer(settings.json)
        try:
            hellos = self._meet(observer.note)
            is_restarted = any(hello.is_restarted for hello in hellos)
            settings = self._folder.restore(resolved, settings, is_restarted=is_restarted)
            if self._folder.unknown_why:
                observer.note(self._folder.unknown_why)
            host = Host(make=partial(self._make, observer.note), signals=self._heard_by_ranks)
            summary = launch_run(self._program, settings, observer, host)
            self._folder.forget()
            if settings.json:
                result = summary if summary is not None else observer.shown_plan
                assert result is not None
                print(json.dumps(result.to_json(), allow_nan=False), flush=True)  # noqa: T201  rank 0 speaks for the command
        except Interrupted as end:
            if settings.json:
                print(json.dumps(end.summary.to_json(), allow_nan=False), flush=True)  # noqa: T201  rank 0 speaks for the command
            raise
        finally:
            observer.close()
        return 0

    def _meet(self, note: Callable[[str], None]) -> list[Hello]:
        """Wait for all ranks, compare how they were started, and return what they say of it."""
        hellos: dict[int, Hello] = {}
        size, start_s, has_noted = self._post.size, time.monotonic(), False
        while len(hellos) < size:
            for seat, message in self._post.hear(0.5):
                if isinstance(message, Hello):
                    hellos[seat] = message
                elif isinstance(message, EndAsked):
                    raise SignalInterrupt(message.number)
                elif isinstance(message, Failed):
                    raise (ConfigError if message.whose is Whose.USER else WorkerError)(
                        message.text
                    )
            waited_s = time.monotonic() - start_s
            missing = sorted(set(range(size)) - hellos.keys())
            if missing and waited_s > _NOTE_S and not has_noted:
                has_noted = True
                note(
                    f"worker {missing[0]} has not called paceline.connect() within {_NOTE_S:.0f} s"
                )
            if missing and waited_s > _GIVE_UP_S:
                raise LinkError(
                    f"worker {missing[0]} has not called paceline.connect() within "
                    f"{_GIVE_UP_S:.0f} s: check that all machines started the script with the same "
                    "MASTER_ADDR and MASTER_PORT, and that every process calls it"
                )
        self._life.place.close_registration()
        ordered = [hellos[seat] for seat in range(size)]
        _compare(ordered)
        _refuse_unreachable(ordered)
        self._processes |= {
            seat: (f"process {hello.pid} on {hello.host}", hello.pid)
            for seat, hello in hellos.items()
        }
        self._num_machines = _num_machines(ordered)
        self._why_unmapped = _why_unmapped(ordered)
        seeds = unseeded([hello.random for hello in ordered])
        self._post.tell_all(Meet(seeds, is_near=self._num_machines == 1))
        return ordered

    def _make(self, note: Callable[[str], None], name: str, num_workers: int) -> Engine:
        life = self._life

        def began(folder: str) -> None:
            if warning := self._folder.began(folder):
                note(warning)

        return TorchrunEngine(num_workers, RankZero(
            post=self._post,
            memory=lambda: (life.carrier.arena, life.carrier.control),
            processes=self._processes,
            lost=self._lost,
            on_signal=self._hear_signal,
            on_folder=began,
            is_one_machine=self._num_machines == 1,
            why_unmapped=self._why_unmapped,
        ))  # fmt: skip

    @contextmanager
    def _heard_by_ranks(self, stop_softly: Callable[[int], bool]) -> Iterator[None]:
        self._stop_softly = stop_softly
        yield

    def _hear_signal(self, number: int) -> None:
        """Stop at the first signal; all ranks get it, and torchrun sends it once more."""
        if self._signal is None:
            self._signal = number
            if not self._stop_softly(number):
                raise SignalInterrupt(number)

    def _end_all(self, code: int) -> None:
        """Tell all ranks of the end, this one last, since the store may end with it."""
        others = set(range(1, self._post.size)) - self._lost
        with contextlib.suppress(LinkError):
            for seat in sorted(others):
                self._post.tell(seat, [RunOver(code)])
            end_s = time.monotonic() + _BYE_S
            while others and time.monotonic() < end_s:
                for seat, message in self._post.hear(0.1):
                    others -= {seat, message.seat if isinstance(message, Lost) else seat}
        self._life.place.close_registration()  # not earlier, so that late ranks hear of the end
        self._post.close()
        with contextlib.suppress(LinkError):
            self._post.tell(0, [RunOver(code)])


def _compare(hellos: Sequence[Hello]) -> None:
    """Raise ConfigError where two ranks were started with different settings."""
    first = json.loads(hellos[0].settings)
    for rank, hello in enumerate(hellos):
        own = json.loads(hello.settings)
        for name in first.keys() | own.keys():
            if first.get(name) != own.get(name):
                raise ConfigError(
                    f"workers 0 and {rank} ({hellos[0].host} and {hello.host}) were started with "
                    f"different settings: {name} is {first.get(name)!r} and {own.get(name)!r}; set "
                    f"{PREFIX}{name.upper()}, or paceline.toml, to the same value on all machines"
                )


def _num_machines(hellos: Sequence[Hello]) -> int:
    """Count machines by name and boot: machines of one image may all be called ``localhost``."""
    return len({(hello.host, hello.boot) for hello in hellos})


def _why_unmapped(hellos: Sequence[Hello]) -> str:
    """Return why ranks cannot map each other's memory; "": rank 0 may open that of all others."""
    if (count := _num_machines(hellos)) > 1:
        return f"they are on {count} machines"
    for rank, hello in enumerate(hellos[1:], 1):
        try:
            os.close(open_at(*hello.memory))
        except OSError as error:
            return f"worker 0 may not open that of worker {rank} ({error.strerror or error})"
    return ""


def _refuse_unreachable(hellos: Sequence[Hello]) -> None:
    """Raise ConfigError if gloo would bind to an address that other machines cannot reach."""
    if _num_machines(hellos) < 2:
        return
    for rank, hello in enumerate(hellos):
        if hello.unreachable_why:
            raise ConfigError(
                f"worker {rank} on {hello.host}: {hello.unreachable_why}: the other machines "
                "cannot reach it with gloo; export GLOO_SOCKET_IFNAME=eth0 there (ip -brief "
                "address lists the names), or set its address in /etc/hosts"
            )
