"""Overlap of known work, and the verbs on a machine that has only a CPU."""

import doctest
import json
from collections.abc import Callable

import pytest
import torch

from paceline.bench import overlap, samples
from paceline.bench.overlap import measure_overlap, measure_parallel
from paceline.bench.samples import TimedTogether, measure_together, overlap_of, render_together
from paceline.errors import ConfigError

Say = Callable[[str], tuple[int, str, str]]


@pytest.mark.parametrize(
    ("both_s", "overlap"), [(8.0, 1.0), (13.0, 0.0), (10.5, 0.5), (14.0, -0.2)]
)
def test_overlap_of_known_times(both_s: float, overlap: float) -> None:
    assert overlap_of(8.0, 5.0, both_s) == pytest.approx(overlap)


def test_the_example_is_true() -> None:
    assert doctest.testmod(samples).failed == 0


def waits(*seconds: float) -> Callable[[], float]:
    """Work that says how long so many waits at once take; it need not wait for that."""
    return lambda: max(seconds)


def known() -> TimedTogether:
    return measure_together("known", waits(0.2), waits(0.1), waits(0.2, 0.1), num_rounds=3)


def test_work_that_runs_at_once_overlaps_wholly() -> None:
    found = known()
    assert found.overlap == pytest.approx(1.0)
    assert len(found.both.samples_s) == 3  # the first round did not count
    assert "100%" in "\n".join(render_together((found,), "one", "other"))


def test_a_whole_that_is_shorter_than_its_part_was_disturbed() -> None:
    found = measure_together("odd", waits(0.2), waits(0.1), waits(0.1), num_rounds=3)
    assert found.overlap is None
    assert "disturbed" in "\n".join(render_together((found,), "one", "other"))


def test_computing_and_copying_on_a_cpu(say: Say) -> None:
    code, out, err = say("bench overlap --size 64 --count 4 --device cpu --json")
    assert code == 0, err
    found = json.loads(out)
    assert [row["name"] for row in found["ways"]] == ["blocking", "by a second thread"]
    assert "no copy engine" in found["notes"][0]


def test_two_processes_work_at_once_on_a_cpu(say: Say) -> None:
    code, out, err = say("bench parallel --size 64 --count 4 --device cpu --json")
    assert code == 0, err
    found = json.loads(out)
    assert found["places"].startswith("two processes on the CPU")
    assert found["one"]["count"] == found["other"]["count"] == found["both"]["count"]
    assert found["both"]["median_s"] > 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("bench overlap --count 1", "--count >= 2"),
        ("bench parallel --size 0", "must be >= 1"),
        ("bench overlap --device cuda:7", "is not here"),
    ],
)
def test_what_cannot_be_is_refused(say: Say, line: str, said: str) -> None:
    code, _, err = say(line)
    assert code == 2
    assert said in err


def test_a_failed_measurement_restores_the_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(overlap, "measure_together", fail)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError, match="planted"):
            measure_overlap(torch.device("cpu"), 8, 2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_devices_without_queues_of_their_own_are_refused() -> None:
    for measure in (measure_overlap, measure_parallel):
        with pytest.raises(ConfigError, match="knows cpu and cuda, got meta"):
            measure(torch.device("meta"), 8, 2)
