"""A coordinator at rest: its state in a checkpoint, and that others can resume from it."""

import json
import random
from collections import Counter

import pytest

from driver import Driver
from paceline.core.batches import Batches
from paceline.core.coordinator import Coordinator
from paceline.core.ledger import Ledger
from paceline.core.rest_state import audit, frontier, next_member, recut
from paceline.events import Apply, Grant, Joined, Lease, Order, Pushed, Ticket
from paceline.protocols import PROTOCOLS, parse, with_number

SPELLINGS = [
    with_number(name, max([2, *(one.minimum for one in kind.arguments)]))
    for name, kind in PROTOCOLS.items()
]


def _driver(text: str, rng: random.Random, *, num_workers: int = 3) -> Driver:
    num_pushes = parse(text, num_workers).num_pushes
    size = rng.randint(num_pushes, 3 * num_pushes)
    driver = Driver(
        lambda: parse(text, num_workers), lambda: Ledger(67, size, num_pushes), num_workers
    )
    for member in range(num_workers):
        if rng.random() < 0.5:
            driver.look_ahead(member, rng.randint(1, 3))
    driver.open_epoch()
    return driver


def _fitting(text: str, num_workers: int) -> str:
    """The protocol with a number that this many workers allow."""
    name, _, number = text.partition(":")
    is_limited = any(argument.is_at_most_workers for argument in PROTOCOLS[name].arguments)
    is_too_much = is_limited and int(number) > num_workers
    return f"{name}:{num_workers}" if is_too_much else text


def _go_on_for_a_while(driver: Driver, rng: random.Random) -> None:
    for _ in range(rng.randint(0, 30)):
        if not driver.is_epoch_open:
            driver.open_epoch()
        if rng.random() < 0.05 and len(driver.live) > 1:
            driver.crash(rng.choice(sorted(driver.live)))
        elif driver.at_work:
            driver.push(rng.choice(sorted(driver.at_work)))


@pytest.mark.parametrize("text", SPELLINGS)
@pytest.mark.parametrize("seed", range(20))
def test_a_resting_state_is_what_a_stop_would_leave(text: str, seed: int) -> None:
    rng = random.Random(f"{text} {seed}")
    driver = _driver(text, rng)
    _go_on_for_a_while(driver, rng)
    before = json.dumps(driver.coordinator.state())
    resting = driver.coordinator.resting_state()
    assert json.dumps(driver.coordinator.state()) == before, "looking changed something"
    driver.stop()
    assert json.loads(json.dumps(resting)) == json.loads(json.dumps(driver.coordinator.state()))


class Resumed:
    """New members that resume from a resting state with their own protocol, one by one."""

    def __init__(self, state: dict, text: str, num_workers: int, ledger: Ledger) -> None:  # type: ignore[type-arg]
        self.coordinator = Coordinator(parse(text, num_workers), ledger)
        self.coordinator.resume(state)
        self.at_work: dict[int, tuple[Ticket, tuple[Lease, ...]]] = {}
        self.pushed: dict[Ticket, tuple[Lease, ...]] = {}
        self.updates: list[list[Lease]] = []
        first = next_member(state)
        for member in range(first, first + num_workers):
            assert self.coordinator.hear(Joined(member, 0.0)) == [], "nobody has arrived yet"
        self._note(self.coordinator.open_epoch(0.0))

    def _note(self, orders: list[Order]) -> None:
        for order in orders:
            if isinstance(order, Grant):
                self.at_work[order.ticket.member] = (order.ticket, order.leases)
            elif isinstance(order, Apply):
                self.updates.append(
                    [x for ticket in order.tickets for x in self.pushed.pop(ticket)]
                )

    def finish(self, rng: random.Random) -> None:
        while self.coordinator.is_epoch_open:
            ticket, leases = self.at_work.pop(rng.choice(sorted(self.at_work)))
            self.pushed[ticket] = leases
            num_samples = sum(lease.num_samples for lease in leases)
            orders = self.coordinator.hear(Pushed(ticket, num_samples, 0.5, True, 1.0))
            for order in orders:
                if type(order).__name__ == "Cancel":
                    self.at_work.pop(order.member)
            self._note(orders)


