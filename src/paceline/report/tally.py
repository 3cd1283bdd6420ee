"""What a run adds up to: its trace, counted line by line.

Times are those of the trace; training time is from an epoch's first grant to its end, or to its
last update where it was not finished, so evaluations do not count. Lines of which not all can be
true are refused, rather than added up. Above 300 lines because each kind of line is counted here.
This module must not know what is made of the numbers.
"""

import math
from collections import Counter
from dataclasses import dataclass, field

from ..core.stats import ServiceTimes
from ..events import Apply, Discard, EpochEnd, Grant, Joined, Late, Lease, Pushed, Retire, Ticket
from ..trace import contradiction
from ..trace.records import (
    Ended,
    Evaluated,
    Handed,
    Header,
    Heard,
    Ordered,
    Record,
    Resumed,
    Scaled,
    StreamEnded,
    SupersededRecord,
)

WARM_UP_UPDATES = 3
"""At a run's begin, while workers fill caches and allocate."""


@dataclass(slots=True)
class WorkerTally:
    """One worker, over all its lives."""

    members: int = 0
    pushes: int = 0
    samples: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    push_s: float = 0.0
    input_s: float = 0.0
    superseded_s: float = 0.0


@dataclass(slots=True)
class EpochTally:
    """One epoch."""

    epoch: int
    start_s: float
    stop_s: float
    updates: int = 0
    loss_sum: float = 0.0
    loss_samples: int = 0
    is_whole: bool = False
    open_leases: dict[int, int] = field(default_factory=dict)
    """Samples of the leases that were granted and are in no update yet."""
    end_version: int = -1
    """At which it ended; -1: it has not."""
    end: int | None = None
    """Of a stream, once it is known: behind it there is nothing."""
    first_id: int = 0
    """Of the lease at position 0, where each is one position."""

    @property
    def seconds(self) -> float:
        return self.stop_s - self.start_s


@dataclass(frozen=True, slots=True)
class Update:
    """One applied update whose loss is known."""

    t_s: float
    num_samples: int
    loss: float


@dataclass(slots=True)
class WarmRate:
    """Updates once a run is warm, and only within epochs: what lies between two does not count."""

    updates: int = 0
    samples: int = 0
    seconds: float = 0.0
    _num_seen: int = 0
    _last_s: float | None = None

    def applied(self, t_s: float, num_samples: int) -> None:
        """An update was decided then."""
        self._num_seen += 1
        if self._last_s is not None and self._num_seen > WARM_UP_UPDATES:
            self.updates += 1
            self.samples += num_samples
            self.seconds += t_s - self._last_s
        self._last_s = t_s

    def paused(self) -> None:
        """What comes next does not follow at once."""
        self._last_s = None


