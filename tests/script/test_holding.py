"""What a push carries, keeps and returns follows from what the loop did with each batch."""

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


def test_a_stepped_batch_is_in_the_push() -> None:
    held = holding(0)
    assert held.stepped() == 1
    assert held.work() == Work(num_samples=4, weight=4.0)


def test_accumulated_batches_are_sent_with_the_next_push() -> None:
    held = Holding(is_local=False)
    held.follow(grant(0, 0))
    held.take()
    held.differentiated()
    held.close()
    assert held.has_accumulated
    work = held.work()
    assert (work.weight, work.kept) == (0.0, (0,))
    held.pushed(work)
    held.follow(grant(1, 0, 1))
    assert held.take() == lease(1)  # the first is here already
    held.stepped()
    assert held.work().num_samples == 8


def test_a_zeroed_batch_is_returned_as_unused() -> None:
    held = Holding(is_local=False)
    held.follow(grant(0, 0))
    held.take()
    held.differentiated()
    held.zeroed()
    assert not held.has_accumulated
    assert held.work().unused == (0,)


def test_a_weight_of_zero_leaves_the_batch_unused() -> None:
    held = holding(0)
    assert held.current is not None
    held.current.weight = 0.0
    held.stepped()
    assert held.work() == Work(unused=(0,))


def test_a_kept_batch_that_is_leased_to_others_is_called_off() -> None:
    holder = holding(0)
    holder.differentiated()
    held = holder.current
    holder.pushed(holder.work())
    assert not holder.follow(grant(1, 2))
    assert held is not None
    assert held.is_called_off
    assert holder.take() == lease(2)


@pytest.mark.parametrize("num_stepped", [1, 2])
def test_local_steps_are_due_when_every_lease_was_stepped(num_stepped: int) -> None:
    held = Holding(is_local=True)
    held.follow(grant(0, 0, 1))
    due = []
    for number in range(2):
        held.take()
        held.differentiated()
        if number < num_stepped:
            held.stepped()
        due.append(held.close())
    assert due == [False, num_stepped == 2]
