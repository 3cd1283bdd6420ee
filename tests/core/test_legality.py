"""Refused facts and decisions; a refusal leaves the books unchanged."""

from collections.abc import Callable
from typing import Any

import pytest

from driver import Driver
from paceline.core.coordinator import Coordinator
from paceline.core.ledger import Ledger
from paceline.core.membership import Membership, check_decisions
from paceline.errors import ProtocolError
from paceline.events import (
    Apply,
    Cancel,
    Decision,
    Discard,
    Exhausted,
    Fact,
    Grant,
    Joined,
    Late,
    Lease,
    Left,
    Pushed,
    Release,
    Stalled,
    Ticket,
)
from paceline.protocols import parse
from paceline.protocols.base import SyncProtocol


def _driver(text: str, num_members: int, num_samples: int, *, batch_size: int) -> Driver:
    num_pushes = parse(text, num_members).num_pushes
    driver = Driver(
        lambda: parse(text, num_members),
        lambda: Ledger(num_samples, batch_size, num_pushes),
        num_members,
    )
    driver.open_epoch()
    return driver


def _pushed(ticket: Ticket, num_samples: int = 1) -> Pushed:
    return Pushed(ticket, num_samples, 0.5, True, 9.0)


@pytest.mark.parametrize(
    ("fact", "message"),
    [
        (_pushed(Ticket(9, 0, 0)), "member 9 has never joined"),
        (_pushed(Ticket(0, 7, 0)), "never granted"),
        (_pushed(Ticket(0, -1, 0)), "never granted"),
        (_pushed(Ticket(0, 0, 4)), "version"),
        (_pushed(Ticket(0, 0, 0), num_samples=-1), "at least 1 sample"),
        (_pushed(Ticket(0, 0, 0))._replace(weight=-1.0), "at least 1 sample"),
        (_pushed(Ticket(0, 0, 0), num_samples=0)._replace(weight=1.0), "at least 1 sample"),
        (_pushed(Ticket(0, 0, 0))._replace(kept=(99,)), "only leases that it holds"),
        (Joined(0, 1.0), "member 0 joined twice"),
        (Joined(2, 1.0), "member 2 joined twice"),  # it has left
        (Left(9, 1.0), "member 9 has never joined"),
        (Stalled(9, 1.0), "member 9 has never joined"),
        (Exhausted(1.0), "only the coordinator itself can find this out"),
    ],
)
def test_an_illegal_fact_changes_nothing(fact: Fact, message: str) -> None:
    driver = _driver("k-sync:2", 3, 20, batch_size=4)
    driver.crash(2)
    before = driver.coordinator.state()
    with pytest.raises(ProtocolError, match=message):
        driver.coordinator.hear(fact)
    assert driver.coordinator.state() == before


def test_a_members_end_may_be_reported_twice() -> None:
    driver = _driver("async", 2, 20, batch_size=2)
    driver.crash(0)
    before = driver.coordinator.state()
    assert driver.coordinator.hear(Left(0, 5.0)) == []
    assert driver.coordinator.hear(Stalled(0, 5.0)) == []
    assert driver.coordinator.state() == before


class Scripted(SyncProtocol):
    """Makes a test's decisions; releases each member that joins, else decides nothing."""

    name = "scripted"
    summary = "for tests"

    def __init__(self, answers: dict[type, Callable[[Any], list[Decision]]]) -> None:
        super().__init__(2, num_pushes=1)
        self._answers = answers

    def react(self, fact: Fact) -> list[Decision]:
        if type(fact) in self._answers:
            return self._answers[type(fact)](fact)
        return [Release(fact.member)] if isinstance(fact, Joined) else []

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        pass


def _scripted(
    answers: dict[type, Callable[[Any], list[Decision]]], num_samples: int = 20
) -> Coordinator:
    coordinator = Coordinator(Scripted(answers), Ledger(num_samples, 2, 1))
    for member in (0, 1):
        coordinator.hear(Joined(member, 0.0))
    coordinator.open_epoch(0.0)
    return coordinator


MINE, OTHERS = Ticket(0, 0, 0), Ticket(1, 0, 0)


