"""What became of one sample: which update used it, by which worker and how stale, epoch by epoch.

    sample --order of the epoch--> position --lease--> tickets --> the update, or why there is none

A run hands out positions of an epoch's order. The order is drawn by the user's sampler, which a
trace does not hold; where the sampler is torch's own it is drawn again here from the run's seed.
Everything else comes from the trace alone. Above 300 lines, since one pass over the trace answers
all. This module must not know terminals or engines.
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
        epoch: from 1, as it is shown.
        position: in the epoch's order.
        tries: how often its mini-batch was worked on.
        update: that used it, from 1; None: none did.
        worker: whose gradient that was.
        staleness_versions: updates between the parameters of the gradient and its own.
        reason: why no update used it, or what became of it before one did.
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
    """The samples of one epoch, by what became of them: the parts add up to the whole."""

    epoch: int
    samples: int
    used: int
    dropped: int
    open: int
    """Of an epoch that was not finished: not used yet."""
    twice: int
    """In more than one update: 0, or something is wrong."""


@dataclass(slots=True)
class _Lease:
    lease: Lease
    tickets: list[tuple[int, int]] = field(default_factory=list)
    update: int | None = None
    worker: int | None = None
    staleness: int | None = None
    num_updates: int = 0


class Fates:
    """The leases of a run, each with what became of it; ``add`` every record in order."""

    def __init__(self) -> None:
        self.header: Header | None = None
        self.epochs: dict[int, dict[int, _Lease]] = {}
        self.ended: set[int] = set()
        self._returned: dict[int, list[_Lease]] = {}
        """What no update had used when a run was resumed, by epoch: then others have its range."""
        self._seats: dict[int, int] = {}
        self._work: dict[tuple[int, int], list[_Lease]] = {}
        self._current: dict[int, tuple[int, int]] = {}
        self._pushed: dict[tuple[int, int], Pushed] = {}
        self._given_up: dict[tuple[int, int], str] = {}
        """Work that came to nothing, and why."""
        self._gone: dict[int, str] = {}
        self._version = 0

    def add(self, record: Record) -> None:
        """Take one record in."""
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
        """Leases that no update has used are granted again, cut for the new number of workers."""
        self._version = record.version  # that of before, but for a trace that was damaged
        self._work.clear()
        for epoch, leases in self.epochs.items():
            returned = [lease for lease in leases.values() if lease.update is None]
            self._returned.setdefault(epoch, []).extend(returned)
            for one in returned:
                del leases[one.lease.start]

    def _ordered(self, record: Ordered) -> None:
        match record.order:
            case Grant(ticket, leases, _):
                known = [self._lease(lease) for lease in leases]
                self._work.setdefault(ticket[:2], []).extend(known)
                self._current[ticket.member] = ticket[:2]
                for one in known:
                    one.tickets.append(ticket[:2])
            case Apply(tickets, _):
                self._applied(tickets)
            case Retire(tickets):
                for ticket in tickets:  # of what was stepped on before: its last update
                    for one in self._used_by(ticket[:2]):
                        one.num_updates, one.update, one.staleness = 1, self._version, 0
                        one.worker = self._seats.get(ticket.member, ticket.member)
            case Cancel(member):
                if member not in self._current:
                    raise contradiction(f"member {member} is called off and never had work")
                self._give_up(self._current[member], "called off")
            case Discard(ticket):
                self._give_up(ticket[:2], "its push was discarded")
            case Late(ticket):
                self._give_up(ticket[:2], "its push came late")
            case EpochEnd(epoch, _):
                self.ended.add(epoch)

    def _applied(self, tickets: Iterable[tuple[int, int, int]]) -> None:
        for member, serial, version in tickets:
            for one in self._used_by((member, serial)):
                one.num_updates += 1
                one.update = self._version + 1
                one.worker = self._seats.get(member, member)
                one.staleness = self._version - version
        self._version += 1

    def _used_by(self, ticket: tuple[int, int]) -> list[_Lease]:
        """What a push has a gradient of: neither kept for a later one, nor left unused."""
        work, fact = self._work.pop(ticket, []), self._pushed.get(ticket)
        if fact is None:
            return work
        for one in work:
            if one.lease.id in fact.unused:
                self._given_up[ticket] = "the script did nothing with it"
        return [one for one in work if one.lease.id not in fact.kept + fact.unused]

    def _give_up(self, ticket: tuple[int, int], why: str) -> None:
        said = self._given_up.get(ticket)
        self._given_up[ticket] = why if said is None else f"{said}, {why}"

    def _history(self, tickets: Iterable[tuple[int, int]]) -> list[str]:
        """What came to nothing before the update, or instead of one."""
        said = []
        for ticket in tickets:
            why = self._given_up.get(ticket)
            if why is None and ticket not in self._pushed:  # a trace may tell of a death early
                why = self._gone.get(ticket[0])
            if why is not None:
                said.append(f"worker {self._seats.get(ticket[0], ticket[0])}: {why}")
        return said

    def _lease(self, lease: Lease) -> _Lease:
        leases = self.epochs.setdefault(lease.epoch, {})
        return leases.setdefault(lease.start, _Lease(lease))

    def _handed_out(self, epoch: int) -> list[_Lease]:
        """All leases of an epoch, those last that stand for its samples now."""
        return [*self._returned.get(epoch, ()), *self.epochs[epoch].values()]

    def fate(self, epoch: int, position: int) -> Fate:
        """What became of the sample at this position of an epoch's order."""
        held = [one for one in self._handed_out(epoch) if _holds(one.lease, position)]
        found = held[-1] if held else None
        tickets = [ticket for one in held for ticket in one.tickets]
        reason = "; then ".join(self._history(tickets))
        if found is None or found.update is None:
            last = "dropped" if epoch in self.ended else "the run ended before it was used"
            if found is None and epoch in self.ended:
                last = "left out: the last batch of the epoch was not full (drop_last)"
            reason = f"{reason}; {last}" if reason else last
        return Fate(
            epoch=epoch + 1,
            position=position,
            tries=len(tickets),
            update=found.update if found else None,
            worker=found.worker if found else None,
            staleness_versions=found.staleness if found else None,
            reason=reason,
        )

    def num_positions(self, epoch: int) -> int:
        """Samples of an epoch's order; of a stream or of numbers those that were handed out."""
        assert self.header is not None
        if self.header.text("order", "own") in ("numbers", "stream"):
            return max(one.lease.stop for one in self._handed_out(epoch))
        return self.header.number("num_samples")

    def ledger(self, epoch: int, num_samples: int) -> EpochLedger:
        """How the samples of an epoch add up."""
        counts: Counter[str] = Counter()
        for one in self.epochs[epoch].values():
            counts["used" if one.num_updates else "unused"] += one.lease.num_samples
            counts["twice"] += one.lease.num_samples if one.num_updates > 1 else 0
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
    """All of a run about one sample."""

    sample: int
    fates: tuple[Fate, ...]
    ledgers: tuple[EpochLedger, ...]


