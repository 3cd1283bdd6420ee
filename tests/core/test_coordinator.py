"""The coordinator: grants, late pushes, and refusals."""

import random

import pytest

from driver import Driver
from ledger_places import LedgerPlace, counts
from paceline.core.batches import Batches, PeerLeases
from paceline.core.coordinator import Coordinator
from paceline.core.ledger import Dropped, Ledger
from paceline.errors import ProtocolError
from paceline.events import (
    Apply,
    Cancel,
    Discard,
    EpochEnd,
    Grant,
    Joined,
    Lease,
    Order,
    Pushed,
    Ticket,
)
from paceline.protocols import parse


def _driver(
    text: str, num_members: int, num_samples: int, *, batch_size: int, dropped: Dropped = "requeue"
) -> Driver:
    num_pushes = parse(text, num_members).num_pushes
    driver = Driver(
        lambda: parse(text, num_members),
        lambda: Ledger(num_samples, batch_size, num_pushes, dropped=dropped),
        num_members,
    )
    driver.open_epoch()
    return driver


def _starts(driver: Driver, member: int) -> list[int]:
    return [lease.start for lease in driver.at_work[member][1]]


def _pushed(ticket: Ticket, num_samples: int = 1) -> Pushed:
    return Pushed(ticket, num_samples, 0.5, True, 9.0)


# -- what equals what --------------------------------------------------------------------------


def _log_of_random_run(text: str, seed: int) -> list[Order]:
    rng = random.Random(seed)
    driver = _driver(text, 4, 96, batch_size=8)
    for _ in range(2):
        driver.finish_epoch(rng)
        driver.open_epoch()
    return driver.log


@pytest.mark.parametrize("text", ["k-sync:4", "k-async:4", "local-sgd:1"])
@pytest.mark.parametrize("seed", range(3))
def test_protocols_that_wait_for_all_give_full_syncs_orders(text: str, seed: int) -> None:
    assert _log_of_random_run(text, seed) == _log_of_random_run("full-sync", seed)


@pytest.mark.parametrize("seed", range(3))
def test_async_gives_the_orders_of_k_batch_async_with_k_1(seed: int) -> None:
    assert _log_of_random_run("async", seed) == _log_of_random_run("k-batch-async:1", seed)


def test_k_batch_sync_is_full_sync_when_each_member_pushes_once_an_update() -> None:
    def updates(text: str) -> list[Order]:
        driver = _driver(text, 3, 90, batch_size=9)
        for _ in range(9):
            for member in (0, 2, 1):
                driver.push(member)
        return [order for order in driver.log if isinstance(order, Apply)]

    batch, full = updates("k-batch-sync:3"), updates("full-sync")
    assert [[t.member for t in update.tickets] for update in batch] == [[0, 2, 1]] * 9
    assert [update.weights for update in batch] == [update.weights for update in full]


@pytest.mark.parametrize("text", ["full-sync", "local-sgd:3", "post-local-sgd:4,3"])
@pytest.mark.parametrize("num_samples", [90, 91, 97, 59, 5])
@pytest.mark.parametrize("depth", [0, 1, 2, 7])
@pytest.mark.parametrize("is_sticky", [False, True])
def test_grants_without_faults_are_the_rounds_of_peers(
    text: str, num_samples: int, depth: int, is_sticky: bool
) -> None:
    """Also with prefetching loaders, and where each member keeps its part of every batch."""
    num_pushes = parse(text, 3).num_pushes
    driver = Driver(
        lambda: parse(text, 3),
        lambda: Ledger(num_samples, 6, num_pushes, is_sticky=is_sticky),
        3,
    )
    for member in range(3):
        driver.look_ahead(member, depth)
    driver.open_epoch()
    batches = Batches(num_samples, 6, num_pushes, has_columns=is_sticky)
    first = parse(text, 3)
    leases = PeerLeases(batches, 3, first.long_steps, first.num_short, epoch=0)
    driver.finish_epoch(random.Random(1))
    granted: dict[int, list[list[Lease]]] = {0: [], 1: [], 2: []}
    for order in driver.log:
        if isinstance(order, Grant):
            granted[order.ticket.member].append(list(order.leases))
    for member in granted:
        rounds = [leases.of(number, member) for number in range(leases.num_rounds)]
        assert granted[member] == [own for own in rounds if own]
        if is_sticky:
            own = [lease for row in rounds for lease in row]
            assert [batches.part_at(lease.start) for lease in own] == [member] * len(own)
            assert [batches.batch_at(lease.start) for lease in own] == list(range(len(own)))