@pytest.mark.parametrize("text", SPELLINGS)
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_each_sample_is_used_once_across_the_cut(text: str, num_workers: int, seed: int) -> None:
    rng = random.Random(f"{text} {num_workers} {seed}")
    driver = _driver(text, rng)
    while not driver.is_epoch_open or not driver.version:
        _go_on_for_a_while(driver, rng)
    text = _fitting(text, num_workers)
    protocol, size = parse(text, num_workers), driver.ledger._cuts.batches.bounds(0)[1]
    if size < protocol.num_pushes:
        return  # refused before anything starts: a batch has no such many parts
    state = json.loads(json.dumps(driver.coordinator.resting_state()))
    learned = {name: state["protocol"][name] for name in protocol.learned}
    state["protocol"] = {**protocol.state(), **learned}
    state["ledger"] = recut(state["ledger"], Batches(67, size, protocol.num_pushes))
    ledger = Ledger(67, size, protocol.num_pushes)
    resumed = Resumed(state, text, num_workers, ledger)
    resumed.finish(rng)
    used = Counter(driver.used)
    for update in resumed.updates:
        for lease in update:
            used.update(range(lease.start, lease.stop))
    assert used == Counter(range(67))


@pytest.mark.parametrize("text", ["full-sync", "local-sgd:2"])
@pytest.mark.parametrize("num_workers", [1, 2, 4, 6])
@pytest.mark.parametrize("num_updates", [0, 1, 4, 5])
def test_an_update_is_one_batch_again_with_another_number_of_workers(
    text: str, num_workers: int, num_updates: int
) -> None:
    """Equally fast members leave no hole, so the batches are those of one process."""
    ledger = Ledger(67, 12, 3)
    driver = Driver(lambda: parse(text, 3), lambda: ledger, 3)
    driver.open_epoch()
    while driver.version < num_updates and driver.is_epoch_open:
        for member in sorted(driver.at_work):
            if member in driver.at_work:
                driver.push(member)
    if not driver.is_epoch_open:
        return
    state = driver.coordinator.resting_state()
    batches = Batches(67, 12, num_workers)
    state["ledger"] = recut(state["ledger"], batches)
    position = frontier(state["ledger"], batches)
    assert position == min(67, num_updates * 12 * parse(text, 3).num_steps)
    state["protocol"] = parse(text, num_workers).state()
    resumed = Resumed(state, text, num_workers, Ledger(67, 12, num_workers))
    resumed.finish(random.Random(1))
    assert resumed.updates
    if text == "full-sync":
        spans = [(u[0].start, u[-1].stop) for u in map(sorted, resumed.updates)]
        assert spans == [(s, min(s + 12, 67)) for s in range(position, 67, 12)]


def test_a_frontier_does_not_hide_a_hole() -> None:
    driver = Driver(lambda: parse("async", 2), lambda: Ledger(40, 4, 1), 2)
    driver.open_epoch()
    driver.push(1)  # the second lease, while the first is at work
    state = driver.coordinator.resting_state()["ledger"]
    assert frontier(state, Batches(40, 4, 1)) is None
    driver.push(0)
    state = driver.coordinator.resting_state()["ledger"]
    assert frontier(state, Batches(40, 4, 1)) == 8


@pytest.mark.parametrize("text", ["adaptive", "adaptive-local:4"])
def test_a_protocols_learned_state_outlives_its_members(text: str) -> None:
    driver = Driver(lambda: parse(text, 3), lambda: Ledger(200, 6, parse(text, 3).num_pushes), 3)
    driver.open_epoch()
    for _ in range(40):
        if not driver.is_epoch_open:
            driver.open_epoch()
        driver.push(min(driver.at_work))
    learned = {name: driver.protocol.state()[name] for name in parse(text, 3).learned}
    assert learned != {name: parse(text, 3).state()[name] for name in learned}
    driver.stop()
    assert {name: driver.protocol.state()[name] for name in learned} == learned


def test_batches_of_zero_weight_before_the_first_update_are_not_missing() -> None:
    """``step.weight = 0`` in the first batches: they are done, and no version has them."""
    ledger = Ledger(12, 4, 2)
    coordinator = Coordinator(parse("full-sync", 2), ledger)
    for member in range(2):
        coordinator.hear(Joined(member, 0.0))
    for order in coordinator.open_epoch(0.0):
        assert isinstance(order, Grant)
        coordinator.hear(Pushed(order.ticket, 2, 0.5, True, 1.0, weight=0.0))
    assert coordinator.version == 0
    state = json.loads(json.dumps(coordinator.resting_state()))
    audit(state, Batches(12, 4, 2))
    resumed = Resumed(state, "full-sync", 2, Ledger(12, 4, 2))
    resumed.finish(random.Random(0))
    assert len(resumed.updates) == 2
