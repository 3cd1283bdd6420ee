"""A profile: requested delays are removed, the rest is the cost of the machine."""

import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.conditions.delays import parse_delay
from paceline.conditions.machine import Drift
from paceline.errors import ConfigError
from paceline.events import Apply, EpochEnd, Grant, Lease, Pushed, Ticket
from paceline.predict.profiles import Profile, read_profile
from paceline.predict.simulation import World, forecast, likely_update_s
from paceline.predict.step_times import FEWEST_STEPS
from paceline.protocols import parse
from paceline.report.forecast import render_forecast
from paceline.simulation.timing import TimingRun
from paceline.trace import FILE_NAME, Trace

WORK_S, EXCHANGE_S, APPLY_S, FACTOR = 0.003, 0.002, 0.0005, 2.0


def written_profile(
    folder: Path, missed: int = 0, engine: str = "local", *, pause_s: float = 0.0,
    more: bool = True, batch_size: int = 0,
) -> Profile:  # fmt: skip
    """The profile of a made-up run of two workers, the second twice as slow, both with a delay.

    Args:
        missed: cancelled tickets of each worker between two pushes.
        pause_s: time the run evaluates after its last push.
        more: whether another epoch begins then.
        batch_size: samples averaged by an update; 0: not recorded.
    """
    trace = Trace(folder / FILE_NAME)
    trace.header(
        task="made up", protocol="k-batch-async:2", workers=2, engine=engine, path="store", seed=7,
        mini_batch_size=4, num_parameters=5, delay=["exp:10ms"], slow=["1=2x"], cores=2,
        batch_size=batch_size,
    )  # fmt: skip
    delay, t_s = parse_delay("exp:10ms"), 1.0
    draws = [random.Random(f"7/{worker}") for worker in range(2)]
    for worker in range(2):
        trace.joined(0.0, worker, worker, 1)
    for number in range(40):
        for worker in range(2):
            ticket = Ticket(worker, number * (missed + 1), number)
            for back in range(missed if number else 0, 0, -1):  # granted and cancelled
                delay.sample(draws[worker])
                off = ticket._replace(serial=ticket.serial - back)
                trace.order(Grant(off, (Lease(0, 0, 0, 4),)), t_s)
            is_new = number % 2 == 1
            if is_new:
                trace.order(Apply((ticket,), (1.0,)), t_s)
            trace.order(Grant(ticket, (Lease(0, 0, 0, 4),)), t_s)
            compute_s = (WORK_S + delay.sample(draws[worker])) * (FACTOR if worker else 1.0)
            t_s += compute_s + EXCHANGE_S + APPLY_S * is_new
            trace.pushed(Pushed(ticket, 4, 1.0, True, t_s), compute_s, 0.001, 0.004)
    if pause_s:
        if more:
            trace.order(EpochEnd(0, 40), t_s)
        trace.evaluated(t_s + 0.9 * pause_s, 0, 40, {"loss": (1.0, 1.0)})
        if more:
            trace.order(Grant(Ticket(0, 200, 40), (Lease(0, 1, 0, 4),)), t_s + pause_s)
    trace.close()
    return read_profile(folder)


@pytest.mark.parametrize("missed", [0, 3])
def test_requested_delays_are_removed_and_the_rest_separated(tmp_path: Path, missed: int) -> None:
    result = written_profile(tmp_path, missed)
    for worker in range(2):
        assert statistics.fmean(result.work_s[worker]) == pytest.approx(WORK_S, abs=2e-6)
        assert statistics.fmean(result.exchange_s[worker]) == pytest.approx(EXCHANGE_S, abs=2e-5)
    assert result.apply_s == pytest.approx(APPLY_S, abs=2e-5)
    assert (result.cores, result.delay, result.slow) == (2, ("exp:10ms",), ("1=2x",))


@pytest.mark.parametrize(("more", "share"), [(True, 1.0), (False, 0.9)])
def test_pause_between_epochs_is_measured(tmp_path: Path, *, more: bool, share: float) -> None:
    result = written_profile(tmp_path, pause_s=2.0, more=more)
    assert result.pause_s == pytest.approx(2.0 * share, abs=1e-5)
    assert result.machine(2, 2).pause_s == result.pause_s
    assert statistics.fmean(result.exchange_s[0]) == pytest.approx(EXCHANGE_S, abs=2e-5)


