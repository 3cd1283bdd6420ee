"""Delays: draws follow the text, and invalid texts are refused."""

import math
import random
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.conditions.delays import parse_delay, parse_delays
from paceline.conditions.distributions import Exponential, LogNormal, Pareto, Term, Weibull
from paceline.conditions.slowness import parse_slow
from paceline.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "mean_s"),
    [
        ("20ms", 0.020),
        ("0ms", 0.0),
        ("250us", 250e-6),
        ("1.5s", 1.5),
        ("1e+1ms", 0.010),
        ("exp:20ms", 0.020),
        ("10ms+exp:5ms", 0.015),
        ("10ms + exp:5ms", 0.015),
        ("pareto:2,10ms", 0.020),
        ("1ms+exp:1ms+pareto:3,2ms", 0.005),
        ("EXP:20MS", 0.020),
        ("lognormal:2,10ms", 0.010 * math.exp(2)),
        ("weibull:1,20ms", 0.020),
        ("weibull:0.5,10ms", 0.020),
        ("list:8ms,9ms,30ms", 0.047 / 3),
        ("1ms+list:8ms,10ms", 0.010),
    ],
)
def test_the_mean_is_that_of_the_text(text: str, mean_s: float) -> None:
    assert parse_delay(text).mean_s == pytest.approx(mean_s)


ALL_KINDS = [
    "20ms", "exp:20ms", "10ms+exp:5ms", "pareto:3,10ms", "lognormal:0.5,10ms", "weibull:0.7,10ms",
    "list:8ms,9ms,30ms", "1ms+exp:2ms+pareto:3,10ms",
]  # fmt: skip


@pytest.mark.parametrize("text", ALL_KINDS)
def test_draws_average_to_the_mean(text: str) -> None:
    delay, rng = parse_delay(text), random.Random(1)
    draws = [delay.sample(rng) for _ in range(20_000)]
    spread = statistics.stdev(draws) / math.sqrt(len(draws))
    assert abs(statistics.fmean(draws) - delay.mean_s) <= 4 * spread + 1e-12


@pytest.mark.parametrize(
    ("term", "plain"),
    [
        (Exponential(mean_s=4.0), lambda rng: rng.expovariate(0.25)),
        (Pareto(shape=3.0, scale_s=4.0), lambda rng: 4.0 * rng.paretovariate(3.0)),
        (LogNormal(sigma=0.5, median_s=4.0), lambda rng: 4.0 * math.exp(rng.normalvariate(0, 0.5))),
        (Weibull(shape=0.7, scale_s=4.0), lambda rng: rng.weibullvariate(4.0, 0.7)),
    ],
    ids=lambda one: type(one).__name__,
)
def test_draws_are_those_of_the_standard_library(
    term: Term, plain: Callable[[random.Random], float]
) -> None:
    draw, rng = term.drawer(random.Random(3)), random.Random(3)
    assert [draw() for _ in range(50)] == [plain(rng) for _ in range(50)]


@pytest.mark.parametrize("text", ALL_KINDS)
def test_draws_in_bulk_equal_single_draws(text: str) -> None:
    delay = parse_delay(text)
    draw, rng = delay.drawer(random.Random(3)), random.Random(3)
    assert [draw() for _ in range(50)] == [delay.sample(rng) for _ in range(50)]


@pytest.mark.parametrize("text", [text for text in ALL_KINDS if text != "20ms"])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_a_quantile_is_exceeded_with_its_probability(text: str, share: float) -> None:
    delay, rng = parse_delay(text), random.Random(4)
    border_s = delay.exceeded_s(share)
    result = sum(delay.sample(rng) > border_s for _ in range(10_000)) / 10_000
    if text.startswith("list"):  # a step: the share is between those next to the threshold
        assert result <= share <= result + 1 / 3 + 0.02
    else:
        assert result == pytest.approx(share, abs=0.02)


def test_a_pareto_draw_is_never_below_its_scale_and_has_its_tail() -> None:
    delay, rng = parse_delay("pareto:2,10ms"), random.Random(2)
    draws = [delay.sample(rng) for _ in range(20_000)]
    assert min(draws) >= 0.010
    # P(X > 4 x_m) = 4^-2
    share = sum(draw > 0.040 for draw in draws) / len(draws)
    assert share == pytest.approx(1 / 16, abs=0.008)