def report_sample(
    run_dir: Path, sample: int, draw: Callable[[Header, int, int], Sequence[int]]
) -> SampleReport:
    """What became of ``sample`` in every epoch of the run.

    Args:
        sample: its index in the data set.
        draw: the order of an epoch's samples, where it can be redrawn.

    Raises:
        ConfigError: there is no such run or sample, or its order was the user's own.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"there is no run at {run_dir}; runs lie under runs/, see: ls runs")
    fates = Fates()
    for record in read_trace(run_dir / FILE_NAME):
        fates.add(record)
    header = fates.header
    if header is None or not fates.epochs:
        raise ConfigError(f"{run_dir} has no epoch: the run ended before its first mini-batch")
    sizes = {epoch: fates.num_positions(epoch) for epoch in sorted(fates.epochs)}
    found = []
    for epoch, size in sizes.items():
        order = draw(header, epoch, size)
        if sample in order:
            found.append(fates.fate(epoch, list(order).index(sample)))
    if not found:
        raise ConfigError(
            f"sample {sample} is in no epoch of {run_dir}: it has {max(sizes.values())} samples, "
            f"0 to {max(sizes.values()) - 1}"
        )
    ledgers = tuple(fates.ledger(epoch, size) for epoch, size in sizes.items())
    return SampleReport(sample=sample, fates=tuple(found), ledgers=ledgers)


def render_sample(report: SampleReport) -> list[str]:
    """The report as lines for people."""
    lines = [f"sample {report.sample}"]
    for fate in report.fates:
        where = f"epoch {fate.epoch}, position {fate.position}"
        if fate.update is None:
            lines.append(f"  {where}: in no update: {fate.reason}")
            continue
        stale = fate.staleness_versions or 0
        age = "fresh" if not stale else f"{stale} version{'s' * (stale != 1)} stale"
        lines.append(f"  {where}: update {fate.update}, by worker {fate.worker}, {age}")
        if fate.reason:
            lines.append(f"    before that: {fate.reason}")
    lines += ["", "epoch   samples      used   dropped      open     twice"]
    for ledger in report.ledgers:
        lines.append(
            f"{ledger.epoch:<5}{ledger.samples:>10,}{ledger.used:>10,}{ledger.dropped:>10,}"
            f"{ledger.open:>10,}{ledger.twice:>10,}"
        )
    return lines
