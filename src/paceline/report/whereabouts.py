"""What became of one sample: which update used it, by which worker and how stale, epoch by epoch.

    sample --order of the epoch--> position --lease--> tickets --> the update, or why there is none

A run hands out positions of an epoch's order. The order is drawn by the user's sampler, which a
trace does not hold; the order of torch's own sampler is redrawn from the run's seed. Everything
else comes from the trace. Above 300 lines, since one pass over the trace answers all. This module
must not know terminals or engines.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ConfigError
from ..events import (
    Apply,
    Cancel,
    Discard,
    EpochEnd,
    Grant,
    Joined,
    Late,
    Lease,
    Left,
    Pushed,
    Retire,
)
from ..trace import FILE_NAME, contradiction, read_trace
from ..trace.records import Handed, Header, Heard, Ordered, Record, Resumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What became of one sample in one epoch.

    Attributes:
        epoch: from 1.
        position: in the epoch's order.
        tries: how often its mini-batch was granted.
        update: the update that used it, from 1; None: none did.
        worker: the worker that computed the gradient.
        staleness_versions: updates between the gradient's parameters and its update.
        reason: why no update used it, or what happened before one did.
    """

    epoch: int
    position: int
    tries: int
    update: int | None
    worker: int | None
    staleness_versions: int | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochLedger:
    """Counts of an epoch's samples: ``used``, ``dropped`` and ``open`` add up to ``samples``."""

    epoch: int
    samples: int
    used: int
    dropped: int
    open: int
    """Not used yet, in an epoch that was not finished."""
    twice: int
    """In more than one update; anything but 0 is a bug."""


@dataclass(slots=True)
class _TrackedLease:
    lease: Lease
    tickets: list[tuple[int, int]] = field(default_factory=list)
    update: int | None = None
    worker: int | None = None
    staleness: int | None = None
    num_updates: int = 0


class Fates:
    """The leases of a run and what became of each; call ``add`` with every record in order."""

    def __init__(self) -> None:
        self.header: Header | None = None
        self.epochs: dict[int, dict[int, _TrackedLease]] = {}
        self.ended: set[int] = set()
        self._returned: dict[int, list[_TrackedLease]] = {}
        """Epoch -> leases unused when the run was resumed; their ranges were then leased again."""
        self._seats: dict[int, int] = {}
        self._work: dict[tuple[int, int], list[_TrackedLease]] = {}
        self._current: dict[int, tuple[int, int]] = {}
        self._pushed: dict[tuple[int, int], Pushed] = {}
        self._given_up: dict[tuple[int, int], str] = {}
        """Ticket -> why no update used its work."""
        self._gone: dict[int, str] = {}
        self._version = 0

    def add(self, record: Record) -> None:
        """Process one record."""
        match record:
            case Header():
                self.header = record
            case Heard(fact=Joined(member, _)):
                self._seats[member] = member if record.worker is None else record.worker
            case Resumed():
                self._resumed(record)
            case Heard(fact=Left(member, _)):
                self._gone[member] = record.reason or "gone"
            case Handed():
                self._pushed[record.fact.ticket[:2]] = record.fact
            case Ordered():
                self._ordered(record)

    def _resumed(self, record: Resumed) -> None:
        """Set unused leases aside: their ranges are cut again for the new number of workers."""
        self._version = record.version  # differs only if the trace is damaged
        self._work.clear()
        for epoch, leases in self.epochs.items():
            returned = [lease for lease in leases.values() if lease.update is None]
            self._returned.setdefault(epoch, []).extend(returned)
            for unused in returned:
                del leases[unused.lease.start]

    def _ordered(self, record: Ordered) -> None:
        match record.order:
            case Grant(ticket, leases, _):
                granted = [self._track(lease) for lease in leases]
                self._work.setdefault(ticket[:2], []).extend(granted)
                self._current[ticket.member] = ticket[:2]
                for tracked in granted:
                    tracked.tickets.append(ticket[:2])
            case Apply(tickets, _):
                self._applied(tickets)
            case Retire(tickets):
                for ticket in tickets:  # its batches were stepped on: name the last update
                    for used in self._used_by(ticket[:2]):
                        used.num_updates, used.update, used.staleness = 1, self._version, 0
                        used.worker = self._seats.get(ticket.member, ticket.member)
            case Cancel(member):
                if member not in self._current:
                    raise contradiction(f"member {member} is cancelled but never had work")
                self._give_up(self._current[member], "cancelled")
            case Discard(ticket):
                self._give_up(ticket[:2], "its push was discarded")
            case Late(ticket):
                self._give_up(ticket[:2], "its push was late")
            case EpochEnd(epoch, _):
                self.ended.add(epoch)

    def _applied(self, tickets: Iterable[tuple[int, int, int]]) -> None:
        for member, serial, version in tickets:
            for tracked in self._used_by((member, serial)):
                tracked.num_updates += 1
                tracked.update = self._version + 1
                tracked.worker = self._seats.get(member, member)
                tracked.staleness = self._version - version
        self._version += 1

    def _used_by(self, ticket: tuple[int, int]) -> list[_TrackedLease]:
        """Take the leases that a push uses: neither kept for a later push nor left unused."""
        work, fact = self._work.pop(ticket, []), self._pushed.get(ticket)
        if fact is None:
            return work
        for tracked in work:
            if tracked.lease.id in fact.unused:
                self._given_up[ticket] = "the script did not use it"
        return [tracked for tracked in work if tracked.lease.id not in fact.kept + fact.unused]

    def _give_up(self, ticket: tuple[int, int], why: str) -> None:
        earlier = self._given_up.get(ticket)
        self._given_up[ticket] = why if earlier is None else f"{earlier}, {why}"

    def _history(self, tickets: Iterable[tuple[int, int]]) -> list[str]:
        """Return why tries of a mini-batch were not used, in order."""
        reasons = []
        for ticket in tickets:
            reason = self._given_up.get(ticket)
            if reason is None and ticket not in self._pushed:  # a trace may record a death early
                reason = self._gone.get(ticket[0])
            if reason is not None:
                reasons.append(f"worker {self._seats.get(ticket[0], ticket[0])}: {reason}")
        return reasons

    def _track(self, lease: Lease) -> _TrackedLease:
        leases = self.epochs.setdefault(lease.epoch, {})
        return leases.setdefault(lease.start, _TrackedLease(lease))

    def _handed_out(self, epoch: int) -> list[_TrackedLease]:
        """Return all leases of an epoch; the current ones come last."""
        return [*self._returned.get(epoch, ()), *self.epochs[epoch].values()]

    def fate(self, epoch: int, position: int) -> Fate:
        """What became of the sample at this position of an epoch's order."""
        held = [tracked for tracked in self._handed_out(epoch) if _holds(tracked.lease, position)]
        current = held[-1] if held else None
        tickets = [ticket for tracked in held for ticket in tracked.tickets]
        reason = "; then ".join(self._history(tickets))
        if current is None or current.update is None:
            ending = "dropped" if epoch in self.ended else "the run ended before it was used"
            if current is None and epoch in self.ended:
                ending = "left out: the last batch of the epoch was not full (drop_last)"
            reason = f"{reason}; {ending}" if reason else ending
        return Fate(
            epoch=epoch + 1,
            position=position,
            tries=len(tickets),
            update=current.update if current else None,
            worker=current.worker if current else None,
            staleness_versions=current.staleness if current else None,
            reason=reason,
        )

    def num_positions(self, epoch: int) -> int:
        """Samples in an epoch's order; for a stream or numbers, positions handed out so far."""
        assert self.header is not None
        if self.header.text("order", "own") in ("numbers", "stream"):
            return max(tracked.lease.stop for tracked in self._handed_out(epoch))
        return self.header.number("num_samples")

    def ledger(self, epoch: int, num_samples: int) -> EpochLedger:
        """Count the samples of an epoch.

        Raises:
            ConfigError: more samples are in updates than the epoch has.
        """
        counts: Counter[str] = Counter()
        for tracked in self.epochs[epoch].values():
            counts["used" if tracked.num_updates else "unused"] += tracked.lease.num_samples
            counts["twice"] += tracked.lease.num_samples if tracked.num_updates > 1 else 0
        is_over = epoch in self.ended
        rest = num_samples - counts["used"]
        if rest < 0:
            raise contradiction(f"{counts['used']:,} of {num_samples:,} samples are in updates")
        return EpochLedger(
            epoch=epoch + 1,
            samples=num_samples,
            used=counts["used"],
            dropped=rest if is_over else 0,
            open=0 if is_over else rest,
            twice=counts["twice"],
        )