# -- grants ------------------------------------------------------------------------------------


def test_the_first_grants_are_in_member_order_when_the_epoch_opens() -> None:
    coordinator = Coordinator(parse("async", 3), Ledger(30, 2, 1))
    for member in (2, 0, 1):
        assert coordinator.hear(Joined(member, 0.0)) == []
    grants = coordinator.open_epoch(1.0)
    assert grants == [Grant(Ticket(m, 0, 0), (Lease(m, 0, 2 * m, 2 * m + 2),)) for m in range(3)]
    assert coordinator.live_members == [0, 1, 2]


def test_nothing_is_granted_between_two_epochs() -> None:
    driver = _driver("async", 2, 4, batch_size=2)
    driver.push(0)
    driver.push(1)
    assert driver.log[-1] == EpochEnd(0, 2)
    driver.join()
    assert not driver.at_work
    driver.open_epoch()
    assert driver.coordinator.epoch == 1
    assert _starts(driver, 0) == [0]
    assert _starts(driver, 1) == [2]


def test_a_member_that_joins_in_an_epoch_starts_in_it() -> None:
    driver = _driver("async", 1, 10, batch_size=2)
    member = driver.join()
    assert _starts(driver, member) == [2]


def test_an_open_epoch_cannot_be_opened_again() -> None:
    driver = _driver("async", 1, 10, batch_size=2)
    with pytest.raises(ProtocolError, match="epoch 0 has not ended"):
        driver.coordinator.open_epoch(1.0)


def test_a_dead_members_mini_batch_goes_to_a_waiting_member_at_once() -> None:
    driver = _driver("full-sync", 3, 2, batch_size=3)
    assert sorted(driver.at_work) == [0, 1]
    driver.crash(0)
    assert _starts(driver, 2) == [0]


def test_the_mini_batches_of_an_update_are_completed_after_a_death() -> None:
    driver = _driver("full-sync", 3, 30, batch_size=6)
    driver.push(0)
    driver.crash(1)
    assert _starts(driver, 0) == [2]
    driver.push(0)
    driver.push(2)
    assert sorted(driver.used) == list(range(6))


# -- late, copies, skipped ----------------------------------------------------------------------


def test_a_push_sent_before_its_cancellation_arrived_is_late() -> None:
    driver = _driver("k-sync:1", 2, 20, batch_size=2)
    driver.push(0)
    assert driver.over == [Ticket(1, 0, 0)]
    driver.push_late(Ticket(1, 0, 0))
    assert driver.coordinator.last_stats.late == 1
    assert driver.coordinator.last_stats.cancelled == 1


def test_a_push_of_a_member_that_left_is_late() -> None:
    driver = _driver("async", 2, 20, batch_size=2)
    driver.crash(1)
    driver.push_late(Ticket(1, 0, 0))


def test_in_the_tail_idle_members_copy_leases_and_the_first_push_wins() -> None:
    driver = _driver("async", 3, 6, batch_size=2)
    driver.push(0)
    assert _starts(driver, 0) == _starts(driver, 1) == [2]
    driver.push(2)
    assert _starts(driver, 2) == [2]  # both have one copy: 1 was granted first, but 0 copied it
    unheard = driver.protocol.state()
    driver.push(0)
    assert driver.protocol.state() == unheard
    assert driver.log[-3:] == [
        Cancel(2),
        Apply((Ticket(0, 1, 1),), (1.0,)),
        EpochEnd(0, 3),
    ]


def test_no_copies_are_made_for_a_protocol_without_them() -> None:
    driver = _driver("full-sync", 3, 4, batch_size=3)
    for member in range(3):
        driver.push(member)
    assert sorted(driver.at_work) == [0]


