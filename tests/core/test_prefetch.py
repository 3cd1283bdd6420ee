"""Leases reserved for members that prefetch are given out in the reported order."""

from collections.abc import Callable

from paceline.core.prefetch import Lookahead
from paceline.events import Lease


def fresh(num: int) -> tuple[Callable[[], Lease | None], Callable[[int], int]]:
    """This many leases, one a call, and how many are left."""
    leases = [Lease(number, 0, number, number + 1) for number in range(num)]

    def left(at_most: int) -> int:
        return min(at_most, len(leases))

    return lambda: leases.pop(0) if leases else None, left


def test_leases_are_reserved_in_turns_to_each_depth_and_reported_once() -> None:
    ahead = Lookahead()
    ahead.set_depth(4, 2)
    ahead.set_depth(7, 1)
    ahead.top_up(*fresh(9), num_at_once=1)
    assert [lease.id for lease in ahead.kept(4)] == [0, 2]
    assert [lease.id for lease in ahead.news(7)] == [1]
    assert ahead.news(7) == ()
    assert [lease.id for lease in ahead.untold(4)] == [0, 2]


def test_a_member_takes_its_oldest_reservation_and_another_its_newest() -> None:
    ahead = Lookahead()
    ahead.set_depth(4, 3)
    ahead.top_up(*fresh(3), num_at_once=3)
    newest = ahead.take_from_any()
    assert newest is not None
    assert newest.id == 2
    assert [ahead.take(4).id, ahead.take(4).id] == [0, 1]
    assert ahead.take_from_any() is None
    assert not ahead


def test_reservations_return_when_their_member_stops_prefetching() -> None:
    ahead = Lookahead()
    ahead.set_depth(4, 2)
    ahead.top_up(*fresh(2), num_at_once=1)
    assert [lease.id for lease in ahead.forget(4)] == [0, 1]
    assert not ahead.is_used
    assert ahead.forget(4) == []


def test_reservations_are_restored_from_their_state() -> None:
    ahead, other = Lookahead(), Lookahead()
    ahead.set_depth(4, 2)
    ahead.top_up(*fresh(2), num_at_once=1)
    ahead.news(4)
    other.load(ahead.state(), lambda number: Lease(number, 0, number, number + 1))
    assert other.state() == ahead.state()
