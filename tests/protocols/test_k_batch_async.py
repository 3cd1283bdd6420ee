"""k-batch-async and async: no member ever waits, and every K pushes are an update."""

import random

import pytest

from alone import Alone, updates
from paceline.events import Apply, Release, Ticket


def test_a_push_releases_its_member_at_once_and_no_other() -> None:
    run = Alone("k-batch-async:3", 2)
    assert run.push(1) == [Release(1)]
    assert run.push(1) == [Release(1)]
    decisions = run.push(0)
    assert [(t.member, t.serial) for t in updates(decisions)[0].tickets] == [(1, 0), (1, 1), (0, 0)]
    assert decisions[1:] == [Release(0)]


def test_async_applies_every_push_separately() -> None:
    run = Alone("async", 2)
    assert run.push(1) == [Apply((Ticket(1, 0, 0),), (1.0,)), Release(1)]
    assert run.push(0) == [Apply((Ticket(0, 0, 0),), (1.0,)), Release(0)]
    assert run.staleness_versions == [0, 1]


def test_async_makes_the_decisions_of_k_batch_async_with_k_1() -> None:
    rng = random.Random(4)
    first, second = Alone("async", 3), Alone("k-batch-async:1", 3)
    for step in range(300):
        member = rng.choice(sorted(first.working))
        assert first.push(member) == second.push(member)
        if step % 50 == 49:
            assert first.leave(member) == second.leave(member)
            assert first.join(100 + step) == second.join(100 + step)
            assert first.stall(100 + step) == second.stall(100 + step)
            assert first.exhaust() == second.exhaust()


@pytest.mark.parametrize(("num_pushes", "num_members"), [(2, 8), (5, 20), (1, 6), (9, 4)])
def test_mean_staleness_is_p_minus_1_over_k(num_pushes: int, num_members: int) -> None:
    rng = random.Random(0)
    run = Alone(f"k-batch-async:{num_pushes}", num_members)
    for _ in range(18_000):
        run.push(rng.choice(sorted(run.working)))
    mean = sum(run.staleness_versions) / len(run.staleness_versions)
    assert mean == pytest.approx((num_members - 1) / num_pushes, rel=0.03)
