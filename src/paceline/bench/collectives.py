"""Collectives measured between processes of this machine, beside gloo's own and the formulas.

    what a message costs    every rank sends to the next at once: small, large, several at a time
    each collective, size   a block of calls in all ranks; the slowest counts; blocks take turns
    beside it               its formula with what a message was measured to cost

Bus bandwidth is the buffer over the time, times what the operation has to move for each byte of it:
2 (P - 1) / P of an all-reduce, and so on, so that it can be compared with what a link carries
whatever P is (as NVIDIA's nccl-tests define it). A formula is right where ranks do not disturb one
another; where they share cores they do. This module must not know how schedules are made. Question,
measurement and table are one file, as of the others here, of a little more than 300 lines.
"""

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ..collectives import parse
from ..collectives.base import LinkCost
from ..collectives.choose import candidates, choose
from ..collectives.transfers import Operation
from ..errors import ConfigError, WorkerError, unknown
from ..plan import format_bytes
from ..report.text import format_duration, table
from ..system.processors import num_cores
from .apart import Answer, Apart
from .collective_seat import HAVE_NATIVE, NATIVE, CollectiveSeat
from .samples import Measured, Timing, take_turns

_BLOCK_S, _MOST_CALLS = 0.1, 300
_SMALL_BYTES, _AT_ONCE = 4, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivesQuestion:
    """What is measured.

    Args:
        names: as collectives are written; empty: all that fit.
        sizes_bytes: of the whole buffer, 4 and more; of an all-to-all what a rank begins with.
        num_rounds: blocks of each.
    """

    num_ranks: int
    operation: Operation
    names: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    num_rounds: int = 5

    def __post_init__(self) -> None:
        if self.num_ranks < 2 or self.num_rounds < 1:
            raise ConfigError(
                "bench collectives needs --workers >= 2 and --rounds >= 1, got "
                f"{self.num_ranks} and {self.num_rounds}"
            )
        if not self.sizes_bytes or min(self.sizes_bytes) < 4:
            raise ConfigError("--sizes needs sizes of 4 B and more, such as 1KiB,64KiB,4MiB")

    def fitting(self) -> list[str]:
        """The collectives that are measured, each as it is written."""
        have = []
        for text in self.names or candidates(self.num_ranks):
            member = parse(text, self.num_ranks)
            try:
                member.rounds(self.operation)
            except ConfigError:
                if self.names:
                    raise
                continue
            have.append(str(member))
        return have


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollective(Measured):
    """One collective at one size; times are of one call, by the slowest rank."""

    name: str
    num_bytes: int
    timing: Timing
    bus_bytes_per_s: float
    predicted_s: float | None  # None: gloo's own, whose schedule is not ours


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink(Measured):
    """What a message costs while all ranks send one to the next, and what memory does."""

    latency_s: float
    overhead_s: float
    s_per_byte: float
    reduce_s_per_byte: float
    copy_bytes_per_s: float

    @property
    def cost(self) -> LinkCost:
        """As the formulas take it."""
        return LinkCost(
            latency_s=self.latency_s,
            s_per_byte=self.s_per_byte,
            overhead_s=self.overhead_s,
            reduce_s_per_byte=self.reduce_s_per_byte,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollectives(Measured):
    """All of one operation."""

    operation: Operation
    num_ranks: int
    num_cores: int
    link: MeasuredLink
    rows: tuple[MeasuredCollective, ...]


def measure_collectives(
    question: CollectivesQuestion, say: Callable[[str], None] = lambda line: None
) -> MeasuredCollectives:
    """The measurement.

    Raises:
        ConfigError: a collective does not fit, or has no such operation.
        WorkerError: a process died, or a sum is not one.
    """
    names, operation = question.fitting(), question.operation
    with _seats(question.num_ranks) as seats:
        for name in names if operation is Operation.ALL_REDUCE else ():
            if not all(answer["is_right"] for answer in _all(seats, "check", name=name)):
                raise WorkerError(f"{name} does not add up: please report it")
        link = _link(seats, max(question.sizes_bytes), question.num_rounds)
        rows: list[MeasuredCollective] = []
        with_native = [*names, NATIVE] if operation in HAVE_NATIVE else names
        for num_bytes in question.sizes_bytes:
            say(f"{operation.value} of {format_bytes(num_bytes)}")
            rows += _rows(seats, question, with_native, num_bytes, link.cost)
        _all(seats, "close")
    return MeasuredCollectives(
        operation=operation,
        num_ranks=question.num_ranks,
        num_cores=num_cores(),
        link=link,
        rows=tuple(rows),
    )


@contextlib.contextmanager
def _seats(num_ranks: int) -> Iterator[list[Apart]]:
    with contextlib.ExitStack() as stack:
        meeting = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "meeting"
        yield [
            stack.enter_context(
                Apart(
                    f"{CollectiveSeat.__module__}:{CollectiveSeat.__name__}",
                    {"rank": rank, "num_ranks": num_ranks, "meeting": str(meeting)},
                    {"OMP_NUM_THREADS": "1"},
                )
            )
            for rank in range(num_ranks)
        ]


def _all(seats: Sequence[Apart], what: str, **arguments: object) -> list[Answer]:
    for seat in seats:
        seat.begin(what, **arguments)
    return [seat.end() for seat in seats]


def _slowest_s(seats: Sequence[Apart], what: str, **arguments: object) -> float:
    return max(float(answer["seconds"]) for answer in _all(seats, what, **arguments))


def _link(seats: Sequence[Apart], largest: int, num_rounds: int) -> MeasuredLink:
    kinds = {"one": (_SMALL_BYTES, 1), "several": (_SMALL_BYTES, _AT_ONCE), "large": (largest, 1)}
    took = take_turns(
        {
            name: _block(seats, "messages", num_bytes=size, at_once=at_once)
            for name, (size, at_once) in kinds.items()
        },
        num_rounds,
    )
    one_s, several_s, large_s = (took[name].median_s for name in kinds)
    overhead_s = min(one_s, max(0.0, (several_s - one_s) / (_AT_ONCE - 1)))
    answers = _all(seats, "memory", num_bytes=largest, count=5)
    return MeasuredLink(
        latency_s=one_s - overhead_s,
        overhead_s=overhead_s,
        s_per_byte=max(0.0, large_s - one_s) / largest,
        reduce_s_per_byte=statistics.median(one["seconds"] for one in answers) / largest,
        copy_bytes_per_s=largest / statistics.median(one["copy_s"] for one in answers),
    )


def _block(seats: Sequence[Apart], what: str, **arguments: object) -> Callable[[], float]:
    """Seconds of one call, measured over about a tenth of a second of them."""
    once_s = _slowest_s(seats, what, count=1, **arguments)
    count = max(1, min(_MOST_CALLS, int(_BLOCK_S / max(once_s, 1e-9))))
    return lambda: _slowest_s(seats, what, count=count, **arguments)


def _rows(
    seats: Sequence[Apart],
    question: CollectivesQuestion,
    names: Sequence[str],
    num_bytes: int,
    link: LinkCost,
) -> Iterator[MeasuredCollective]:
    what, size = question.operation, question.num_ranks
    blocks = {
        name: _block(seats, "calls", name=name, operation=what.value, num_bytes=num_bytes)
        for name in names
    }
    for name, timing in take_turns(blocks, question.num_rounds).items():
        is_ours = name != NATIVE
        yield MeasuredCollective(
            name=name,
            num_bytes=num_bytes,
            timing=timing,
            bus_bytes_per_s=num_bytes * moved_share(what, size) / timing.median_s,
            predicted_s=parse(name, size).formula_s(what, num_bytes, link) if is_ours else None,
        )


def moved_share(operation: Operation, num_ranks: int) -> float:
    """What a link must carry at least, for each byte of the buffer.

    Example:
        >>> moved_share(Operation.ALL_REDUCE, 4), moved_share(Operation.BROADCAST, 4)
        (1.5, 1.0)
    """
    if operation in (Operation.BROADCAST, Operation.REDUCE):
        return 1.0
    return (2 if operation is Operation.ALL_REDUCE else 1) * (num_ranks - 1) / num_ranks


def sizes_of(text: str) -> tuple[int, ...]:
    """``1KiB,4MiB`` in bytes, from small to large.

    Raises:
        ConfigError: it reads otherwise.

    Example:
        >>> sizes_of("1MiB,64KiB,100")
        (100, 65536, 1048576)
    """
    sizes = set()
    for one in text.split(","):
        factor = next((1 << power for unit, power in _UNITS.items() if one.endswith(unit)), 1)
        number = one.removesuffix("B").removesuffix("Ki").removesuffix("Mi").strip()
        if not number.isdecimal():
            raise ConfigError(f"--sizes {text!r} must read as 1KiB,64KiB,4MiB")
        sizes.add(int(number) * factor)
    return tuple(sorted(sizes))


_UNITS = {"KiB": 10, "MiB": 20}


def operation_of(text: str) -> Operation:
    """Raises ConfigError for a name that is none."""
    try:
        return Operation(text)
    except ValueError:
        raise unknown("operation", text, [one.value for one in Operation]) from None


def render_collectives(found: MeasuredCollectives) -> list[str]:
    """The table, what a message costs, and where one takes over from another."""
    header = ("", "size", "measured", "least to most", "bus GB/s", "formula", "measured/formula")
    rows = [
        (
            row.name,
            format_bytes(row.num_bytes),
            format_duration(row.timing.median_s),
            f"{format_duration(row.timing.least_s)} to {format_duration(row.timing.most_s)}",
            f"{row.bus_bytes_per_s / 1e9:.3g}",
            "" if row.predicted_s is None else format_duration(row.predicted_s),
            "" if not row.predicted_s else f"{row.timing.median_s / row.predicted_s:.2f}",
        )
        for row in found.rows
    ]
    link = found.link
    per_s = f"{1e-9 / link.s_per_byte:.3g} GB/s" if link.s_per_byte else "too fast to tell"
    lines = [
        f"{found.operation.value} between {found.num_ranks} processes of one thread",
        "",
        *table(header, rows),
        "",
        f"a message: {format_duration(link.latency_s)}, {format_duration(link.overhead_s)} at each "
        f"end, {per_s} each way; memory is copied at {link.copy_bytes_per_s / 1e9:.3g} GB/s",
        *_taken_over(found),
    ]
    if found.num_ranks > found.num_cores:
        cores = f"{found.num_cores} core{'s' * (found.num_cores != 1)}"
        lines.append(f"{found.num_ranks} processes share {cores}: they wait for one another, too")
    return lines


def _taken_over(found: MeasuredCollectives) -> Iterator[str]:
    """Where the fastest of ours changes, measured and by the formulas."""
    times: dict[int, dict[str, float]] = {}
    for row in found.rows:
        if row.predicted_s is not None:
            times.setdefault(row.num_bytes, {})[row.name] = row.timing.median_s
    fastest = {size: min(took, key=lambda name: took[name]) for size, took in times.items()}
    for (low, before), (high, after) in pairwise(fastest.items()):
        if before != after:
            between = f"{format_bytes(low)} and {format_bytes(high)}"
            yield f"measured: {after} takes over from {before} between {between}"
    if found.operation is Operation.ALL_REDUCE and times:
        names: Mapping[str, float] = next(iter(times.values()))
        chosen = choose(1, found.num_ranks, found.link.cost, names=names)
        if not chosen.crossovers:
            yield f"by the formulas: {chosen.name} is the fastest, or as fast as any, at every size"
        for one in chosen.crossovers:
            where = format_bytes(one.size_bytes)
            yield f"by the formulas: {one.above} takes over from {one.below} at {where}"
