"""The contract under faults: for every protocol and any plan, the run ends with consistent books.

no deadlock        every epoch ends
every sample       in exactly one update of its epoch, or dropped on request
versions dense     one a update, from 0
every push         in at most one update; each meets exactly one of Apply, Discard and Late
"""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from faulty_run import FaultyRun
from ledger_places import LedgerPlace, whereabouts
from paceline.conditions.delays import parse_delay
from paceline.conditions.faults import Fault, FaultPlan, Kind
from paceline.conditions.world import Conditions
from paceline.core.ledger import Dropped, Ledger
from paceline.events import Apply, Cancel, Discard, Fact, Grant, Late, Lease, Order, Pushed, Stalled
from paceline.protocols import PROTOCOLS, parse, with_number
from paceline.simulation.engine import Nothing

WORKERS = 4
NUM_SAMPLES = 61
EPOCHS = 3


def _spellings(name: str) -> list[str]:
    arguments = PROTOCOLS[name].arguments
    numbers = {min(argument.minimum for argument in arguments), 3} if arguments else {0}
    return [with_number(name, number) for number in sorted(numbers)]


SPELLINGS = [text for name in PROTOCOLS for text in _spellings(name)]


class Books(Nothing):
    """Counts grants, pushes and decisions, from facts and orders alone."""

    def __init__(self) -> None:
        self.leases: dict[tuple[int, int], tuple[Lease, ...]] = {}
        self.pushes: Counter[tuple[int, int]] = Counter()
        self.met: Counter[tuple[int, int]] = Counter()
        self.used: dict[int, Counter[int]] = {}
        self.num_updates = 0
        self.stalled: list[int] = []
        self.num_called_off = 0

    def carry_out(self, orders: Sequence[Order], fact: Fact) -> None:
        if isinstance(fact, Pushed):
            self.pushes[fact.ticket[:2]] += 1
        elif isinstance(fact, Stalled):
            self.stalled.append(fact.member)
        for order in orders:
            if isinstance(order, Grant):
                self.leases[order.ticket[:2]] = order.leases
            elif isinstance(order, Apply):
                self._applied(order)
            elif isinstance(order, Late | Discard):
                self.met[order.ticket[:2]] += 1
            elif isinstance(order, Cancel):
                self.num_called_off += 1

    def _applied(self, order: Apply) -> None:
        self.num_updates += 1
        for ticket in order.tickets:
            self.met[ticket[:2]] += 1
            for lease in self.leases[ticket[:2]]:
                used = self.used.setdefault(lease.epoch, Counter())
                used.update(range(lease.start, lease.stop))


WORKER_KINDS = [kind for kind in Kind if kind.is_of_worker]


@st.composite
def plans(draw: st.DrawFn) -> FaultPlan:
    """Any faults of any workers, from inside and outside."""
    faults = []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(WORKER_KINDS))
        when = draw(st.sampled_from(("update", "step", "at_s")))
        faults.append(
            Fault(
                kind=kind,
                worker=draw(st.integers(0, WORKERS - 1)),
                for_s=draw(st.sampled_from((0.01, 0.3, 2.0, 30.0))) if "TIME" in kind.value else 0,
                factor=draw(st.sampled_from((1.0, 3.0, 100.0))) if "FACTOR" in kind.value else 1.0,
                **{when: draw(st.integers(1, 12)) / (10 if when == "at_s" else 1)},
            )
        )
    return FaultPlan(faults=tuple(faults))


def run_with(text: str, plan: FaultPlan, seed: int, dropped: Dropped) -> tuple[FaultyRun, Books]:
    """Three epochs in virtual time; at the end of each the ledger is compared with the books."""
    protocol = parse(text, WORKERS)
    ledger = Ledger(NUM_SAMPLES, 2 * protocol.num_pushes, protocol.num_pushes, dropped=dropped)
    books = Books()
    delays = (parse_delay("20ms+exp:80ms"),) * WORKERS

    def hear_epoch(epoch: int, at_s: float) -> bool:
        gone = Counter(
            position
            for lease in ledger.cut_all()
            if whereabouts(ledger, lease).place is LedgerPlace.DROPPED
            for position in range(lease.start, lease.stop)
        )
        assert not gone or dropped == "skip"
        assert books.used.get(epoch, Counter()) + gone == Counter(range(NUM_SAMPLES))
        return epoch + 1 < EPOCHS

    run = FaultyRun(
        protocol, ledger, Conditions(delays=delays, seed=seed), plan,
        silence_s=0.5, new_life_s=0.7, work=books, hear_epoch=hear_epoch,
    )  # fmt: skip
    run.run(None)
    return run, books


def check(run: FaultyRun, books: Books) -> None:
    assert run.ending == "finished"
    assert run.coordinator.epoch + 1 == EPOCHS
    assert run.coordinator.version == books.num_updates
    assert set(books.pushes.values()) <= {1}
    assert books.met == books.pushes


@pytest.mark.parametrize("text", SPELLINGS)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(plan=plans(), seed=st.integers(0, 99), dropped=st.sampled_from(("requeue", "skip")))
def test_any_plan_of_faults_ends_with_consistent_books(
    text: str, plan: FaultPlan, seed: int, dropped: Dropped
) -> None:
    check(*run_with(text, plan, seed, dropped))


@pytest.mark.parametrize("text", SPELLINGS)
@pytest.mark.parametrize("kind", WORKER_KINDS, ids=lambda kind: kind.name.lower())
def test_every_kind_of_fault_fires_when_it_is_planned(text: str, kind: Kind) -> None:
    fault = Fault(kind=kind, worker=1, step=2, for_s=2.0, factor=5.0)
    run, books = run_with(text, FaultPlan(faults=(fault,)), 3, "requeue")
    check(run, books)
    assert run.happened == [fault]
    lives, protocol = len(run._agenda.current), parse(text, WORKERS)
    if kind in (Kind.KILL, Kind.RAISE):
        assert lives == WORKERS + 1
    elif kind is Kind.SLOW or protocol.cancels:  # a member whose work is called off is released
        assert (lives, books.stalled) == (WORKERS, [])
    else:
        assert books.stalled == [1]
        is_replaced = not protocol.copies_in_tail
        assert lives == WORKERS + (kind is Kind.DROP or is_replaced)


def test_a_replaced_member_that_returns_is_late_and_ends() -> None:
    """full-sync hands the work of a stalled member on: its own push is refused."""
    fault = Fault(kind=Kind.STOP, worker=1, step=2, for_s=2.0)
    run, books = run_with("full-sync", FaultPlan(faults=(fault,)), 3, "requeue")
    check(run, books)
    assert run.coordinator.last_stats.late == 1
    assert 1 not in run.coordinator.live_members
