"""k-async: the first K members make the update, the others continue undisturbed."""

import random

import pytest

from alone import Alone, released, updates


def test_only_the_members_of_the_update_continue() -> None:
    run = Alone("k-async:2", 3)
    slow = run.working[2]
    assert run.push(1) == []
    decisions = run.push(0)
    assert [t.member for t in updates(decisions)[0].tickets] == [1, 0]
    assert released(decisions) == [0, 1]
    assert run.working[2] == slow


def test_a_slow_gradient_joins_a_later_update_and_is_stale() -> None:
    run = Alone("k-async:2", 3)
    for member in (0, 1, 0, 1, 2, 0):
        run.push(member)
    assert run.staleness_versions == [0, 0, 0, 0, 2, 0]


def test_an_update_has_pushes_of_k_different_members() -> None:
    run = Alone("k-async:2", 3)
    run.push(0)
    assert 0 not in run.working


def test_with_fewer_than_k_members_the_finished_push_again() -> None:
    run = Alone("k-async:3", 3)
    run.push(0)
    run.push(1)
    assert released(run.leave(2)) == [0]


@pytest.mark.parametrize(("num_pushes", "num_members"), [(2, 8), (5, 20), (4, 4)])
def test_mean_staleness_is_p_over_k_minus_1(num_pushes: int, num_members: int) -> None:
    rng = random.Random(0)
    run = Alone(f"k-async:{num_pushes}", num_members)
    for _ in range(8000):
        run.push(rng.choice(sorted(run.working)))
    mean = sum(run.staleness_versions) / len(run.staleness_versions)
    assert mean == pytest.approx(num_members / num_pushes - 1, rel=0.02, abs=1e-9)
