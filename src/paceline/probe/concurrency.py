"""One job as coroutines, threads and processes: what each brings, what it costs, what it may not.

                 the same number of jobs, of three kinds
    waiting      a pause, as for a disk or a network: nobody computes
    Python       arithmetic in Python: only who holds the interpreter's lock computes
    library      a hash of bytes in C, which gives the lock away meanwhile

    one after the other | coroutines | threads | processes          seconds, beside the first

Beside it what it takes to make one of each, and to hand a word over and get one back. From these
follows what is right for which work; on one core nothing computes at once, whatever is written.
Above 300 lines, since jobs, ways and table are one file.
"""

import asyncio
import hashlib
import multiprocessing
import queue
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from ..bench.samples import Measured, Timing, take_turns
from ..errors import ConfigError
from ..report.text import table, three_figures
from ..system.processors import num_cores

_AIM_S = 0.05
"""About how long one job takes."""
_ROUNDS, _MADE, _WORDS = 3, 5, 200
_HASHED = bytes(1 << 20)
_KINDS = ("waiting", "Python", "library")
MOST_AT_ONCE = 64
WAYS = ("one after the other", "coroutines", "threads", "processes")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTimes(Measured):
    """All jobs of one kind, by each way.

    Args:
        kind: of work.
        ways: name of a way -> seconds of all jobs.
    """

    kind: str
    ways: dict[str, Timing]

    def speedup(self, way: str) -> float:
        """How many times as fast as one after the other."""
        return self.ways[WAYS[0]].median_s / self.ways[way].median_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency(Measured):
    """What was found.

    Args:
        has_lock: whether this Python lets only one thread compute at a time.
        make_s, talk_s: way -> seconds to make and end one; to hand a word over and get one back.
    """

    jobs: int
    at_once: int
    cores: int
    has_lock: bool
    kinds: tuple[JobTimes, ...]
    make_s: dict[str, float]
    talk_s: dict[str, float]


# -- jobs ------------------------------------------------------------------------------------------


def _compute(count: int) -> int:
    """In Python: the lock is held."""
    value = 1
    for _ in range(count):
        value = (value * 1103515245 + 12345) & 0x7FFFFFFF
    return value


def _hash(count: int) -> bytes:
    """In C: the lock is given away, since what is hashed is large."""
    found = hashlib.sha256()
    for _ in range(count):
        found.update(_HASHED)
    return found.digest()


def _wait(milliseconds: int) -> None:
    time.sleep(milliseconds / 1e3)


_JOBS: dict[str, Callable[[int], object]] = {"waiting": _wait, "Python": _compute, "library": _hash}


def _count(kind: str) -> int:
    """So much of it that one job takes about `_AIM_S`."""
    if kind == "waiting":
        return int(_AIM_S * 1e3)
    count, took_s = {"Python": 10_000, "library": 1}[kind], 0.0
    for _ in range(3):
        start_s = time.perf_counter()
        _JOBS[kind](count)
        took_s = min(took_s or 1.0, time.perf_counter() - start_s)
    return max(1, int(count * _AIM_S / max(took_s, 1e-6)))


# -- ways ------------------------------------------------------------------------------------------


def measure_concurrency(jobs: int, at_once: int, say: Callable[[str], None]) -> Concurrency:
    """All kinds by all ways, in turns.

    Raises:
        ConfigError: a number is out of range.
    """
    if not (1 <= jobs <= 1000 and 1 <= at_once <= MOST_AT_ONCE):
        raise ConfigError(
            f"--jobs must be 1 to 1000 and --at-once 1 to {MOST_AT_ONCE}, got {jobs} and {at_once}"
        )
    context = multiprocessing.get_context("spawn")  # a process with torch in it is not forked
    with (
        ThreadPoolExecutor(at_once) as threads,
        ProcessPoolExecutor(at_once, mp_context=context) as processes,
    ):
        say("begin processes")
        list(processes.map(_wait, [50] * at_once))
        kinds = []
        for kind in _KINDS:
            say(kind)
            ways = _ways(kind, _count(kind), jobs, threads, processes)
            kinds.append(JobTimes(kind=kind, ways=take_turns(ways, _ROUNDS)))
    say("making and talking")
    return Concurrency(
        jobs=jobs, at_once=at_once, cores=num_cores(), kinds=tuple(kinds),
        has_lock=getattr(sys, "_is_gil_enabled", lambda: True)(),
        make_s={"coroutines": _coroutine_s(), "threads": _thread_s(), "processes": _process_s()},
        talk_s={"coroutines": _talk_coroutine_s(), "threads": _talk_thread_s(),
                "processes": _talk_process_s()},
    )  # fmt: skip


