"""k-batch-sync: K pushes at one version make the update, also several of one member."""

from alone import Alone, cancelled, released, updates
from paceline.events import Release


def test_a_member_that_has_pushed_continues_at_the_same_version() -> None:
    run = Alone("k-batch-sync:3", 2)
    assert run.push(0) == [Release(0)]
    assert run.working[0].version == 0
    assert run.working[0].serial == 1


def test_one_fast_member_can_make_the_whole_update() -> None:
    run = Alone("k-batch-sync:3", 2)
    run.push(0)
    run.push(0)
    decisions = run.push(0)
    assert [t.member for t in updates(decisions)[0].tickets] == [0, 0, 0]
    assert cancelled(decisions) == [1]
    assert released(decisions) == [0, 1]


def test_no_gradient_is_ever_stale() -> None:
    run = Alone("k-batch-sync:2", 3)
    for member in (0, 0, 2, 1, 1, 1):
        run.push(member)
    assert run.staleness_versions == [0] * 6


def test_no_member_is_ever_idle() -> None:
    run = Alone("k-batch-sync:4", 3)
    for member in (0, 0, 2, 1, 1, 1, 0, 2):
        run.push(member)
        assert sorted(run.working) == [0, 1, 2]
