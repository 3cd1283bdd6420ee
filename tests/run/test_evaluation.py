"""An evaluation that members share: each position once, all by the same names."""

import pytest

from paceline.errors import ConfigError
from paceline.run.calls import EvaluationBook


def test_what_a_dead_member_held_is_counted_by_another() -> None:
    book = EvaluationBook(num_samples=5, batch_size=2)
    assert [book.take(0), book.take(1)] == [[(0, 2)], [(2, 4)]]
    book.left(0)
    for start, ranges in ((2, [(0, 2)]), (0, [(4, 5)]), (4, [])):
        book.counted(1, start, {})
        assert book.take(1) == ranges
    assert book.is_complete


def test_a_member_holds_ranges_ahead_and_leaves_them_in_their_order() -> None:
    book = EvaluationBook(num_samples=10, batch_size=2, num_ahead=2)
    assert book.take(0) == [(0, 2), (2, 4), (4, 6)]
    assert book.take(1) == [(6, 8), (8, 10)]
    book.counted(0, 0, {})
    assert book.take(0) == [(2, 4), (4, 6)]
    book.left(0)
    book.counted(1, 6, {})
    assert book.take(1) == [(8, 10), (2, 4), (4, 6)]
    assert not book.is_complete


def test_members_that_measure_by_different_names_are_refused_with_both() -> None:
    book = EvaluationBook(num_samples=4, batch_size=2)
    book.counted(0, 0, {"acc": (1.0, 2.0), "loss": (1.0, 2.0)})
    with pytest.raises(ConfigError, match="'acc' in worker 0, 'accuracy' in worker 1"):
        book.counted(1, 2, {"accuracy": (1.0, 2.0), "loss": (1.0, 2.0)})


def test_names_that_follow_from_the_data_are_summed_where_they_are() -> None:
    book = EvaluationBook(num_samples=6, batch_size=2)
    book.counted(0, 0, {"cats": (1.0, 2.0)})
    book.counted(0, 2, {"dogs": (1.0, 2.0)})
    book.counted(1, 4, {"dogs": (1.0, 2.0)})
    assert book.totals() == {"cats": (1.0, 2.0), "dogs": (2.0, 4.0)}