def _ways(
    kind: str, count: int, jobs: int, threads: Executor, processes: Executor
) -> dict[str, Callable[[], float]]:
    job = _JOBS[kind]

    def in_turn() -> None:
        for _ in range(jobs):
            job(count)

    async def one() -> None:
        if kind == "waiting":
            await asyncio.sleep(count / 1e3)
        else:
            job(count)  # nothing in it waits: no other coroutine gets a turn

    async def together() -> None:
        await asyncio.gather(*(one() for _ in range(jobs)))

    return {
        WAYS[0]: _timed(in_turn),
        WAYS[1]: _timed(lambda: asyncio.run(together())),
        WAYS[2]: _timed(lambda: list(threads.map(job, [count] * jobs))),
        WAYS[3]: _timed(lambda: list(processes.map(job, [count] * jobs))),
    }


def _timed(work: Callable[[], object]) -> Callable[[], float]:
    def seconds() -> float:
        start_s = time.perf_counter()
        work()
        return time.perf_counter() - start_s

    return seconds


# -- what one costs --------------------------------------------------------------------------------


def _least_s(work: Callable[[], object], count: int = 1) -> float:
    return min(_timed(work)() for _ in range(_MADE)) / count


async def _nothing() -> None:
    return None


def _coroutine_s() -> float:
    async def many() -> None:
        for _ in range(_WORDS):
            await asyncio.create_task(_nothing())

    return _least_s(lambda: asyncio.run(many()), _WORDS)


def _thread_s() -> float:
    def one() -> None:
        begun = threading.Thread(target=_wait, args=(0,))
        begun.start()
        begun.join()

    return _least_s(one)


def _process_s() -> float:
    def one() -> None:
        begun = multiprocessing.get_context("spawn").Process(target=_wait, args=(0,))
        begun.start()
        begun.join()

    return min(_timed(one)() for _ in range(2))


def _talk_coroutine_s() -> float:
    async def talk() -> None:
        there: asyncio.Queue[int] = asyncio.Queue()
        back: asyncio.Queue[int] = asyncio.Queue()

        async def answer() -> None:
            for _ in range(_WORDS):
                await back.put(await there.get())

        other = asyncio.create_task(answer())
        for number in range(_WORDS):
            await there.put(number)
            await back.get()
        await other

    return _least_s(lambda: _run(talk()), _WORDS)


def _run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def _talk_thread_s() -> float:
    there: queue.SimpleQueue[int] = queue.SimpleQueue()
    back: queue.SimpleQueue[int] = queue.SimpleQueue()

    def answer() -> None:
        while (word := there.get()) >= 0:
            back.put(word)

    other = threading.Thread(target=answer)
    other.start()

    def talk() -> None:
        for number in range(_WORDS):
            there.put(number)
            back.get()

    took_s = _least_s(talk, _WORDS)
    there.put(-1)
    other.join()
    return took_s


def _answer(end: Connection) -> None:
    while (word := end.recv()) >= 0:
        end.send(word)


@contextmanager
def _answering() -> Iterator[Connection]:
    """A process that gives back each word."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    other = context.Process(target=_answer, args=(theirs,))
    other.start()
    try:
        yield ours
    finally:
        ours.send(-1)
        other.join()


def _talk_process_s() -> float:
    with _answering() as end:

        def talk() -> None:
            for number in range(_WORDS):
                end.send(number)
                end.recv()

        talk()
        return _least_s(talk, _WORDS)


# -- how it is shown -------------------------------------------------------------------------------


def render_concurrency(found: Concurrency) -> list[str]:
    """A row a kind of work, then what one costs, then what follows."""
    rows = [
        (
            one.kind,
            *(
                f"{three_figures(one.ways[way].median_s)}, x {one.speedup(way):.2f}"
                for way in WAYS
            ),
        )
        for one in found.kinds
    ]  # fmt: skip
    costs = [
        (name, *(three_figures(seconds[way]) for way in WAYS[1:]))
        for name, seconds in (
            ("to make one and end it", found.make_s),
            ("a word there and back", found.talk_s),
        )
    ]
    lock = "one thread computes Python at a time" if found.has_lock else "Python without its lock"
    lines = [
        f"{found.jobs} jobs, {found.at_once} at once, {found.cores} "
        f"core{'s' * (found.cores != 1)}; {lock}", "",
        *table(("work", *WAYS), rows), "", *table(("cost", *WAYS[1:]), costs), "",
    ]  # fmt: skip
    if found.at_once > found.cores:
        lines.append(
            f"{found.at_once} at once are more than {found.cores} cores carry: what computes takes "
            "turns, only what waits gains"
        )
    return lines + [f"{one.kind}: {_advice(one)}" for one in found.kinds]


def _advice(one: JobTimes) -> str:
    """The cheapest way that is nearly the fastest here."""
    best = max(one.speedup(way) for way in WAYS)
    way = next(way for way in WAYS if one.speedup(way) >= 0.9 * best)
    if way == WAYS[0]:
        return "one after the other: nothing at once is faster here"
    return f"{way} ({one.speedup(way):.2f} times as fast as one after the other)"
