"""The next pass over the loader, computed from the numbers alone."""

from collections.abc import Sequence

import pytest

from paceline.errors import ConfigError
from paceline.passes import Passes, ScriptPlace


def test_own_epoch_count_is_refused_after_one_pass_or_on_resume() -> None:
    passes = Passes()
    passes.take()
    assert passes.own_count(3, knows=False) is None
    passes.take()
    assert "--epochs 3" in str(passes.own_count(3, knows=True))
    passes = Passes(5)
    passes.take()
    assert "resumes at pass 6" in str(passes.own_count(None, knows=False))
    assert passes.own_count(None, knows=True) is None


def test_passes_are_numbered_consecutively() -> None:
    passes = Passes()
    passes.looked(passes.take())
    for position in range(3):
        passes.arrive(position)
        passes.looked(passes.take())
        passes.take()
    assert passes.place == ScriptPlace(2, 5, 1, (0, 5))
    assert passes.next == 7


def test_resumed_run_skips_completed_passes() -> None:
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
def test_next_place_of_other_workers_is_computed(
    epoch: int, passes_each: int, wanted: object
) -> None:
    assert ScriptPlace(2, 5, 1, (0, 5)).after(epoch, passes_each)[:2] == wanted
    known = ScriptPlace(2, 5, 1, (0, 5), first=0, value=2).after(epoch, passes_each)
    assert known.position - known.ahead == 2


def _gone_through(passes: Passes, values: Sequence[int]) -> list[int]:
    """The values yielded by a loop over ``pace.epochs``."""
    first = passes.enter(values)
    results = []
    for index in range(len(values) if first is None else first, len(values)):
        passes.arrive(passes.begin + index, values[index])
        passes.take()
        results.append(values[index])
    if first is not None:
        passes.arrive(passes.begin + len(values))
    return results


AT_6 = ScriptPlace(6, 6, value=6, first=0)
"""A place in the seventh value of ``range(10)``."""


@pytest.mark.parametrize(
    ("place", "values", "wanted"),
    [
        (AT_6, range(10), [6, 7, 8, 9]),
        (AT_6, range(6, 10), [6, 7, 8, 9]),
        (AT_6, range(4, 10), [6, 7, 8, 9]),
        (AT_6, [6, 9], [6, 9]),
        (AT_6, range(3), []),
        (AT_6._replace(position=7, began=7, ahead=1), range(10), [7, 8, 9]),
        (AT_6._replace(position=7, began=7, ahead=1), range(4, 10), [7, 8, 9]),
        (AT_6._replace(position=7, began=7, ahead=1), range(7, 10), [7, 8, 9]),
        (AT_6._replace(position=7, began=7, ahead=1), [], []),
        (ScriptPlace(2, 2, value=7, first=5), [5, 7, 7], [7]),
        (ScriptPlace(6, 6), range(10), [6, 7, 8, 9]),
    ],
)
def test_script_that_starts_later_continues_at_the_value_of_the_run(
    place: ScriptPlace, values: Sequence[int], wanted: list[int]
) -> None:
    passes = Passes(place.began, place)
    assert _gone_through(passes, values) == wanted
    if wanted:
        assert passes.place.position == place.position + len(wanted)
        assert passes.next == place.began + len(wanted)


def test_second_resume_keeps_the_value_of_the_first() -> None:
    second = Passes(6, AT_6)
    assert second.enter(range(6, 10)) == 0
    second.arrive(6, 6)
    second.take()
    second.arrive(7, 7)
    third = Passes(7, ScriptPlace.read(list(second.place)))
    assert _gone_through(third, range(6, 10)) == [7, 8, 9]
    assert _gone_through(Passes(7, second.place), range(10)) == [7, 8, 9]


@pytest.mark.parametrize(
    ("values", "given"), [(range(7, 10), "given 7 to 9"), ([], "given no values")]
)
def test_script_that_starts_beyond_the_run_is_refused(values: Sequence[int], given: str) -> None:
    with pytest.raises(ConfigError, match=rf"resumes at 6 of pace\.epochs.*{given}: the script"):
        Passes(6, AT_6).enter(values)


def test_each_loop_resumes_by_its_own_number() -> None:
    """The first loop has the same value."""
    passes = Passes(3, ScriptPlace(3, 3, loop=1, first=0, value=1))
    assert [_gone_through(passes, range(2)), passes.has_missed] == [[], True]
    assert [_gone_through(passes, range(2)), passes.has_missed] == [[1], False]
    assert passes.place[:2] == (4, 4)
