"""A live worker is delayed as its simulated twin: the same draws, the same phases."""

import pytest

from paceline.conditions.delays import parse_delays
from paceline.conditions.slowness import InjectedDelay, parse_slowness
from paceline.conditions.world import Conditions
from paceline.context import Context

DELAY, SEED, STEPS = "5ms+exp:20ms", 7, 200


def of(slow: tuple[str, ...], seat: int) -> InjectedDelay:
    return InjectedDelay.of(Context(workers=2, delay=(DELAY,), slow=slow, seed=SEED), seat)


@pytest.mark.parametrize("slow", [(), ("1=3x",), ("1=4x@80ms/40ms",), ("1=2x@30ms/30ms",)])
def test_a_worker_that_computes_nothing_ends_its_steps_with_its_twin(
    slow: tuple[str, ...],
) -> None:
    factors, phases = parse_slowness(slow, 2)
    world = Conditions(delays=parse_delays((DELAY,), 2), slow=factors, phases=phases, seed=SEED)  # type: ignore[arg-type]
    finish_s, held = world.finisher(1), of(slow, 1)
    twin_s, zero_s = 0.0, 1000.0
    live_s = zero_s
    for _ in range(STEPS):
        twin_s = finish_s(twin_s)
        live_s += held.seconds(live_s, live_s)
        assert live_s - zero_s == pytest.approx(twin_s, abs=1e-9)


def test_cancelled_tickets_do_not_change_the_draws_of_others() -> None:
    whole, broken = of((), 0), of((), 0)
    draws = []
    for serial in range(20):
        whole.catch_up(serial)
        draws.append(whole.seconds(0.0, 0.0))
    for serial in (0, 3, 4, 11, 19):
        broken.catch_up(serial)
        assert broken.seconds(0.0, 0.0) == draws[serial]


def test_computing_time_counts_as_work_of_the_step() -> None:
    held = InjectedDelay.of(Context(workers=2, slow=("1=5x",)), 1)
    assert held.seconds(10.0, 10.5) == pytest.approx(2.0)
    assert InjectedDelay.of(Context(workers=2, slow=("1=5x",)), 0).seconds(10.0, 10.5) == 0.0
