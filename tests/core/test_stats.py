"""Statistics that a run keeps while it runs."""

import math
import random

import pytest

from paceline.core.stats import Patience, ServiceTimes


def test_patience_grows_with_the_steps_of_the_run() -> None:
    patience = Patience()
    assert patience.stopped_s == 5.0
    assert math.isnan(patience.usual_s)
    for _ in range(10):
        patience.add(0.1)
    assert patience.usual_s == 0.1
    assert (patience.stopped_s, patience.silent_s) == (0.5, 60.0)
    for _ in range(64):
        patience.add(2.0)
    assert (patience.stopped_s, patience.silent_s) == (6.0, 200.0)


def test_one_long_step_extends_silence_and_leaves_the_usual_step_unchanged() -> None:
    """A run that occasionally takes a long time, as for a checkpoint, is not taken for dead."""
    patience = Patience()
    for step_s in [0.1] * 20 + [30.0] + [0.1] * 20:
        patience.add(step_s)
    assert patience.usual_s == 0.1
    assert patience.silent_s == 120.0
    assert patience.stopped_s == 0.5


def test_a_given_time_replaces_the_measured_one() -> None:
    patience = Patience(given_s=1.5)
    assert patience.silent_s == 1.5
    patience.add(10.0)
    assert patience.silent_s == 1.5
    assert patience.stopped_s == 1.5


def test_a_given_time_applies_to_a_stopped_worker_too() -> None:
    patience = Patience(given_s=4.0)
    patience.add(0.01)
    assert patience.stopped_s == 4.0


def times(**workers: list[float]) -> ServiceTimes:
    """``w0=[0.1, ...]`` for each worker."""
    service = ServiceTimes()
    for name, steps_s in workers.items():
        for step_s in steps_s:
            service.add(int(name[1:]), step_s)
    return service


def test_a_worker_that_takes_three_times_as_long_is_named() -> None:
    (slow,) = times(w0=[0.1, 0.11] * 10, w1=[0.3, 0.33] * 10, w2=[0.1, 0.12] * 10).slow()
    assert slow.worker == 1
    assert 2.5 < slow.factor < 3.2


def test_slowness_by_input_is_told_by_the_difference() -> None:
    service = ServiceTimes()
    for step_s, input_s, theirs_s in [(0.30, 0.21, 0.01), (0.33, 0.20, 0.02)] * 10:
        service.add(1, step_s, input_s)
        service.add(0, 0.1, theirs_s)
        service.add(2, 0.1, theirs_s)
    (slow,) = service.slow()
    assert slow[3:] == pytest.approx((0.205, 0.015))
    assert slow.is_by_input
    assert not slow._replace(input_s=0.1).is_by_input


def test_a_few_long_or_varying_steps_make_no_worker_slow() -> None:
    rng = random.Random(1)
    varied = [[rng.expovariate(10.0) for _ in range(32)] for _ in range(3)]
    assert times(w0=varied[0], w1=varied[1], w2=varied[2]).slow() == []
    assert times(w0=[0.1] * 20, w1=[0.1] * 16 + [9.0] * 4).slow() == []


def test_chance_makes_no_worker_slow() -> None:
    """Eight equal workers, checked after every round, in 100 runs."""
    num_named = 0
    for seed in range(100):
        rng, service = random.Random(seed), ServiceTimes()
        for _ in range(40):
            for worker in range(8):
                service.add(worker, rng.expovariate(10.0))
            num_named += bool(service.slow())
    assert num_named <= 4  # of 4,000


def test_one_slow_worker_of_two_is_found_soon() -> None:
    assert times(w0=[0.1] * 12, w1=[0.2] * 12).slow()


def test_a_lone_worker_or_a_few_steps_are_never_slow() -> None:
    assert times(w0=[5.0] * 20).slow() == []
    assert times(w0=[0.1] * 20, w1=[5.0] * 7).slow() == []


def test_a_worker_that_was_slow_can_recover() -> None:
    service = times(w0=[0.1] * 32, w1=[0.5] * 32)
    assert [worker.worker for worker in service.slow()] == [1]
    for _ in range(32):
        service.add(1, 0.1)
    assert service.slow() == []
