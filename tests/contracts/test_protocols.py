"""The contract of the family: whatever happens to members, these claims hold for every protocol.

It runs over the table and names no member: a protocol states its needs as data.
"""

import json
import random
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from driver import Driver
from paceline.core.ledger import Ledger
from paceline.events import (
    Apply,
    EpochEnd,
    Exhausted,
    Joined,
    Left,
    Pushed,
    Release,
    Stalled,
    Ticket,
)
from paceline.protocols import PROTOCOLS, parse, spelling, with_number
from paceline.protocols.base import SyncProtocol


def _values(name: str, num_workers: int) -> list[str]:
    """The protocol with its least number, a middle one, and the largest or more than workers."""
    arguments = PROTOCOLS[name].arguments
    if not arguments:
        return [name]
    is_limited = any(argument.is_at_most_workers for argument in arguments)
    most, least = num_workers if is_limited else num_workers + 2, arguments[0].minimum
    numbers = {least, min(least + 1, most), most}
    return [with_number(name, number) for number in sorted(numbers)]


SPELLINGS = [
    (text, num_workers)
    for num_workers in (1, 2, 4)
    for name in PROTOCOLS
    for text in _values(name, num_workers)
]


def _driver(text: str, num_workers: int, rng: random.Random) -> Driver:
    num_pushes = parse(text, num_workers).num_pushes
    num_samples = rng.randint(1, 60)
    batch_size = rng.randint(num_pushes, 2 * num_pushes + 3)
    ends = None
    if rng.random() < 0.3:
        size = rng.randint(1, num_samples)
        ends = sorted(rng.sample(range(1, num_samples + 1), size))
    dropped = "skip" if rng.random() < 0.3 else "requeue"
    return Driver(
        lambda: parse(text, num_workers),
        lambda: Ledger(num_samples, batch_size, num_pushes, batch_ends=ends, dropped=dropped),
        num_workers,
    )


def _random_event(driver: Driver, rng: random.Random) -> None:
    """One thing that may happen, most often a push."""
    what = rng.choices(
        ("push", "late", "crash", "join", "stall", "extend", "give back", "look ahead", "save",
         "push some", "step again", "leave"),
        (60, 4, 4, 4, 2, 6, 3, 3, 2, 8, 3, 1),
    )[0]  # fmt: skip
    at_work, live = sorted(driver.at_work), sorted(driver.live)
    if what == "push" and at_work:
        driver.push(rng.choice(at_work), is_newest_pulled=rng.random() < 0.2)
    elif what == "late" and driver.over:
        driver.push_late(rng.choice(driver.over))
    elif what == "crash" and live:
        driver.crash(rng.choice(live))
    elif what == "join" and len(live) < 6:
        driver.join()
    elif what == "stall" and live:
        driver.stall(rng.choice(live))
    elif what == "extend" and at_work:
        driver.extend(rng.choice(at_work))
    elif what == "give back" and at_work:
        driver.give_back(rng.choice(at_work))
    elif what == "look ahead" and live:
        driver.look_ahead(rng.choice(live), rng.randint(0, 4))
    elif what == "push some" and at_work:
        driver.push_some(rng.choice(at_work), rng)
    elif what == "step again" and at_work and driver.protocol.is_spmd:
        driver.step_again(rng.choice(at_work))
    elif what == "leave" and at_work:
        driver.leave(rng.choice(at_work), keeps=rng.random() < 0.5)
    elif what == "save":
        driver.save_and_load(continue_from_copy=rng.random() < 0.5)
    if not driver.is_epoch_open:
        driver.open_epoch()


@pytest.mark.parametrize(("text", "num_workers"), SPELLINGS)
def test_every_rule_holds_and_every_epoch_ends_under_random_events(
    text: str, num_workers: int
) -> None:
    for seed in range(12):
        rng = random.Random(f"{text} {num_workers} {seed}")
        driver = _driver(text, num_workers, rng)
        driver.open_epoch()
        for _ in range(rng.randint(5, 80)):
            _random_event(driver, rng)
        driver.finish_epoch(rng)
        driver.open_epoch()
        driver.finish_epoch(rng)
        assert driver.num_epochs_ended >= 2


