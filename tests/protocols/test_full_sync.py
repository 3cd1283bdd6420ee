"""full-sync and local-sgd: an update is one push from every member, whatever happens to any."""

from alone import Alone, cancelled, released, updates
from paceline.events import Release


def test_no_member_continues_before_all_have_pushed() -> None:
    run = Alone("full-sync", 3)
    assert run.push(2) == []
    assert run.push(0) == []
    decisions = run.push(1)
    assert [t.member for t in updates(decisions)[0].tickets] == [2, 0, 1]
    assert released(decisions) == [0, 1, 2]


def test_a_push_is_weighted_by_its_samples() -> None:
    run = Alone("full-sync", 2)
    run.push(0, num_samples=3)
    assert updates(run.push(1, num_samples=1))[0].weights == (0.75, 0.25)


def test_every_gradient_is_of_the_newest_version() -> None:
    run = Alone("full-sync", 3)
    for member in (0, 1, 2, 2, 0, 1, 1, 2, 0):
        run.push(member)
    assert run.staleness_versions == [0] * 9


def test_a_finished_member_takes_over_from_a_dead_one_at_the_same_version() -> None:
    run = Alone("full-sync", 3)
    run.push(0)
    assert run.leave(1) == [Release(0)]
    run.push(2)
    assert run.version == 0
    assert len(updates(run.push(0))[0].tickets) == 3


def test_the_push_of_a_member_that_left_still_counts() -> None:
    run = Alone("full-sync", 2)
    run.push(0)
    assert run.leave(0) == []
    assert [t.member for t in updates(run.push(1))[0].tickets] == [0, 1]


def test_a_stalled_member_is_called_off_and_not_released_again() -> None:
    run = Alone("full-sync", 3)
    run.push(0)
    decisions = run.stall(1)
    assert cancelled(decisions) == [1]
    assert released(decisions) == [0]
    run.push(0)
    assert 1 not in released(run.push(2))
    assert run.stall(1) == []
    assert run.leave(1) == []


def test_a_member_that_stalls_while_waiting_leaves_no_work() -> None:
    run = Alone("full-sync", 2)
    run.push(0)
    assert run.stall(0) == []
    assert released(run.push(1)) == [
        1,
    ]
    assert released(run.push(1)) == [1]  # the update lacks a push: a live member makes it


def test_a_joining_member_replaces_a_dead_one() -> None:
    run = Alone("full-sync", 2)
    run.leave(1)
    assert run.join(7) == [Release(7)]


def test_a_surplus_member_waits() -> None:
    run = Alone("full-sync", 2)
    assert run.join(2) == []
    run.push(0)
    assert released(run.push(1)) == [0, 1]


def test_the_last_update_of_an_epoch_may_be_short() -> None:
    run = Alone("full-sync", 3)
    run.push(0, num_samples=2)
    run.push(1, num_samples=2)
    decisions = run.exhaust()
    assert updates(decisions)[0].weights == (0.5, 0.5)
    assert released(decisions) == [0, 1]  # 2 is released already: it waits for a lease


def test_local_sgd_releases_members_for_h_steps() -> None:
    run = Alone("local-sgd:5", 2)
    assert run.protocol.num_steps == 5
    run.push(0, num_samples=30)
    decisions = run.push(1, num_samples=10)
    assert updates(decisions)[0].weights == (0.75, 0.25)
    assert decisions[1:] == [Release(0, 5), Release(1, 5)]


def test_local_sgd_averages_parameters_and_full_sync_gradients() -> None:
    assert Alone("local-sgd:2", 2).protocol.update_rule == "mean"
    assert Alone("full-sync", 2).protocol.update_rule == "optimizer"
