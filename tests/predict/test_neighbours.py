"""Processes beside the measured one compute meanwhile, answer messages, and end."""

import errno
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.errors import LinkError
from paceline.predict.neighbours import Neighbours, neighbours
from paceline.predict.split_models import SplitQuestion

_A_ROUND = 4
"""Steps per round, of which the first does not count."""


def test_neighbours_compute_and_join_exchanges() -> None:
    with neighbours(SplitQuestion(spec="quadratic", num_workers=2), 2, 1) as beside:
        assert beside is not None
        costs = beside.exchanges()
        assert costs.size == 2
        assert 0.0 < costs.link.latency_s < 0.1
        assert costs.meeting_s > 0.0
        (process,) = beside.processes
        other = psutil.Process(process.pid)
        with beside.compute(4):
            before_s = other.cpu_times().user
            while other.cpu_times().user - before_s < 0.05:
                time.sleep(0.01)
        assert beside.exchanges().meeting_s > 0.0  # it answers again after computing
    assert process.returncode == 0


def test_neighbour_without_a_free_core_does_not_compute() -> None:
    with neighbours(SplitQuestion(spec="quadratic", num_workers=2), 1, 1) as beside:
        assert beside is not None
        (process,) = beside.processes
        beside.exchanges()
        with beside.compute(4):
            other = psutil.Process(process.pid)
            before_s = sum(other.cpu_times()[:2])
            time.sleep(0.2)
            assert sum(other.cpu_times()[:2]) - before_s < 0.15


def test_model_no_other_process_can_build_is_measured_alone() -> None:
    with neighbours(SplitQuestion(spec="nowhere_to_be_found:model", num_workers=2), 2, 1) as beside:
        assert beside is None
    with neighbours(SplitQuestion(spec="quadratic", num_workers=1), 1, 1) as beside:
        assert beside is None


def test_modules_in_the_working_folder_do_not_shadow_pythons_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise OSError('not this one')")
    monkeypatch.chdir(tmp_path)
    with neighbours(SplitQuestion(spec="quadratic", num_workers=2), 2, 1) as beside:
        assert beside is not None


def test_failed_start_is_an_error_and_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = list[subprocess.Popen[str]]()
    popen = subprocess.Popen

    def first_only(*args: Any, **kwargs: Any) -> subprocess.Popen[str]:
        if started:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(popen(*args, **kwargs))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", first_only)
    with (
        pytest.raises(LinkError, match="cannot start process 2 of the 2"),
        neighbours(SplitQuestion(spec="quadratic", num_workers=3), 2, 1),
    ):
        pass
    assert started[0].returncode is not None


def test_process_not_ready_in_time_is_not_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.predict.neighbours._START_S", 0.0)
    with neighbours(SplitQuestion(spec="quadratic", num_workers=2), 2, 1) as beside:
        assert beside is None


def test_killed_process_is_named_at_once() -> None:
    with neighbours(SplitQuestion(spec="quadratic", num_workers=2), 2, 1) as beside:
        assert beside is not None
        (process,) = beside.processes
        process.kill()
        lost = r"process 1 of the 1 that compute .* ended \(exit status -9\); free some memory"
        with pytest.raises(LinkError, match=lost):
            beside.exchanges()
        with pytest.raises(LinkError, match=lost), beside.compute(4):
            pytest.fail("nobody computes")
        with pytest.raises(LinkError, match=lost):
            beside._round_s("round 4 1 2", lambda: None, 1)


def test_one_that_waits_for_a_lost_one_does_not_delay_the_error() -> None:
    def lose_one(beside: Neighbours | None) -> None:
        assert beside is not None
        ended.extend(beside.processes)
        beside.processes[1].kill()
        started_s.append(time.monotonic())
        beside.together_s(4, lambda: None, 3)

    ended, started_s = list[subprocess.Popen[str]](), list[float]()
    three = neighbours(SplitQuestion(spec="quadratic", num_workers=3), 3, 1)
    with pytest.raises(LinkError, match="process 2 of the 2"), three as beside:
        lose_one(beside)
    assert time.monotonic() - started_s[0] < 15.0  # `_END_S` is 20
    assert all(process.poll() is not None for process in ended)


def test_turn_cost_is_the_extra_time_beyond_the_free_cores() -> None:
    def step() -> None:
        time.sleep(slow_s if len(rounds) > _A_ROUND else 0.03)
        rounds.append(None)

    rounds, slow_s = list[None](), 0.18
    with neighbours(SplitQuestion(spec="quadratic", num_workers=2), 1, 1) as beside:
        assert beside is not None
        result = beside.taking_turns(4, step, _A_ROUND - 1)
    assert 2.0 < result < 3.5  # twice the work of the cores in six times the time
    with neighbours(SplitQuestion(spec="quadratic", num_workers=2), 2, 1) as beside:
        assert beside is not None
        assert beside.taking_turns(4, step, 3) == 1.0
    assert len(rounds) == 2 * _A_ROUND  # nothing is measured if each has its own core


def test_process_with_an_unread_request_ends_cleanly() -> None:
    group = object.__new__(Neighbours)
    process = subprocess.Popen([sys.executable, "-c", "pass"], stdin=subprocess.PIPE, text=True)
    process.wait()
    assert process.stdin is not None
    process.stdin.write("a request that nobody reads")
    group.processes = [process]
    group._kill()
    assert process.stdin.closed