def test_a_member_that_skips_its_mini_batch_is_given_another() -> None:
    driver = _driver("async", 2, 20, batch_size=2)
    driver.give_back(0)
    assert _starts(driver, 0) == [4]
    driver.push(1)
    assert _starts(driver, 1) == [0]


def test_a_member_that_skips_the_last_mini_batch_is_given_it_again() -> None:
    driver = _driver("async", 1, 2, batch_size=2)
    driver.give_back(0)
    assert _starts(driver, 0) == [0]


def test_a_skipped_last_mini_batch_ends_the_epoch_with_dropped_skip() -> None:
    driver = _driver("async", 1, 2, batch_size=2, dropped="skip")
    driver.give_back(0)
    assert driver.log[-1] == EpochEnd(0, 0)


def test_an_ended_ticket_cannot_be_extended_or_returned() -> None:
    driver = _driver("k-sync:1", 2, 20, batch_size=2)
    driver.push(0)
    before = driver.coordinator.state()
    assert driver.coordinator.extend(Ticket(1, 0, 0)) is None
    assert driver.coordinator.give_back(Ticket(1, 0, 0), 1.0) == []
    assert driver.coordinator.state() == before


@pytest.mark.parametrize("text", ["full-sync", "local-sgd:2"])
def test_mini_batches_of_stalled_and_lost_members_are_never_dropped(text: str) -> None:
    driver = _driver(text, 4, 40, batch_size=8, dropped="skip")
    driver.stall(1)
    driver.crash(2)
    driver.finish_epoch(random.Random(0))
    assert counts(driver.ledger)[LedgerPlace.DROPPED] == 0


def test_superseded_work_is_dropped_on_request() -> None:
    driver = _driver("k-sync:1", 2, 8, batch_size=2, dropped="skip")
    driver.push(0)
    assert counts(driver.ledger)[LedgerPlace.DROPPED] == 1
    assert _starts(driver, 1) == [6]


# -- versions and counters ----------------------------------------------------------------------


def test_an_update_has_the_version_that_was_actually_pulled() -> None:
    driver = _driver("async", 2, 20, batch_size=2)
    driver.push(0)
    driver.push(1, is_newest_pulled=True)
    assert Apply((Ticket(1, 0, 1),), (1.0,)) in driver.log
    assert driver.coordinator.last_stats.staleness_versions == {0: 2}


def test_staleness_is_counted_at_the_update() -> None:
    driver = _driver("async", 2, 40, batch_size=2)
    for member in (0, 0, 0, 1):
        driver.push(member)
    assert driver.coordinator.last_stats.staleness_versions == {0: 3, 3: 1}
    assert driver.coordinator.last_stats.updates == 4


# -- looking ahead ------------------------------------------------------------------------------


def test_a_member_that_prefetches_gets_upcoming_leases_with_its_grant() -> None:
    coordinator = Coordinator(parse("full-sync", 2), Ledger(40, 4, 2))
    for member in (0, 1):
        coordinator.hear(Joined(member, 0.0))
        coordinator.set_lookahead(member, 2)
    first = [order for order in coordinator.open_epoch(0.0) if isinstance(order, Grant)]
    assert [[lease.id for lease in grant.upcoming] for grant in first] == [[2, 4], [3, 5]]
    coordinator.hear(_pushed(first[0].ticket))
    second = coordinator.hear(_pushed(first[1].ticket))[1:]
    assert [
        ([lease.id for lease in grant.leases], [lease.id for lease in grant.upcoming])
        for grant in second
        if isinstance(grant, Grant)
    ] == [([2], [6]), ([3], [7])]


# -- stop ---------------------------------------------------------------------------------------


def test_a_stop_returns_all_unapplied_work() -> None:
    driver = _driver("k-sync:3", 4, 24, batch_size=6)
    for member in (0, 1, 2, 3, 0):
        driver.push(member)
    driver.stop()
    assert driver.log[-4:] == [
        Discard(Ticket(3, 1, 1)),
        Discard(Ticket(0, 1, 1)),
        Cancel(1),
        Cancel(2),
    ]
    assert counts(driver.ledger)[LedgerPlace.RETIRED] == 3
    driver.push_late(Ticket(1, 1, 1))
