"""Overlap of known work, and the commands on a machine that has only a CPU."""

import doctest
import json
from collections.abc import Callable

import pytest
import torch

from paceline.bench import samples
from paceline.bench.asynchrony import measure_asynchrony
from paceline.bench.overlap import measure_overlap, measure_parallel
from paceline.bench.samples import TimedTogether, measure_together, overlap_of, render_together
from paceline.errors import ConfigError

Say = Callable[[str], tuple[int, str, str]]


@pytest.mark.parametrize(
    ("both_s", "overlap"), [(8.0, 1.0), (13.0, 0.0), (10.5, 0.5), (14.0, -0.2)]
)
def test_overlap_follows_from_known_times(both_s: float, overlap: float) -> None:
    assert overlap_of(8.0, 5.0, both_s) == pytest.approx(overlap)


def test_doctests_pass() -> None:
    assert doctest.testmod(samples).failed == 0


def waits(*seconds: float) -> Callable[[], float]:
    """Work that returns how long simultaneous waits take, without waiting."""
    return lambda: max(seconds)


def known() -> TimedTogether:
    return measure_together("known", waits(0.2), waits(0.1), waits(0.2, 0.1), num_rounds=3)


def test_simultaneous_work_overlaps_completely() -> None:
    result = known()
    assert result.overlap == pytest.approx(1.0)
    assert len(result.both.samples_s) == 3  # the first round is not counted
    assert "100%" in "\n".join(render_together((result,), "one", "other"))


def test_total_shorter_than_a_part_is_reported_as_disturbed() -> None:
    result = measure_together("odd", waits(0.2), waits(0.1), waits(0.1), num_rounds=3)
    assert result.overlap is None
    assert "disturbed" in "\n".join(render_together((result,), "one", "other"))


def test_bench_overlap_runs_on_a_cpu(say: Say) -> None:
    code, out, err = say("bench overlap --size 64 --count 4 --device cpu --json")
    assert code == 0, err
    report = json.loads(out)
    assert [row["name"] for row in report["ways"]] == ["blocking", "by a second thread"]
    assert "no copy engine" in report["notes"][0]


def test_bench_parallel_runs_two_processes_on_a_cpu(say: Say) -> None:
    code, out, err = say("bench parallel --size 64 --count 4 --device cpu --json")
    assert code == 0, err
    report = json.loads(out)
    assert report["places"].startswith("two processes on the CPU")
    assert report["one"]["count"] == report["other"]["count"] == report["both"]["count"]
    assert report["both"]["median_s"] > 0


def test_failed_measurement_restores_the_threads_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no memory left")

    monkeypatch.setattr("paceline.bench.overlap.measure_together", fail)
    monkeypatch.setattr("paceline.bench.asynchrony.make_backend", fail)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError, match="no memory left"):
            measure_overlap(torch.device("cpu"), 8, 2)
        assert torch.get_num_threads() == 2
        with pytest.raises(RuntimeError, match="no memory left"):
            measure_asynchrony(torch.device("cpu"), 100)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("bench overlap --count 1", "--count >= 2"),
        ("bench parallel --size 0", "must be >= 1"),
        ("bench overlap --device cuda:7", "is not here"),
    ],
)
def test_invalid_options_are_refused(say: Say, line: str, said: str) -> None:
    code, _, err = say(line)
    assert code == 2
    assert said in err


def test_devices_without_queues_are_refused() -> None:
    for measure in (measure_overlap, measure_parallel):
        with pytest.raises(ConfigError, match="supports cpu and cuda, got meta"):
            measure(torch.device("meta"), 8, 2)
