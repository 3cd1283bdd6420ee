"""What a trace tells of its steps: what nobody ordered, and what the exchange beside them cost.

    grant ------ exchange ------ computing ---- ordered delay ---- push --> heard
            (message, update,                   (--delay: known,      (slot,
             pull)             compute           taken out)            message)

The exchange of a step is the time from its grant to its push being heard, less the computing and
the ordered delay: the messages both ways, the pull, and the coordinator's own time. The adding is
measured by itself (``add_s``), since an update of one push adds nothing, and pushes at the same
time are added one after the other. Where an exchange began with a new version, writing that is in
it as well: what such steps take longer is ``apply_s``. A run between peers has no grants: its
exchange is what its workers say they spent on it. This module must not know what is predicted.
"""

import math
import random
import statistics
from collections import defaultdict
from typing import NamedTuple

from ..conditions.delays import parse_delays, parse_slowness
from ..errors import ConfigError
from ..events import Apply, Grant, Joined, Ticket
from ..protocols import parse
from ..trace import contradiction
from ..trace.records import Handed, Header, Heard, Ordered, Record, SupersededRecord

_WARM_UP_STEPS = 2
"""Left out at the start of each member: the first steps fill caches and allocate."""
FEWEST_STEPS = 10
"""From which a mean is taken."""


class _Granted(NamedTuple):
    """When work was granted, whether with a version just made, and in answer to one's own push."""

    at_s: float
    is_updated: bool
    is_at_once: bool


class Steps:
    """The steps of a trace, one after the other.

    Args:
        header: of the trace.
    """

    def __init__(self, header: Header) -> None:
        self.num_steps = 0
        self.work_s: defaultdict[int, list[float]] = defaultdict(list)
        self._beside_s: defaultdict[int, list[tuple[bool, float]]] = defaultdict(list)
        self._ordered = _Ordered(header)
        is_local = header.text("engine") == "local"
        self._has_grants = is_local and header.text("path") == "store"
        self._is_on_cores = is_local and header.text("device", "cpu") == "cpu"
        self._worker_of: dict[int, int] = {}
        self._granted: dict[tuple[int, int], _Granted] = {}
        self._num_leases: dict[tuple[int, int], int] = {}
        self._num_granted: defaultdict[int, int] = defaultdict(int)
        self._num_of: defaultdict[int, int] = defaultdict(int)
        self._is_updated = False
        self._last = -1  # who pushed last
        self._added_s: list[float] = []
        self._share = _Share()

    def hear(self, record: Record) -> None:
        """The next line."""
        match record:
            case Heard(fact=Joined(member, _), worker=int(worker)):
                self._worker_of[member] = worker
            case Handed():
                self._is_updated = False
                self._last = record.fact.ticket.member
                self._pushed(record)
            case Ordered(order=Apply()):
                self._is_updated = True
            case Ordered(order=Grant(ticket=ticket, leases=leases)):
                self._num_leases[ticket[:2]] = len(leases)
                self._num_granted[ticket.member] += 1
                is_at_once = self._last == ticket.member
                self._granted[ticket[:2]] = _Granted(record.t_s, self._is_updated, is_at_once)
            case SupersededRecord() if not self._ordered.is_delayed:
                member = record.ticket.member
                factor = self._ordered.factor(self._worker_of.get(member, member))
                self._share.hear(record.t_s, record.wasted_s, record.wasted_s / factor)

    def _pushed(self, record: Handed) -> None:
        ticket = record.fact.ticket
        worker = self._worker_of.get(ticket.member, ticket.member)
        if self._num_granted and ticket.serial >= self._num_granted[ticket.member]:
            raise contradiction(
                f"member {ticket.member} pushes ticket {ticket.serial}, and was given "
                f"{self._num_granted[ticket.member]}"
            )
        num_leases = self._num_leases.pop(ticket[:2], None)
        work_s = self._ordered.rest_s(worker, ticket, record.compute_s, num_leases)
        granted = self._granted.pop(ticket[:2], None)
        self._num_of[ticket.member] += 1
        beside_s, is_updated = record.push_s, False
        if self._has_grants and granted is not None:
            beside_s = record.fact.at_s - granted.at_s - record.compute_s
            is_updated = granted.is_updated
            if granted.is_at_once:  # else it added while it waited
                beside_s -= record.add_s
        num_steps = num_leases or self._ordered.num_steps
        self._share.hear(
            record.fact.at_s, record.compute_s + max(0.0, beside_s),
            max(0.0, work_s) * num_steps + max(0.0, beside_s),
        )  # fmt: skip
        if self._num_of[ticket.member] <= _WARM_UP_STEPS or record.compute_s <= 0.0:
            return
        if record.add_s:
            self._added_s.append(record.add_s)
        self.num_steps += 1
        self.work_s[worker].append(max(0.0, work_s))
        self._beside_s[worker].append((is_updated, max(0.0, beside_s)))

    def sharing(self, cores: int | None) -> float:
        """How many times longer steps took because more computed at a time than ``cores``."""
        if cores is None or not self._is_on_cores:
            return 1.0
        return max(1.0, self._share.mean_at_work() / cores)

    def add_s(self) -> float:
        """What adding a push takes."""
        return statistics.fmean(self._added_s) if self._added_s else 0.0

    def apply_s(self) -> float:
        """What exchanges take longer that began with a new version."""
        both = [one for row in self._beside_s.values() for one in row]
        new, old = ([s for is_new, s in both if is_new is wanted] for wanted in (True, False))
        if min(len(new), len(old)) < FEWEST_STEPS:
            return 0.0
        return max(0.0, statistics.fmean(new) - statistics.fmean(old))

    def exchange_s(self, apply_s: float) -> dict[int, list[float]]:
        """The exchanges, without the writing of new versions."""
        return {
            worker: [max(0.0, beside_s - apply_s * is_updated) for is_updated, beside_s in row]
            for worker, row in self._beside_s.items()
        }


