"""What a split's workers do together takes so long here: measured between as many processes.

    a message        there and back between two, halved         what crosses a pipeline's border
    a meeting        a line from each to all                    spread/meeting.py
    a turn           how much later all have met where each has computed before: they are not ready
                     at the same time, and where they are more than the cores, wait for one
    gather, reduce   of a unit of parameters                    spread/units.py
    a sum            of what is divided over channels           spread/columns.py
    a round          each computes, then all meet               where some wait for a core

What is timed is what a run calls, so it stays right when that changes. All processes call `measure`
at the same time, and do the same in it: both directions of each link are busy, as in a run. Large
units, their gradients and the rooms between are more than a cache holds. A time is the median of
some means: of many crossings a step has the mean, and what else runs here takes from some. This
module must not know models, nor what is priced.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..collectives.base import LinkCost
from ..collectives.host import Curve
from ..exchange.group import MemberGroup, Parcel, TorchGroup
from ..spread.columns import summed
from ..spread.meeting import Intent, Meeting, PartTask
from ..spread.units import ParameterUnit, UnitRooms

_SMALL_BYTES, _LARGE_BYTES = 64, 1 << 22
_UNITS = ((1 << 12, 8), (1 << 20, 2), (1 << 24, 1))
_SUMS = ((1 << 12, 8), (1 << 18, 4), (1 << 22, 1))
"""Sizes in bytes, and how many are timed at a time."""
_MEANS = 5
_COMPUTED_S = 4e-3
"""Before a meeting: a few layers of a small model."""
_MEETINGS = 8
_WIDTH = 256
"""Of the matrices that are multiplied then: they stay in a core's own cache."""


class ExchangeCosts(NamedTuple):
    """Seconds of exchanges between ``size`` processes at the same time.

    Attributes:
        size: processes.
        link: of a message from one to another.
        turn_s: of a meeting behind computing, beyond its own and the computing.
        gather_s, reduce_s: at sizes of a unit in bytes.
        sum_s: at sizes of what each has.
    """

    size: int
    link: LinkCost
    meeting_s: float
    turn_s: float
    gather_s: Curve
    reduce_s: Curve
    sum_s: Curve


class NeighbourGroup(TorchGroup):
    """All that measure together.

    Args:
        gloo: their group, as torch has it.
    """

    def __init__(self, gloo: Any) -> None:
        self.rank, self.size, self._group = gloo.rank(), gloo.size(), gloo


def measure(group: TorchGroup) -> ExchangeCosts:
    """What this process sees of it; all others measure meanwhile."""
    meeting = Meeting(group, range(group.size))

    def meet() -> None:
        meeting.show(Intent(PartTask.STEP_END))

    meeting_s = _usual_s(meet, 8)
    gathered, reduced = [], []
    rooms = UnitRooms()
    for num_bytes, times in _UNITS:
        gather, reduce = _unit(num_bytes, group, rooms)
        gathered.append((num_bytes, _usual_s(gather, times)))
        reduced.append((num_bytes, _usual_s(reduce, times)))
    added = []
    for num_bytes, times in _SUMS:
        mine = torch.zeros(num_bytes // 4)
        added.append((num_bytes, _usual_s(lambda: summed(mine, group), times)))  # noqa: B023  called at once
    return ExchangeCosts(
        size=group.size, link=_link(group), meeting_s=meeting_s,
        turn_s=_turn_s(group, meet, meeting_s),
        gather_s=tuple(gathered), reduce_s=tuple(reduced), sum_s=tuple(added),
    )  # fmt: skip


def round_s(group: TorchGroup, work: Callable[[], object], times: int) -> float:
    """Seconds until all have done this and have met; all others measure meanwhile.

    Args:
        times: of rounds, of which the median counts; a first one does not.
    """
    meeting, taken = Meeting(group, range(group.size)), list[float]()
    meeting.show(Intent(PartTask.STEP_END))
    for _ in range(1 + times):
        start_s = time.perf_counter()
        work()
        meeting.show(Intent(PartTask.STEP_END))
        taken.append(time.perf_counter() - start_s)
    return statistics.median(taken[1:])


def _usual_s(work: Callable[[], object], times: int) -> float:
    """Of one: the median of means over so many each; a first one is not counted."""
    work()
    means = []
    for _ in range(_MEANS):
        start_s = time.perf_counter()
        for _ in range(times):
            work()
        means.append((time.perf_counter() - start_s) / times)
    return statistics.median(means)


def _unit(
    num_bytes: int, group: MemberGroup, rooms: UnitRooms
) -> tuple[Callable[[], None], Callable[[], None]]:
    """To gather one unit, and to reduce its gradient."""
    weight = nn.Parameter(torch.zeros(num_bytes // 4))
    gradients = [torch.zeros_like(weight) for _ in range(2)]
    unit = ParameterUnit(0, None, [("weight", weight)], group, rooms)

    def gather() -> None:
        unit.gather()
        unit.hide()

    def reduce() -> None:
        unit.show()
        gradients.reverse()  # each step makes its gradient again
        weight.grad = gradients[0]
        unit.reduce()
        for piece in unit.pieces:
            piece.held.grad = None

    return gather, reduce


def _link(group: TorchGroup) -> LinkCost:
    """Of a message between the first two; all others wait."""
    taken = []
    for num_bytes, times in ((_SMALL_BYTES, 16), (_LARGE_BYTES, 2)):
        room = torch.zeros(num_bytes, dtype=torch.uint8)

        def there_and_back(room: Tensor = room) -> None:
            parcel = [Parcel(1 - group.rank, room)]
            for sender in range(2):
                is_mine = group.rank == sender
                group.swap(parcel if is_mine else [], [] if is_mine else parcel)

        taken.append(_usual_s(there_and_back, times) / 2 if group.rank < 2 else 0.0)
    slope = max(0.0, taken[1] - taken[0]) / (_LARGE_BYTES - _SMALL_BYTES)
    return LinkCost(latency_s=taken[0], s_per_byte=slope)


def _turn_s(group: TorchGroup, meet: Callable[[], object], meeting_s: float) -> float:
    """Of meetings, each behind computing, beyond as much computing and a meeting for each."""
    matrix = torch.ones(_WIDTH, _WIDTH)
    out = torch.empty_like(matrix)
    once_s = _usual_s(lambda: torch.mm(matrix, matrix, out=out), 4)
    told = torch.zeros(group.size)
    group.all_gather(torch.tensor([_COMPUTED_S / once_s]), told).wait()
    num = max(1, round(float(told[0])))

    def compute() -> None:
        for _ in range(num):
            torch.mm(matrix, matrix, out=out)

    def taken_s(*works: Callable[[], object]) -> float:
        meet()
        start_s = time.perf_counter()
        for _ in range(_MEETINGS):
            for work in works:
                work()
        meet()
        return time.perf_counter() - start_s

    more_s = [taken_s(compute, meet) - taken_s(compute) for _ in range(3)]
    return max(0.0, statistics.median(more_s) / _MEETINGS - meeting_s)
