"""Collectives measured between processes of this machine, beside gloo's own and what is predicted.

    what rounds cost        each kind of round at some sizes
    each collective, size   a block of calls in all ranks; the slowest counts; blocks take turns
    beside it               what its rounds cost, one after the other (collectives/host.py)
    where two cross         measured beside predicted (collectives/crossings.py)

Bus bandwidth is the buffer over the time, times what the operation has to move for each byte of it:
2 (P - 1) / P of an all-reduce, and so on, so that it can be compared with what a link carries
whatever P is (as NVIDIA's nccl-tests define it). This module must not know how schedules are made.
Question, measurement and table are one file, as of the others here, of more than 300 lines.
"""

import contextlib
import dataclasses
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Final

from ..collectives import parse
from ..collectives.choose import candidates
from ..collectives.crossings import Crossing, find_crossings
from ..collectives.host import Curve, HostCost, RoundOfKind, kinds_of
from ..collectives.transfers import Action, Operation
from ..errors import ConfigError, WorkerError, unknown
from ..plan import format_bytes
from ..report.text import format_duration, table
from ..system.processors import num_cores
from .apart import Answer, Apart
from .collective_seat import HAVE_NATIVE, NATIVE, CollectiveSeat
from .samples import Measured, Timing, take_turns

_BLOCK_S, _MOST_CALLS = 0.1, 300
_MESSAGES_BYTES: Final = tuple(1 << power for power in (6, 10, 13, 16, 18, 20, 22, 24))
"""Of a message: as many sizes as its time bends at, on loopback."""
_NUM_TURNS = 3
"""In which kinds of rounds are measured."""


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
    predicted_s: float | None  # by what its rounds cost; None: gloo's own, which is not ours


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollectives(Measured):
    """All of one operation."""

    operation: Operation
    num_ranks: int
    num_cores: int
    cost: HostCost
    copy_bytes_per_s: float  # of memory, by one process
    rows: tuple[MeasuredCollective, ...]

    def to_json(self) -> dict[str, object]:
        """As one JSON object, with where collectives cross."""
        return {
            "operation": self.operation.value,
            "num_ranks": self.num_ranks,
            "num_cores": self.num_cores,
            "cost": self.cost.write(),
            "copy_bytes_per_s": self.copy_bytes_per_s,
            "rows": [row.to_json() for row in self.rows],
            "crossings": [one._asdict() for one in self.crossings()],
        }

    def blocks(self) -> dict[str, dict[int, tuple[float, ...]]]:
        """Of ours: seconds by collective and size, block by block."""
        found: dict[str, dict[int, tuple[float, ...]]] = {}
        for row in self.rows:
            if row.predicted_s is not None:
                found.setdefault(row.name, {})[row.num_bytes] = row.timing.samples_s
        return found

    def crossings(self) -> list[Crossing]:
        """Where one takes over from another, from small sizes to large ones."""
        found = find_crossings(self.blocks(), self.predicted_s)
        return sorted(found, key=lambda one: one.measured_bytes)

    def predicted_s(self, name: str, num_bytes: int) -> float:
        """Seconds of the operation along a collective."""
        return self.cost.seconds(parse(name, self.num_ranks), self.operation, num_bytes)


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
        cost, copy_bytes_per_s = _cost(seats, question, say)
        rows: list[MeasuredCollective] = []
        with_native = [*names, NATIVE] if operation in HAVE_NATIVE else names
        for num_bytes in question.sizes_bytes:
            say(f"{operation.value} of {format_bytes(num_bytes)}")
            rows += _rows(seats, question, with_native, num_bytes, cost)
        _all(seats, "close")
    if operation is Operation.ALL_REDUCE:
        own = {row.num_bytes: row.timing.median_s for row in rows if row.name == NATIVE}
        cost = dataclasses.replace(cost, native_s=tuple(own.items()))
    return MeasuredCollectives(
        operation=operation,
        num_ranks=question.num_ranks,
        num_cores=num_cores(),
        cost=cost,
        copy_bytes_per_s=copy_bytes_per_s,
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


def _cost(
    seats: Sequence[Apart], question: CollectivesQuestion, say: Callable[[str], None]
) -> tuple[HostCost, float]:
    """What rounds take, and what a process copies in a second."""
    size, largest = question.num_ranks, max(question.sizes_bytes)

    def block(kind: str, action: str, num_bytes: int) -> Callable[[], float]:
        return _block(seats, "rounds", kind=kind, action=action, num_bytes=num_bytes)

    smaller = takewhile(lambda one: one < largest, _MESSAGES_BYTES[:-1])
    keys = [(kind, action) for kind in kinds_of(size) for action in Action]
    curves: dict[tuple[str, Action], Curve] = dict.fromkeys(keys, ())
    for num_bytes in [*smaller, min(largest, _MESSAGES_BYTES[-1])]:
        say(f"messages of {format_bytes(num_bytes)}")
        blocks = {
            " ".join((kind, how.value)): block(kind, how.value, num_bytes) for kind, how in keys
        }
        took = take_turns(blocks, _NUM_TURNS)
        for kind, how in keys:
            call_s = took[" ".join((kind, how.value))].median_s
            round_s = call_s / RoundOfKind(size, kind, how).num_rounds
            curves[kind, how] = (*curves[kind, how], (num_bytes, round_s))
    copy_s = statistics.median(one["seconds"] for one in _all(seats, "copy", num_bytes=largest))
    return HostCost(num_ranks=size, rounds=curves), largest / copy_s


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
    cost: HostCost,
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
            predicted_s=cost.seconds(parse(name, size), what, num_bytes) if is_ours else None,
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
    """The table, what messages cost, and where one takes over from another."""
    header = (
        "",
        "size",
        "measured",
        "least to most",
        "bus GB/s",
        "predicted",
        "predicted/measured",
    )
    rows = [
        (
            row.name,
            format_bytes(row.num_bytes),
            format_duration(row.timing.median_s),
            f"{format_duration(row.timing.least_s)} to {format_duration(row.timing.most_s)}",
            f"{row.bus_bytes_per_s / 1e9:.3g}",
            "" if row.predicted_s is None else format_duration(row.predicted_s),
            "" if not row.predicted_s else f"{row.predicted_s / row.timing.median_s:.2f}",
        )
        for row in found.rows
    ]
    lines = [
        f"{found.operation.value} between {found.num_ranks} processes of one thread",
        "",
        *table(header, rows),
        "",
        *_messages(found.cost),
        f"memory is copied at {found.copy_bytes_per_s / 1e9:.3g} GB/s by one process",
        *_fastest(found),
        *_crossings(found),
    ]
    if found.num_ranks > found.num_cores:
        cores = f"{found.num_cores} core{'s' * (found.num_cores != 1)}"
        lines.append(f"{found.num_ranks} processes share {cores}: they wait for one another, too")
    return lines


def _messages(cost: HostCost) -> Iterator[str]:
    """What the smallest and the largest message take."""
    curves = {kind: cost.rounds[kind, Action.COPY] for kind in ("alone", "ring")}
    for end in (0, -1):
        size, alone_s = curves["alone"][end]
        ring_s = format_duration(curves["ring"][end][1])
        yield (
            f"a message of {format_bytes(size)}: {format_duration(alone_s)} alone, {ring_s} where "
            "each rank sends one"
        )


def _fastest(found: MeasuredCollectives) -> Iterator[str]:
    """What the fastest by prediction takes, over the fastest that was measured."""
    worst = 1.0
    times = {
        name: {size: statistics.median(one) for size, one in blocks.items()}
        for name, blocks in found.blocks().items()
    }
    if len(times) < 2:
        return
    for size in sorted(next(iter(times.values()))):
        best = min(times, key=lambda name: times[name][size])
        chosen = min(times, key=lambda name: found.predicted_s(name, size))
        over = times[chosen][size] / times[best][size]
        worst = max(worst, over)
        other = "" if chosen == best else f"; predicted: {chosen}, which took {over:.2f} of it"
        yield f"fastest at {format_bytes(size)}: {best}{other}"
    yield f"the predicted one takes at most {worst:.2f} of the fastest"


def _crossings(found: MeasuredCollectives) -> Iterator[str]:
    """The table of crossings, and how many were predicted within a factor of 2."""
    crossings = found.crossings()
    if not crossings:
        yield "none clearly takes over from another between these sizes"
        return
    rows = [
        (
            f"{one.above} from {one.below}",
            format_bytes(one.measured_bytes),
            "nowhere" if one.predicted_bytes is None else format_bytes(one.predicted_bytes),
            "" if one.predicted_bytes is None
            else f"{one.predicted_bytes / one.measured_bytes:.2f}",
        )
        for one in crossings
    ]  # fmt: skip
    yield ""
    yield from table(("takes over", "measured at", "predicted at", "predicted/measured"), rows)
    num_near = sum(one.is_near for one in crossings)
    yield f"predicted within a factor of 2: {num_near} of {len(crossings)}"
    yield ""
