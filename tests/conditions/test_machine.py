"""A machine: cores are shared in turns, and called-off work frees its core."""

import math
import random

import pytest

from paceline.conditions.delays import NO_DELAY, Delay, parse_delay
from paceline.conditions.machine import Cores, CostSum, Drift, Machine, drift_of
from paceline.conditions.world import Conditions
from paceline.protocols import parse
from paceline.simulation.timing import TimingRun


def update_s(
    protocol: str, workers: int, *, delay: Delay = NO_DELAY, num_updates: int = 50,
    add_s: float = 0.0, apply_s: float = 0.0, cores: int | None = None, work: str = "2ms",
) -> float:  # fmt: skip
    """Mean seconds of an update; exchange 1 ms."""
    machine = Machine(
        text="made up",
        work=(parse_delay(work),) * workers,
        exchange=(parse_delay("1ms"),) * workers,
        add_s=add_s,
        apply_s=apply_s,
        cores=cores,
    )
    conditions = Conditions(delays=(delay,) * workers, machine=machine)
    return TimingRun(parse(protocol, workers), conditions).run(num_updates).mean_update_s()


@pytest.mark.parametrize(("cores", "expected_s"), [(8, 3e-3), (4, 6e-3), (3, 9e-3), (1, 24e-3)])
def test_workers_released_together_share_the_cores(cores: int, expected_s: float) -> None:
    assert update_s("full-sync", 8, cores=cores) == pytest.approx(expected_s)


def test_a_worker_uses_no_core_during_its_injected_delay() -> None:
    # The first computes and waits, the second computes meanwhile: 3 + 3 + 10 ms.
    ten, three = parse_delay("10ms"), parse_delay("3ms")
    assert update_s("full-sync", 2, cores=1, delay=ten) == pytest.approx(16e-3)
    found_s = update_s("async", 2, cores=1, delay=three, num_updates=200)
    assert found_s == pytest.approx(3e-3, rel=0.02)


def test_an_update_delays_the_members_released_with_it() -> None:
    found_s = update_s("full-sync", 4, apply_s=5e-3, num_updates=400)
    assert found_s == pytest.approx(8e-3, rel=0.01)
    found_s = update_s("k-batch-async:4", 4, apply_s=4e-3, num_updates=400)
    assert found_s == pytest.approx(4e-3, rel=0.02)


def test_simultaneous_pushes_are_added_one_after_the_other() -> None:
    assert update_s("full-sync", 4, add_s=1e-3) == pytest.approx(7e-3, rel=0.03)
    assert update_s("full-sync", 4, add_s=1e-3, apply_s=2e-3) == pytest.approx(9e-3, rel=0.05)


def test_an_early_push_is_added_while_others_compute() -> None:
    early = Machine(
        text="made up",
        work=tuple(map(parse_delay, ("2ms", "9ms"))),
        exchange=(parse_delay("1ms"),) * 2,
        add_s=1e-3,
    )
    conditions = Conditions(delays=(NO_DELAY,) * 2, machine=early)
    counts = TimingRun(parse("full-sync", 2), conditions).run(100)
    assert counts.mean_update_s() == pytest.approx(11e-3, rel=0.02)


def test_a_continuing_member_adds_first_and_a_single_push_adds_nothing() -> None:
    found_s = update_s("k-batch-async:2", 1, add_s=1e-3, num_updates=200)
    assert found_s == pytest.approx(8e-3, rel=0.02)
    assert update_s("async", 1, add_s=1e-3, num_updates=200) == pytest.approx(3e-3, rel=0.02)


def test_a_refused_push_is_not_added() -> None:
    total = CostSum(1.0, 2.0)
    total.push(5.0)
    total.push(5.0)
    total.refuse()
    assert total.ready_s(5.0, is_updated=False) == 6.0


def test_no_member_starts_before_its_grant() -> None:
    total = CostSum(1.0, 2.0)
    total.push(5.0)
    assert total.ready_s(50.0, is_updated=False) == 50.0


def test_members_that_share_a_core_end_almost_together() -> None:
    # Eight steps of 3 ms fit a turn each, in a row; of 30 ms they are done almost together.
    assert update_s("k-batch-sync:2", 8, cores=2) == pytest.approx(3e-3)
    found_s = update_s("k-batch-sync:2", 8, cores=2, work="29ms")
    assert found_s == pytest.approx(111e-3)  # nine whole rounds, and the first two of the tenth
    assert update_s("full-sync", 8, cores=2, work="29ms") == pytest.approx(120e-3)
    found_s = update_s("async", 8, cores=2, work="29ms", num_updates=400)
    assert found_s == pytest.approx(15e-3, rel=0.02)


