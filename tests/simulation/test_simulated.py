"""In virtual time the lean driver makes the same decisions as the coordinator."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.conditions.delays import parse_delay
from paceline.conditions.machine import Machine
from paceline.conditions.slowness import Phases
from paceline.conditions.world import Absence, Conditions, Link
from paceline.core.ledger import Ledger
from paceline.core.stats import Counts
from paceline.errors import ConfigError
from paceline.events import Decision, Fact, Ticket
from paceline.protocols import PROTOCOLS, parse, with_number
from paceline.protocols.base import SyncProtocol
from paceline.simulation.engine import SimulatedRun, endless_ledger
from paceline.simulation.timing import LeanDriver, TimingRun

DELAYS = ["10ms", "exp:10ms", "5ms+exp:5ms", "pareto:2,5ms", "list:5ms,10ms,10ms"]


class Heard:
    """A protocol that records its facts and decisions."""

    def __init__(self, protocol: SyncProtocol) -> None:
        self.log: list[tuple[Fact, list[Decision]]] = []
        self._react = protocol.react
        protocol.react = self.react  # type: ignore[method-assign]
        self.protocol = protocol

    def react(self, fact: Fact) -> list[Decision]:
        decisions = self._react(fact)
        self.log.append((fact, list(decisions)))
        return decisions


def spelled(name: str, number: int) -> str:
    return with_number(name, number)


@st.composite
def worlds(draw: Any) -> Conditions:
    """Workers with different delays, some slow, some away, over a link or none."""
    count = draw(st.integers(1, 5))
    delays = tuple(parse_delay(draw(st.sampled_from(DELAYS))) for _ in range(count))
    workers = st.integers(0, count - 1)
    factors = st.dictionaries(workers, st.sampled_from([1.5, 4.0]), max_size=2)
    phases = {
        worker: Phases(factor=3.0, fast_s=0.05, slow_s=0.02) for worker in draw(st.sets(workers))
    }
    # Worker 0 never leaves, so one worker is always present.
    absences = tuple(
        Absence(worker=worker, from_s=from_s, until_s=from_s + 0.03)
        for worker in sorted(draw(st.sets(workers)) - {0})
        for from_s in draw(st.sampled_from([(), (0.0,), (0.02,), (0.0, 0.05)]))
    )
    link = Link(num_bytes=1e6, latency_s=1e-3, bytes_per_s=1e9, server_bytes_per_s=1e9)
    machine = Machine(
        text="made up", work=(parse_delay("exp:4ms"),) * count, add_s=5e-4, apply_s=1e-3, cores=2,
        exchange=(parse_delay("list:1ms,2ms"),) * count,
    )  # fmt: skip
    return Conditions(
        delays=delays, slow=draw(factors), phases=phases, absences=absences,
        link=draw(st.sampled_from([None, link])), seed=draw(st.integers(0, 99)),
        machine=draw(st.sampled_from([None, machine])),
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    worlds(), st.sampled_from(sorted(PROTOCOLS)), st.integers(1, 3),
    st.sampled_from(["none", "inverse", "drop:0", "drop:2"]),
)  # fmt: skip
def test_lean_driver_decides_as_the_coordinator(
    conditions: Conditions, name: str, number: int, staleness: str
) -> None:
    text = spelled(name, min(number, conditions.num_workers))
    lean, whole = (Heard(parse(text, conditions.num_workers, staleness)) for _ in range(2))
    driver = LeanDriver(lean.protocol, conditions)
    driver.advance(20)
    counts = driver.counts
    counts.there_s = driver.there_s(counts.times_s[-1])
    others = SimulatedRun(whole.protocol, endless_ledger(whole.protocol), conditions).run(20)
    assert [fact_of(one) for one in lean.log] == [fact_of(one) for one in whole.log]
    for field in counts.__slots__:
        assert getattr(counts, field) == pytest.approx(getattr(others, field)), field


def fact_of(heard: tuple[Fact, list[Decision]]) -> str:
    """A fact or decision; the samples of a push of several steps differ by design."""
    fact, decisions = heard
    if hasattr(fact, "num_samples"):
        fact = fact._replace(num_samples=1)
    return repr((fact, decisions))


@pytest.mark.parametrize("text", ["full-sync", "k-batch-sync:3", "k-batch-async:3"])
def test_same_seed_gives_the_same_run(text: str) -> None:
    conditions = Conditions(delays=(parse_delay("exp:1s"),) * 4, seed=5)
    one, again = (TimingRun(parse(text, 4), conditions).run(50) for _ in range(2))
    assert one.times_s == again.times_s
    other = TimingRun(parse(text, 4), dataclasses.replace(conditions, seed=6)).run(50)
    assert one.times_s != other.times_s


def test_run_continues_where_it_stopped() -> None:
    conditions = Conditions(delays=(parse_delay("exp:1s"),) * 4)
    whole, parts = (TimingRun(parse("k-async:2", 4), conditions) for _ in range(2))
    parts.run(7)
    assert parts.run(30).times_s == whole.run(30).times_s


def test_error_says_when_all_workers_are_gone_for_good() -> None:
    away = Absence(worker=0, from_s=1.0, until_s=float("inf"))
    conditions = Conditions(delays=(parse_delay("300ms"),), absences=(away,))
    with pytest.raises(ConfigError, match="all workers are gone and none returns"):
        TimingRun(parse("async", 1), conditions).run(10)


def test_step_that_takes_no_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="a step of worker 1 takes no time"):
        Conditions(delays=(parse_delay("1ms"), parse_delay("0ms")))


def test_epochs_are_separated_by_the_measured_pause() -> None:
    delay = parse_delay("10ms")
    given = Machine(text="", work=(delay,) * 2, exchange=(parse_delay("0ms"),) * 2)
    times, means_s = [], []
    for machine in (given, dataclasses.replace(given, pause_s=0.25)):
        conditions = Conditions(delays=(parse_delay("0ms"),) * 2, seed=0, machine=machine)
        run = SimulatedRun(parse("full-sync", 2), Ledger(12, 4, 2), conditions)
        times.append(run.run(7).times_s)
        means_s.append(run.counts.mean_update_s())
    late = [b - a for a, b in zip(*times, strict=True)]
    assert late == pytest.approx([0.0] * 3 + [0.25] * 3 + [0.5])
    assert means_s[1] == pytest.approx(means_s[0])  # of training alone


def test_pauses_do_not_affect_update_times() -> None:
    counts = Counts()
    for number in range(80):
        counts.applied((Ticket(0, number, number),), number, 1.0 + number + 9.0 * (number // 30))
        if number % 30 == 29:
            counts.paused(9.0)
    assert (counts.mean_update_s(), counts.error_update_s()) == (1.0, 0.0)
    assert counts.trained_s(30) == 30.0


@pytest.mark.parametrize(("from_s", "until_s"), [(0.0, 0.4), (0.3, 0.5)])
def test_worker_joining_between_epochs_waits_for_the_next(from_s: float, until_s: float) -> None:
    delay, none = parse_delay("10ms"), parse_delay("0ms")
    machine = Machine(text="", work=(delay,) * 2, exchange=(none,) * 2, pause_s=1.0)
    away = Absence(worker=1, from_s=from_s, until_s=until_s)
    conditions = Conditions(delays=(none,) * 2, machine=machine, absences=(away,))
    counts = SimulatedRun(parse("async", 2), Ledger(12, 2, 1), conditions).run(9)
    assert counts.times_s[6] == pytest.approx(counts.times_s[5] + 1.01)
    assert 0.0 < counts.mean_update_s() <= 0.01
