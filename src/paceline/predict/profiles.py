"""What a short real run tells: how long steps take, and what the exchange beside them costs.

    grant ------ exchange ------ computing ---- ordered delay ---- push --> heard
            (message, update,                   (--delay: known,      (slot,
             pull)             compute           taken out)            message)

The exchange of a step is the time from its grant to its push being heard, less the computing and
the ordered delay: the messages both ways, the pull, and the coordinator's own time. The adding is
measured by itself (``add_s``), since an update of one push adds nothing, and pushes at the same
time are added one after the other. Where an exchange began with a new version, writing that is in
it as well: what such steps take longer is ``apply_s``. A run between peers has no grants: its
exchange is what its workers say they spent on it.

All of it is measured with the cores as busy as they were in that run, so the best profile is of an
asynchronous run, where nobody is granted at the same time as others (paceline plan takes one of
k-batch-async). Of more workers than cores it is brought to what a core of one's own would take.
This module must not know what is predicted from it.
"""

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..conditions.delays import Delay, parse_delays
from ..conditions.distributions import Empirical
from ..conditions.machine import Drift, Machine, drift_of
from ..conditions.slowness import parse_slowness
from ..errors import ConfigError
from ..events import Apply, Grant, Joined, Ticket
from ..protocols import parse
from ..trace import FILE_NAME, contradiction, read_trace
from ..trace.records import Handed, Header, Heard, Ordered, Record, Resumed, SupersededRecord

_WARM_UP_STEPS, _FEWEST_STEPS = 2, 10
"""Left out of each member, while it fills caches and allocates; and from which a mean is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The timing of one recorded run: of one task, one model and one mini-batch size.

    Attributes:
        work_s: by worker, the seconds of computing each mini-batch on a core of its own, without
            warm-up and what ``delay`` and ``slow`` ordered.
        exchange_s: by worker, the seconds of each exchange beside them.
        add_s: what adding a push to the sum of its update takes; 0.0 where none was.
        apply_s: what writing a new version takes; 0.0 where it could not be told apart.
        delay, slow: as that run was given them.
        cores: that its workers shared; None: it was not recorded.
        drift: how much the machine's speed changed meanwhile (`drift_of`).
    """

    run_dir: Path
    task: str
    mini_batch_size: int
    num_parameters: int
    work_s: Mapping[int, tuple[float, ...]]
    exchange_s: Mapping[int, tuple[float, ...]]
    add_s: float
    apply_s: float
    delay: tuple[str, ...]
    slow: tuple[str, ...]
    cores: int | None
    drift: Drift

    @property
    def num_steps(self) -> int:
        return sum(len(one) for one in self.work_s.values())

    @property
    def mean_step_s(self) -> float:
        """Seconds of computing a mini-batch."""
        return statistics.fmean(value for one in self.work_s.values() for value in one)

    @property
    def push_s(self) -> float:
        """Seconds beside it, from a grant to the next push."""
        return statistics.fmean(value for one in self.exchange_s.values() for value in one)

    def machine(self, num_workers: int, cores: int | None) -> Machine:
        """What so many workers would meet, ``cores`` of them at the same time (None: all).

        With as many workers as the run had each has its own times, otherwise all share all.
        """
        return Machine(
            text=f"as in {self.run_dir}", work=_delays(self.work_s, num_workers),
            exchange=_delays(self.exchange_s, num_workers),
            add_s=self.add_s, apply_s=self.apply_s, cores=cores, drift=self.drift,
        )  # fmt: skip

    def check(
        self, task: str, num_parameters: int, mini_batch_size: int, flag: str = "--profile"
    ) -> None:
        """Raises ConfigError where the profile is of something else; it says what differs."""
        pairs = {
            "task": (self.task, task),
            "parameters": (self.num_parameters, num_parameters),
            "mini-batch size": (self.mini_batch_size, mini_batch_size),
        }
        wrong = [f"{name} {a} there, {b} here" for name, (a, b) in pairs.items() if a != b]
        if wrong:
            remedy = "leave --profile out to take one now"
            if flag != "--profile":
                remedy = f"give {flag} a run of the same"
            if len(wrong) == 1 and self.mini_batch_size != mini_batch_size:
                remedy += f", or ask for --mini-batch-size {self.mini_batch_size}"
            raise ConfigError(
                f"the profile {self.run_dir} is of something else ({'; '.join(wrong)}); {remedy}"
            )


