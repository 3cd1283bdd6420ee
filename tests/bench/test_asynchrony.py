"""t1, t2 and t3 of a back end with known delays, the cost of n calls, and the queue depth."""

import json
import time
from collections.abc import Callable

import pytest
import torch

from paceline.bench.asynchrony import (
    Asynchrony,
    make_backend,
    measure_backend,
    numpy_and_torch,
    render_asynchrony,
)
from paceline.bench.queues import QueueBackend

Say = Callable[[str], tuple[int, str, str]]
CALL_S = 0.002


def wait() -> None:
    """An operation that takes 2 ms without using a core."""
    time.sleep(CALL_S)


def measured_times(calls: int) -> Asynchrony:
    backend = QueueBackend(wait, "a wait of 2 ms", depth=16)
    try:
        return measure_backend(backend, calls)
    finally:
        backend.close()


def test_blocking_and_queued_times_match_the_formulas() -> None:
    result = measured_times(60)
    t1_s, t2_s, t3_s = result.t1.mean_s, result.t2.mean_s, result.t3.mean_s
    assert result.blocking_predicted_s == pytest.approx(60 * (t1_s + t2_s + t3_s))
    parts = result.parts  # queued, each part has a t1 and a t3 of its own
    assert result.queued_predicted_s == pytest.approx(
        parts * (t1_s + t3_s) + 60 * result.busy.mean_s
    )
    assert result.t2.least_s >= CALL_S
    assert result.busy.least_s >= CALL_S
    assert min(result.blocking_s, result.queued_s) >= 60 * CALL_S


def test_measured_queue_depth_is_the_real_depth() -> None:
    assert measured_times(10).depth == 16


def test_cpu_operation_takes_longer_than_queueing_it() -> None:
    backend = make_backend(torch.device("cpu"))
    try:
        assert "torch has no queue on a CPU" in backend.title
        spans = [backend.once() for _ in range(20)]
        assert min(span.t2_s for span in spans) > min(span.t1_s for span in spans)
    finally:
        backend.close()


def test_bench_async_reports_calls_depth_and_chapter(say: Say) -> None:
    code, out, err = say("bench async --calls 50 --device cpu --json")
    assert code == 0, err
    report = json.loads(out)
    assert report["calls"] == 50
    assert report["depth"] == 1024
    assert [one["name"] for one in report["chapter"]] == ["numpy", "torch", "torch, synchronised"]
    assert say("bench async --calls 3 --device cpu")[0] == 2


def test_cpu_report_says_that_queueing_changes_nothing() -> None:
    toy = numpy_and_torch(torch.device("cpu"), num_rounds=1)
    text = "\n".join(render_asynchrony(measured_times(10), toy, "cpu"))
    for word in (
        "n (t1 + t2 + t3)",
        "10 (t1 + t3) + n busy",
        "the queue holds 16",
        "changes nothing here",
    ):
        assert word in text