@pytest.mark.parametrize(
    ("decisions", "message"),
    [
        ([Release(1)], "only a waiting member can be released"),
        ([Release(0), Release(0)], "only a waiting member can be released"),
        ([Release(0, 0)], "for at least 1 step"),
        ([Release(8)], "only a waiting member can be released"),
        ([Cancel(0)], "only a released member can be cancelled"),
        ([Cancel(1), Cancel(1)], "only a released member can be cancelled"),
        ([Cancel(8)], "only a released member can be cancelled"),
        ([Apply((OTHERS,), (1.0,))], "not a gathered push"),
        ([Apply((MINE, MINE), (0.5, 0.5))], "not a gathered push"),
        ([Apply((MINE,), (1.0,)), Discard(MINE)], "not a gathered push"),
        ([Apply((MINE,), (0.9,))], "one weight a push, with a sum of 1"),
        ([Apply((MINE,), (0.5, 0.5))], "one weight a push, with a sum of 1"),
        ([Apply((), ())], "one weight a push, with a sum of 1"),
        ([Discard(OTHERS)], "not a gathered push"),
    ],
)
def test_an_illegal_decision_is_refused_before_the_books_change(
    decisions: list[Decision], message: str
) -> None:
    coordinator = _scripted({Pushed: lambda fact: decisions})
    before = coordinator.state()
    with pytest.raises(ProtocolError, match=message):
        coordinator.hear(_pushed(MINE))
    assert coordinator.state() == before


def test_a_member_that_left_can_be_neither_released_nor_cancelled() -> None:
    for decision in (Release(0), Cancel(0)):
        coordinator = _scripted({Left: lambda fact, d=decision: [d]})
        before = coordinator.state()
        with pytest.raises(ProtocolError):
            coordinator.hear(Left(0, 1.0))
        assert coordinator.state() == before


def test_a_busy_member_can_be_released_after_it_is_cancelled() -> None:
    coordinator = _scripted({Pushed: lambda fact: [Discard(fact.ticket), Cancel(1), Release(1)]})
    orders = coordinator.hear(_pushed(MINE))
    assert orders[:2] == [Discard(MINE), Cancel(1)]
    assert orders[2] == Grant(Ticket(1, 1, 0), (Lease(0, 0, 0, 2),))
    assert coordinator.last_stats.discarded == 1


def test_work_discarded_at_the_end_of_an_epoch_is_given_out_again() -> None:
    coordinator = _scripted(
        {Exhausted: lambda fact: [Discard(MINE), Discard(OTHERS), Release(0), Release(1)]}, 4
    )
    coordinator.hear(_pushed(MINE))
    orders = coordinator.hear(_pushed(OTHERS))
    assert [type(order) for order in orders] == [Discard, Discard, Grant, Grant]
    assert coordinator.is_epoch_open


def test_a_protocol_that_keeps_pushes_at_the_end_is_refused() -> None:
    coordinator = _scripted({}, 4)
    coordinator.hear(_pushed(MINE))
    with pytest.raises(ProtocolError, match="scripted left"):
        coordinator.hear(_pushed(OTHERS))


def test_a_late_push_is_freed_and_not_passed_to_the_protocol() -> None:
    heard: list[Fact] = []
    coordinator = _scripted({Pushed: lambda fact: heard.append(fact) or [Discard(fact.ticket)]})
    coordinator.hear(_pushed(MINE))
    assert coordinator.hear(_pushed(MINE)) == [Late(MINE)]
    assert len(heard) == 1


def test_a_member_that_just_pushed_is_waiting_and_one_that_left_is_gone() -> None:
    members = Membership()
    members.join(0)
    ticket = Ticket(0, 0, 0)
    members.pending[0] = 1
    members.begin_work(ticket)
    pushed = Pushed(ticket, 4, 1.0, True, 0.0)
    check_decisions([Release(0, 1)], pushed, members, lambda member: False)
    with pytest.raises(ProtocolError, match="only a waiting member can be released"):
        check_decisions([Release(0, 1)], Left(0, 0.0), members, lambda member: False)
    with pytest.raises(ProtocolError, match="is not a gathered push"):
        check_decisions([Discard(Ticket(0, 1, 0))], pushed, members, lambda member: False)
    assert members.is_at_work(0)
