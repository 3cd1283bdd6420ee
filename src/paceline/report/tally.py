"""Totals of a run, counted from its trace line by line.

Times are those of the trace. Training time runs from an epoch's first grant to its end, or to its
last update if it was not finished, so evaluations do not count. Lines that contradict each other
raise ConfigError. Above 300 lines because each kind of line is counted here. This module must not
know what the numbers are used for.
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
"""Updates at the start of a run that do not count: workers fill caches and allocate memory."""


@dataclass(slots=True)
class WorkerTally:
    """Totals of one worker, over all its lives."""

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
    """Totals of one epoch."""

    epoch: int
    start_s: float
    stop_s: float
    updates: int = 0
    loss_sum: float = 0.0
    loss_samples: int = 0
    is_whole: bool = False
    open_leases: dict[int, int] = field(default_factory=dict)
    """Lease id -> its samples that are granted and in no update yet."""
    end_version: int = -1
    """The version at which the epoch ended; -1: it has not."""
    end: int | None = None
    """The position where a stream ended; None: not known yet."""
    first_id: int = 0
    """Id of the lease at position 0 of a stream, where a lease is one position."""

    @property
    def seconds(self) -> float:
        return self.stop_s - self.start_s


@dataclass(frozen=True, slots=True)
class Update:
    """One applied update whose loss is known; ``version`` is the one that it made."""

    version: int
    t_s: float
    num_samples: int
    loss: float


@dataclass(slots=True)
class WarmRate:
    """Rate of updates after the warm-up; the time between epochs does not count."""

    updates: int = 0
    samples: int = 0
    seconds: float = 0.0
    _num_applied: int = 0
    _last_s: float | None = None

    def applied(self, t_s: float, num_samples: int) -> None:
        """Count an update that was decided at ``t_s``."""
        self._num_applied += 1
        if self._last_s is not None and self._num_applied > WARM_UP_UPDATES:
            self.updates += 1
            self.samples += num_samples
            self.seconds += t_s - self._last_s
        self._last_s = t_s

    def paused(self) -> None:
        """Do not count the time until the next update."""
        self._last_s = None


@dataclass(slots=True)
class Mean:
    """A running mean."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float, count: int = 1) -> None:
        self.total += value * count
        self.count += count


@dataclass(slots=True)
class Scales:
    """Factors a staleness rule applied to pushes: as decided, or as measured when applied."""

    decided: Mean = field(default_factory=Mean)
    measured: Mean = field(default_factory=Mean)

    @property
    def mean(self) -> float | None:
        mean = self.measured if self.measured.count else self.decided
        return mean.total / mean.count if mean.count else None


class Tally:
    """Totals of one run; call ``add`` with each record in order."""

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
        """Those whose loss is known: others have none, or one that is not finite."""
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
        """Samples of leases in no update at their epoch's end; a later push may still use them."""

    @property
    def first_s(self) -> float:
        """When the first step began."""
        return self.epochs[0].start_s if self.epochs else 0.0

    @property
    def trained_s(self) -> float:
        """Seconds of training, over all epochs."""
        return sum(epoch.seconds for epoch in self.epochs)

    def last_updates(self, num: int) -> list[Update]:
        """Those of the last ``num`` updates whose loss is known."""
        return [update for update in self.updates[-num:] if update.version > self.version - num]

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
                self.version = record.version  # differs only if the trace is damaged
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
                for ticket in order.tickets:  # others used what it neither kept nor left unused
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
                continue  # carried over from the previous epoch
            if not self.epochs or self.epochs[-1].epoch < lease.epoch:
                self.epochs.append(EpochTally(lease.epoch, t_s, t_s))
            epoch = self.epochs[-1]
            epoch.first_id = lease.id - lease.start
            if epoch.end is None or lease.start < epoch.end:
                epoch.open_leases.setdefault(lease.id, self._size(lease))

    def _size(self, lease: Lease) -> int:
        """Return the samples of a lease; a position of a stream is a whole mini-batch."""
        return lease.num_samples * self._samples_each

    def _stream_ended(self, record: StreamEnded) -> None:
        """Forget open leases past the end of the stream: they hold no samples."""
        self.last_s = max(self.last_s, record.t_s)
        if self.epochs and self.epochs[-1].epoch == record.epoch:
            epoch, end = self.epochs[-1], record.end
            epoch.end, leases = end, epoch.open_leases
            epoch.open_leases = {
                lease_id: n for lease_id, n in leases.items() if lease_id - epoch.first_id < end
            }

    def _applied(self, order: Apply, t_s: float) -> None:
        loss_sum, loss_samples, num_samples = 0.0, 0, 0
        is_finite = True
        for ticket in order.tickets:
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
            self.updates.append(Update(self.version, t_s, loss_samples, loss_sum / loss_samples))
        if self.epochs:
            epoch = self.epochs[-1]
            epoch.stop_s = max(epoch.stop_s, t_s)
            epoch.updates += 1
            epoch.loss_sum += loss_sum
            epoch.loss_samples += loss_samples

    def _use_leases(self, ticket: Ticket, fact: Pushed | None) -> None:
        """Count the leases of a push as used, except those that it keeps or leaves unused."""
        rest = () if fact is None else fact.kept + fact.unused
        for lease in self._leases.pop(ticket[:2], ()):
            if self.epochs and lease.id not in rest:
                self.epochs[-1].open_leases[lease.id] = 0
                self.dropped_samples -= self._over.pop(lease.id, 0)

    def _forget(self, ticket: Ticket) -> None:
        self._pushed.pop(ticket[:2], None)
        self._leases.pop(ticket[:2], None)

    def _free_leases(self) -> None:
        """Drop leases that are granted or in no update yet: a resumed run grants them again."""
        self.warm.paused()
        self._pushed.clear()
        self._leases.clear()
        if self.epochs:
            leases = self.epochs[-1].open_leases
            self.epochs[-1].open_leases = {lease_id: n for lease_id, n in leases.items() if not n}

    def _epoch_ended(self, order: EpochEnd, t_s: float) -> None:
        if not self.epochs or self.epochs[-1].epoch != order.epoch:
            return
        epoch = self.epochs[-1]
        epoch.stop_s = t_s
        epoch.is_whole, epoch.end_version = True, order.version
        # A lease in no update was dropped, unless a later push uses it (_use_leases).
        self.dropped_samples += sum(epoch.open_leases.values()) + order.num_unused
        self._over.update({lease_id: n for lease_id, n in epoch.open_leases.items() if n})
        epoch.open_leases.clear()