def test_steps_of_oversubscribed_workers_are_scaled_to_one_core(tmp_path: Path) -> None:
    trace = Trace(tmp_path / FILE_NAME)
    trace.header(
        task="made up", protocol="full-sync", workers=4, engine="local", path="store", seed=0,
        mini_batch_size=4, num_parameters=5, cores=2,
    )  # fmt: skip
    for worker in range(4):
        trace.joined(0.0, worker, worker, 1)
    for number in range(20):  # 8 ms of computing and 2 ms of exchange each, four on two cores
        for worker in range(4):
            trace.order(Grant(Ticket(worker, number, number), (Lease(0, 0, 0, 4),)), 0.02 * number)
        for worker in range(4):
            pushed = Pushed(Ticket(worker, number, number), 4, 1.0, True, 0.02 * (number + 1))
            trace.pushed(pushed, 0.016, 0.0, 0.004)
    trace.close()
    result = read_profile(tmp_path)
    assert result.mean_step_s == pytest.approx(0.008, rel=0.01)
    assert result.push_s == pytest.approx(0.002, rel=0.01)
    conditions = World(like=tmp_path).conditions(4)
    run = TimingRun(parse("full-sync", 4), conditions).run(50)
    assert run.mean_update_s() == pytest.approx(0.020, rel=0.01)


def threaded_profile(folder: Path, workers: int, threads: int, device: str = "cpu") -> Profile:
    """The profile of a run on 2 cores, 10 ms per step, all workers at the same time."""
    trace = Trace(folder / FILE_NAME)
    trace.header(
        task="made up", protocol="async", workers=workers, engine="local", path="store", seed=0,
        mini_batch_size=4, num_parameters=5, cores=2, threads=threads, device=device,
    )  # fmt: skip
    for worker in range(workers):
        trace.joined(0.0, worker, worker, 1)
    for number in range(20):
        for worker in range(workers):
            trace.order(Grant(Ticket(worker, number, number), (Lease(0, 0, 0, 4),)), 0.01 * number)
        for worker in range(workers):
            pushed = Pushed(Ticket(worker, number, number), 4, 1.0, True, 0.01 * (number + 1))
            trace.pushed(pushed, 0.01, 0.0, 0.0)
    trace.close()
    return read_profile(folder)


@pytest.mark.parametrize(
    ("threads", "device", "update_s"), [(1, "cpu", 0.01), (2, "cpu", 0.02), (2, "cuda", 0.01)]
)
def test_step_of_several_threads_uses_as_many_cores(
    tmp_path: Path, threads: int, device: str, update_s: float
) -> None:
    assert threaded_profile(tmp_path, 1, threads, device).mean_step_s == pytest.approx(0.01)
    run = TimingRun(parse("full-sync", 2), World(like=tmp_path).conditions(2)).run(50)
    assert run.mean_update_s() == pytest.approx(update_s, rel=0.01)


def test_steps_of_oversubscribed_threads_are_scaled_to_own_cores(
    tmp_path: Path,
) -> None:
    assert threaded_profile(tmp_path, 2, 2).mean_step_s == pytest.approx(0.005)
    run = TimingRun(parse("full-sync", 2), World(like=tmp_path).conditions(2)).run(50)
    assert run.mean_update_s() == pytest.approx(0.01, rel=0.01)
    with pytest.raises(ConfigError, match="2 threads each, more than --cores 1; use a run"):
        World(like=tmp_path, cores=1).conditions(2)


def test_profile_of_too_few_steps_is_refused(tmp_path: Path) -> None:
    trace = Trace(tmp_path / FILE_NAME)
    trace.header(task="made up", protocol="async", workers=1, engine="local", path="store")
    trace.joined(0.0, 0, 0, 1)
    for number in range(FEWEST_STEPS):  # the first two are not steady
        ticket, t_s = Ticket(0, number, number), 1.0 + number
        trace.order(Grant(ticket, (Lease(0, 0, 0, 4),)), t_s)
        trace.pushed(Pushed(ticket, 4, 1.0, True, t_s + 0.5), 0.1, 0.0, 0.0)
    trace.close()
    with pytest.raises(ConfigError, match="has 8 timed steps, at least 10 are needed"):
        read_profile(tmp_path)