@given(st.integers())
def test_the_same_seed_gives_the_same_delays(seed: int) -> None:
    delay = parse_delay("1ms+exp:5ms+pareto:2,1ms")
    first, second = random.Random(seed), random.Random(seed)
    assert [delay.sample(first) for _ in range(5)] == [delay.sample(second) for _ in range(5)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is not a time"),
        ("20", "'20' has no unit, wanted one of us, ms, s"),
        ("20min", "'20min' has the unit 'min'"),
        ("-5ms", "must be >= 0 and finite, got '-5ms'"),
        ("1e999ms", "must be >= 0 and finite"),
        ("nanms", "'nanms' is not a time"),
        ("infms", "'infms' is not a time"),
        ("exp:0ms", "the mean of exp must be > 0"),
        ("exp:", "'' is not a time"),
        ("expo:20ms", "unknown kind of delay 'expo'.*did you mean 'exp'"),
        ("normal:20ms", "unknown kind of delay 'normal'.*exp, list, lognormal, pareto"),
        ("pareto:inf,10ms", "pareto needs a shape and a least time"),
        ("lognormal:0.5", "lognormal needs a sigma and a median, got '0.5'"),
        ("lognormal:0,10ms", "sigma of lognormal must be > 0, got 0"),
        ("lognormal:1e9,10ms", "its mean is not finite with sigma 1e9"),
        ("weibull:-1,10ms", "shape of weibull must be > 0, got -1"),
        ("weibull:2,0s", "scale of weibull must be > 0"),
        ("list:", "'' is not a time"),
        ("list:1ms,,2ms", "'' is not a time"),
        ("list:1ms,-2ms", "must be >= 0 and finite, got '-2ms'"),
        ("pareto:2", "pareto needs a shape and a least time"),
        ("pareto:1,10ms", "shape of pareto must be > 1"),
        ("pareto:2,0ms", "least time of pareto must be > 0"),
        ("10ms++exp:5ms", "'' is not a time"),
        ("exp:exp:5ms", "unknown kind of delay 'exp:exp'"),
    ],
)
def test_an_invalid_delay_is_refused_with_an_example(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        parse_delay(text)
    assert "10ms+exp:5ms" in str(caught.value)


@given(st.text(max_size=20))
def test_any_text_is_a_delay_or_a_config_error(text: str) -> None:
    try:
        delay = parse_delay(text)
    except ConfigError:
        return
    assert 0 <= delay.mean_s < math.inf


def test_a_delay_for_one_worker_overrides_one_for_all() -> None:
    delays = parse_delays(["1=exp:20ms", "5ms"], 3)
    assert [str(delay) for delay in delays] == ["5ms", "exp:20ms", "5ms"]
    only = parse_delays(["2=pareto:2,10ms"], 3)
    assert [delay is None for delay in only] == [True, True, False]
    assert parse_delays([], 2) == (None, None)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (["5ms", "exp:20ms"], "two delays for all workers: '5ms' and 'exp:20ms'.*5ms.exp:20ms"),
        (["1=5ms", "1=6ms"], "worker 1 has one already"),
        (["3=5ms"], "no worker 3; with 3 workers they are numbered 0 to 2"),
        (["-1=5ms"], "'-1' is not a worker"),
        (["x=5ms"], "'x' is not a worker"),
        (["=5ms"], "'' is not a worker"),
        ([f"{'9' * 5000}=5ms"], "is not a worker"),
    ],
)
def test_delays_for_unknown_workers_are_refused(values: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_delays(values, 3)


def test_slow_factors_are_read_with_and_without_their_x() -> None:
    assert parse_slow(["1=5x", "0=1.5"], 2) == {1: 5.0, 0: 1.5}
    assert parse_slow([], 2) == {}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("5x", "must read WORKER=FACTORx, got '5x'; 1=5x makes"),
        ("1=", "must read WORKER=FACTORx"),
        ("1=fast", "must read WORKER=FACTORx"),
        ("1=0.5x", "must be >= 1 and finite, got 0.5"),
        ("1=-2x", "must be >= 1"),
        ("2=5x", "no worker 2; with 2 workers"),
        ("a=5x", "'a' is not a worker"),
    ],
)
def test_an_invalid_slow_factor_is_refused_by_name(value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_slow([value], 2)


def test_a_worker_has_at_most_one_slow_factor() -> None:
    with pytest.raises(ConfigError, match="worker 1 has one already"):
        parse_slow(["1=5x", "1=2x"], 2)
