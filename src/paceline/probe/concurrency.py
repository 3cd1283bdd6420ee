"""The same jobs as coroutines, threads and processes: what each gains and costs.

                 the same number of jobs, of three kinds
    waiting      a pause, as for a disk or a network: nothing computes
    Python       arithmetic in Python, which holds the interpreter's lock (GIL)
    library      a hash of bytes in C, which releases the lock

    one after the other | coroutines | threads | processes     seconds, compared with the first

It also measures the cost of starting each, and of sending a word and getting one back. The advice
follows from these; on one core nothing computes in parallel.
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
"""Approximate duration of one job."""
_ROUNDS, _MADE, _WORDS = 3, 5, 200
_HASHED = bytes(1 << 20)
_KINDS = ("waiting", "Python", "library")
MOST_AT_ONCE = 64
WAYS = ("one after the other", "coroutines", "threads", "processes")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTimes(Measured):
    """Times of all jobs of one kind, for each way.

    Args:
        kind: kind of work.
        ways: name of a way -> seconds for all jobs.
    """

    kind: str
    ways: dict[str, Timing]

    def speedup(self, way: str) -> float:
        """Return the speedup over one after the other."""
        return self.ways[WAYS[0]].median_s / self.ways[way].median_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency(Measured):
    """The result of the measurement.

    Args:
        has_lock: whether this Python has a GIL: only one thread runs Python code at a time.
        make_s, talk_s: way -> seconds to start and end one; to send a word and get one back.
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
    """Compute in Python, which holds the lock."""
    value = 1
    for _ in range(count):
        value = (value * 1103515245 + 12345) & 0x7FFFFFFF
    return value


def _hash(count: int) -> bytes:
    """Hash in C, which releases the lock for large buffers."""
    digest = hashlib.sha256()
    for _ in range(count):
        digest.update(_HASHED)
    return digest.digest()


def _wait(milliseconds: int) -> None:
    time.sleep(milliseconds / 1e3)


_JOBS: dict[str, Callable[[int], object]] = {"waiting": _wait, "Python": _compute, "library": _hash}


def _count(kind: str) -> int:
    """Return the amount of work for which one job takes about `_AIM_S`."""
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
    """Measure all kinds of work in all ways, in turns.

    Raises:
        ConfigError: a number is out of range.
    """
    if not (1 <= jobs <= 1000 and 1 <= at_once <= MOST_AT_ONCE):
        raise ConfigError(
            f"--jobs must be 1 to 1000 and --at-once 1 to {MOST_AT_ONCE}, got {jobs} and {at_once}"
        )
    context = multiprocessing.get_context(
        "spawn"
    )  # a process that has loaded torch must not be forked
    with (
        ThreadPoolExecutor(at_once) as threads,
        ProcessPoolExecutor(at_once, mp_context=context) as processes,
    ):
        say("start processes")
        list(processes.map(_wait, [50] * at_once))
        kinds = []
        for kind in _KINDS:
            say(kind)
            ways = _ways(kind, _count(kind), jobs, threads, processes)
            kinds.append(JobTimes(kind=kind, ways=take_turns(ways, _ROUNDS)))
    say("cost of starting and messages")
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
            job(count)  # it never awaits, so no other coroutine runs meanwhile

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
        thread = threading.Thread(target=_wait, args=(0,))
        thread.start()
        thread.join()

    return _least_s(one)


def _process_s() -> float:
    def one() -> None:
        process = multiprocessing.get_context("spawn").Process(target=_wait, args=(0,))
        process.start()
        process.join()

    return min(_timed(one)() for _ in range(2))


def _talk_coroutine_s() -> float:
    async def talk() -> None:
        there: asyncio.Queue[int] = asyncio.Queue()
        back: asyncio.Queue[int] = asyncio.Queue()

        async def answer() -> None:
            for _ in range(_WORDS):
                await back.put(await there.get())

        task = asyncio.create_task(answer())
        for number in range(_WORDS):
            await there.put(number)
            await back.get()
        await task

    return _least_s(lambda: _run(talk()), _WORDS)


def _run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def _talk_thread_s() -> float:
    there: queue.SimpleQueue[int] = queue.SimpleQueue()
    back: queue.SimpleQueue[int] = queue.SimpleQueue()

    def answer() -> None:
        while (word := there.get()) >= 0:
            back.put(word)

    thread = threading.Thread(target=answer)
    thread.start()

    def talk() -> None:
        for number in range(_WORDS):
            there.put(number)
            back.get()

    took_s = _least_s(talk, _WORDS)
    there.put(-1)
    thread.join()
    return took_s


def _answer(end: Connection) -> None:
    while (word := end.recv()) >= 0:
        end.send(word)


@contextmanager
def _answering() -> Iterator[Connection]:
    """Yield the connection to a process that sends each word back."""
    context = multiprocessing.get_context("spawn")
    near_end, far_end = context.Pipe()
    process = context.Process(target=_answer, args=(far_end,))
    process.start()
    try:
        yield near_end
    finally:
        near_end.send(-1)
        process.join()


def _talk_process_s() -> float:
    with _answering() as end:

        def talk() -> None:
            for number in range(_WORDS):
                end.send(number)
                end.recv()

        talk()
        return _least_s(talk, _WORDS)


# -- how it is shown -------------------------------------------------------------------------------


def render_concurrency(result: Concurrency) -> list[str]:
    """Return the lines: a row for each kind of work, the costs, then the advice."""
    rows = [
        (
            times.kind,
            *(
                f"{three_figures(times.ways[way].median_s)}, x {times.speedup(way):.2f}"
                for way in WAYS
            ),
        )
        for times in result.kinds
    ]  # fmt: skip
    costs = [
        (name, *(three_figures(seconds[way]) for way in WAYS[1:]))
        for name, seconds in (
            ("start and end one", result.make_s),
            ("a word there and back", result.talk_s),
        )
    ]
    lock = (
        "one thread runs Python code at a time (GIL)" if result.has_lock else "Python without a GIL"
    )
    lines = [
        f"{result.jobs} jobs, {result.at_once} at once, {result.cores} "
        f"core{'s' * (result.cores != 1)}; {lock}", "",
        *table(("work", *WAYS), rows), "", *table(("cost", *WAYS[1:]), costs), "",
    ]  # fmt: skip
    if result.at_once > result.cores:
        lines.append(
            f"{result.at_once} at once is more than {result.cores} cores: jobs that compute "
            "take turns, only jobs that wait get faster"
        )
    return lines + [f"{times.kind}: {_advice(times)}" for times in result.kinds]


def _advice(times: JobTimes) -> str:
    """Name the cheapest way that is nearly the fastest here."""
    best = max(times.speedup(way) for way in WAYS)
    way = next(way for way in WAYS if times.speedup(way) >= 0.9 * best)
    if way == WAYS[0]:
        return "one after the other: no concurrent way is faster here"
    return f"{way} ({times.speedup(way):.2f} times as fast as one after the other)"
