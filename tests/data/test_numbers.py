"""The numbers of a loop without a loader: consecutive, in batches."""

from paceline.data.numbers import Numbers, note, numbered
from paceline.data.order import EpochOrder


def test_a_pass_has_whole_batches_of_consecutive_numbers() -> None:
    numbers = Numbers(3)
    assert (list(numbers), len(numbers)) == ([0, 1, 2], 3)
    numbers.first, numbers.stop = 2, 4
    assert (list(numbers), len(numbers)) == ([6, 7, 8, 9, 10, 11], 6)


def test_a_loader_of_numbers_gives_them_one_by_one() -> None:
    numbers = Numbers(1)
    numbers.stop = 3
    assert list(numbered(numbers)) == [0, 1, 2]
    assert "one" in note(1)
    assert "4" in note(4)


def test_any_number_of_updates_takes_no_memory() -> None:
    """``pace.updates(10**9)`` in a script that stops by itself."""
    numbers = Numbers(4)
    order = EpochOrder(numbered(numbers), 0)
    digests = []
    for numbers.stop in (1 << 50, 1 << 51):  # 2^55 bytes, if they were listed
        order.draw(0)
        digests.append(order.digest())
    assert digests[0] != digests[1]
