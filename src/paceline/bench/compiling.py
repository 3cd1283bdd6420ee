"""The same model eager and through each compiler, timed on the same work in turns.

Every way has a process of its own (`ways.TimedWay`) with an empty compile cache. The ways are built
one after another, then take turns in blocks of calls, so that other work on the machine affects all
of them. The one-time cost of a way is its time until it has settled, less the time of as many
settled calls; it breaks even with eager after

    calls = (one-time cost of the way - one-time cost of eager) / (gain of a call)

The default workload is that of Zhang et al., "Dive into Deep Learning", 13.1: 1,000 calls of an
MLP 512-256-128-2, with and without TorchScript. This module must not know how a way works.
"""

import math
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, PacelineError, unknown
from ..exports.subject import CHAPTER
from ..plan import format_bytes
from ..report.text import or_dash, table, three_figures
from .apart import Apart
from .samples import (
    Gain,
    Measured,
    Timing,
    gain_of,
    quartiles,
    take_turns,
)
from .ways import SETTLING_CALLS, WAYS

ROUNDS = 40
_AIM_S = 4.0
"""About how long one way is timed if the question does not set the number of calls."""
_MOST_CALLS, _LEAST_CALLS = 1000, ROUNDS
_HEADER = ("way", "first call", "a call", "middle half", "speed", "peak memory", "ahead after")


@dataclass(frozen=True, slots=True, kw_only=True)
class WaysQuestion:
    """The question.

    Args:
        subject: as `exports.subject.find_subject` takes it.
        ways: names of WAYS; eager is always added.
        batch_size: samples a call, >= 1.
        calls: of each way, >= ROUNDS; None: 1,000, or as many as take about `_AIM_S`, if fewer.
        device: "cpu", "cuda", ...
        threads: of torch, >= 1.

    Raises:
        ConfigError: a number is out of range, or a way is unknown.
    """

    subject: str = CHAPTER
    ways: tuple[str, ...] = tuple(WAYS)
    batch_size: int = 1
    calls: int | None = None
    device: str = "cpu"
    threads: int = 1

    def __post_init__(self) -> None:
        for way in self.ways:
            if way not in WAYS:
                raise unknown("way", way, WAYS, "--ways")
        if self.batch_size < 1:
            raise ConfigError(f"--batch-size must be >= 1, got {self.batch_size}")
        if self.calls is not None and self.calls < ROUNDS:
            raise ConfigError(f"--calls must be >= {ROUNDS}, got {self.calls}")

    @property
    def work(self) -> dict[str, Any]:
        """The arguments of `ways.TimedWay` that all ways share."""
        names = ("subject", "batch_size", "device", "threads")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Measured):
    """The result of one way. If it failed, ``failure`` is the reason and the rest is None.

    Args:
        first_call_s: from the model to the first output, compilation included.
        once_s: one-time cost: the time until it settled, less settled calls.
        call: times of one settled call, a sample a block.
        peak_bytes: most memory while building and running (on a CPU, of the whole process).
        recompiles: graphs recompiled for two other batch sizes; None: not counted.
        graph_breaks: number of graph breaks; None: not counted.
        other_batches_s: first call with each of these two batch sizes.
        other_batches_failure: why it does not run with them.
        max_difference: largest difference of its output from eager's.
        gain: over eager; None for eager itself.
        break_even_calls: calls after which it is ahead of eager; None: never, or not clear.
    """

    way: str
    failure: str = ""
    first_call_s: float | None = None
    once_s: float | None = None
    call: Timing | None = None
    peak_bytes: int | None = None
    recompiles: int | None = None
    graph_breaks: int | None = None
    other_batches_s: tuple[float, ...] = ()
    other_batches_failure: str = ""
    max_difference: float | None = None
    gain: Gain | None = None
    break_even_calls: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WaysCompared:
    """All results, eager first, then in the question's order; ``calls`` of each were timed."""

    question: WaysQuestion
    calls: int
    results: tuple[Result, ...]

    def to_json(self) -> dict[str, object]:
        """Return the result as one JSON object."""
        ways = [result.to_json() for result in self.results]
        return {**self.question.work, "calls": self.calls, "ways": ways}


def compare_ways(question: WaysQuestion, say: Callable[[str], None]) -> WaysCompared:
    """Build every way, time them in turns, and return each one's result.

    Args:
        say: gets each line of progress.

    Raises:
        ConfigError: the eager model does not run.
    """
    names = ("eager", *(way for way in question.ways if way != "eager"))
    seats: dict[str, Apart] = {}
    facts: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        caches = stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-cache-"))
        for way in names:
            # An empty cache of its own: the first call compiles from scratch.
            environment = {"TORCHINDUCTOR_CACHE_DIR": str(Path(caches) / way)}
            seat = Apart("paceline.bench.ways:TimedWay", {"way": way, **question.work}, environment)
            stack.enter_context(seat)
            facts[way] = _prepared(way, seat, say)
            if "failure" not in facts[way]:
                seats[way] = seat
            elif way == "eager":
                raise ConfigError(f"{question.subject} does not run: {facts[way]['failure']}")
        calls = question.calls or _calls_for(seats["eager"])
        calls = math.ceil(calls / ROUNDS) * ROUNDS  # whole blocks
        say(f"{len(seats)} ways take turns: {calls:,} calls each in {ROUNDS} blocks")
        _measure(seats, facts, calls)
    eager = _result("eager", facts.pop("eager"))
    others = (_result(way, values, eager) for way, values in facts.items())
    return WaysCompared(question=question, calls=calls, results=(eager, *others))