@dataclass(slots=True)
class Mean:
    """A mean under way."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float, count: int = 1) -> None:
        self.total += value * count
        self.count += count


@dataclass(slots=True)
class Scales:
    """What a staleness rule left of pushes: by decision, or measured where they were applied."""

    decided: Mean = field(default_factory=Mean)
    measured: Mean = field(default_factory=Mean)

    @property
    def mean(self) -> float | None:
        one = self.measured if self.measured.count else self.decided
        return one.total / one.count if one.count else None


class Tally:
    """Counts of one run; ``add`` each record in order."""

    def __init__(self) -> None:
        self.header: Header | None = None
        self.version = 0
        self.samples = 0
        self.staleness: Counter[int] = Counter()
        self.scales = Scales()
        self.skipped = 0
        """Updates that changed nothing: a gradient in them was not finite."""
        self.discarded = 0
        self.late = 0
        self.superseded = 0
        self.wasted_s = 0.0
        self.saved_s = 0.0
        self.dropped_samples = 0
        self.workers: dict[int, WorkerTally] = {}
        self.epochs: list[EpochTally] = []
        self.updates: list[Update] = []
        self.evaluations: list[Evaluated] = []
        self.service = ServiceTimes(num_kept=4096)
        self.warm = WarmRate()
        self.resumes: list[Resumed] = []
        self.last_s = 0.0
        self.ended = ""
        self._samples_each = 1
        self._seats: dict[int, int] = {}
        self._pushed: dict[tuple[int, int], Pushed] = {}
        self._leases: dict[tuple[int, int], tuple[Lease, ...]] = {}
        self._over: dict[int, int] = {}
        """Samples of leases in no update when their epoch ended; they may ride on a later push."""

    @property
    def first_s(self) -> float:
        """When the first step began."""
        return self.epochs[0].start_s if self.epochs else 0.0

    @property
    def trained_s(self) -> float:
        """Seconds of training, over all epochs."""
        return sum(epoch.seconds for epoch in self.epochs)

    def add(self, record: Record) -> None:
        """Count one record. Raises ConfigError where it contradicts those before."""
        match record:
            case Header():
                self.header = record
                self._samples_each = record.number("samples_each") or 1
            case Handed():
                self._handed(record)
            case Ordered():
                self._ordered(record)
            case Heard(fact=Joined(member, at_s)):
                worker = member if record.worker is None else record.worker
                self._seats[member] = worker
                self.workers.setdefault(worker, WorkerTally()).members += 1
                self.last_s = max(self.last_s, at_s)
            case Heard():
                self.last_s = max(self.last_s, record.fact.at_s)
            case SupersededRecord():
                self.superseded += 1
                self.wasted_s += record.wasted_s
                self.saved_s += record.saved_s
                self._worker(record.ticket.member).superseded_s += record.wasted_s
                self.last_s = max(self.last_s, record.t_s)
            case Scaled():
                self.scales.measured.add(record.scale)
                self.last_s = max(self.last_s, record.t_s)
            case StreamEnded():
                self._stream_ended(record)
            case Resumed():
                self.resumes.append(record)
                self.version = record.version  # that of before, but for a trace that was damaged
                self._free_leases()
                self.last_s = max(self.last_s, record.t_s)
            case Evaluated():
                self.evaluations.append(record)
                self.last_s = max(self.last_s, record.t_s)
            case Ended():
                self.ended = record.reason
                self.last_s = max(self.last_s, record.t_s)
            case _:
                self.last_s = max(self.last_s, record.t_s)

    def _worker(self, member: int) -> WorkerTally:
        return self.workers.setdefault(self._seats.get(member, member), WorkerTally())

    def _handed(self, record: Handed) -> None:
        fact = record.fact
        granted = sum(map(self._size, self._leases.get(fact.ticket[:2], ())))
        if granted and fact.num_samples > granted:
            raise contradiction(
                f"member {fact.ticket.member} hands in {fact.num_samples:,} samples of {granted:,}"
            )
        self._pushed[fact.ticket[:2]] = fact
        self.last_s = max(self.last_s, fact.at_s)
        worker = self._worker(fact.ticket.member)
        worker.pushes += 1
        worker.samples += fact.num_samples
        worker.compute_s += record.compute_s
        worker.wait_s += record.wait_s
        worker.push_s += record.push_s
        worker.input_s += record.input_s
        seat = self._seats.get(fact.ticket.member, fact.ticket.member)
        self.service.add(seat, record.compute_s, record.input_s)

    def _ordered(self, record: Ordered) -> None:
        order, t_s = record.order, record.t_s
        self.last_s = max(self.last_s, t_s)
        match order:
            case Apply():
                self._applied(order, t_s)
            case Grant():
                self._granted(order, t_s)
            case Discard():
                self.discarded += 1
                self._forget(order.ticket)
            case Late():
                self.late += 1
                self._forget(order.ticket)
            case Retire():
                for ticket in order.tickets:  # what it neither keeps nor leaves, others have used
                    self._use_leases(ticket, self._pushed.pop(ticket[:2], None))
            case EpochEnd():
                self.warm.paused()
                self._epoch_ended(order, t_s)

    def _granted(self, order: Grant, t_s: float) -> None:
        # A ticket may be granted more than once: gradient accumulation adds leases to it.
        self._leases[order.ticket[:2]] = (
            *self._leases.get(order.ticket[:2], ()),
            *order.leases,
        )
        for lease in (*order.leases, *order.upcoming):
            if lease.id in self._over:
                continue  # it rides on
            if not self.epochs or self.epochs[-1].epoch < lease.epoch:
                self.epochs.append(EpochTally(lease.epoch, t_s, t_s))
            epoch = self.epochs[-1]
            epoch.first_id = lease.id - lease.start
            if epoch.end is None or lease.start < epoch.end:
                epoch.open_leases.setdefault(lease.id, self._size(lease))

    def _size(self, lease: Lease) -> int:
        """Samples of a lease: of a stream each position is a mini-batch."""
        return lease.num_samples * self._samples_each

    def _stream_ended(self, record: StreamEnded) -> None:
        """What was granted behind its end holds nothing, and is not missing."""
        self.last_s = max(self.last_s, record.t_s)
        if self.epochs and self.epochs[-1].epoch == record.epoch:
            epoch, end = self.epochs[-1], record.end
            epoch.end, leases = end, epoch.open_leases
            epoch.open_leases = {one: n for one, n in leases.items() if one - epoch.first_id < end}

    def _applied(self, order: Apply, t_s: float) -> None:
        loss_sum, loss_samples, num_samples = 0.0, 0, 0
        is_finite = True
        for ticket in order.tickets:
            # The version that the gradient was computed at against the one it is applied to.
            fact = self._pushed.pop(ticket[:2], None)
            if fact is None or ticket.version > self.version:
                raise contradiction(f"update {self.version + 1} has a push that nobody handed in")
            self.staleness[self.version - ticket.version] += 1
            self._use_leases(ticket, fact)
            num_samples += fact.num_samples
            is_finite &= fact.is_finite
            if math.isfinite(fact.loss):
                loss_sum += fact.loss * fact.num_samples
                loss_samples += fact.num_samples
        self.samples += num_samples
        self.warm.applied(t_s, num_samples)
        # Without a rule the weights are shares of the samples and sum to 1.
        self.scales.decided.add(sum(order.weights), len(order.tickets))
        self.version += 1
        self.skipped += not is_finite
        if loss_samples:
            self.updates.append(Update(t_s, loss_samples, loss_sum / loss_samples))
        if self.epochs:
            epoch = self.epochs[-1]
            epoch.stop_s = max(epoch.stop_s, t_s)
            epoch.updates += 1
            epoch.loss_sum += loss_sum
            epoch.loss_samples += loss_samples

    def _use_leases(self, ticket: Ticket, fact: Pushed | None) -> None:
        """An update has used the leases of a push, but for those that it keeps or leaves unused."""
        rest = () if fact is None else fact.kept + fact.unused
        for lease in self._leases.pop(ticket[:2], ()):
            if self.epochs and lease.id not in rest:
                self.epochs[-1].open_leases[lease.id] = 0
                self.dropped_samples -= self._over.pop(lease.id, 0)

    def _forget(self, ticket: Ticket) -> None:
        self._pushed.pop(ticket[:2], None)
        self._leases.pop(ticket[:2], None)

    def _free_leases(self) -> None:
        """Free the leases at work or in no update yet: they are granted again."""
        self.warm.paused()
        self._pushed.clear()
        self._leases.clear()
        if self.epochs:
            leases = self.epochs[-1].open_leases
            self.epochs[-1].open_leases = {one: n for one, n in leases.items() if not n}

    def _epoch_ended(self, order: EpochEnd, t_s: float) -> None:
        if not self.epochs or self.epochs[-1].epoch != order.epoch:
            return
        epoch = self.epochs[-1]
        epoch.stop_s = t_s
        epoch.is_whole, epoch.end_version = True, order.version
        # Every lease is in an update or was dropped: what is in none was dropped, or rides on.
        self.dropped_samples += sum(epoch.open_leases.values()) + order.num_unused
        self._over.update({one: n for one, n in epoch.open_leases.items() if n})
        epoch.open_leases.clear()