def _holds(lease: Lease, position: int) -> bool:
    return lease.start <= position < lease.stop


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleReport:
    """What became of one sample in a run, and the ledgers of its epochs."""

    sample: int
    fates: tuple[Fate, ...]
    ledgers: tuple[EpochLedger, ...]


def report_sample(
    run_dir: Path, sample: int, draw: Callable[[Header, int, int], Sequence[int]]
) -> SampleReport:
    """What became of ``sample`` in every epoch of the run.

    Args:
        run_dir: the run's folder.
        sample: its index in the data set.
        draw: returns the order of an epoch, from the header, the epoch and its number of samples.

    Raises:
        ConfigError: there is no such run or sample, or ``draw`` cannot redraw the order.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"no run found at {run_dir}; runs are in runs/, see: ls runs")
    fates = Fates()
    for record in read_trace(run_dir / FILE_NAME):
        fates.add(record)
    header = fates.header
    if header is None or not fates.epochs:
        raise ConfigError(f"{run_dir} has no epoch: the run ended before its first mini-batch")
    sizes = {epoch: fates.num_positions(epoch) for epoch in sorted(fates.epochs)}
    sample_fates = []
    for epoch, size in sizes.items():
        order = draw(header, epoch, size)
        if sample in order:
            sample_fates.append(fates.fate(epoch, list(order).index(sample)))
    if not sample_fates:
        raise ConfigError(
            f"sample {sample} is in no epoch of {run_dir}: it has {max(sizes.values())} samples, "
            f"0 to {max(sizes.values()) - 1}"
        )
    ledgers = tuple(fates.ledger(epoch, size) for epoch, size in sizes.items())
    return SampleReport(sample=sample, fates=tuple(sample_fates), ledgers=ledgers)


def render_sample(report: SampleReport) -> list[str]:
    """Return the report as lines of text."""
    lines = [f"sample {report.sample}"]
    for fate in report.fates:
        where = f"epoch {fate.epoch}, position {fate.position}"
        if fate.update is None:
            lines.append(f"  {where}: not used: {fate.reason}")
            continue
        stale = fate.staleness_versions or 0
        age = "fresh" if not stale else f"{stale} version{'s' * (stale != 1)} stale"
        lines.append(f"  {where}: update {fate.update}, by worker {fate.worker}, {age}")
        if fate.reason:
            lines.append(f"    before: {fate.reason}")
    lines += ["", "epoch   samples      used   dropped      open     twice"]
    for ledger in report.ledgers:
        lines.append(
            f"{ledger.epoch:<5}{ledger.samples:>10,}{ledger.used:>10,}{ledger.dropped:>10,}"
            f"{ledger.open:>10,}{ledger.twice:>10,}"
        )
    return lines
