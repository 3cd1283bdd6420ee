"""A file is tried on rows that its example has not, and on altered ones."""

import torch

from paceline.exports.subject import parse_input, random_inputs
from paceline.exports.trials import are_known, trials_of

MAKE = random_inputs(
    [parse_input("1,3"), parse_input("1,2:int64"), parse_input("1:bool")], [2, 50, 2]
)


def test_other_rows_come_after_those_of_the_example() -> None:
    rows = torch.arange(12.0).reshape(6, 2)
    other, negative = trials_of(lambda batch: (rows[:batch],), (rows[:2],), 3)
    assert torch.equal(other[0], rows[2:5])
    assert torch.equal(negative[0], -rows[2:5])


def test_integers_take_their_extremes_and_floats_their_negatives() -> None:
    other, negative, smallest, largest = trials_of(MAKE, MAKE(2), 5)
    assert all(len(value) == 5 for trial in (other, negative, smallest, largest) for value in trial)
    assert torch.equal(negative[0], -other[0])
    assert torch.equal(negative[1], other[1])
    assert torch.equal(smallest[0], other[0])
    for low, value, high in zip(smallest[1:], other[1:], largest[1:], strict=True):
        assert low.dtype == value.dtype == high.dtype
        assert bool((low <= value).all())
        assert bool((value <= high).all())
        assert len(low.unique()) == len(high.unique()) == 1


def test_integers_are_below_the_number_of_rows_of_a_table() -> None:
    numbers, truths = MAKE(40)[1:]
    assert 40 < numbers.max() < 50
    assert set(truths.tolist()) == {False, True}


def test_trials_that_repeat_the_example_are_known() -> None:
    example = MAKE(2)
    assert not are_known(trials_of(MAKE, example, 1), example)
    assert are_known([tuple(value[1:] for value in example)], example)