def test_sharing_a_core_stretches_injected_slowness_as_well() -> None:
    machine = Machine(
        text="made up", work=(parse_delay("20ms"),) * 2, exchange=(parse_delay("0ms"),) * 2, cores=1
    )
    conditions = Conditions(delays=(NO_DELAY,) * 2, slow={0: 3.0}, machine=machine)
    counts = TimingRun(parse("full-sync", 2), conditions).run(50)
    # Both compute for about 40 ms; the slow one then sleeps twice as long as it computed.
    assert counts.mean_update_s() == pytest.approx(3 * 38.5e-3, rel=0.05)


def test_cores_are_used_in_turns() -> None:
    cores = Cores(1, slice_s=1.0)
    first = cores.enter(7, 0.0, 2.5)
    assert first == (7, 0.0, 1.0)
    assert cores.enter(8, 0.5, 1.0) is None
    assert first is not None
    assert cores.pass_on(first) == (False, (8, 1.0, 2.0))
    assert not cores.is_under_way(first)
    assert 7 in cores


def test_a_called_off_member_frees_its_core() -> None:
    cores = Cores(1, slice_s=1.0)
    first = cores.enter(0, 0.0, 0.5)
    for member in (1, 2):
        assert cores.enter(member, 0.0, 0.5) is None
    assert cores.leave(1, 0.1) is None  # it waited
    following = cores.leave(0, 0.2)
    assert following == (2, 0.2, 0.7)
    assert first is not None
    assert not cores.is_under_way(first)
    assert following is not None
    assert cores.pass_on(following) == (True, None)
    assert cores.enter(3, 9.0, 0.5) == (3, 9.0, 9.5)


def steps(speeds: list[float], scatter: float, seed: int = 1) -> list[tuple[int, float, float]]:
    """100 steps of two workers at each speed, the second worker's twice as long."""
    rng = random.Random(seed)
    results = []
    for number in range(100 * len(speeds)):
        for worker, usual_s in enumerate((0.01, 0.02)):
            length_s = usual_s * speeds[number // 100] * math.exp(rng.gauss(0.0, scatter))
            results.append((worker, number + 0.5 * worker, length_s))
    return results


def test_a_machine_of_constant_speed_has_no_drift_with_scattered_steps() -> None:
    assert drift_of(steps([1.0] * 8, scatter=0.2)).relative < 0.015


def test_a_drift_is_the_common_change_of_whole_stretches() -> None:
    speeds = [0.9, 1.1, 0.9, 1.1, 0.9, 1.1, 0.9, 1.1]
    for scatter in (0.0, 0.2):
        result = drift_of(steps(speeds, scatter))
        assert result.relative == pytest.approx(0.107, abs=0.02)
        assert result.stretch_s == pytest.approx(100.0, abs=1.0)
    assert drift_of([(0, 0.0, 1.0)] * 20) == Drift()  # too few to tell


def test_longer_measurements_and_runs_have_a_smaller_drift_error() -> None:
    drift = Drift(relative=0.1, stretch_s=2.5)  # measured for 20 s
    assert drift.error(20.0) == pytest.approx(0.1 * math.sqrt(4 / 8 + 4 / 8))  # four hang together
    assert drift.error(2.5) == pytest.approx(0.1 * math.sqrt(4 / 8 + 1))
    assert drift.error(1e9) == pytest.approx(0.1 / math.sqrt(2), rel=1e-3)


@pytest.mark.parametrize(
    "text",
    ["20ms", "exp:20ms", "pareto:3,10ms", "lognormal:0.5,10ms", "weibull:1.5,10ms", "list:1ms,5ms",
     "10ms+exp:5ms"],
)  # fmt: skip
def test_a_stretched_delay_is_longer_by_the_factor(text: str) -> None:
    delay = parse_delay(text)
    longer = delay.stretched(3.0)
    assert longer.mean_s == pytest.approx(3.0 * delay.mean_s)
    assert longer.exceeded_s(0.25) == pytest.approx(3.0 * delay.exceeded_s(0.25), rel=0.01)
