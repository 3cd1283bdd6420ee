"""adaptive-local: H follows the loss down, for all members of a round alike."""

import pytest

from paceline.events import Joined, Pushed, Release, Ticket
from paceline.protocols import parse
from paceline.protocols.adaptive import LossProgress


def rounds(text: str, losses: list[float], num_workers: int = 2) -> list[set[int]]:
    """The numbers of local steps released in each round."""
    protocol = parse(text, num_workers)
    results: list[set[int]] = []
    released = {
        one.num_steps
        for member in range(num_workers)
        for one in protocol.react(Joined(member, 0.0))
        if isinstance(one, Release)
    }
    results.append(released)
    for number, loss in enumerate(losses):
        released = set()
        for member in range(num_workers):
            fact = Pushed(Ticket(member, number, number), 4, loss, True, 0.0)
            decisions = protocol.react(fact)
            released |= {
                decision.num_steps for decision in decisions if isinstance(decision, Release)
            }
        results.append(released)
    return results


def test_h_follows_the_root_of_the_loss_ratio() -> None:
    results = rounds("adaptive-local:8", [5.0] * 4 + [1.0] * 40)
    assert results[0] == {8}
    assert results[-1] == {4}  # ceil(8 sqrt(1/5))
    steps = [result.pop() for result in results]
    assert steps == sorted(steps, reverse=True)


def test_h_never_grows_and_never_falls_below_one() -> None:
    assert rounds("adaptive-local:8", [1.0] * 4 + [0.2] * 40 + [2.0] * 40)[-1] == {4}
    assert rounds("adaptive-local:8", [1.0] * 4 + [0.0] * 90)[-1] == {1}


def test_without_progress_it_equals_local_sgd() -> None:
    losses = [1.0, 1.5, float("nan"), 2.0]
    assert rounds("adaptive-local:3", losses) == rounds("local-sgd:3", losses) == [{3}] * 5


@pytest.mark.parametrize("start", [-1.0, 0.0])
def test_a_loss_that_starts_at_or_below_zero_measures_nothing(start: float) -> None:
    progress = LossProgress(2)
    for loss in (start, start, -3.0, -9.0):
        progress.hear(loss)
    assert progress.ratio == 1.0
