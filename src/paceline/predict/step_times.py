"""The times of the steps of a recorded run, read from its trace.

    pushes     the work: computing minus the ordered delay; and the exchange beside it
    epochs     the pause from the end of one to the first work of the next

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
"""Skipped for each member, while it fills caches and allocates."""
FEWEST_STEPS = 10
"""The fewest steps that a mean is taken of."""


class _Granted(NamedTuple):
    """A grant to a member.

    Attributes:
        at_s: when it was granted.
        num_leases: mini-batches of it.
        is_updated: whether it came with a version just made.
        is_answer: whether it answered the member's own push.
    """

    at_s: float
    num_leases: int
    is_updated: bool
    is_answer: bool


class StepTimes:
    """Collects the times of steps from the records of a trace, in their order.

    Attributes:
        work_s: by worker, the seconds of computing each mini-batch.
        exchanges: by worker, whether each exchange began with a new version, and its seconds.
        add_s: the seconds of adding each push.
        steps: worker, time and ``work_s`` of each step.
    """

    def __init__(self, header: Header) -> None:
        self.work_s: defaultdict[int, list[float]] = defaultdict(list)
        self.exchanges: defaultdict[int, list[tuple[bool, float]]] = defaultdict(list)
        self.add_s: list[float] = []
        self.steps: list[tuple[int, float, float]] = []
        self._ordered = _OrderedDelays(header)
        is_local = header.text("engine") == "local"
        self._has_grants = is_local and header.text("path") == "store"
        self._is_on_cores = is_local and header.text("device", "cpu") == "cpu"
        self.threads = max(1, header.number("threads", 1)) if self._is_on_cores else 1
        """Threads of each worker: the cores that its step takes on this machine."""
        self._worker_of: dict[int, int] = {}
        self._granted: dict[tuple[int, int], _Granted] = {}
        self._num_granted: defaultdict[int, int] = defaultdict(int)
        self._num_pushed: defaultdict[int, int] = defaultdict(int)
        self._is_updated = False
        self._last_pusher = -1
        self._spans: list[tuple[float, float]] = []  # start and end of each step
        self._busy_s = 0.0  # seconds of a core that the steps in them needed
        self._epoch_end_s: float | None = None  # of the last epoch, until the next work
        self._pauses_s: list[float] = []
        self._last_push_s = 0.0
        self._evaluation_s = 0.0

    def add(self, record: Record) -> None:
        """Add the next record of the trace."""
        match record:
            case Heard(fact=Joined(member, _), worker=int(worker)):
                self._worker_of[member] = worker
            case Handed():
                self._is_updated, self._last_push_s = False, record.fact.at_s
                self._last_pusher = record.fact.ticket.member
                self._add_push(record)
            case Ordered(order=Apply()):
                self._is_updated = True
            case Ordered(order=EpochEnd()):
                self._epoch_end_s = record.t_s
            case Evaluated():
                self._evaluation_s = record.t_s - (self._epoch_end_s or self._last_push_s)
            case Ordered(order=Grant(ticket=ticket, leases=leases)):
                if self._epoch_end_s is not None:
                    self._pauses_s.append(record.t_s - self._epoch_end_s)
                    self._epoch_end_s = None
                self._num_granted[ticket.member] += 1
                self._granted[ticket[:2]] = _Granted(
                    record.t_s, len(leases), self._is_updated, self._last_pusher == ticket.member
                )
            case SupersededRecord() if not self._ordered.is_delayed:
                member = record.ticket.member
                factor = self._ordered.slow.get(self._worker_of.get(member, member), 1.0)
                self._add_span(record.t_s, record.wasted_s, record.wasted_s / factor)

    def _add_push(self, record: Handed) -> None:
        ticket = record.fact.ticket
        member, at_s, compute_s = ticket.member, record.fact.at_s, record.compute_s
        worker = self._worker_of.get(member, member)
        if self._num_granted and ticket.serial >= self._num_granted[member]:
            raise contradiction(
                f"member {member} pushes ticket {ticket.serial} after "
                f"{self._num_granted[member]} grants"
            )
        granted = self._granted.pop(ticket[:2], None)
        num_steps = (granted and granted.num_leases) or self._ordered.num_steps
        work_s = max(0.0, self._ordered.work_s(worker, ticket, compute_s, num_steps))
        exchange_s, is_updated = record.push_s, False
        if self._has_grants and granted is not None:
            exchange_s, is_updated = at_s - granted.at_s - compute_s, granted.is_updated
            if granted.is_answer:  # otherwise it added while it waited for the grant
                exchange_s -= record.add_s
        exchange_s = max(0.0, exchange_s)
        self._add_span(at_s, compute_s + exchange_s, work_s * num_steps + exchange_s)
        self._num_pushed[member] += 1
        if self._num_pushed[member] <= _WARM_UP_STEPS or compute_s <= 0.0:
            return
        if record.add_s:
            self.add_s.append(record.add_s)
        self.work_s[worker].append(work_s)
        self.steps.append((worker, at_s, work_s))
        self.exchanges[worker].append((is_updated, exchange_s))

    def _add_span(self, end_s: float, lasted_s: float, busy_s: float) -> None:
        """Add a step that needed a core for ``busy_s`` of the time it lasted."""
        self._spans.append((end_s - lasted_s, end_s))
        self._busy_s += busy_s

    def sharing(self, cores: int | None) -> float:
        """How many times longer steps took because more workers computed than ``cores`` carry."""
        if cores is None or not self._is_on_cores:
            return 1.0
        covered_s, latest_s = 0.0, -math.inf
        for start_s, end_s in sorted(self._spans):
            covered_s += max(0.0, end_s - max(start_s, latest_s))
            latest_s = max(latest_s, end_s)
        num_at_once = places(cores, self.threads)
        return max(1.0, self._busy_s / covered_s / num_at_once) if covered_s else 1.0

    def pause_s(self) -> float:
        """The mean seconds from the end of an epoch to the next one."""
        return statistics.fmean(self._pauses_s or [self._evaluation_s])

    def apply_s(self) -> float:
        """The extra seconds of exchanges that began with a new version; 0.0: too few of a kind."""
        exchanges = [exchange for row in self.exchanges.values() for exchange in row]
        with_update_s = [seconds for is_updated, seconds in exchanges if is_updated]
        without_s = [seconds for is_updated, seconds in exchanges if not is_updated]
        if min(len(with_update_s), len(without_s)) < FEWEST_STEPS:
            return 0.0
        return max(0.0, statistics.fmean(with_update_s) - statistics.fmean(without_s))

    def exchange_s(self, worker: int, apply_s: float, factor: float) -> tuple[float, ...]:
        """The seconds of a worker's exchanges, times ``factor``, without writing new versions."""
        return tuple(
            factor * max(0.0, seconds - apply_s * is_updated)
            for is_updated, seconds in self.exchanges[worker]
        )


