"""The bounds in limiting cases, and against gradient descent on a parabola."""

import random

import pytest

from paceline.conditions.delays import parse_delay
from paceline.errors import ConfigError
from paceline.theory import order_statistic_s, update_s
from paper.bounds import (
    Problem,
    error_after,
    error_floor,
    fresh_share,
    gradient_after,
    k_async_bound_s,
    most_learning_rate,
    slowdown,
    speed_up,
)

EXP = parse_delay("exp:1s")
SHIFTED = parse_delay("25ms+exp:25ms")
PROBLEM = Problem(smoothness=4.0, convexity=1.0, variance=9.0, first_error=5.0, growth=2.0)


def test_bound_starts_at_the_first_error_and_ends_at_the_floor() -> None:
    assert error_after(PROBLEM, 0.1, 8, 0) == PROBLEM.first_error
    floor = error_floor(PROBLEM, 0.1, 8)
    assert floor == pytest.approx(0.1 * 4 * 9 / (2 * 1 * 8))
    assert error_after(PROBLEM, 0.1, 8, 2000) == pytest.approx(floor)


def test_staleness_slows_the_bound_and_raises_the_floor() -> None:
    progress = slowdown(0.5, 0.25)
    assert progress == 0.625
    assert error_floor(PROBLEM, 0.1, 8, progress) > error_floor(PROBLEM, 0.1, 8)
    assert error_after(PROBLEM, 0.1, 8, 20, progress) > error_after(PROBLEM, 0.1, 8, 20)


def test_more_samples_allow_a_larger_learning_rate() -> None:
    assert most_learning_rate(PROBLEM, 8) == pytest.approx(1 / (8 * (2 / 8 + 1)))
    assert most_learning_rate(PROBLEM, 8, num_pushes=4) == pytest.approx(1 / (8 * (2 / 8 + 1 / 4)))


def test_nonconvex_gradient_bound_decays_with_the_updates() -> None:
    assert gradient_after(PROBLEM, 0.1, 8, 9, 1.0) == pytest.approx(10 + 4 * 0.1 * 9 / 8)


def test_sgd_on_a_parabola_stays_below_the_bound() -> None:
    # F(w) = w^2/2, gradient w + noise: L = c = 1, the floor is half the bound.
    problem = Problem(smoothness=1.0, convexity=1.0, variance=1.0, first_error=8.0)
    rng, lr, samples, updates = random.Random(0), 0.2, 4, 40
    total = 0.0
    for _ in range(1000):
        w = 4.0
        for _ in range(updates):
            noise = sum(rng.gauss(0, 1) for _ in range(samples)) / samples
            w -= lr * (w + noise)
        total += w * w / 2 / 1000
    bound = error_after(problem, lr, samples, updates)
    assert 0.2 * bound < total <= bound


def test_invalid_problem_is_refused() -> None:
    with pytest.raises(ConfigError, match="convexity <= smoothness, got 2"):
        Problem(smoothness=1.0, convexity=2.0, variance=1.0, first_error=1.0)


@pytest.mark.parametrize(
    ("text", "p", "paper"),
    [
        ("exp:1s", 20, 71.95), ("1s+exp:1s", 20, 45.98), ("pareto:2,1s", 20, 79.76),
        ("exp:1s", 10, 29.29), ("1s+exp:1s", 10, 19.64), ("pareto:2,1s", 10, 28.38),
        ("exp:1s", 5, 11.42), ("1s+exp:1s", 5, 8.21), ("pareto:2,1s", 5, 10.16),
    ],
)  # fmt: skip
def test_speedups_match_figure_5(text: str, p: int, paper: float) -> None:
    assert speed_up(parse_delay(text), p) == pytest.approx(paper, rel=0.001)


def test_k_async_bound_exists_only_for_light_tails() -> None:
    assert k_async_bound_s(EXP, 8, 4) == update_s("k-async", EXP, 8, 4)
    assert k_async_bound_s(SHIFTED, 8, 4) == order_statistic_s(SHIFTED, 4, 8)
    assert k_async_bound_s(parse_delay("weibull:2,1s"), 8, 4) is not None
    for heavy in ("pareto:2,1s", "lognormal:1,1s", "weibull:0.5,1s"):
        assert k_async_bound_s(parse_delay(heavy), 8, 4) is None


def test_fresh_share_is_k_over_p() -> None:
    assert fresh_share(8, 2) == 0.25
