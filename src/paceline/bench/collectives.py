"""Collectives between processes of this machine, beside gloo, shared memory and predicted times.

    cost of rounds          each kind of round at several sizes
    each collective, size   a block of calls in all ranks; the slowest counts; blocks take turns
    prediction              the sum of the costs of its rounds (collectives/host.py)
    crossings               measured beside predicted (collectives/crossings.py)

Bus bandwidth is the buffer over the time, times the bytes that the operation must move for each
byte of the buffer (2 (P - 1) / P for an all-reduce), so that for every P it can be compared with a
link's bandwidth (as NVIDIA's nccl-tests define it). Question, measurement and table are one file,
as in the other measurements, which makes more than 300 lines. This module must not know schedules.
"""

import dataclasses
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..collectives import parse
from ..collectives.choose import candidates
from ..collectives.crossings import Crossing, find_crossings
from ..collectives.host import HostCost
from ..collectives.transfers import Action, Operation, moved_share
from ..config import refuse_too_many
from ..errors import ConfigError, WorkerError, unknown
from ..exchange import FIRST_BUCKET_BYTES, SHARED
from ..plan import format_bytes
from ..report.text import format_duration, table
from ..system.processors import num_cores
from .collective_seat import HAVE_NATIVE, NATIVE, Seats
from .samples import Measured, Timing

NOT_KEPT = (
    "not kept: --collective auto needs all collectives and two or more sizes, the largest at least "
    f"{format_bytes(FIRST_BUCKET_BYTES)}; omit --names and --sizes"
)
"""The message for a measurement that runs cannot use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivesQuestion:
    """The question.

    Args:
        names: of collectives; empty: all that fit.
        sizes_bytes: of the whole buffer, each >= 4; for an all-to-all, of what a rank starts with.
        num_rounds: blocks of each collective, >= 1.
    """

    num_ranks: int
    operation: Operation
    names: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    num_rounds: int = 5

    def __post_init__(self) -> None:
        refuse_too_many(self.num_ranks, "--workers")
        if self.num_ranks < 2 or self.num_rounds < 1:
            raise ConfigError(
                "bench collectives needs --workers >= 2 and --rounds >= 1, got "
                f"{self.num_ranks} and {self.num_rounds}"
            )
        if not self.sizes_bytes or min(self.sizes_bytes) < 4:
            raise ConfigError("--sizes must be 4 B or more, such as 1KiB,64KiB,4MiB")

    @classmethod
    def read(
        cls, operation: str, *, workers: int, names: str | None, sizes: str, rounds: int
    ) -> "CollectivesQuestion":
        """Return the question in the command line's values; ConfigError: one is invalid."""
        try:
            kind = Operation(operation)
        except ValueError:
            operations = [member.value for member in Operation]
            raise unknown("operation", operation, operations) from None
        return cls(
            num_ranks=workers,
            operation=kind,
            names=tuple(names.split(",")) if names else (),
            sizes_bytes=sizes_of(sizes),
            num_rounds=rounds,
        )

    @property
    def is_whole(self) -> bool:
        """Whether runs can use the result: it has all collectives and sizes up to a bucket or more.

        With one size alone, every size would get the same time.
        """
        sizes = self.sizes_bytes
        return not self.names and len(sizes) > 1 and max(sizes) >= FIRST_BUCKET_BYTES

    def fitting(self) -> list[str]:
        """Return the names of the collectives to measure."""
        names = []
        for text in self.names or candidates(self.num_ranks):
            member = parse(text, self.num_ranks)
            try:
                member.rounds(self.operation)
            except ConfigError:
                if self.names:
                    raise
                continue
            names.append(str(member))
        return names


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollective(Measured):
    """One collective at one size; times are of one call in the slowest rank."""

    name: str
    num_bytes: int
    timing: Timing
    bus_bytes_per_s: float
    predicted_s: float | None  # from the cost of its rounds; None for gloo's own and shared memory


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollectives(Measured):
    """All measurements of one operation."""

    operation: Operation
    num_ranks: int
    num_cores: int
    cost: HostCost
    copy_bytes_per_s: float  # of memory, by one process
    rows: tuple[MeasuredCollective, ...]

    def to_json(self) -> dict[str, object]:
        """Return the result as one JSON object, with the crossings."""
        return {
            "operation": self.operation.value,
            "num_ranks": self.num_ranks,
            "num_cores": self.num_cores,
            "cost": self.cost.write(),
            "copy_bytes_per_s": self.copy_bytes_per_s,
            "rows": [row.to_json() for row in self.rows],
            "crossings": [crossing._asdict() for crossing in self.crossings()],
        }

    def blocks(self) -> dict[str, dict[int, tuple[float, ...]]]:
        """Return the seconds of each block of what is predicted, by collective and size."""
        samples_s: dict[str, dict[int, tuple[float, ...]]] = {}
        for row in self.rows:
            if row.predicted_s is not None:
                samples_s.setdefault(row.name, {})[row.num_bytes] = row.timing.samples_s
        return samples_s

    def crossings(self) -> list[Crossing]:
        """Return where one collective overtakes another, from small sizes to large."""
        crossings = find_crossings(self.blocks(), self.predicted_s)
        return sorted(crossings, key=lambda crossing: crossing.measured_bytes)

    def predicted_s(self, name: str, num_bytes: int) -> float:
        """Return the predicted seconds of the operation with a collective."""
        return self.cost.seconds(parse(name, self.num_ranks), self.operation, num_bytes)


