"""k-batch-async and async: nobody ever waits, and every K pushes are an update."""

import random

import pytest

from alone import Alone, updates
from paceline.events import Apply, Release, Ticket


def test_a_push_is_followed_at_once_by_a_release_of_that_member_alone() -> None:
    run = Alone("k-batch-async:3", 2)
    assert run.push(1) == [Release(1)]
    assert run.push(1) == [Release(1)]
    decisions = run.push(0)
    assert [(t.member, t.serial) for t in updates(decisions)[0].tickets] == [(1, 0), (1, 1), (0, 0)]
    assert decisions[1:] == [Release(0)]


def test_async_applies_every_push_alone() -> None:
    run = Alone("async", 2)
    assert run.push(1) == [Apply((Ticket(1, 0, 0),), (1.0,)), Release(1)]
    assert run.push(0) == [Apply((Ticket(0, 0, 0),), (1.0,)), Release(0)]
    assert run.staleness_versions == [0, 1]


def test_async_is_k_batch_async_with_k_1_decision_for_decision() -> None:
    rng = random.Random(4)
    one, other = Alone("async", 3), Alone("k-batch-async:1", 3)
    for step in range(300):
        member = rng.choice(sorted(one.working))
        assert one.push(member) == other.push(member)
        if step % 50 == 49:
            assert one.leave(member) == other.leave(member)
            assert one.join(100 + step) == other.join(100 + step)
            assert one.stall(100 + step) == other.stall(100 + step)
            assert one.exhaust() == other.exhaust()


@pytest.mark.parametrize(("num_pushes", "num_members"), [(2, 8), (5, 20), (1, 6), (9, 4)])
def test_mean_staleness_is_p_minus_1_over_k(num_pushes: int, num_members: int) -> None:
    rng = random.Random(0)
    run = Alone(f"k-batch-async:{num_pushes}", num_members)
    for _ in range(18_000):
        run.push(rng.choice(sorted(run.working)))
    mean = sum(run.staleness_versions) / len(run.staleness_versions)
    assert mean == pytest.approx((num_members - 1) / num_pushes, rel=0.03)
