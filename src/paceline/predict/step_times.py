"""The steps of a recorded run, as its trace tells them: what each took, and of what.

    pushes     computing less the delay that was ordered: the work; the exchange beside it
    epochs     from the end of one to the first work of the next

This module must not know what is predicted from them.
"""

import math
import random
import statistics
from collections import defaultdict
from typing import NamedTuple

from ..conditions.delays import parse_delays
from ..conditions.machine import places
from ..conditions.slowness import parse_slowness
from ..errors import ConfigError
from ..events import Apply, EpochEnd, Grant, Joined, Ticket
from ..protocols import parse
from ..trace import contradiction
from ..trace.records import (
    Evaluated,
    Handed,
    Header,
    Heard,
    Ordered,
    Record,
    SupersededRecord,
)

_WARM_UP_STEPS = 2
"""Left out of each member, while it fills caches and allocates."""
FEWEST_STEPS = 10
"""From which a mean is taken."""


class _Granted(NamedTuple):
    """Work: of how many mini-batches, with a version just made, in answer to one's own push."""

    at_s: float
    num_leases: int
    is_updated: bool
    is_at_once: bool


class StepTimes:
    """The steps of a trace, one after the other; by worker, each exchange with `is_updated`."""

    def __init__(self, header: Header) -> None:
        self.work_s: defaultdict[int, list[float]] = defaultdict(list)
        self.beside_s: defaultdict[int, list[tuple[bool, float]]] = defaultdict(list)
        self.added_s: list[float] = []
        self.steps: list[tuple[int, float, float]] = []
        self._ordered = _OrderedDelays(header)
        is_local = header.text("engine") == "local"
        self._has_grants = is_local and header.text("path") == "store"
        self._is_on_cores = is_local and header.text("device", "cpu") == "cpu"
        self.threads = max(1, header.number("threads", 1)) if self._is_on_cores else 1
        """Of each worker: where it computes on cores of this machine, its step takes so many."""
        self._worker_of: dict[int, int] = {}
        self._granted: dict[tuple[int, int], _Granted] = {}
        self._num_granted: defaultdict[int, int] = defaultdict(int)
        self._num_pushed: defaultdict[int, int] = defaultdict(int)
        self._is_updated = False
        self._last = -1  # the last to push
        self._spans: list[tuple[float, float]] = []  # from when to when somebody was at work
        self._busy_s = 0.0  # what they wanted of a core in them
        self._ended_s: float | None = None  # when an epoch ended, until something starts
        self._pauses_s: list[float] = []
        self._pushed_s = 0.0  # when somebody pushed last
        self._evaluation_s = 0.0

    def hear(self, record: Record) -> None:
        """The next line."""
        match record:
            case Heard(fact=Joined(member, _), worker=int(worker)):
                self._worker_of[member] = worker
            case Handed():
                self._is_updated, self._pushed_s = False, record.fact.at_s
                self._last = record.fact.ticket.member
                self._pushed(record)
            case Ordered(order=Apply()):
                self._is_updated = True
            case Ordered(order=EpochEnd()):
                self._ended_s = record.t_s
            case Evaluated():
                self._evaluation_s = record.t_s - (self._ended_s or self._pushed_s)
            case Ordered(order=Grant(ticket=ticket, leases=leases)):
                if self._ended_s is not None:
                    self._pauses_s.append(record.t_s - self._ended_s)
                    self._ended_s = None
                self._num_granted[ticket.member] += 1
                self._granted[ticket[:2]] = _Granted(
                    record.t_s, len(leases), self._is_updated, self._last == ticket.member
                )
            case SupersededRecord() if not self._ordered.is_delayed:
                member = record.ticket.member
                factor = self._ordered.slow.get(self._worker_of.get(member, member), 1.0)
                self._worked(record.t_s, record.wasted_s, record.wasted_s / factor)

    def _pushed(self, record: Handed) -> None:
        ticket = record.fact.ticket
        member, at_s, compute_s = ticket.member, record.fact.at_s, record.compute_s
        worker = self._worker_of.get(member, member)
        if self._num_granted and ticket.serial >= self._num_granted[member]:
            raise contradiction(
                f"member {member} pushes ticket {ticket.serial}, and was given "
                f"{self._num_granted[member]}"
            )
        granted = self._granted.pop(ticket[:2], None)
        num_steps = (granted and granted.num_leases) or self._ordered.num_steps
        work_s = max(0.0, self._ordered.rest_s(worker, ticket, compute_s, num_steps))
        beside_s, is_updated = record.push_s, False
        if self._has_grants and granted is not None:
            beside_s, is_updated = at_s - granted.at_s - compute_s, granted.is_updated
            if granted.is_at_once:  # else it added while it waited
                beside_s -= record.add_s
        beside_s = max(0.0, beside_s)
        self._worked(at_s, compute_s + beside_s, work_s * num_steps + beside_s)
        self._num_pushed[member] += 1
        if self._num_pushed[member] <= _WARM_UP_STEPS or compute_s <= 0.0:
            return
        if record.add_s:
            self.added_s.append(record.add_s)
        self.work_s[worker].append(work_s)
        self.steps.append((worker, at_s, work_s))
        self.beside_s[worker].append((is_updated, beside_s))

    def _worked(self, until_s: float, lasted_s: float, busy_s: float) -> None:
        """A step ended then; of the time that it lasted it wanted a core for so long."""
        self._spans.append((until_s - lasted_s, until_s))
        self._busy_s += busy_s

    def sharing(self, cores: int | None) -> float:
        """How many times longer steps took because more computed at a time than ``cores`` carry."""
        if cores is None or not self._is_on_cores:
            return 1.0
        covered_s, reached_s = 0.0, -math.inf
        for from_s, until_s in sorted(self._spans):
            covered_s += max(0.0, until_s - max(from_s, reached_s))
            reached_s = max(reached_s, until_s)
        at_once = places(cores, self.threads)
        return max(1.0, self._busy_s / covered_s / at_once) if covered_s else 1.0

    def pause_s(self) -> float:
        """From the end of an epoch to the next one, in the mean."""
        return statistics.fmean(self._pauses_s or [self._evaluation_s])

    def apply_s(self) -> float:
        """What exchanges take longer that began with a new version."""
        both = [one for row in self.beside_s.values() for one in row]
        new, old = ([s for is_new, s in both if is_new is wanted] for wanted in (True, False))
        if min(len(new), len(old)) < FEWEST_STEPS:
            return 0.0
        return max(0.0, statistics.fmean(new) - statistics.fmean(old))

    def exchange_s(self, worker: int, apply_s: float, alone: float) -> tuple[float, ...]:
        """A worker's exchanges, without the writing of new versions."""
        row = self.beside_s[worker]
        return tuple(alone * max(0.0, s - apply_s * is_updated) for is_updated, s in row)


class _OrderedDelays:
    """The delays that a run was given: they are known, so that the rest can be told."""

    def __init__(self, header: Header) -> None:
        workers = header.number("workers", 1)
        self._delays = parse_delays(header.texts("delay"), workers)
        self.slow, phases = parse_slowness(header.texts("slow"), workers)
        if phases:
            raise ConfigError(
                "a run whose workers are slow in phases is no profile: what it measured cannot be "
                "told from the phases; take one without --slow and name it for what is predicted"
            )
        self.num_steps = parse(header.text("protocol"), workers).num_steps
        self._seed = header.number("seed")
        self.is_delayed = any(delay is not None and delay.mean_s for delay in self._delays)
        self._draws: dict[int, tuple[random.Random, int]] = {}  # of a member, and the next ticket

    def rest_s(self, worker: int, ticket: Ticket, compute_s: float, num_steps: int) -> float:
        """Of the seconds of a ticket's computing, those that nobody ordered, a mini-batch."""
        if not 0 <= worker < len(self._delays):
            raise contradiction(f"worker {worker} pushes in a run of {len(self._delays)}")
        factor, delay = self.slow.get(worker, 1.0), self._delays[worker]
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