@pytest.mark.parametrize(("text", "num_workers"), SPELLINGS)
def test_a_stopped_run_can_be_resumed_by_new_members(text: str, num_workers: int) -> None:
    rng = random.Random(f"{text} {num_workers}")
    driver = _driver(text, num_workers, rng)
    driver.open_epoch()
    for _ in range(rng.randint(0, 20)):
        _random_event(driver, rng)
    driver.stop()
    driver.save_and_load(continue_from_copy=True)
    for _ in range(num_workers):
        driver.join()
    driver.finish_epoch(rng)


class AnythingCanHappen(RuleBasedStateMachine):
    """Hypothesis searches for the shortest sequence that breaks a rule."""

    @initialize(
        spelling_=st.sampled_from(SPELLINGS),
        num_samples=st.integers(1, 30),
        spare=st.integers(0, 3),
        dropped=st.sampled_from(("requeue", "skip")),
    )
    def begin(self, spelling_: tuple[str, int], num_samples: int, spare: int, dropped: str) -> None:
        text, num_workers = spelling_
        num_pushes = parse(text, num_workers).num_pushes
        self.driver = Driver(
            lambda: parse(text, num_workers),
            lambda: Ledger(num_samples, num_pushes + spare, num_pushes, dropped=dropped),
            num_workers,
        )
        self.driver.open_epoch()

    def _pick(self, members: set[int] | dict[int, object], index: int) -> int:
        return sorted(members)[index % len(members)]

    @precondition(lambda self: self.driver.at_work)
    @rule(index=st.integers(0, 5), is_newest_pulled=st.booleans())
    def push(self, index: int, is_newest_pulled: bool) -> None:
        member = self._pick(self.driver.at_work, index)
        self.driver.push(member, is_newest_pulled=is_newest_pulled)

    @precondition(lambda self: self.driver.over)
    @rule()
    def push_late(self) -> None:
        self.driver.push_late(self.driver.over[0])

    @precondition(lambda self: self.driver.live)
    @rule(index=st.integers(0, 5))
    def crash(self, index: int) -> None:
        self.driver.crash(self._pick(self.driver.live, index))

    @precondition(lambda self: len(self.driver.live) < 6)
    @rule()
    def join(self) -> None:
        self.driver.join()

    @precondition(lambda self: self.driver.live)
    @rule(index=st.integers(0, 5))
    def stall(self, index: int) -> None:
        self.driver.stall(self._pick(self.driver.live, index))

    @precondition(lambda self: self.driver.at_work)
    @rule(index=st.integers(0, 5))
    def extend(self, index: int) -> None:
        self.driver.extend(self._pick(self.driver.at_work, index))

    @precondition(lambda self: self.driver.at_work)
    @rule(index=st.integers(0, 5))
    def give_back(self, index: int) -> None:
        self.driver.give_back(self._pick(self.driver.at_work, index))

    @precondition(lambda self: self.driver.live)
    @rule(index=st.integers(0, 5), depth=st.integers(0, 3))
    def look_ahead(self, index: int, depth: int) -> None:
        self.driver.look_ahead(self._pick(self.driver.live, index), depth)

    @rule(continue_from_copy=st.booleans())
    def save_and_load(self, continue_from_copy: bool) -> None:
        self.driver.save_and_load(continue_from_copy=continue_from_copy)

    @precondition(lambda self: not self.driver.is_epoch_open)
    @rule()
    def open_epoch(self) -> None:
        self.driver.open_epoch()

    def teardown(self) -> None:
        if hasattr(self, "driver") and self.driver.is_epoch_open:
            self.driver.finish_epoch(random.Random(0))


AnythingCanHappen.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None
)
TestAnythingCanHappen = AnythingCanHappen.TestCase


# -- the protocols alone, without a coordinator ------------------------------------------------