class _Share:
    """How many wanted a core at the same time, while anybody did."""

    def __init__(self) -> None:
        self._busy_s = 0.0
        self._spans: list[tuple[float, float]] = []

    def hear(self, until_s: float, lasted_s: float, busy_s: float) -> None:
        """A step ended then; of the time that it lasted it wanted a core for so long."""
        self._spans.append((until_s - lasted_s, until_s))
        self._busy_s += busy_s

    def mean_at_work(self) -> float:
        """Mean over the time in which somebody was at work."""
        covered_s, reached_s = 0.0, -math.inf
        for from_s, until_s in sorted(self._spans):
            covered_s += max(0.0, until_s - max(from_s, reached_s))
            reached_s = max(reached_s, until_s)
        return self._busy_s / covered_s if covered_s else 0.0


class _Ordered:
    """The delays that a run was given: they are known, so that the rest can be told.

    Args:
        header: of the trace.
    """

    def __init__(self, header: Header) -> None:
        workers = header.number("workers", 1)
        self._delays = parse_delays(header.texts("delay"), workers)
        self._slow, phases = parse_slowness(header.texts("slow"), workers)
        if phases:
            raise ConfigError(
                "a run whose workers are slow in phases is no profile: what it measured cannot be "
                "told from the phases; take one without --slow and name it for what is predicted"
            )
        self.num_steps = parse(header.text("protocol"), workers).num_steps
        self._seed = header.number("seed")
        self.is_delayed = any(one is not None and one.mean_s for one in self._delays)
        self._draws: dict[int, tuple[random.Random, int]] = {}  # of a member, and the next ticket

    def factor(self, worker: int) -> float:
        """How many times longer a worker was made to take."""
        return self._slow.get(worker, 1.0)

    def rest_s(
        self, worker: int, ticket: Ticket, compute_s: float, num_leases: int | None
    ) -> float:
        """Of the seconds of a ticket's computing, those that nobody ordered, a mini-batch.

        Args:
            num_leases: mini-batches of the ticket; None: as many as the protocol says.
        """
        if not 0 <= worker < len(self._delays):
            raise contradiction(f"worker {worker} pushes in a run of {len(self._delays)}")
        factor, delay = self._slow.get(worker, 1.0), self._delays[worker]
        num_steps = num_leases or self.num_steps
        if delay is None:
            return compute_s / factor / num_steps
        # A new life at a seat begins with the seat's first draw, as its process does.
        if ticket.member not in self._draws:
            self._draws[ticket.member] = (random.Random(f"{self._seed}/{worker}"), 0)
        rng, next_serial = self._draws[ticket.member]
        for _ in range((ticket.serial - next_serial) * self.num_steps):  # work called off
            delay.sample(rng)
        self._draws[ticket.member] = (rng, ticket.serial + 1)
        ordered_s = sum(delay.sample(rng) for _ in range(num_steps))
        return (compute_s / factor - ordered_s) / num_steps
