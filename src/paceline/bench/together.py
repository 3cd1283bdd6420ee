"""Two pieces of work, alone and at once, and how much of the shorter one was hidden.

    one alone     |########|
    other alone   |#####|
    at once       |#########|            overlap = (one + other - both) / shorter, here 4/5

1 means that the shorter one cost nothing, 0 that they ran one after the other, less than 0 that
they were in each other's way. Independent work at two places is measured so (`bench parallel`):

    two GPUs     each its own; nothing is waited for between them
    one GPU      two of its streams, which share it
    a CPU        two processes, each with half of the threads

There the work is the chapter's (Zhang et al., "Dive into Deep Learning", 13.3.1): a list of
products of matrices at each place. This module must not know how it is printed.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ..errors import ConfigError
from .apart import Apart
from .lines import duration, table
from .samples import Timing, take_turns

_NOISE = 0.1
"""Share of a time that is not worth a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedTogether:
    """What two pieces of work came to.

    Args:
        name: of this way of doing both.
        one: times of the first alone.
        other: times of the second alone.
        both: times of both.
    """

    name: str
    one: Timing
    other: Timing
    both: Timing

    @property
    def overlap(self) -> float | None:
        """The share of the shorter one that was hidden, from the least time of each; at most 1.

        What else the machine does only ever makes a time longer, and a difference of three times
        shows it three times; so the least ones are compared. None: both at once took less than
        one of them alone, which cannot be; other work disturbed the measurement.
        """
        longer_s = max(self.one.least_s, self.other.least_s)
        if self.both.least_s < (1 - _NOISE) * longer_s:
            return None
        return min(1.0, overlap_of(self.one.least_s, self.other.least_s, self.both.least_s))

    def to_json(self) -> dict[str, object]:
        """As one JSON object."""
        return {
            "name": self.name,
            "one": self.one.to_json(),
            "other": self.other.to_json(),
            "both": self.both.to_json(),
            "overlap": self.overlap,
        }


def overlap_of(one_s: float, other_s: float, both_s: float) -> float:
    """How much of the shorter one was hidden, from three times in seconds.

    Example:
        >>> overlap_of(8.0, 5.0, 9.0)
        0.8
    """
    return (one_s + other_s - both_s) / min(one_s, other_s)


def measure_together(
    name: str,
    one: Callable[[], float],
    other: Callable[[], float],
    both: Callable[[], float],
    num_rounds: int,
) -> TimedTogether:
    """Let the three take turns after one round that does not count; each returns its seconds."""
    for work in (one, other, both):
        work()
    found = take_turns({"one": one, "other": other, "both": both}, num_rounds)
    return TimedTogether(name=name, one=found["one"], other=found["other"], both=found["both"])


def render_together(rows: tuple[TimedTogether, ...], one: str, other: str) -> list[str]:
    """A table, a row each."""
    cells = [
        (
            row.name,
            duration(row.one.median_s),
            duration(row.other.median_s),
            duration(row.both.median_s),
            f"{duration(row.both.least_s)} to {duration(row.both.most_s)}",
            "disturbed" if row.overlap is None else f"{row.overlap:.0%}",
        )
        for row in rows
    ]
    header = ("", f"{one} alone", f"{other} alone", "both", "least to most", "overlap")
    return [
        *table(header, cells),
        "times: medians; overlap: (one + other - both) / shorter, of the least times",
    ]


ROUNDS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Work at two places.

    Args:
        places: what they are, in words.
        work: of each.
        result: the two alone and together.
    """

    places: str
    work: str
    result: TimedTogether

    def to_json(self) -> dict[str, object]:
        """As one JSON object."""
        return {"places": self.places, "work": self.work, **self.result.to_json()}


class Products:
    """Products of matrices in a process of their own; `Apart` makes it."""

    def __init__(self, size: int, count: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self._x = torch.rand(size, size)
        self._out = torch.empty(size, size)
        self._count = count

    def work(self) -> Mapping[str, object]:
        """Do them."""
        for _ in range(self._count):
            torch.mm(self._x, self._x, out=self._out)
        return {}


def measure_parallel(device: torch.device, size: int, count: int) -> Parallel:
    """``count`` products of size x size at each of two places.

    Raises:
        ConfigError: a number is out of range, or the device is neither a CPU nor a GPU.
    """
    if size < 1 or count < 1:
        raise ConfigError(f"--size and --count must be >= 1, got {size} and {count}")
    work = f"{count} products of {size} x {size} matrices at each"
    if device.type == "cpu":
        return _processes(size, count, work)
    if device.type != "cuda":
        raise ConfigError(f"bench parallel knows cpu and cuda, got {device.type}")
    if torch.cuda.device_count() > 1:
        return _on_gpus([torch.device("cuda", 0), torch.device("cuda", 1)], size, count, work)
    return _on_gpus([device, device], size, count, work)


def _processes(size: int, count: int, work: str) -> Parallel:
    threads = max(1, torch.get_num_threads() // 2)
    arguments = {"size": size, "count": count, "threads": threads}
    target = f"{__name__}:Products"
    with Apart(target, arguments) as one, Apart(target, arguments) as other:

        def timed(*seats: Apart) -> Callable[[], float]:
            def measure() -> float:
                start_s = time.perf_counter()
                for seat in seats:
                    seat.begin("work")
                for seat in seats:
                    seat.end()
                return time.perf_counter() - start_s

            return measure

        result = measure_together(
            "two processes", timed(one), timed(other), timed(one, other), ROUNDS
        )
    places = f"two processes on the CPU, {threads} thread{'s' * (threads != 1)} each"
    return Parallel(places=places, work=work, result=result)


def _on_gpus(devices: list[torch.device], size: int, count: int, work: str) -> Parallel:
    streams = [_stream(device) for device in devices]
    inputs = [torch.rand(size, size, device=device) for device in devices]

    def run(*places: int) -> Callable[[], float]:
        def measure() -> float:
            for device in devices:
                torch.cuda.synchronize(device)
            start_s = time.perf_counter()
            for place in places:
                with torch.cuda.stream(streams[place]):
                    for _ in range(count):
                        torch.mm(inputs[place], inputs[place])
            for place in places:
                torch.cuda.synchronize(devices[place])
            return time.perf_counter() - start_s

        return measure

    is_one = devices[0] == devices[1]
    places = f"two streams of {devices[0]}" if is_one else f"{devices[0]} and {devices[1]}"
    name = "two streams" if is_one else "two devices"
    result = measure_together(name, run(0), run(1), run(0, 1), ROUNDS)
    return Parallel(places=places, work=work, result=result)


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
