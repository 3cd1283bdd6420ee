"""Many updates at once: equal to event by event, and never used where event order matters."""

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.conditions.delays import parse_delay
from paceline.conditions.slowness import Phases
from paceline.conditions.world import Absence, Conditions
from paceline.core.stats import Counts
from paceline.events import Decision, Fact
from paceline.protocols import PROTOCOLS, parse, with_number
from paceline.protocols.base import Rhythm
from paceline.protocols.k_sync import KSync
from paceline.simulation import bulk
from paceline.simulation.bulk import bulk_driver
from paceline.simulation.timing import LeanDriver

DELAYS = ["exp:10ms", "5ms+exp:5ms", "pareto:2,5ms", "weibull:1.5,10ms", "lognormal:0.5,10ms"]
RHYTHMIC = sorted(name for name, kind in PROTOCOLS.items() if kind.rhythm is not None)


@st.composite
def runs(draw: Any) -> tuple[str, Conditions]:
    """A protocol that has a rhythm, and unequal workers."""
    name = draw(st.sampled_from(RHYTHMIC))
    count = draw(st.integers(1, 9))
    is_limited = any(argument.is_at_most_workers for argument in PROTOCOLS[name].arguments)
    text = with_number(name, draw(st.integers(1, count if is_limited else 2 * count)))
    delays = tuple(parse_delay(draw(st.sampled_from(DELAYS))) for _ in range(count))
    factors = st.sampled_from([1.5, 40.0])
    slow = draw(st.dictionaries(st.integers(0, count - 1), factors, max_size=2))
    return text, Conditions(delays=delays, slow=slow, seed=draw(st.integers(0, 99)))


def assert_equal_counts(counts: Counts, others: Counts) -> None:
    for field in counts.__slots__:
        assert getattr(counts, field) == pytest.approx(getattr(others, field), rel=1e-9), field


@settings(max_examples=200, deadline=None)
@given(runs(), st.integers(1, 70), st.integers(0, 70))
def test_bulk_driver_equals_event_by_event_simulation(
    run: tuple[str, Conditions], first: int, more: int
) -> None:
    text, conditions = run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bulk, "_FEW", 0)
        many = bulk_driver(parse(text, conditions.num_workers), conditions)
    assert many is not None
    one = LeanDriver(parse(text, conditions.num_workers), conditions)
    many.advance(first)
    for driver in (many, one):
        driver.advance(first + more)
        driver.counts.there_s = driver.there_s(driver.counts.times_s[-1])
    assert_equal_counts(many.counts, one.counts)


@pytest.mark.parametrize("text", ["k-batch-async:7", "k-async:50", "k-batch-sync:150", "k-sync:3"])
def test_bulk_driver_handles_one_much_faster_worker(text: str) -> None:
    slow = dict.fromkeys(range(1, 80), 1000.0)
    conditions = Conditions(delays=(parse_delay("exp:1ms"),) * 80, slow=slow)
    many, one = bulk_driver(parse(text, 80), conditions), LeanDriver(parse(text, 80), conditions)
    assert many is not None
    for driver in (many, one):
        driver.advance(60)
    assert_equal_counts(many.counts, one.counts)


@pytest.mark.parametrize("name", RHYTHMIC)
def test_bulk_driver_handles_more_steps_than_it_holds(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "_FEW", 0)
    monkeypatch.setattr(bulk, "_CELLS", 40)  # no whole number of updates of 3 pushes
    conditions = Conditions(delays=(parse_delay("exp:10ms"),) * 5)
    text = with_number(name, 3)
    many, one = bulk_driver(parse(text, 5), conditions), LeanDriver(parse(text, 5), conditions)
    assert many is not None
    for driver in (many, one):
        driver.advance(200)
    assert_equal_counts(many.counts, one.counts)


def test_heavy_tail_draws_only_the_steps_needed() -> None:
    """Almost all steps are a thousand times shorter than the mean."""
    conditions = Conditions(delays=(parse_delay("lognormal:6,10ms"),) * 8)
    many, one = (
        bulk_driver(parse("async", 8), conditions),
        LeanDriver(parse("async", 8), conditions),
    )
    assert isinstance(many, bulk._Chains)
    for driver in (many, one):
        driver.advance(3000)
    assert_equal_counts(many.counts, one.counts)
    assert sum(map(len, many._ahead)) < 20_000


def test_step_rows_do_not_grow_with_one_much_faster_worker() -> None:
    slow = dict.fromkeys(range(1, 300), 1e6)
    conditions = Conditions(delays=(parse_delay("exp:1ms"),) * 300, slow=slow)
    assert bulk_driver(parse("k-batch-sync:20000", 300), conditions) is None
    assert (
        bulk_driver(parse("k-batch-sync:20000", 300), dataclasses.replace(conditions, slow={}))
        is not None
    )


PLAIN = Conditions(delays=(parse_delay("exp:1s"),) * 3)


@pytest.mark.parametrize(
    "conditions",
    [
        dataclasses.replace(PLAIN, delays=(parse_delay("1s"),) * 3),
        dataclasses.replace(PLAIN, delays=(*PLAIN.delays[:2], parse_delay("list:1s,2s"))),
        dataclasses.replace(PLAIN, delays=(parse_delay("1s+exp:1e-20s"),) * 3),
        dataclasses.replace(PLAIN, phases={1: Phases(factor=3.0, fast_s=5.0, slow_s=2.0)}),
        dataclasses.replace(PLAIN, absences=(Absence(worker=0, from_s=1.0, until_s=math.inf),)),
    ],
    ids=["ties", "ties of one", "ties by rounding", "slow phases", "absences"],
)
def test_bulk_driver_is_refused_where_event_order_matters(conditions: Conditions) -> None:
    assert bulk_driver(parse("async", 3), PLAIN) is not None
    assert bulk_driver(parse("async", 3), conditions) is None


def test_bulk_driver_is_refused_if_pushes_are_dropped() -> None:
    assert bulk_driver(parse("async", 3, "drop:1"), PLAIN) is None
    assert bulk_driver(parse("async", 3, "inverse"), PLAIN) is not None


def test_subclass_with_other_decisions_inherits_no_rhythm() -> None:
    class Restless(KSync):
        def react(self, fact: Fact) -> list[Decision]:
            return super().react(fact)

    assert KSync.rhythm == Rhythm(waits=True, restarts=True)
    assert Restless.rhythm is None
    assert bulk_driver(Restless(3, 2), PLAIN) is None