def _push_all(protocol: SyncProtocol, num_pushes: int, rng: random.Random) -> list[object]:
    """Random pushes of released members; returns all decisions."""
    decisions: list[object] = []
    serials: dict[int, int] = {}
    working: set[int] = set()

    def carry_out(news: list) -> None:
        for decision in news:
            if isinstance(decision, Release):
                working.add(decision.member)
            elif not isinstance(decision, Apply):
                working.discard(decision.member)
        decisions.extend(news)

    for member in range(protocol.num_workers):
        carry_out(protocol.react(Joined(member, 0.0)))
    for _ in range(num_pushes):
        member = rng.choice(sorted(working))
        working.remove(member)
        serials[member] = serials.get(member, -1) + 1
        ticket = Ticket(member, serials[member], 0)
        carry_out(protocol.react(Pushed(ticket, rng.randint(1, 9), 0.5, True, 1.0)))
    return decisions


@pytest.mark.parametrize(("text", "num_workers"), SPELLINGS)
def test_an_update_has_exactly_the_pushes_that_the_protocol_promises(
    text: str, num_workers: int
) -> None:
    protocol = parse(text, num_workers)
    decisions = _push_all(protocol, 40, random.Random(text))
    updates = [decision for decision in decisions if isinstance(decision, Apply)]
    if protocol.is_adaptive:
        sizes = [len(update.tickets) for update in updates]
        assert all(1 <= size <= num_workers for size in sizes)
        assert 40 - num_workers < sum(sizes) <= 40
        return
    assert len(updates) == 40 // protocol.num_pushes
    assert all(len(update.tickets) == protocol.num_pushes for update in updates)


@pytest.mark.parametrize(("text", "num_workers"), SPELLINGS)
def test_equal_facts_give_equal_decisions_also_after_saving(text: str, num_workers: int) -> None:
    first, second = parse(text, num_workers), parse(text, num_workers)
    _push_all(first, 7, random.Random(text))
    second.load(json.loads(json.dumps(first.state())))
    assert second.state() == first.state()
    for fact in (Joined(90, 2.0), Stalled(0, 2.5), Left(0, 3.0), Exhausted(4.0)):
        assert first.react(fact) == second.react(fact)
        assert first.state() == second.state()


@pytest.mark.parametrize(("text", "num_workers"), SPELLINGS)
def test_a_protocol_without_cancellation_declares_it(text: str, num_workers: int) -> None:
    protocol = parse(text, num_workers)
    names = {type(decision).__name__ for decision in _push_all(protocol, 60, random.Random(1))}
    assert protocol.cancels or "Cancel" not in names


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_protocol_documents_itself_completely(name: str) -> None:
    protocol = PROTOCOLS[name]
    assert protocol.name == name
    _, has_part, part = f"\n{sys.modules[protocol.__module__].__doc__}".partition(f"\n{name}: ")
    assert has_part
    assert "Source: " in part
    assert protocol.summary
    assert not protocol.summary.endswith(".")
    assert spelling(name).startswith(name)


@pytest.mark.parametrize(("text", "num_workers"), SPELLINGS)
def test_a_protocol_is_spelled_as_it_is_parsed(text: str, num_workers: int) -> None:
    assert str(parse(text, num_workers)) == text


@pytest.mark.parametrize(("text", "num_workers"), SPELLINGS)
def test_an_epoch_without_faults_has_one_update_per_batch(text: str, num_workers: int) -> None:
    protocol = parse(text, num_workers)
    batch_size = 3 * protocol.num_pushes
    driver = Driver(
        lambda: parse(text, num_workers),
        lambda: Ledger(5 * batch_size * protocol.num_steps, batch_size, protocol.num_pushes),
        num_workers,
    )
    driver.open_epoch()
    driver.finish_epoch(random.Random(3))
    assert isinstance(driver.log[-1], EpochEnd)
    version, num_batches = driver.coordinator.version, driver.ledger.num_batches
    if protocol.is_adaptive:
        most_steps = max(protocol.num_steps, *protocol.values, 1)
        assert num_batches // (num_workers * most_steps) <= version <= num_batches
    else:
        assert version == num_batches // protocol.num_steps