class _OrderedDelays:
    """The delays in the settings of a run: they can be repeated and subtracted."""

    def __init__(self, header: Header) -> None:
        workers = header.number("workers", 1)
        self._delays = parse_delays(header.texts("delay"), workers)
        self.slow, phases = parse_slowness(header.texts("slow"), workers)
        if phases:
            raise ConfigError(
                "a run whose workers are slow in phases cannot be a profile: its times do not "
                "separate from the phases; profile a run without --slow, and give --slow to the "
                "prediction"
            )
        self.num_steps = parse(header.text("protocol"), workers).num_steps
        self._seed = header.number("seed")
        self.is_delayed = any(delay is not None and delay.mean_s for delay in self._delays)
        self._draws: dict[int, tuple[random.Random, int]] = {}  # by member: generator, next ticket

    def work_s(self, worker: int, ticket: Ticket, compute_s: float, num_steps: int) -> float:
        """The seconds that a mini-batch of a ticket computed, without the ordered delay."""
        if not 0 <= worker < len(self._delays):
            raise contradiction(f"worker {worker} pushes in a run of {len(self._delays)} workers")
        factor, delay = self.slow.get(worker, 1.0), self._delays[worker]
        if delay is None:
            return compute_s / factor / num_steps
        # A new member of a worker starts with the worker's first draw, as its process does.
        if ticket.member not in self._draws:
            self._draws[ticket.member] = (random.Random(f"{self._seed}/{worker}"), 0)
        rng, next_serial = self._draws[ticket.member]
        for _ in range((ticket.serial - next_serial) * self.num_steps):  # cancelled work
            delay.sample(rng)
        self._draws[ticket.member] = (rng, ticket.serial + 1)
        ordered_s = sum(delay.sample(rng) for _ in range(num_steps))
        return (compute_s / factor - ordered_s) / num_steps
