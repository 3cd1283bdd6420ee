"""post-local-sgd: one step a push for N updates, then H, with any joins and deaths."""

from alone import Alone
from paceline.events import Joined, Release
from paceline.protocols import parse


def steps(run: Alone, num_workers: int, num_updates: int) -> list[set[int]]:
    """The numbers of local steps released in each round."""
    results = []
    for _ in range(num_updates):
        released = [decision for member in range(num_workers) for decision in run.push(member)]
        results.append(
            {decision.num_steps for decision in released if isinstance(decision, Release)}
        )
    return results


def test_parameters_are_averaged_after_every_step_and_later_after_h() -> None:
    protocol = parse("post-local-sgd:3,8", 2)
    assert protocol.react(Joined(0, 0.0)) == [Release(0, 1)]
    assert steps(Alone("post-local-sgd:3,8", 2), 2, 5) == [{1}, {1}, {8}, {8}, {8}]


def test_reassigned_work_belongs_to_the_same_update() -> None:
    run = Alone("post-local-sgd:2,8", 3)
    run.push(0)
    assert run.leave(1) == [Release(0, 1)]
    run.push(0)
    run.push(2)
    run.push(0)
    assert run.push(0) == []
    assert [decision for decision in run.push(2) if isinstance(decision, Release)] == [
        Release(0, 8), Release(2, 8),
    ]  # fmt: skip


def test_the_update_count_outlives_all_members() -> None:
    """A resumed run takes over only the protocol's learned state."""
    before = parse("post-local-sgd:2,8", 2)
    before.load({**before.state(), "num_updates": 2})
    after = parse("post-local-sgd:2,8", 2)
    state = before.state()
    after.load({**after.state(), **{name: state[name] for name in after.learned}})
    assert (before.num_steps, after.num_steps) == (8, 8)
