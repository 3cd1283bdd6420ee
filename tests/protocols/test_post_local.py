"""post-local-sgd: one step a push for N updates, then H, whoever comes and goes."""

from alone import Alone
from paceline.events import Joined, Release
from paceline.protocols import parse


def steps(run: Alone, num_workers: int, num_updates: int) -> list[set[int]]:
    """Local steps that each round is released for."""
    found = []
    for _ in range(num_updates):
        released = [one for member in range(num_workers) for one in run.push(member)]
        found.append({one.num_steps for one in released if isinstance(one, Release)})
    return found


def test_an_average_after_every_step_and_later_after_h() -> None:
    protocol = parse("post-local-sgd:3,8", 2)
    assert protocol.react(Joined(0, 0.0)) == [Release(0, 1)]
    assert steps(Alone("post-local-sgd:3,8", 2), 2, 5) == [{1}, {1}, {8}, {8}, {8}]


def test_work_that_is_handed_on_is_of_the_same_update() -> None:
    run = Alone("post-local-sgd:2,8", 3)
    run.push(0)
    assert run.leave(1) == [Release(0, 1)]
    run.push(0)
    run.push(2)
    run.push(0)
    assert run.push(0) == []
    assert [one for one in run.push(2) if isinstance(one, Release)] == [
        Release(0, 8), Release(2, 8),
    ]  # fmt: skip


def test_how_far_it_is_outlives_all_members() -> None:
    """Of a run that goes on, only what the protocol has learned is taken over."""
    before = parse("post-local-sgd:2,8", 2)
    before.load({**before.state(), "num_updates": 2})
    after = parse("post-local-sgd:2,8", 2)
    state = before.state()
    after.load({**after.state(), **{name: state[name] for name in after.learned}})
    assert (before.num_steps, after.num_steps) == (8, 8)
