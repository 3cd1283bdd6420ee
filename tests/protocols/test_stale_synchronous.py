"""stale-synchronous: no member leads the slowest by more than the slack; no other member waits."""

import random

import pytest

from alone import Alone, released, updates
from paceline.events import Release


@pytest.mark.parametrize("slack_steps", [0, 1, 3])
def test_no_member_leads_by_more_than_slack(slack_steps: int) -> None:
    rng = random.Random(slack_steps)
    run = Alone(f"stale-synchronous:{slack_steps}", 4)
    finished = dict.fromkeys(range(4), 0)
    leads = set()
    for _ in range(500):
        leads |= {finished[member] - min(finished.values()) for member in run.working}
        may_work = {m for m in finished if finished[m] - min(finished.values()) <= slack_steps}
        assert set(run.working) == may_work, "somebody waits who need not, or works who must not"
        member = rng.choice(sorted(run.working))
        run.push(member)
        finished[member] += 1
    assert max(leads) == slack_steps


def test_every_push_is_an_update() -> None:
    run = Alone("stale-synchronous:1", 2)
    assert len(updates(run.push(0))) == 1
    assert len(updates(run.push(1))) == 1


def test_without_slack_it_is_a_round_of_all_members() -> None:
    run = Alone("stale-synchronous:0", 3)
    assert released(run.push(1)) == []
    assert released(run.push(0)) == []
    assert released(run.push(2)) == [0, 1, 2]


def test_a_member_that_left_holds_no_other_back() -> None:
    run = Alone("stale-synchronous:0", 3)
    run.push(0)
    run.push(1)
    assert run.leave(2) == [Release(0), Release(1)]


def test_a_member_that_leaves_while_waiting_is_not_released() -> None:
    run = Alone("stale-synchronous:0", 3)
    run.push(0)
    run.leave(0)
    run.push(1)
    assert released(run.push(2)) == [1, 2]


def test_a_joining_member_starts_at_the_slowest_clock() -> None:
    run = Alone("stale-synchronous:1", 2)
    for member in (0, 1, 0, 1, 0):  # 3 and 2 steps finished
        run.push(member)
    assert run.join(2) == [Release(2)]
    run.push(1)
    assert released(run.push(0)) == []  # 4 ahead of the joiner's 2 by more than 1
    assert released(run.push(2)) == [0, 2]


def test_clocks_are_equal_after_an_epoch() -> None:
    run = Alone("stale-synchronous:1", 2)
    run.push(0)
    assert released(run.push(0)) == []
    assert run.exhaust() == [Release(0)]
    assert released(run.push(0)) == [0]
    assert released(run.push(0)) == []


def test_a_stalled_member_is_still_waited_for() -> None:
    run = Alone("stale-synchronous:0", 2)
    run.push(0)
    assert run.stall(1) == []
    assert released(run.push(1)) == [0, 1]
