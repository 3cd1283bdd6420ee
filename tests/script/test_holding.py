"""What a push carries, keeps and gives back: told by what the loop did with each batch."""

import pytest

from paceline.events import Grant, Lease, Ticket
from paceline.exchange.base import Work
from paceline.script.holding import Holding


def lease(number: int, *, size: int = 4) -> Lease:
    return Lease(number, 0, number * size, (number + 1) * size)


def grant(serial: int, *numbers: int) -> Grant:
    return Grant(Ticket(0, serial, serial), tuple(map(lease, numbers)))


def holding(*numbers: int, is_local: bool = False) -> Holding:
    """All of a first grant are with the loop."""
    made = Holding(is_local=is_local)
    assert made.follow(grant(0, *numbers))
    while made.take() is not None:
        made.close()
    return made


def test_a_batch_that_was_stepped_on_is_in_the_push() -> None:
    one = holding(0)
    assert one.stepped() == 1
    assert one.work() == Work(num_samples=4, weight=4.0)


def test_what_is_accumulated_rides_on_the_next_push() -> None:
    one = Holding(is_local=False)
    one.follow(grant(0, 0))
    one.take()
    one.differentiated()
    one.close()
    assert one.has_accumulated
    work = one.work()
    assert (work.weight, work.kept) == (0.0, (0,))
    one.pushed(work)
    one.follow(grant(1, 0, 1))
    assert one.take() == lease(1)  # the first is here already
    one.stepped()
    assert one.work().num_samples == 8


def test_what_was_zeroed_is_given_back_unused() -> None:
    one = Holding(is_local=False)
    one.follow(grant(0, 0))
    one.take()
    one.differentiated()
    one.zeroed()
    assert not one.has_accumulated
    assert one.work().unused == (0,)


def test_a_weight_of_nothing_leaves_the_batch_unused() -> None:
    one = holding(0)
    assert one.current is not None
    one.current.weight = 0.0
    one.stepped()
    assert one.work() == Work(unused=(0,))


def test_what_was_kept_and_went_to_others_is_called_off() -> None:
    one = holding(0)
    one.differentiated()
    held = one.current
    one.pushed(one.work())
    assert not one.follow(grant(1, 2))
    assert held is not None
    assert held.is_called_off
    assert one.take() == lease(2)


@pytest.mark.parametrize("num_stepped", [1, 2])
def test_local_steps_are_due_when_every_lease_has_made_its_own(num_stepped: int) -> None:
    one = Holding(is_local=True)
    one.follow(grant(0, 0, 1))
    due = []
    for number in range(2):
        one.take()
        one.differentiated()
        if number < num_stepped:
            one.stepped()
        due.append(one.close())
    assert due == [False, num_stepped == 2]
