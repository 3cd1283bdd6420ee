"""Joint work of all members: an evaluation, each position once, and sums of equal lengths."""

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.run.calls import Calls, EvaluationBook
from paceline.wire.messages import Count, Range, Summed, SumValues


def test_a_dead_members_ranges_are_counted_by_another() -> None:
    book = EvaluationBook(num_samples=5, batch_size=2)
    assert [book.take(0), book.take(1)] == [[(0, 2)], [(2, 4)]]
    book.left(0)
    for start, ranges in ((2, [(0, 2)]), (0, [(4, 5)]), (4, [])):
        book.counted(1, start, {})
        assert book.take(1) == ranges
    assert book.is_complete


def test_a_member_holds_ranges_ahead_and_returns_them_in_order() -> None:
    book = EvaluationBook(num_samples=10, batch_size=2)
    book.enter(0, num_ahead=2)
    book.enter(1, num_ahead=2)
    assert book.take(0) == [(0, 2), (2, 4), (4, 6)]
    assert book.take(1) == [(6, 8), (8, 10)]
    book.counted(0, 0, {})
    assert book.take(0) == [(2, 4), (4, 6)]
    book.left(0)
    book.counted(1, 6, {})
    assert book.take(1) == [(8, 10), (2, 4), (4, 6)]
    assert not book.is_complete


def test_members_with_different_metric_names_are_refused() -> None:
    book = EvaluationBook(num_samples=4, batch_size=2)
    book.counted(0, 0, {"acc": (1.0, 2.0), "loss": (1.0, 2.0)})
    with pytest.raises(ConfigError, match="'acc' in worker 0, 'accuracy' in worker 1"):
        book.counted(1, 2, {"accuracy": (1.0, 2.0), "loss": (1.0, 2.0)})


def test_metric_names_that_depend_on_the_data_are_summed() -> None:
    book = EvaluationBook(num_samples=6, batch_size=2)
    book.counted(0, 0, {"cats": (1.0, 2.0)})
    book.counted(0, 2, {"dogs": (1.0, 2.0)})
    book.counted(1, 4, {"dogs": (1.0, 2.0)})
    assert book.totals() == {"cats": (1.0, 2.0), "dogs": (2.0, 4.0)}


def calls_of(
    *members: int, left_peers: Collection[int] = ()
) -> tuple[Calls, list[tuple[int, Any]]]:
    """Calls of these members, and the messages to them."""
    told: list[tuple[int, Any]] = []
    run: Any = SimpleNamespace(
        crew=members,
        is_open=False,
        ending="",
        roster={
            one: SimpleNamespace(seat=one, has_arrived=True, has_joined=True) for one in members
        },
        coordinator=SimpleNamespace(epoch=0),
        dispatch=SimpleNamespace(tell=lambda *what: told.append(what)),
    )
    return Calls(run, lambda totals: None, lambda member: member in left_peers), told


def test_loaders_may_prefetch_different_numbers_of_batches() -> None:
    calls, told = calls_of(0, 1)
    calls.count(0, Count(64, 16, None, "alike", 0, ahead=0))
    calls.count(1, Count(64, 16, None, "alike", 0, ahead=4))
    assert [member for member, _ in told] == [0, 1]
    assert told == [(0, Range(0, 16)), (1, Range(16, 32, ((32, 48), (48, 64))))]
    with pytest.raises(ConfigError, match="different samples or batches"):
        calls.count(1, Count(64, 16, None, "unlike", 0, ahead=0))


def test_several_numbers_are_summed_in_one_round() -> None:
    calls, told = calls_of(0, 1)
    calls.sum(0, SumValues((1.0, 2.0, 3.0)))
    assert told == []
    calls.sum(1, SumValues((10.0, 20.0, 30.0)))
    assert told == [(0, Summed((11.0, 22.0, 33.0))), (1, Summed((11.0, 22.0, 33.0)))]


def test_sums_of_different_lengths_are_refused() -> None:
    calls, _ = calls_of(0, 1)
    calls.sum(0, SumValues((1.0, 2.0)))
    with pytest.raises(ConfigError, match="3 numbers in worker 1 and 2 in worker 0: give it a t"):
        calls.sum(1, SumValues((1.0, 2.0, 3.0)))


def test_after_a_stop_a_sum_waits_for_no_member_that_left_the_loop() -> None:
    calls, told = calls_of(0, 1, 2)
    calls.sum(0, SumValues((1.0,)))
    calls.stopped()
    calls.out_of_loop(1)
    calls.sum(1, SumValues((10.0, 20.0)))  # behind the loop: another sum
    assert told == []
    calls.out_of_loop(2)
    assert told == [(0, Summed((1.0,)))]
    calls.out_of_loop(0)
    calls.sum(0, SumValues((1.0, 2.0)))
    assert len(told) == 1, "worker 2 is missing"
    calls.sum(2, SumValues((100.0, 200.0)))
    assert told[1:] == [(member, Summed((111.0, 222.0))) for member in (0, 1, 2)]


def test_after_a_stop_a_sum_waits_for_no_newcomer_outside_the_loop() -> None:
    calls, told = calls_of(0, 1)
    calls._run.roster[1].has_joined = False
    calls.sum(0, SumValues((1.0,)))
    assert told == []
    calls.stopped()
    assert told == [(0, Summed((1.0,)))]


def test_a_sum_after_a_loops_last_step_is_not_one_after_the_loop() -> None:
    """Worker 1's last step was cancelled, and with it the rest of its block."""
    calls, told = calls_of(0, 1)
    calls.stopped()
    calls.heard_end(0)
    calls.sum(0, SumValues((1.0,)))
    calls.heard_end(1)
    assert told == [], "worker 1 may still come to it"
    calls.out_of_loop(1)
    calls.sum(1, SumValues((10.0, 20.0)))
    assert told == [(0, Summed((1.0,)))]
    calls.out_of_loop(0)
    calls.sum(0, SumValues((1.0, 2.0)))
    assert told[1:] == [(member, Summed((11.0, 22.0))) for member in (0, 1)]


def test_a_sum_after_a_last_step_that_all_made_has_all_members() -> None:
    calls, told = calls_of(0, 1)
    calls.stopped()
    calls.heard_end(0)
    calls.sum(0, SumValues((1.0,)))
    calls.heard_end(1)
    calls.sum(1, SumValues((2.0,)))
    assert told == [(0, Summed((3.0,))), (1, Summed((3.0,)))]


def test_after_a_stop_a_sum_waits_for_no_member_whose_step_was_cancelled() -> None:
    """It waits until the summing member has left them too, which it does at its step."""
    left_peers = set[int]()
    calls, told = calls_of(0, 1, left_peers=left_peers)
    calls.sum(0, SumValues((1.0,)))
    left_peers.add(1)
    calls.left_peers()
    assert told == [], "the run is not stopped: member 1 comes to this sum"
    calls._run.ending = "6 seconds are over"
    calls.left_peers()
    assert told == [(0, Summed((1.0,)))]


def test_without_a_stop_a_sum_waits_for_members_that_left_the_loop() -> None:
    calls, told = calls_of(0, 1)
    calls.sum(0, SumValues((1.0,)))
    calls.out_of_loop(1)
    assert told == []
    calls.sum(1, SumValues((2.0,)))
    assert told == [(0, Summed((3.0,))), (1, Summed((3.0,)))]