def measure_collectives(
    question: CollectivesQuestion, say: Callable[[str], None] = lambda line: None
) -> MeasuredCollectives:
    """Measure the collectives of a question.

    Raises:
        ConfigError: a collective does not fit, or has no such operation.
        WorkerError: a process died, or a collective computes a wrong sum.
    """
    names, operation = question.fitting(), question.operation
    with Seats(question.num_ranks) as seats:
        is_sum = operation is Operation.ALL_REDUCE
        own = [*names, SHARED] if is_sum and seats.can_share() else names
        for name in own if is_sum else ():
            if not seats.adds_up(name):
                raise WorkerError(f"{name} computed a wrong sum: please report it")
        largest, rows = max(question.sizes_bytes), list[MeasuredCollective]()
        cost, copy_bytes_per_s = seats.cost(largest, say), seats.copy_bytes_per_s(largest)
        measured = [*own, NATIVE] if operation in HAVE_NATIVE else names
        for size in question.sizes_bytes:
            say(f"{operation.value} of {format_bytes(size)}")
            rows += _rows(seats, question, measured, size, cost)
        if is_sum:
            native_s = {row.num_bytes: row.timing.median_s for row in rows if row.name == NATIVE}
            beside_s = seats.beside(names, cost, native_s, question.num_rounds)
            cost = dataclasses.replace(cost, native_s=tuple(native_s.items()), beside_s=beside_s)
        seats.leave()
    return MeasuredCollectives(
        operation=operation,
        num_ranks=question.num_ranks,
        num_cores=num_cores(),
        cost=cost,
        copy_bytes_per_s=copy_bytes_per_s,
        rows=tuple(rows),
    )


def _rows(
    seats: Seats,
    question: CollectivesQuestion,
    names: Sequence[str],
    num_bytes: int,
    cost: HostCost,
) -> Iterator[MeasuredCollective]:
    """Yield the rows of one size, a row for each collective."""
    operation, num_ranks = question.operation, question.num_ranks
    for name, timing in seats.times(names, operation, num_bytes, question.num_rounds).items():
        predicted_s = None
        if name not in (SHARED, NATIVE):
            predicted_s = cost.seconds(parse(name, num_ranks), operation, num_bytes)
        yield MeasuredCollective(
            name=name,
            num_bytes=num_bytes,
            timing=timing,
            bus_bytes_per_s=num_bytes * moved_share(operation, num_ranks) / timing.median_s,
            predicted_s=predicted_s,
        )