def test_times_reported_by_workers_are_used_without_grants(tmp_path: Path) -> None:
    result = written_profile(tmp_path, engine="inline")
    assert result.push_s == pytest.approx(0.004)
    assert result.apply_s == 0.0


def test_world_like_a_run_keeps_its_stragglers_unless_overridden(tmp_path: Path) -> None:
    written_profile(tmp_path)
    same = World(like=tmp_path).conditions(2)
    assert [one.text for one in same.delays] == ["exp:10ms", "exp:10ms"]
    assert same.slow == {1: 2.0}
    assert same.machine is not None
    assert same.machine.cores == 2
    other = World(like=tmp_path, delay=("20ms",), slow=("0=3x",), cores=4).conditions(8)
    assert (other.delays[7].text, other.slow) == ("20ms", {0: 3.0})
    assert other.machine is not None
    assert other.machine.cores == 4
    assert other.mean_step_s(0) == pytest.approx(3 * (WORK_S + 0.020) + EXCHANGE_S, abs=1e-4)


def test_forecast_notes_another_batch_size_than_the_run(tmp_path: Path) -> None:
    """Two workers shared a batch of 8: four would have 2 each, not 4."""
    written_profile(tmp_path, batch_size=8)
    like = World(like=tmp_path)
    same, more = forecast("full-sync", 2, like, 40), forecast("full-sync", 4, like, 40)
    assert (same.mini_batch_size, same.samples_per_update, same.note) == (4, 8, "")
    assert (more.mini_batch_size, more.samples_per_update) == (4, 16)
    assert more.note == (
        f"a step takes 4 samples, as in {tmp_path}, so an update averages 16 samples instead of "
        "that run's 8; for 8 give --like a run with mini-batches of 2"
    )
    assert "mini-batch      4 samples, 16 an update" in render_forecast(more)
    timed = forecast("full-sync", 4, World(delay=("1s",)), 40)
    assert (timed.mini_batch_size, timed.samples_per_update, timed.note) == (None, None, "")


def test_fewer_workers_keep_only_their_own_stragglers(
    tmp_path: Path,
) -> None:
    written_profile(tmp_path)  # worker 1 is slow
    assert World(like=tmp_path).conditions(1).slow == {}
    with pytest.raises(ConfigError, match="there is no worker 1"):
        World(like=tmp_path, slow=("1=2x",)).conditions(1)


def test_likely_range_widens_with_drift_of_computing_time(
    tmp_path: Path,
) -> None:
    written_profile(tmp_path)
    result = World(like=tmp_path, delay=("0ms",)).conditions(2)
    assert result.machine is not None
    assert result.machine.drift.relative < 1e-3  # all made-up steps take the same time

    def width(drift: float, delay: str) -> float:
        """The width of the likely range relative to the prediction."""
        assert result.machine is not None
        then = replace(result, machine=replace(result.machine, drift=Drift(drift, 1.0)),
                       delays=(parse_delay(delay),) * 2)  # fmt: skip
        protocol = parse("k-sync:1", 2)
        counts = TimingRun(protocol, then).run(400)
        ends_s = likely_update_s(protocol, then, counts)
        assert ends_s is not None
        assert ends_s[0] < counts.mean_update_s() < ends_s[1]
        return (ends_s[1] - ends_s[0]) / counts.mean_update_s()

    assert width(0.0, "0ms") == pytest.approx(0.19, abs=0.01)
    assert width(0.1, "0ms") == pytest.approx(0.45, abs=0.03)  # all four stretches of the run
    assert width(0.1, "500ms") < 0.02


def test_likely_range_needs_a_profile_and_enough_updates(tmp_path: Path) -> None:
    written_profile(tmp_path)
    assert forecast("async", 2, World(delay=("exp:1s",)), 100).time_likely_s is None
    like = World(like=tmp_path)
    assert forecast("async", 2, like, 39).time_likely_s is None
    predicted = forecast("async", 2, like, 400)
    assert predicted.time_likely_s is not None
    assert predicted.time_likely_s[0] < predicted.time_per_update_s < predicted.time_likely_s[1]
    line = next(one for one in render_forecast(predicted) if one.startswith("  likely"))
    assert " in 9 of 10 live runs (the machine's speed changed by 0.0 % while" in line
