"""A stream's end, found while it is read: each number before it once, none after it."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driver import Driver
from paceline.core.batches import Batches
from paceline.core.cuts import Cuts
from paceline.core.ledger import Ledger
from paceline.protocols import PROTOCOLS, parse

FAR = 40
"""Where a pass ends that nobody knows the end of: beyond all that is drawn here."""
SPELLINGS = [
    "full-sync", "k-sync:2", "k-batch-sync:2", "async", "k-async:2", "k-batch-async:2",
    "stale-synchronous:1", "local-sgd:3", "adaptive", "adaptive-local:4",
    "post-local-sgd:3,4",
]  # fmt: skip


class StreamDriver(Driver):
    """A driver whose members find nothing after the end, and report it."""

    def __init__(self, text: str, num_members: int, end: int) -> None:
        self.end = end
        size = parse(text, num_members).num_pushes
        super().__init__(
            lambda: parse(text, num_members), lambda: Ledger(FAR * size, size, size), num_members
        )

    def push_what_is_there(self, member: int) -> None:
        """A member learns of the end when it asks for something after it."""
        leases = self.at_work[member][1]
        if any(lease.start >= self.end for lease in leases):
            self.tell_end()
        ticket, leases = self.at_work.pop(member)
        self.stalled.discard(member)
        used = [lease for lease in leases if lease.start < self.end]
        self._push_parts(ticket, used, [], [lease for lease in leases if lease not in used])

    def tell_end(self) -> None:
        self.is_closed = True
        epoch = self.coordinator.epoch
        self._both(lambda c: c.end_stream(epoch, self.end, self.now_s))

    def finish(self, rng: random.Random) -> None:
        for _ in range(20 + 8 * (self.end + 4) * (len(self.live) + 1)):
            if not self.is_epoch_open:
                return
            self.push_what_is_there(rng.choice(sorted(self.at_work)))
        raise AssertionError("the epoch does not end")

    def _check_that_nobody_idles_in_vain(self) -> None:
        """Copies are made of leases with samples."""
        held = [lease for _, leases in self.at_work.values() for lease in leases]
        if not self.is_closed or any(lease.start < self.end for lease in held):
            super()._check_that_nobody_idles_in_vain()


def test_every_protocol_is_tested() -> None:
    assert {text.partition(":")[0] for text in SPELLINGS} == set(PROTOCOLS)


@pytest.mark.parametrize("text", SPELLINGS)
@settings(deadline=None, max_examples=40)
@given(
    end=st.integers(1, 23), num_members=st.integers(2, 4), seed=st.integers(0, 999),
    depth=st.integers(0, 2), num_events=st.integers(0, 40),
)  # fmt: skip
def test_each_number_before_the_end_counts_once_and_none_after_it(
    text: str, end: int, num_members: int, seed: int, depth: int, num_events: int
) -> None:
    rng = random.Random(seed)
    driver = StreamDriver(text, num_members, end)
    for member in sorted(driver.live):
        driver.look_ahead(member, depth)
    for _ in range(2):
        driver.open_epoch()
        for _ in range(num_events):
            if not driver.is_epoch_open:
                break
            what = rng.random()
            if what < 0.1 and len(driver.live) > 2:
                driver.crash(rng.choice(sorted(driver.live)))
            elif what < 0.2:
                driver.look_ahead(driver.join(), depth)
            elif what < 0.25:
                driver.save_and_load(continue_from_copy=rng.random() < 0.5)
            elif what < 0.3:
                driver.tell_end()
            elif driver.at_work:
                driver.push_what_is_there(rng.choice(sorted(driver.at_work)))
        driver.finish(rng)
        assert driver.used == Counter(range(end))
        first, others = driver.coordinator.done_with()
        assert first >= end
        assert others == ()


@settings(deadline=None, max_examples=40)
@given(end=st.integers(1, 30), num_pushes=st.integers(0, 40), seed=st.integers(0, 99))
def test_reported_numbers_are_the_used_ones(end: int, num_pushes: int, seed: int) -> None:
    rng = random.Random(seed)
    driver = StreamDriver("async", 3, end)
    driver.open_epoch()
    for _ in range(num_pushes):
        if driver.at_work:
            driver.push_what_is_there(rng.choice(sorted(driver.at_work)))
        first, others = driver.coordinator.done_with()
        known = {*range(min(first, end)), *(number for number in others if number < end)}
        assert known == set(driver.used)


@pytest.mark.parametrize("text", ["full-sync", "async", "local-sgd:3"])
@settings(deadline=None, max_examples=40)
@given(end=st.integers(1, 23), num_pushes=st.integers(0, 30), is_told=st.booleans())
def test_a_run_resumed_from_rest_ends_where_the_stream_does(
    text: str, end: int, num_pushes: int, is_told: bool
) -> None:
    rng = random.Random(end)
    driver = StreamDriver(text, 3, end)
    driver.open_epoch()
    for _ in range(num_pushes):
        if driver.at_work:
            driver.push_what_is_there(rng.choice(sorted(driver.at_work)))
    if not driver.is_epoch_open:
        return
    if is_told:
        driver.tell_end()
    resting = driver.coordinator.resting_state()
    driver.stop()
    if driver.is_epoch_open:
        state = driver.coordinator.state()
        assert resting["ledger"] == state["ledger"]


def test_leases_never_taken_do_not_exist() -> None:
    cuts = Cuts(Batches(100, 4, 4), 0, 10)
    assert [cuts.take() for _ in range(5)][-1].start == 4  # type: ignore[union-attr]
    cuts.end_at(6)
    assert [lease.start for lease in iter(cuts.take, None)] == [5]
    assert cuts.next_id == 16
    cuts = Cuts(Batches(100, 4, 4), 0, 0)
    taken = [cuts.take() for _ in range(7)]
    cuts.end_at(2)
    assert cuts.take() is None
    assert [cuts.is_beyond(one) for one in taken if one] == [False] * 2 + [True] * 5
