"""Closed forms against hand-computed cases, against each other, and against samples."""

import math
import random
import statistics

import pytest

from paceline.conditions.delays import parse_delay
from paceline.theory import (
    evenly_s,
    harmonic,
    order_statistic_numeric_s,
    order_statistic_s,
    staleness_versions,
    update_s,
)

EXP = parse_delay("exp:1s")
SHIFTED = parse_delay("25ms+exp:25ms")


def test_harmonic_numbers_are_right() -> None:
    assert harmonic(0) == 0.0
    assert harmonic(4) == pytest.approx(25 / 12)


def test_order_statistics_of_two_exponentials_are_right() -> None:
    assert order_statistic_s(EXP, 1, 2) == pytest.approx(0.5)
    assert order_statistic_s(EXP, 2, 2) == pytest.approx(1.5)


def test_shift_moves_every_rank_equally() -> None:
    assert order_statistic_s(SHIFTED, 1, 8) == pytest.approx(0.025 + 0.025 / 8)
    assert order_statistic_s(SHIFTED, 8, 8) == pytest.approx(0.025 + 0.025 * harmonic(8))


@pytest.mark.parametrize(("k", "paper"), [(1, 2051), (10, 2811), (20, 15953)])
def test_pareto_times_match_the_paper(k: int, paper: int) -> None:
    delay = parse_delay("pareto:2,1s")
    assert 2000 * (order_statistic_s(delay, k, 20) or 0.0) == pytest.approx(paper, rel=0.02)


@pytest.mark.parametrize(("k", "paper"), [(1, 2100), (10, 3338), (20, 9195)])
def test_shifted_exponential_times_match_the_paper(k: int, paper: int) -> None:
    delay = parse_delay("1s+exp:1s")
    assert 2000 * (order_statistic_s(delay, k, 20) or 0.0) == pytest.approx(paper, rel=0.002)


@pytest.mark.parametrize("text", ["1s", "exp:1s", "1s+exp:1s", "pareto:3,1s"])
def test_order_statistics_average_to_the_mean(text: str) -> None:
    delay = parse_delay(text)
    ranks = [order_statistic_s(delay, k, 7) or 0.0 for k in range(1, 8)]
    assert ranks == sorted(ranks)
    assert math.fsum(ranks) / 7 == pytest.approx(delay.mean_s)


def test_two_random_terms_have_no_closed_form() -> None:
    assert order_statistic_s(parse_delay("exp:1s+exp:2s"), 1, 2) is None


@pytest.mark.parametrize("delay", [EXP, SHIFTED], ids=str)
def test_k_sync_and_k_async_with_all_workers_equal_full_sync(delay: object) -> None:
    whole = update_s("full-sync", delay, 8, 8)  # type: ignore[arg-type]
    assert update_s("k-sync", delay, 8, 8) == whole  # type: ignore[arg-type]
    assert update_s("k-async", delay, 8, 8) == whole  # type: ignore[arg-type]


@pytest.mark.parametrize("k", range(1, 9))
def test_exponential_delays_make_both_batch_protocols_equally_fast(k: int) -> None:
    assert update_s("k-batch-sync", EXP, 8, k) == update_s("k-batch-async", EXP, 8, k) == k / 8


@pytest.mark.parametrize("protocol", ["k-batch-sync", "k-async"])
def test_unknown_closed_forms_are_none(protocol: str) -> None:
    assert update_s(protocol, SHIFTED, 8, 4) is None
    assert update_s("stale-synchronous", EXP, 8, 4) is None
    assert staleness_versions("stale-synchronous", 8, 4) is None


def test_k_batch_sync_with_one_push_equals_k_sync_with_one() -> None:
    assert update_s("k-batch-sync", SHIFTED, 8, 1) == update_s("k-sync", SHIFTED, 8, 1)


def test_k_sync_with_more_pushes_than_workers_has_no_time() -> None:
    assert update_s("k-sync", EXP, 2, 3) is None
    assert update_s("k-batch-async", EXP, 2, 3) == pytest.approx(1.5)


def test_staleness_follows_its_formula() -> None:
    assert staleness_versions("k-sync", 8, 2) == 0.0
    assert staleness_versions("k-async", 8, 2) == 3.0
    assert staleness_versions("k-batch-async", 8, 2) == 3.5
    assert staleness_versions("async", 8, 1) == 7.0


def test_order_statistic_equals_the_mean_of_draws() -> None:
    rng = random.Random(1)
    draws = [sorted(SHIFTED.sample(rng) for _ in range(5))[2] for _ in range(20_000)]
    error = statistics.stdev(draws) / math.sqrt(len(draws))
    assert abs(statistics.fmean(draws) - (order_statistic_s(SHIFTED, 3, 5) or 0.0)) < 4 * error


RANKS = [(1, 1), (1, 20), (10, 20), (20, 20), (7, 8), (100, 100), (9000, 10_000)]


@pytest.mark.parametrize("text", ["exp:1s", "1s+exp:1s", "pareto:2,1s", "pareto:1.3,1s", "2s"])
@pytest.mark.parametrize(("k", "p"), RANKS)
def test_numeric_integral_equals_the_closed_form(text: str, k: int, p: int) -> None:
    delay = parse_delay(text)
    assert order_statistic_numeric_s(delay, k, p) == pytest.approx(
        order_statistic_s(delay, k, p), rel=1e-6
    )


@pytest.mark.parametrize("shape", [0.5, 1.0, 3.0])
def test_minimum_of_weibulls_is_a_weibull(shape: float) -> None:
    delay = parse_delay(f"weibull:{shape},1s")
    expected = 8 ** (-1 / shape) * math.gamma(1 + 1 / shape)
    assert order_statistic_numeric_s(delay, 1, 8) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("text", ["lognormal:1,1s", "weibull:0.7,1s", "list:1s,2s,9s"])
def test_order_statistics_of_any_distribution_average_to_its_mean(text: str) -> None:
    delay = parse_delay(text)
    ranks = [order_statistic_numeric_s(delay, k, 7) for k in range(1, 8)]
    assert math.fsum(ranks) / 7 == pytest.approx(delay.mean_s, rel=2e-3)


def test_maximum_of_four_erlangs_is_computed_by_sampling() -> None:
    # E[max] = integral of 1 - F^4, F(x) = 1 - e^-x (1 + x), computed as a sum.
    expected = sum(
        0.001 * (1 - (1 - math.exp(-x) * (1 + x)) ** 4) for x in (i * 0.001 for i in range(40_000))
    )
    actual = order_statistic_numeric_s(parse_delay("exp:1s+exp:1s"), 4, 4)
    assert actual == pytest.approx(expected, rel=0.01)


def test_rates_of_different_workers_add_up() -> None:
    assert evenly_s([1.0, 0.5, 0.25], 7) == pytest.approx(1.0)
    assert evenly_s([3.0] * 4, 2) == update_s("k-batch-async", parse_delay("3s"), 4, 2)


def test_order_statistics_of_a_list_match_counting() -> None:
    delay = parse_delay("1s+list:1s,2s,2s,5s")
    assert order_statistic_s(delay, 1, 2) == pytest.approx(1 + 1 + 9 / 16 + 3 / 16)
    assert order_statistic_s(delay, 2, 2) == pytest.approx(1 + 1 + 15 / 16 + 3 * 7 / 16)
