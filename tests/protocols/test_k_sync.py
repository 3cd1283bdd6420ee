"""k-sync: the first K pushes make the update, and members that have not pushed are called off."""

from alone import Alone, cancelled, released, updates
from paceline.events import Release


def test_the_first_k_are_applied_the_rest_called_off_and_all_released() -> None:
    run = Alone("k-sync:2", 4)
    assert run.push(3) == []
    decisions = run.push(1)
    assert [t.member for t in updates(decisions)[0].tickets] == [3, 1]
    assert cancelled(decisions) == [0, 2]
    assert released(decisions) == [0, 1, 2, 3]


def test_no_gradient_is_ever_stale() -> None:
    run = Alone("k-sync:2", 3)
    for member in (0, 1, 2, 1, 1, 0):
        run.push(member)
    assert run.staleness_versions == [0] * 6


def test_a_member_that_has_pushed_waits_for_the_update() -> None:
    run = Alone("k-sync:2", 3)
    run.push(0)
    assert sorted(run.working) == [1, 2]


def test_with_fewer_than_k_members_the_finished_push_again() -> None:
    run = Alone("k-sync:3", 3)
    run.leave(2)
    assert run.push(0) == [Release(0)]
    assert run.leave(1) == []
    assert run.push(0) == [Release(0)]
    assert len(updates(run.push(0))[0].tickets) == 3


def test_the_death_of_a_backup_changes_nothing() -> None:
    run = Alone("k-sync:2", 3)
    run.push(0)
    assert run.leave(2) == []


def test_a_joining_member_starts_at_once() -> None:
    run = Alone("k-sync:2", 2)
    assert run.join(5) == [Release(5)]


def test_a_stalled_member_is_not_waited_for() -> None:
    run = Alone("k-sync:2", 3)
    assert run.stall(0) == []
    run.push(1)
    assert cancelled(run.push(2)) == [0]
