"""The same model eager and through each compiler, on the same work, one after the other in turns.

Every way lives in a process of its own (`contender.py`) with an empty compile cache. They are built
one after the other, then take turns in blocks of calls: what else the machine does meets all of
them. The one-time cost of a way is all it spent until it had settled, less what its settled calls
cost; it breaks even with eager after

    calls = (one-time cost of the way - one-time cost of eager) / (what a call gains)

which is the chapter's question (Zhang et al., "Dive into Deep Learning", 13.1: 1,000 calls of an
MLP 512-256-128-2, with and without TorchScript). This module must not know how it is printed.
"""

import math
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError, PacelineError, unknown
from ..exports.subject import CHAPTER
from .apart import Apart
from .contender import SETTLING_CALLS, WAYS
from .samples import Timing, take_turns

ROUNDS = 40
_CLEAR = 0.75
"""Share of the blocks that must agree before a way is called faster or slower."""
_AIM_S = 4.0
"""About how long one way is measured where the number of calls is left to us."""
_MOST_CALLS, _LEAST_CALLS = 1000, ROUNDS


@dataclass(frozen=True, slots=True, kw_only=True)
class WaysQuestion:
    """What is to be compared.

    Args:
        subject: as `exports.subject.find_subject` takes it.
        ways: names of WAYS; eager is always among them.
        batch_size: samples a call, >= 1.
        calls: of each way, >= ROUNDS; None: the chapter's 1,000, or what takes
            a few seconds.
        device: where; "cpu", "cuda", ...
        threads: of torch, >= 1.

    Raises:
        ConfigError: a number is out of range, or there is no such way.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """A way beside eager, block by block.

    Args:
        speedup: median of eager's time over the way's.
        call_s: median of eager's time less the way's, for one call.
        is_faster: in three of four blocks at least; False: slower in as many; None: not clear.
    """

    speedup: float
    call_s: float
    is_faster: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one way came to. Where it failed, ``failure`` says why and the rest is None.

    Args:
        first_call_s: from the model to the first output, compilation included.
        once_s: the one-time cost until it had settled, less settled calls.
        call: times of one settled call, a sample a block.
        peak_bytes: held at once while building and running (on a CPU by the whole process).
        recompiles: graphs compiled anew when two other batch sizes came; None: not counted.
        graph_breaks: places where Python took over; None: not counted.
        other_batches_s: the first call of each of those two.
        other_batches_failure: why it does not run with them.
        max_difference: of its output from eager's.
        gain: beside eager; None for eager itself.
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

    def to_json(self) -> dict[str, object]:
        """As one JSON object."""
        return {
            name: value.to_json()
            if isinstance(value, Timing)
            else asdict(value)
            if isinstance(value, Gain)
            else value
            for name in Result.__dataclass_fields__
            for value in (getattr(self, name),)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class WaysCompared:
    """All ways, in the order asked for; ``calls`` of each were timed."""

    question: WaysQuestion
    calls: int
    results: tuple[Result, ...]

    def to_json(self) -> dict[str, object]:
        """As one JSON object."""
        asked = self.question
        return {
            "subject": asked.subject,
            "batch_size": asked.batch_size,
            "device": asked.device,
            "threads": asked.threads,
            "calls": self.calls,
            "ways": [one.to_json() for one in self.results],
        }


@dataclass(slots=True)
class _Entry:
    """A way while it is measured."""

    way: str
    apart: Apart
    facts: dict[str, Any] = field(default_factory=dict)
    failure: str = ""


def compare_ways(question: WaysQuestion, say: Callable[[str], None]) -> WaysCompared:
    """Build every way, let them take turns, and say what each came to.

    Args:
        say: is told what is being done, a line at a time.

    Raises:
        ConfigError: the model as it is written does not run.
    """
    names = ("eager", *(way for way in question.ways if way != "eager"))
    entries: list[_Entry] = []
    with tempfile.TemporaryDirectory(prefix="paceline-cache-") as caches:
        try:
            for way in names:
                entries.append(_start(way, question, Path(caches) / way))
                _prepare(entries[-1], say)
                if entries[0].failure:
                    raise ConfigError(f"{question.subject} does not run: {entries[0].failure}")
            running = [one for one in entries if not one.failure]
            calls = question.calls or _calls_for(running[0])
            calls = math.ceil(calls / ROUNDS) * ROUNDS  # whole blocks
            say(f"{len(running)} ways take turns: {calls:,} calls each in {ROUNDS} blocks")
            _measure(running, calls)
        finally:
            for entry in entries:
                entry.apart.close()
    return WaysCompared(question=question, calls=calls, results=tuple(_results(entries)))


def _start(way: str, question: WaysQuestion, cache: Path) -> _Entry:
    arguments = {
        "way": way,
        "spec": question.subject,
        "batch_size": question.batch_size,
        "device": question.device,
        "threads": question.threads,
    }
    # A cache of its own, empty: the first call is that of somebody who never compiled this.
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    return _Entry(way, Apart("paceline.bench.contender:TimedWay", arguments, environment))


def _prepare(entry: _Entry, say: Callable[[str], None]) -> None:
    try:
        entry.facts.update(entry.apart.ask("prepare"))
    except PacelineError as error:
        entry.failure = str(error)
        say(f"{entry.way}: {entry.failure}")
        return
    say(f"{entry.way}: first call after {entry.facts['first_call_s']:.3g} s")


def _calls_for(eager: _Entry) -> int:
    """The chapter's 1,000, or fewer where they would take too long."""
    call_s = float(eager.apart.ask("block", count=10)["seconds"]) / 10
    return min(_MOST_CALLS, max(_LEAST_CALLS, round(_AIM_S / call_s)))


