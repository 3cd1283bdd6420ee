"""What compressing costs on this machine, beside what it saves on a link: before a run begins.

    spent    encode and decode, measured on numbers like the gradients', without a link
    link     the compressor's own operations, or the all-reduce of whole gradients; of a quick link
             both exchanges are measured whole, in turn; of a slow one
             to begin them and hear of their end, measured with next to nothing in them
             and their bytes, by closed formulas with what a byte was measured to take

Where bytes are cheap, other things are not: a compressor has twice the operations or more, and sums
of 16 bits may be slower than those of 32. More is saved than spent: it wins. Both are of one
update, as if nothing of them overlapped with computing: what overlaps hides the link's time first,
and encoding competes with the backward pass for the same processor, so the verdict errs in favour
of compressing, never against it.

Source: S. Agarwal, H. Wang, S. Venkataraman, D. Papailiopoulos, "On the Utility of Gradient
Compression in Distributed Training Systems", MLSys 2022 (it pays where bytes saved over bandwidth
are more than the time to encode and decode; in few of their 200 set-ups it did).
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

_MEASURE_S = 0.4
_CACHES_BYTES = 32 << 20
"""More than one core has of the caches of a machine of today."""
_LEAST, _MOST = 3, 50
QUICK_S = 0.05
"""Within which whole gradients are exchanged on a quick link."""
_LEAST_TOGETHER, _MOST_TOGETHER, _TOGETHER_S = 5, 15, 0.5
"""Repeats of what members do together, so as many in each; and how long they may take."""


class _NoLink:
    """Members alike: whatever one sends, the others have sent, too."""

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
    """What one member does for an update.

    Attributes:
        spent_s: median seconds to encode and decode.
        operations: of all its exchanges.
    """

    spent_s: float
    operations: tuple[Operation, ...]


class GradientWay(NamedTuple):
    """One way to exchange the gradients of an update.

    Attributes:
        exchanges: begins all of it.
        between: what is done while they are under way.
        keep: the update stands.
    """

    exchanges: Callable[[], Sequence[Exchanging]]
    between: Callable[[], object] = lambda: None
    keep: Callable[[], object] = lambda: None


class FixedCosts(NamedTuple):
    """Of an update's operations between members, whatever their bytes, in seconds.

    Attributes:
        plain_s, sent_s: without a compressor, and with it.
    """

    plain_s: float
    sent_s: float


def measure(
    exchanges: Callable[[], Sequence[Exchanging]],
    keep: Callable[[], object],
    num_members: int,
    device: torch.device,
) -> MeasuredExchange:
    """Encode and decode, again and again, for less than a second.

    Args:
        exchanges: begins all of an update.
        keep: the update stands, so the next one begins with what this one has not sent.
        device: that computes; an accelerator is waited for.
    """
    times: list[float] = []
    forget, end_s = _forgetting(device), time.perf_counter() + _MEASURE_S
    while len(times) < _LEAST or (time.perf_counter() < end_s and len(times) < _MOST):
        forget()
        link, begun_s = _NoLink(num_members), time.perf_counter()
        _through(UnderWay(link), exchanges())
        keep()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - begun_s)
    return MeasuredExchange(spent_s=statistics.median(times), operations=tuple(link.operations))


def measure_in_turn(
    ways: Sequence[GradientWay], link: MemberLink, device: torch.device, about_s: float = 0.0
) -> list[float]:
    """Median seconds of each, one after the other again and again; all members call it together.

    Args:
        about_s: that all of them take, the same in all members; the longer, the fewer repeats.
    """
    each: list[list[float]] = [[] for _ in ways]
    forget = _forgetting(device)
    repeats = _TOGETHER_S / about_s if about_s else math.inf
    for _ in range(int(min(_MOST_TOGETHER, max(_LEAST_TOGETHER, repeats)))):
        for times, way in zip(each, ways, strict=True):
            forget()
            begun_s = time.perf_counter()
            _through(UnderWay(link), way.exchanges(), way.between)
            way.keep()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            times.append(time.perf_counter() - begun_s)
    return [statistics.median(times) for times in each]


def summed(part: Tensor) -> Exchanging:
    """What no compressor has touched: the sum over all members, in place."""
    yield AllReduce(part)


def _through(
    under_way: UnderWay,
    exchanges: Sequence[Exchanging],
    between: Callable[[], object] = lambda: None,
) -> None:
    for one in exchanges:
        under_way.begin(one)
    between()
    under_way.finish()


def _forgetting(device: torch.device) -> Callable[[], object]:
    """Between two of a run a step is computed, so caches hold other things by then; here, too."""
    other = torch.zeros(_CACHES_BYTES if device.type == "cpu" else 0, dtype=torch.uint8)
    return lambda: other.add_(1)


def link_s(operations: Sequence[Operation], num_members: int, link: LinkCost) -> float:
    """Seconds that these take on a network of equals, one after the other.

    An all-reduce goes round a ring: 2 (P - 1) rounds of n / P. The other two are one round, in
    which each sends P - 1 messages: of n / P each (all-to-all), or of all n (all-gather).
    """
    others, total_s = num_members - 1, 0.0
    for one in operations:
        if isinstance(one, AllReduce):
            total_s += 2 * others * link.round_s(1, one.tensor.nbytes / num_members)
            total_s += others / num_members * one.tensor.nbytes * link.reduce_s_per_byte
        else:
            total_s += link.round_s(others, one.sent_bytes(num_members))
    return total_s


_SMALL_NUMBERS, _LARGE_NUMBERS = 2, 1 << 18
"""float32 numbers of the all-reduces that are timed: 8 bytes, 1 MiB."""
_TIMED = 5


def measure_link(
    reduce: Callable[[Tensor], object], num_members: int, device: torch.device
) -> LinkCost:
    """What a message between members costs, from two sizes of an all-reduce; all call it together.

    Args:
        reduce: sums over all members, in place.
    """
    rounds = 2 * (num_members - 1)

    def usual_s(size: int) -> float:
        tensor = torch.zeros(size, device=device)
        times: list[float] = []
        reduce(tensor)  # which also brings them together
        for _ in range(_TIMED):
            begun_s = time.perf_counter()
            reduce(tensor)
            float(tensor[0])  # it has come
            times.append(time.perf_counter() - begun_s)
        middle_s = statistics.median(times)  # as of every step: the least is of no step
        mean = torch.tensor(middle_s / num_members, dtype=torch.float64, device=device)
        reduce(mean)  # so that all say the same
        return float(mean)

    small_s = usual_s(_SMALL_NUMBERS)
    large_s = usual_s(_LARGE_NUMBERS)
    num_bytes = 4 * (_LARGE_NUMBERS - _SMALL_NUMBERS)
    return LinkCost(
        latency_s=small_s / rounds,
        s_per_byte=max(0.0, large_s - small_s) * num_members / rounds / num_bytes,
    )