def sizes_of(text: str) -> tuple[int, ...]:
    """Return the sizes in ``1KiB,4MiB`` in bytes, from small to large; ``64Ki`` is 64 KiB.

    Raises:
        ConfigError: a size is not a whole number of bytes, KiB or MiB.

    Example:
        >>> sizes_of("1MiB,64KiB,100")
        (100, 65536, 1048576)
    """
    sizes = set()
    for size in text.split(","):
        match = _SIZE.fullmatch(size.strip())
        if match is None:
            raise ConfigError(f"--sizes {text!r} must be sizes such as 1KiB,64KiB,4MiB")
        sizes.add(int(match["number"]) << _POWERS[match["unit"]])
    return tuple(sorted(sizes))


_SIZE = re.compile(r"(?P<number>[0-9]+) *(?P<unit>(?:[KM]i)?)B?")
_POWERS = {"": 0, "Ki": 10, "Mi": 20}


def render_collectives(result: MeasuredCollectives) -> list[str]:
    """Return the lines of the report: table, cost of messages, fastest, and crossings."""
    header = ("", "size", "measured", "least to most", "bus GB/s", "predicted",
              "predicted/measured")  # fmt: skip
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
        for row in result.rows
    ]
    lines = [
        f"{result.operation.value} between {result.num_ranks} processes of one thread",
        "",
        *table(header, rows),
        "",
        *_messages(result.cost),
        f"one process copies memory at {result.copy_bytes_per_s / 1e9:.3g} GB/s",
        *_fastest(result),
        *_crossings(result),
    ]
    if result.num_ranks > result.num_cores:
        cores = f"{result.num_cores} core{'s' * (result.num_cores != 1)}"
        lines.append(
            f"{result.num_ranks} processes share {cores}, so they also wait for one another"
        )
    return lines


def _messages(cost: HostCost) -> Iterator[str]:
    """Yield lines with the cost of the smallest and the largest message."""
    alone, ring = (cost.rounds[kind, Action.COPY] for kind in ("alone", "ring"))
    for (size, alone_s), (_, each_s) in ((alone[0], ring[0]), (alone[-1], ring[-1])):
        ring_s = format_duration(each_s)
        yield (
            f"a message of {format_bytes(size)}: {format_duration(alone_s)} alone, {ring_s} where "
            "each rank sends one"
        )


def _fastest(result: MeasuredCollectives) -> Iterator[str]:
    """Yield lines that compare the collective predicted fastest with the measured fastest."""
    worst = 1.0
    times = {
        name: {size: statistics.median(samples_s) for size, samples_s in blocks.items()}
        for name, blocks in result.blocks().items()
    }
    if len(times) < 2:
        return
    for size in sorted(next(iter(times.values()))):
        best = min(times, key=lambda name: times[name][size])
        chosen = min(times, key=lambda name: result.predicted_s(name, size))
        ratio = times[chosen][size] / times[best][size]
        worst = max(worst, ratio)
        note = (
            "" if chosen == best else f"; predicted: {chosen}, which took {ratio:.2f} times as long"
        )
        yield f"fastest at {format_bytes(size)}: {best}{note}"
    yield f"the one predicted fastest takes at most {worst:.2f} times as long as the fastest"


def _crossings(result: MeasuredCollectives) -> Iterator[str]:
    """Yield the table of crossings, and how many were predicted within a factor of 2."""
    crossings = result.crossings()
    if not crossings:
        yield "no collective clearly overtakes another between these sizes"
        return
    rows = [
        (
            f"{crossing.above} from {crossing.below}",
            format_bytes(crossing.measured_bytes),
            "nowhere" if crossing.predicted_bytes is None
            else format_bytes(crossing.predicted_bytes),
            "" if crossing.predicted_bytes is None
            else f"{crossing.predicted_bytes / crossing.measured_bytes:.2f}",
        )
        for crossing in crossings
    ]  # fmt: skip
    yield ""
    yield from table(("takes over", "measured at", "predicted at", "predicted/measured"), rows)
    num_near = sum(crossing.is_near for crossing in crossings)
    yield f"predicted within a factor of 2: {num_near} of {len(crossings)}"
    yield ""
