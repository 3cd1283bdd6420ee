"""The reader of a stream: always one member, from the needed batch on, known to all others."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.events import Grant, Lease, Ticket
from paceline.run.streams import Place, Streams
from paceline.wire.messages import (
    ReadStream,
    StreamAt,
    StreamDone,
    StreamServed,
    StreamState,
    ToMember,
)


class Desk:
    """A run on paper: live members, used batches, and the messages to members."""

    def __init__(self, num_members: int) -> None:
        self.live = list(range(num_members))
        self.place: Place = (0, ())
        self.told: list[tuple[int, ToMember]] = []
        self.streams = Streams(self._tell, lambda: self.live, lambda: self.place)
        self.streams.is_on = True

    def _tell(self, member: int, message: ToMember) -> None:
        assert member in self.live
        self.told.append((member, message))

    def last(self, kind: type) -> tuple[int, Any]:
        return [entry for entry in self.told if isinstance(entry[1], kind)][-1]

    def serve(self) -> None:
        """The member that was told to read does so."""
        member, order = self.last(ReadStream)
        self.streams.served(member, StreamServed(order.epoch, f"at {member}", b"key"))

    def grant(self, member: int) -> None:
        grant = Grant(Ticket(member, 0, 0), (Lease(0, 0, 0, 1),))
        self.streams.pass_on([grant])

    def leave(self, member: int) -> None:
        self.live.remove(member)
        self.streams.left(member)


def test_one_member_is_told_to_read_and_all_are_told_where() -> None:
    desk = Desk(3)
    desk.streams.open(0)
    assert desk.told == [(0, ReadStream(0, 0, (), 0, ""))]
    desk.serve()
    assert desk.told[1:] == [(member, StreamAt(0, 0, "at 0", b"key")) for member in range(3)]


def test_a_newcomer_is_told_where_the_stream_is() -> None:
    desk = Desk(2)
    desk.streams.open(0)
    desk.serve()
    desk.live.append(7)
    desk.streams.joined(7)
    assert desk.told[-1] == (7, StreamAt(0, 0, "at 0", b"key"))


def test_another_member_reads_from_the_first_needed_batch_after_a_death() -> None:
    desk = Desk(3)
    desk.streams.open(0)
    desk.serve()
    desk.place = (5, (7, 9))
    desk.leave(0)
    assert desk.told[-1] == (1, ReadStream(0, 5, (7, 9), 0, ""))
    desk.streams.served(0, StreamServed(0, "a word of the dead", b""))
    assert desk.told[-1] == (1, ReadStream(0, 5, (7, 9), 0, ""))


def test_a_death_of_a_non_reader_changes_nothing() -> None:
    desk = Desk(3)
    desk.streams.open(0)
    desk.serve()
    before = list(desk.told)
    desk.leave(2)
    assert desk.told == before


def test_between_passes_no_reader_is_chosen_until_the_next_pass() -> None:
    desk = Desk(2)
    desk.streams.open(0)
    desk.serve()
    desk.streams.close()
    desk.leave(0)
    assert not isinstance(desk.told[-1][1], ReadStream)
    desk.place = (0, ())
    desk.streams.open(1)
    assert desk.told[-1] == (1, ReadStream(1, 0, (), 0, ""))


def test_a_newcomer_reads_when_no_member_is_left() -> None:
    desk = Desk(1)
    desk.streams.open(0)
    desk.leave(0)
    desk.live.append(1)
    desk.streams.joined(1)
    assert desk.told[-1] == (1, ReadStream(0, 0, (), 0, ""))


def test_reading_continues_from_the_newest_state_before_the_needed_batch() -> None:
    desk = Desk(2)
    desk.streams.open(0)
    for number in (3, 6, 9):
        desk.streams.state(0, StreamState(0, number, f"state {number}"))
    desk.streams.state(1, StreamState(0, 8, "of one who does not read"))
    desk.place = (8, ())
    assert desk.streams.remember() == {"epoch": 0, "number": 6, "state": "state 6"}
    desk.leave(0)
    assert desk.told[-1] == (1, ReadStream(0, 8, (), 6, "state 6"))


def test_a_resumed_run_starts_from_the_saved_position() -> None:
    desk, other = Desk(2), Desk(2)
    desk.streams.open(3)
    desk.streams.state(0, StreamState(3, 4, "here"))
    desk.place = other.place = (5, (6,))
    other.streams.go_on(desk.streams.remember())
    other.streams.open(3)
    assert other.told == [(0, ReadStream(3, 5, (6,), 4, "here"))]
    other.streams.close()
    other.place = (0, ())
    other.streams.open(4)
    assert other.told[-1] == (0, ReadStream(4, 0, (), 0, ""))
    for nothing in (None, {}, Desk(1).streams.remember()):
        fresh = Desk(1)
        fresh.streams.go_on(nothing)
        fresh.streams.open(0)
        assert fresh.told == [(0, ReadStream(0, 0, (), 0, ""))]


@pytest.mark.parametrize(
    "saved",
    [3, [], {"epoch": 1, "number": 0}, {"epoch": 1, "state": ""}, {"number": 1, "state": ""},
     {"epoch": "1", "number": 0, "state": ""}, {"epoch": 1, "number": -1, "state": ""}],
)  # fmt: skip
def test_an_invalid_saved_position_is_refused(saved: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"no place|not a whole|less than 0"):
        Desk(1).streams.go_on(saved)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["used", "grant", "die", "join"]), st.integers(0, 99))))
def test_a_member_always_reads_and_used_batches_are_reported_once(
    events: list[tuple[str, int]],
) -> None:
    desk, used, next_member = Desk(3), set[int](), 3
    desk.streams.open(0)
    desk.serve()
    for what, number in events:
        if what == "used":
            used.add(number % 20)
            first = next(n for n in range(99) if n not in used)
            desk.place = first, tuple(sorted(n for n in used if n > first))
        elif what == "grant":
            desk.grant(desk.live[number % len(desk.live)])
        elif what == "die" and len(desk.live) > 1:
            desk.leave(desk.live[number % len(desk.live)])
            desk.serve()
        elif what == "join":
            desk.live.append(next_member)
            desk.streams.joined(next_member)
            next_member += 1
        assert desk.streams.reader in desk.live
        known = {m: a.address for m, a in desk.told if isinstance(a, StreamAt)}
        assert all(known[member] == f"at {desk.streams.reader}" for member in desk.live)
    desk.grant(desk.live[0])
    orders = [order for _, order in desk.told if isinstance(order, StreamDone | ReadStream)]
    told: list[int] = []
    for order in orders:
        told += order.done if isinstance(order, ReadStream) else order.others
    assert {*range(desk.place[0]), *told} >= used
    assert {*told} <= used
