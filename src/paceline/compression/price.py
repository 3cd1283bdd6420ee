"""Measures, before a run begins, what compressing costs on this machine and saves on the link.

    spent    encoding and decoding, measured on numbers like the gradients', without a link
    link     the compressor's operations, or the all-reduce of uncompressed gradients:
             quick link    both exchanges are measured as they are, in turn
             slow link     beginning and ending their operations, measured with hardly any bytes,
                           plus their bytes, by closed formulas with the measured time per byte

A quick link has other costs than bytes: a compressor has at least twice the operations, and sums in
16 bits may be slower than in 32. Compression wins if it saves more than it spends. Both times are
of one update, as if nothing overlapped with computing. In a run, overlap hides the link's time
first, and encoding competes with the backward pass for the same processor; so the verdict errs in
favour of compressing, never against it.

Source: S. Agarwal, H. Wang, S. Venkataraman, D. Papailiopoulos, "On the Utility of Gradient
Compression in Distributed Training Systems", MLSys 2022 (it pays if the bytes saved, divided by the
bandwidth, take longer than encoding and decoding; in few of their 200 set-ups they did).
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..collectives.base import LinkCost
from .base import AllGather, AllReduce, Exchanging, MemberLink, Operation, UnderWay

_MEASURING_S = 0.4
_CACHE_BYTES = 32 << 20
"""More cache than one core of a present-day machine has."""
_FEWEST, _MOST = 3, 50
QUICK_S = 0.05
"""The most that a quick link takes to exchange uncompressed gradients."""
_FEWEST_TOGETHER, _MOST_TOGETHER, _TOGETHER_S = 5, 15, 0.5
"""The repeats of what members do together, the same number in each, and how long they may take."""


class _NoLink:
    """A stand-in for the link: as if every member had sent the same as this one."""

    def __init__(self, num_members: int) -> None:
        self._num_members = num_members
        self.operations: list[Operation] = []

    def begin(self, operation: Operation) -> Operation:
        self.operations.append(operation)
        return operation

    def finish(self, begun: Operation) -> Tensor:
        tensor = begun.tensor
        is_gathered = isinstance(begun, AllGather)
        return tensor.expand(self._num_members, *tensor.shape) if is_gathered else tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredExchange:
    """The measured work of one member for an update.

    Attributes:
        spent_s: median seconds to encode and decode.
        operations: those of all its exchanges.
    """

    spent_s: float
    operations: tuple[Operation, ...]


class GradientWay(NamedTuple):
    """One way to exchange the gradients of an update.

    Attributes:
        exchanges: returns the exchanges to begin.
        between: called while they are under way.
        keep: called once they are done, to make the update final.
    """

    exchanges: Callable[[], Sequence[Exchanging]]
    between: Callable[[], object] = lambda: None
    keep: Callable[[], object] = lambda: None


class FixedCosts(NamedTuple):
    """The seconds that an update's operations take whatever their bytes.

    Attributes:
        plain_s: without a compressor.
        sent_s: with the compressor.
    """

    plain_s: float
    sent_s: float


def measure(
    exchanges: Callable[[], Sequence[Exchanging]],
    keep: Callable[[], object],
    num_members: int,
    device: torch.device,
) -> MeasuredExchange:
    """Measure encoding and decoding, repeatedly, for less than a second.

    Args:
        exchanges: returns the exchanges of an update.
        keep: makes an update final, so that the next one begins with what this one has not sent.
        num_members: that take part.
        device: that computes; if it is an accelerator, each repeat waits for it.
    """
    times: list[float] = []
    forget, end_s = _cache_flusher(device), time.perf_counter() + _MEASURING_S
    while len(times) < _FEWEST or (time.perf_counter() < end_s and len(times) < _MOST):
        forget()
        link, begun_s = _NoLink(num_members), time.perf_counter()
        _run(UnderWay(link), exchanges())
        keep()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - begun_s)
    return MeasuredExchange(spent_s=statistics.median(times), operations=tuple(link.operations))


def measure_in_turn(
    ways: Sequence[GradientWay], link: MemberLink, device: torch.device, about_s: float = 0.0
) -> list[float]:
    """Measure several ways in turn, and return the median seconds of each.

    All members call this together.

    Args:
        about_s: about how long all the ways take together, the same in all members; the longer, the
            fewer repeats.
    """
    times_of_ways: list[list[float]] = [[] for _ in ways]
    forget = _cache_flusher(device)
    repeats = _TOGETHER_S / about_s if about_s else math.inf
    for _ in range(int(min(_MOST_TOGETHER, max(_FEWEST_TOGETHER, repeats)))):
        for times, way in zip(times_of_ways, ways, strict=True):
            forget()
            begun_s = time.perf_counter()
            _run(UnderWay(link), way.exchanges(), way.between)
            way.keep()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            times.append(time.perf_counter() - begun_s)
    return [statistics.median(times) for times in times_of_ways]


def summed(part: Tensor) -> Exchanging:
    """The exchange of an uncompressed part: its sum over all members, in place."""
    yield AllReduce(part)


def _run(
    under_way: UnderWay,
    exchanges: Sequence[Exchanging],
    between: Callable[[], object] = lambda: None,
) -> None:
    for exchanging in exchanges:
        under_way.begin(exchanging)
    between()
    under_way.finish()


def _cache_flusher(device: torch.device) -> Callable[[], object]:
    """Return a function that flushes the caches, as computing a step does between two exchanges."""
    unrelated = torch.zeros(_CACHE_BYTES if device.type == "cpu" else 0, dtype=torch.uint8)
    return lambda: unrelated.add_(1)


def link_s(operations: Sequence[Operation], num_members: int, link: LinkCost) -> float:
    """Return the seconds of operations, one after another, on a network of identical ranks.

    An all-reduce goes round a ring: 2 (P - 1) rounds of n / P. The other two are one round in which
    each member sends P - 1 messages: of n / P each (all-to-all), or of all n (all-gather).
    """
    others, total_s = num_members - 1, 0.0
    for operation in operations:
        if isinstance(operation, AllReduce):
            total_s += 2 * others * link.round_s(1, operation.tensor.nbytes / num_members)
            total_s += others / num_members * operation.tensor.nbytes * link.reduce_s_per_byte
        else:
            total_s += link.round_s(others, operation.sent_bytes(num_members))
    return total_s


_SMALL_NUMBERS, _LARGE_NUMBERS = 2, 1 << 18
"""The float32 numbers of the two timed all-reduces: 8 bytes and 1 MiB."""
_NUM_TIMED = 5


def measure_link(
    reduce: Callable[[Tensor], object], num_members: int, device: torch.device
) -> LinkCost:
    """Measure the cost of a message between members, from all-reduces of two sizes.

    All members call this together.

    Args:
        reduce: sums a tensor over all members, in place.
    """
    num_rounds = 2 * (num_members - 1)

    def median_s(size: int) -> float:
        tensor = torch.zeros(size, device=device)
        times: list[float] = []
        reduce(tensor)  # also makes all members begin together
        for _ in range(_NUM_TIMED):
            begun_s = time.perf_counter()
            reduce(tensor)
            float(tensor[0])  # waits for the sum
            times.append(time.perf_counter() - begun_s)
        own_s = statistics.median(times)  # not the least, which hardly any step would take
        mean = torch.tensor(own_s / num_members, dtype=torch.float64, device=device)
        reduce(mean)  # so that all members return the same
        return float(mean)

    small_s = median_s(_SMALL_NUMBERS)
    large_s = median_s(_LARGE_NUMBERS)
    num_bytes = 4 * (_LARGE_NUMBERS - _SMALL_NUMBERS)
    return LinkCost(
        latency_s=small_s / num_rounds,
        s_per_byte=max(0.0, large_s - small_s) * num_members / num_rounds / num_bytes,
    )
