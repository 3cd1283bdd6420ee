"""Measures what exchanges between a split's workers take here, with as many processes.

    a message        half of a round trip between two           what crosses a pipeline's border
    a meeting        each sends a line to all                    spread/meeting.py
    a turn           how much longer a meeting takes after computing: processes are not ready at
                     the same time, and if there are more than cores, some wait for one
    gather, reduce   of a unit of parameters                    spread/units.py
    a sum            of what is divided over channels           spread/columns.py
    a round          each computes, then all meet               as with data parallelism

It times the functions that a run calls, so it stays right when those change. All processes call
`measure` at the same time and do the same in it, so both directions of each link are busy, as in a
run. Large units, their gradients and the buffers between them are larger than a cache. A time is
the median of several means: a step makes many exchanges, so their mean counts, and other programs
disturb some of them. This module must not know models or prices.
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from ..collectives.base import LinkCost
from ..collectives.host import Curve
from ..exchange.group import MemberGroup, PeerGroup
from ..spread.columns import summed
from ..spread.group import measured_link
from ..spread.meeting import Intent, Meeting, PartTask
from ..spread.units import ParameterUnit, UnitRooms

_UNITS = ((1 << 12, 8), (1 << 20, 2), (1 << 24, 1))
_SUMS = ((1 << 12, 8), (1 << 18, 4), (1 << 22, 1))
"""Sizes in bytes, and the number of calls in one mean."""
_NUM_MEANS = 5
_COMPUTED_S = 4e-3
"""Computing before a meeting: a few layers of a small model."""
_NUM_MEETINGS = 8
_WIDTH = 256
"""Width of the matrices that are multiplied meanwhile: they stay in a core's own cache."""


class ExchangeCosts(NamedTuple):
    """Seconds of exchanges between ``size`` processes at the same time.

    Attributes:
        size: number of processes.
        link: cost of a message from one to another.
        meeting_s: of a meeting alone.
        turn_s: additional time of a meeting after computing.
        gather_s, reduce_s: by the bytes of a unit.
        sum_s: by the bytes that each process has.
    """

    size: int
    link: LinkCost
    meeting_s: float
    turn_s: float
    gather_s: Curve
    reduce_s: Curve
    sum_s: Curve


def measure(group: PeerGroup) -> ExchangeCosts:
    """Measure all exchanges; return what this process saw. All others must call it, too."""
    meeting = Meeting(group, range(group.size))

    def meet() -> None:
        meeting.show(Intent(PartTask.STEP_END))

    meeting_s = _typical_s(meet, 8)
    gather_s, reduce_s = [], []
    rooms = UnitRooms()
    for num_bytes, num_calls in _UNITS:
        gather, reduce = _gather_and_reduce(num_bytes, group, rooms)
        gather_s.append((num_bytes, _typical_s(gather, num_calls)))
        reduce_s.append((num_bytes, _typical_s(reduce, num_calls)))
    sum_s = []
    for num_bytes, num_calls in _SUMS:
        addend = torch.zeros(num_bytes // 4)
        sum_s.append((num_bytes, _typical_s(lambda: summed(addend, group), num_calls)))  # noqa: B023  called at once
    return ExchangeCosts(
        size=group.size, link=measured_link(group), meeting_s=meeting_s,
        turn_s=_turn_s(group, meet, meeting_s),
        gather_s=tuple(gather_s), reduce_s=tuple(reduce_s), sum_s=tuple(sum_s),
    )  # fmt: skip


def round_s(group: PeerGroup, work: Callable[[], object], num_rounds: int) -> float:
    """Return the seconds until all have done their work and have met; all others must call it, too.

    Args:
        num_rounds: rounds whose median is returned, after one that is not counted.
    """
    meeting, rounds_s = Meeting(group, range(group.size)), list[float]()
    meeting.show(Intent(PartTask.STEP_END))
    for _ in range(1 + num_rounds):
        start_s = time.perf_counter()
        work()
        meeting.show(Intent(PartTask.STEP_END))
        rounds_s.append(time.perf_counter() - start_s)
    return statistics.median(rounds_s[1:])


def _typical_s(work: Callable[[], object], num_calls: int) -> float:
    """Return the seconds of one call: the median of means over ``num_calls`` each, after a first
    call that is not counted."""
    work()
    means_s = []
    for _ in range(_NUM_MEANS):
        start_s = time.perf_counter()
        for _ in range(num_calls):
            work()
        means_s.append((time.perf_counter() - start_s) / num_calls)
    return statistics.median(means_s)


def _gather_and_reduce(
    num_bytes: int, group: MemberGroup, rooms: UnitRooms
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return functions that gather a unit, and that reduce its gradient."""
    weight = nn.Parameter(torch.zeros(num_bytes // 4))
    gradients = [torch.zeros_like(weight) for _ in range(2)]
    unit = ParameterUnit(0, None, [("weight", weight)], group, rooms)

    def gather() -> None:
        unit.gather()
        unit.hide()

    def reduce() -> None:
        unit.show()
        gradients.reverse()  # as each step computes a new gradient
        weight.grad = gradients[0]
        unit.reduce()
        for piece in unit.pieces:
            piece.held.grad = None

    return gather, reduce


def _turn_s(group: PeerGroup, meet: Callable[[], object], meeting_s: float) -> float:
    """Return how much longer a meeting takes after computing than alone."""
    matrix = torch.ones(_WIDTH, _WIDTH)
    out = torch.empty_like(matrix)
    product_s = _typical_s(lambda: torch.mm(matrix, matrix, out=out), 4)
    counts = torch.zeros(group.size)
    group.all_gather(torch.tensor([_COMPUTED_S / product_s]), counts).wait()
    num_products = max(1, round(float(counts[0])))  # the first one's number, for all

    def compute() -> None:
        for _ in range(num_products):
            torch.mm(matrix, matrix, out=out)

    def elapsed_s(*steps: Callable[[], object]) -> float:
        meet()
        start_s = time.perf_counter()
        for _ in range(_NUM_MEETINGS):
            for step in steps:
                step()
        meet()
        return time.perf_counter() - start_s

    differences_s = [elapsed_s(compute, meet) - elapsed_s(compute) for _ in range(3)]
    return max(0.0, statistics.median(differences_s) / _NUM_MEETINGS - meeting_s)