def _prepared(way: str, seat: Apart, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the figures of the way's first calls, or its ``failure``."""
    try:
        facts = dict(seat.ask("prepare"))
    except PacelineError as error:
        say(f"{way}: {error}")
        return {"failure": str(error)}
    say(f"{way}: first call after {facts['first_call_s']:.3g} s")
    return facts


def _calls_for(eager: Apart) -> int:
    """Return 1,000, or as many calls as take about `_AIM_S`, if fewer."""
    call_s = float(eager.ask("block", count=10)["seconds"]) / 10
    return min(_MOST_CALLS, max(_LEAST_CALLS, round(_AIM_S / call_s)))


def _measure(seats: Mapping[str, Apart], facts: Mapping[str, dict[str, Any]], calls: int) -> None:
    """Time all ways in turns and add the figures to ``facts``."""
    count = calls // ROUNDS

    def block(seat: Apart) -> Callable[[], float]:
        return lambda: float(seat.ask("block", count=count)["seconds"]) / count

    timings = take_turns({way: block(seat) for way, seat in seats.items()}, ROUNDS)
    for way, seat in seats.items():
        facts[way]["call"] = timings[way]
        try:
            facts[way].update(seat.ask("finish"))
        except PacelineError as error:
            facts[way]["other_batches_failure"] = str(error)


def _result(way: str, facts: dict[str, Any], eager: Result | None = None) -> Result:
    if "failure" in facts:
        return Result(way=way, **facts)
    call: Timing = facts["call"]
    once_s = max(0.0, facts.pop("settled_s") - SETTLING_CALLS * call.median_s)
    facts["other_batches_s"] = tuple(facts.get("other_batches_s", ()))
    if eager is None or eager.call is None:
        return Result(way=way, once_s=once_s, **facts)
    gain = gain_of(eager.call, call)
    calls = _break_even(once_s, eager.once_s or 0.0, gain)
    return Result(way=way, once_s=once_s, gain=gain, break_even_calls=calls, **facts)


def _break_even(once_s: float, eager_once_s: float, gain: Gain) -> int | None:
    if not gain.is_faster or gain.call_s <= 0:
        return None
    return max(1, math.ceil((once_s - eager_once_s) / gain.call_s))


def render_ways(comparison: WaysCompared) -> list[str]:
    """Return the lines of the report: the table, then notes."""
    question, calls = comparison.question, comparison.calls
    failed = [result for result in comparison.results if result.failure]
    return [
        f"{question.subject}, batch {question.batch_size}, forward, float32, {question.device}, "
        f"{question.threads} thread{'s' * (question.threads != 1)}; {calls:,} calls each, in turns",
        "",
        *table(_HEADER, [_row(result) for result in comparison.results]),
        "",
        *(f"{result.way}: not possible here: {result.failure}" for result in failed),
        *_other_batches(comparison),
        f"a call: median of {ROUNDS} blocks; speed: eager's time over the way's, block by block",
        "ahead after: calls after which it is ahead of eager, including its one-time cost",
        *_memory(question.device),
    ]


def _row(result: Result) -> tuple[str, ...]:
    if result.failure:
        return (result.way, "failed", *["-"] * (len(_HEADER) - 2))
    assert result.call is not None
    return (
        result.way,
        three_figures(result.first_call_s),
        three_figures(result.call.median_s),
        quartiles(result.call),
        "1" if result.gain is None else f"{result.gain.speedup:.2f}",
        or_dash(result.peak_bytes, format_bytes),
        "-" if result.gain is None else _ahead(result, result.gain),
    )


def _ahead(result: Result, gain: Gain) -> str:
    if result.break_even_calls is None:
        return "not clear" if gain.is_faster is None else "never"
    return f"{result.break_even_calls:,} calls"


def _other_batches(comparison: WaysCompared) -> list[str]:
    """Return lines about other batch sizes, and the largest difference between outputs."""
    lines = []
    for result in comparison.results:
        if len(result.other_batches_s) == 2 and result.recompiles is not None:
            first, second = (three_figures(value) for value in result.other_batches_s)
            breaks = f", {result.graph_breaks} graph breaks" if result.graph_breaks else ""
            lines.append(
                f"{result.way}: two other batch sizes: {result.recompiles} recompiles ({first}, "
                f"then {second}){breaks}"
            )
        if result.other_batches_failure:
            lines.append(
                f"{result.way}: fails with other batch sizes: {result.other_batches_failure}"
            )
    differences = [
        result.max_difference for result in comparison.results if result.max_difference is not None
    ]
    lines.append(f"outputs differ from eager's by at most {max(differences):.1e}")
    return lines


def _memory(device: str) -> list[str]:
    if device != "cpu":
        return []
    return ["peak memory: of the whole process, with Python and torch, but not of compilers"]
