"""Simulation matches theory: every closed form, over a grid of P and K.

Within four standard errors, because about a hundred cases are tested. The runs of 20,000
updates, within three, are in bench/simulator.py.
"""

import math

import pytest

from paceline.conditions.delays import parse_delay
from paceline.conditions.slowness import Phases
from paceline.conditions.world import Conditions
from paceline.core.stats import Counts
from paceline.predict.simulation import expected_update_s
from paceline.protocols import PROTOCOLS, parse, with_number
from paceline.simulation.timing import TimingRun
from paceline.theory import staleness_versions
from paper.bounds import fresh_share

WORKERS = (1, 2, 8, 20, 100)
DELAYS = ("exp:1s", "1s+exp:1s", "pareto:3,1s", "lognormal:0.5,1s", "weibull:1.5,1s", "list:1s,2s")
NUM_PUSHES = 6_000  # per case, so that all of them take a few seconds
SEED = 3
RANKED = [
    name
    for name, kind in PROTOCOLS.items()
    if name not in ("stale-synchronous", "local-sgd") and not kind.is_adaptive
]


def simulate(text: str, num_workers: int, delay: str, **changes: object) -> Counts:
    protocol = parse(text, num_workers)
    conditions = Conditions(
        delays=(parse_delay(delay),) * num_workers, seed=SEED, **changes  # type: ignore[arg-type]
    )  # fmt: skip
    return TimingRun(protocol, conditions).run(max(60, NUM_PUSHES // max(num_workers, 1)))


def spelled(name: str, num_workers: int) -> list[str]:
    numbers = sorted({1, math.ceil(num_workers / 2), num_workers})
    return list(dict.fromkeys(with_number(name, k) for k in numbers))


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("name", RANKED)
def test_simulated_update_time_matches_theory(name: str, delay: str) -> None:
    num_held = 0
    for num_workers in WORKERS:
        for text in spelled(name, num_workers):
            conditions = Conditions(delays=(parse_delay(delay),) * num_workers)
            expected_s, _ = expected_update_s(parse(text, num_workers), conditions)
            if expected_s is None:
                continue
            counts = simulate(text, num_workers, delay)
            # The first updates of an asynchronous run precede its steady state: at most one
            # step of each worker is missing, which is a share of 1 / (updates an own step).
            first = conditions.mean_step_s(0) / counts.times_s[-1] if "async" in text else 0.0
            off_s = abs(counts.mean_update_s() - expected_s)
            # A run of this length may never draw the last value of a list, hence 1e-5.
            allowed_s = 4 * counts.error_update_s() + (first + 1e-5) * expected_s
            assert off_s <= allowed_s, (text, num_workers, counts.mean_update_s(), expected_s)
            num_held += 1
    assert num_held >= 5


@pytest.mark.parametrize("delay", ["exp:1s", "pareto:3,1s"])
@pytest.mark.parametrize("text", ["k-async:2", "k-async:5", "k-batch-async:2", "async"])
def test_staleness_is_independent_of_the_delay_distribution(text: str, delay: str) -> None:
    protocol = parse(text, 20)
    counts = TimingRun(
        protocol, Conditions(delays=(parse_delay(delay),) * 20, slow={0: 4.0}, seed=SEED)
    ).run(4000)
    mean = sum(lag * count for lag, count in counts.staleness.items()) / counts.pushes
    expected = staleness_versions(protocol.name, 20, protocol.num_pushes)
    assert mean == pytest.approx(expected, rel=0.01)


def test_fresh_share_of_k_async_matches_theory() -> None:
    counts = simulate("k-async:5", 20, "exp:1s")
    assert counts.staleness[0] / counts.pushes == pytest.approx(fresh_share(20, 5), abs=0.03)


@pytest.mark.parametrize(
    ("text", "expected_s"),
    [("k-sync:4", 1.635), ("k-batch-sync:4", 1.633), ("k-async:4", 1.242), ("k-sync:6", 2.217),
     ("k-batch-sync:6", 2.128), ("k-async:6", 2.053), ("k-batch-async:6", 1.5),
     ("k-batch-sync:8", 2.667)],
)  # fmt: skip
def test_shifted_exponential_delays_take_the_times_of_the_table(
    text: str, expected_s: float
) -> None:
    conditions = Conditions(delays=(parse_delay("1s+exp:1s"),) * 8, seed=SEED)
    counts = TimingRun(parse(text, 8), conditions).run(2500)
    assert abs(counts.mean_update_s() - expected_s) <= 0.02 * expected_s + counts.error_update_s()


def test_rates_of_unequal_workers_add_up() -> None:
    conditions = Conditions(
        delays=tuple(parse_delay(text) for text in ("exp:1s", "2s", "pareto:3,1s")),
        slow={0: 2.0}, phases={1: Phases(factor=4.0, fast_s=30.0, slow_s=10.0)}, seed=SEED,
    )  # fmt: skip
    protocol = parse("k-batch-async:2", 3)
    counts = TimingRun(protocol, conditions).run(8000)
    expected_s, source = expected_update_s(protocol, conditions)
    assert source == "renewal theorem, workers differ"
    assert expected_s == pytest.approx(2 / (1 / 2 + (13 / 16) / 2 + 1 / 1.5))
    assert counts.mean_update_s() == pytest.approx(expected_s, rel=0.02)
