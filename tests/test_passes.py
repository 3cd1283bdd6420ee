"""Which pass over the loader comes next, from the numbers alone."""

import pytest

from paceline.passes import Passes, ScriptPlace


def test_passes_are_numbered_through() -> None:
    passes = Passes()
    passes.looked(passes.take())
    for position in range(3):
        passes.arrive(position)
        passes.looked(passes.take())
        passes.take()
    assert passes.place == ScriptPlace(2, 5, 1, (0, 5))
    assert passes.next == 7


def test_who_goes_on_finds_what_lies_behind() -> None:
    passes = Passes(6, ScriptPlace(2, 5, 1, (0, 5)))
    first = passes.take()
    assert passes.is_behind(first)
    assert passes.was_look(first)
    assert passes.first_position == 2
    passes.arrive(2)
    assert [passes.is_behind(passes.take()) for _ in range(2)] == [True, False]
    passes.arrive(3)
    assert passes.place == ScriptPlace(3, 7, 1, (0,))


@pytest.mark.parametrize(
    ("epoch", "passes_each", "wanted"),
    [(6, 2, (2, 5)), (7, 2, (3, 7)), (6, 0, (3, 6)), (6, 1, (3, 6))],
)
def test_where_the_others_will_be_next(epoch: int, passes_each: int, wanted: object) -> None:
    assert ScriptPlace(2, 5, 1, (0, 5)).after(epoch, passes_each)[:2] == wanted