def _delays(rows: Mapping[int, tuple[float, ...]], num_workers: int) -> tuple[Delay, ...]:
    chosen = [rows[worker] for worker in sorted(rows)]
    if sorted(rows) != list(range(num_workers)):
        chosen = [tuple(value for row in rows.values() for value in row)] * num_workers
    return tuple(Delay(text="measured", terms=(Empirical(values_s=row),)) for row in chosen)


def read_profile(run_dir: Path) -> Profile:
    """The profile that a run's trace holds.

    Raises:
        ConfigError: there is no trace, it is damaged or of another version, or tells too little.
    """
    records = read_trace(run_dir / FILE_NAME)
    header = next((one for one in records if isinstance(one, Header)), None)
    if header is None:
        raise ConfigError(f"the trace in {run_dir} is empty: that run never began")
    found = _Steps(header)
    for record in records:
        if isinstance(record, Resumed):
            break  # its workers' delays go on from a checkpoint, which this file does not hold
        found.hear(record)
    if (num_steps := sum(map(len, found.work_s.values()))) < _FEWEST_STEPS:
        raise ConfigError(
            f"{run_dir} has {num_steps} timed steps, at least {_FEWEST_STEPS} are needed for a "
            "profile; take a longer run"
        )
    apply_s, cores = found.apply_s(), header.number("cores") or None
    alone, workers = 1.0 / found.sharing(cores), sorted(found.work_s)
    return Profile(
        run_dir=run_dir,
        task=header.text("task"),
        mini_batch_size=header.number("mini_batch_size"),
        num_parameters=header.number("num_parameters"),
        work_s={one: tuple(alone * work_s for work_s in found.work_s[one]) for one in workers},
        exchange_s={one: found.exchange_s(one, apply_s, alone) for one in workers},
        add_s=statistics.fmean(found.added_s or [0.0]),
        apply_s=apply_s,
        delay=header.texts("delay"), slow=header.texts("slow"),
        cores=cores, drift=drift_of(found.steps),
    )  # fmt: skip


class _Granted(NamedTuple):
    """Work: of how many mini-batches, with a version just made, in answer to one's own push."""

    at_s: float
    num_leases: int
    is_updated: bool
    is_at_once: bool


class _Steps:
    """The steps of a trace, one after the other; by worker, each exchange with `is_updated`."""

    def __init__(self, header: Header) -> None:
        self.work_s: defaultdict[int, list[float]] = defaultdict(list)
        self.beside_s: defaultdict[int, list[tuple[bool, float]]] = defaultdict(list)
        self.added_s: list[float] = []
        self.steps: list[tuple[int, float, float]] = []
        self._ordered = _Ordered(header)
        is_local = header.text("engine") == "local"
        self._has_grants = is_local and header.text("path") == "store"
        self._is_on_cores = is_local and header.text("device", "cpu") == "cpu"
        self._worker_of: dict[int, int] = {}
        self._granted: dict[tuple[int, int], _Granted] = {}
        self._num_granted: defaultdict[int, int] = defaultdict(int)
        self._num_pushed: defaultdict[int, int] = defaultdict(int)
        self._is_updated = False
        self._last = -1  # who pushed last
        self._spans: list[tuple[float, float]] = []  # from when to when somebody was at work
        self._busy_s = 0.0  # what they wanted of a core in them

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
        """How many times longer steps took because more computed at a time than ``cores``."""
        if cores is None or not self._is_on_cores:
            return 1.0
        covered_s, reached_s = 0.0, -math.inf
        for from_s, until_s in sorted(self._spans):
            covered_s += max(0.0, until_s - max(from_s, reached_s))
            reached_s = max(reached_s, until_s)
        return max(1.0, self._busy_s / covered_s / cores) if covered_s else 1.0

    def apply_s(self) -> float:
        """What exchanges take longer that began with a new version."""
        both = [one for row in self.beside_s.values() for one in row]
        new, old = ([s for is_new, s in both if is_new is wanted] for wanted in (True, False))
        if min(len(new), len(old)) < _FEWEST_STEPS:
            return 0.0
        return max(0.0, statistics.fmean(new) - statistics.fmean(old))

    def exchange_s(self, worker: int, apply_s: float, alone: float) -> tuple[float, ...]:
        """A worker's exchanges, without the writing of new versions."""
        row = self.beside_s[worker]
        return tuple(alone * max(0.0, s - apply_s * is_updated) for is_updated, s in row)


class _Ordered:
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
        self.is_delayed = any(one is not None and one.mean_s for one in self._delays)
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