def _measure(entries: Sequence[_Entry], calls: int) -> None:
    count = calls // ROUNDS

    def block(entry: _Entry) -> Callable[[], float]:
        return lambda: float(entry.apart.ask("block", count=count)["seconds"]) / count

    timings = take_turns({entry.way: block(entry) for entry in entries}, ROUNDS)
    for entry in entries:
        entry.facts["call"] = timings[entry.way]
        try:
            entry.facts.update(entry.apart.ask("finish"))
        except PacelineError as error:
            entry.facts["other_batches_failure"] = str(error)


def _results(entries: Iterable[_Entry]) -> Iterable[Result]:
    eager: Result | None = None
    for entry in entries:
        if entry.failure:
            yield Result(way=entry.way, failure=entry.failure)
            continue
        result = _result(entry.way, entry.facts, eager)
        eager = eager or result
        yield result


def _result(way: str, facts: Mapping[str, Any], eager: Result | None) -> Result:
    call: Timing = facts["call"]
    once_s = max(0.0, facts["settled_s"] - SETTLING_CALLS * call.median_s)
    is_counted = way == "compile"
    gain = gain_of(eager.call, call) if eager and eager.call else None
    return Result(
        way=way,
        first_call_s=facts["first_call_s"],
        once_s=once_s,
        call=call,
        peak_bytes=facts.get("peak_bytes"),
        recompiles=facts.get("recompiles") if is_counted else None,
        graph_breaks=facts.get("graph_breaks") if is_counted else None,
        other_batches_s=tuple(facts.get("other_batches_s", ())),
        other_batches_failure=facts.get("other_batches_failure", ""),
        max_difference=facts["max_difference"],
        gain=gain,
        break_even_calls=_break_even(once_s, eager.once_s or 0.0, gain) if eager and gain else None,
    )


def gain_of(eager: Timing, call: Timing) -> Gain:
    """What a way gains, from blocks that were measured one after the other."""
    pairs = list(zip(eager.samples_s, call.samples_s, strict=True))
    share = sum(ours < theirs for theirs, ours in pairs) / len(pairs)
    return Gain(
        speedup=statistics.median(theirs / ours for theirs, ours in pairs),
        call_s=statistics.median(theirs - ours for theirs, ours in pairs),
        is_faster=True if share >= _CLEAR else False if share <= 1 - _CLEAR else None,
    )


def _break_even(once_s: float, eager_once_s: float, gain: Gain) -> int | None:
    if not gain.is_faster or gain.call_s <= 0:
        return None
    return max(1, math.ceil((once_s - eager_once_s) / gain.call_s))
