"""The numbers of a loop without a loader: consecutive, in batches, pass after pass."""

from paceline.data.numbers import Numbers, note, numbered


def passes(numbers: Numbers) -> list[int]:
    return [one for batch in numbers for one in batch]


def test_a_pass_begins_where_the_last_one_ended() -> None:
    numbers = Numbers(3)
    numbers.begin()
    numbers.go_on(2, 2)
    assert (passes(numbers), len(numbers)) == ([0, 1, 2, 3, 4, 5], 2)
    numbers.go_on(3, 1)
    assert passes(numbers) == [6, 7, 8]


def test_what_is_missing_behind_the_target_is_made_of_new_numbers() -> None:
    numbers = Numbers(2)
    numbers.begin()
    numbers.go_on(3, 3)
    numbers.go_on(3, 1)  # one of the updates was not made
    assert passes(numbers) == [6, 7]
    numbers.come_to(3)
    assert numbers.stop == 4
    numbers.come_to(9)
    numbers.go_on(10, 1)
    assert passes(numbers) == [18, 19]


def test_a_loader_of_numbers_gives_them_one_by_one() -> None:
    numbers = Numbers(1)
    numbers.begin()
    numbers.go_on(3, 3)
    assert list(numbered(numbers)) == [0, 1, 2]
    assert "one" in note(1)
    assert "4" in note(4)
