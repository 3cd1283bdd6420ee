"""Benchmark times known waits and queued work correctly, and counts, nests and prints."""

import doctest
import threading
import time
from collections.abc import Callable, Iterator

import pytest

import paceline
from paceline.bench import clock
from paceline.bench.clock import Benchmark
from paceline.bench.queues import WorkQueue
from paceline.errors import ConfigError


@pytest.fixture
def queue() -> Iterator[WorkQueue]:
    with WorkQueue() as made:
        yield made


class Hands:
    """A clock that only work advances."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


class Wait:
    """Operations of known duration that record when they started and ended."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.spans: list[tuple[float, float]] = []

    def __call__(self) -> None:
        start_s = time.perf_counter()
        while time.perf_counter() < start_s + self.seconds:
            time.sleep(0)
        self.spans.append((start_s, time.perf_counter()))


@pytest.mark.parametrize(("seconds", "count"), [(0.5, 2), (0.25, 10), (0.125, 50)])
def test_queued_work_of_known_delays_is_timed_exactly(
    queue: WorkQueue, monkeypatch: pytest.MonkeyPatch, seconds: float, count: int
) -> None:
    """Exactly, because only the queued work takes time."""
    hands = Hands()
    monkeypatch.setattr(clock, "time", hands)

    def work() -> None:
        hands.now_s += seconds

    queue.put(work)  # queued before: not counted
    with Benchmark("wait", waits_for=[queue], quiet=True) as bench:
        for _ in range(count):
            queue.put(work)
    assert bench.seconds == seconds * count


def test_measured_time_agrees_with_the_times_of_the_queue(queue: WorkQueue) -> None:
    """From the start of the first to the end of the last, and at most the time of the block."""
    work = Wait(0.002)
    before_s = time.perf_counter()
    with Benchmark("wait", waits_for=[queue], quiet=True) as bench:
        for _ in range(20):
            queue.put(work)
    after_s = time.perf_counter()
    assert work.spans[-1][1] - work.spans[0][0] <= bench.seconds <= after_s - before_s


def test_only_queueing_is_measured_without_waiting(queue: WorkQueue) -> None:
    gate = threading.Event()
    with Benchmark("queueing", quiet=True) as bench:
        queue.put(gate.wait)
    assert bench.seconds > 0
    assert not gate.is_set()  # the block ended before the work was done
    gate.set()


def test_work_queued_earlier_is_not_counted(queue: WorkQueue) -> None:
    early = Wait(0.05)
    queue.put(early)
    with Benchmark("late", waits_for=[queue], quiet=True) as bench:
        assert len(early.spans) == 1  # waited for before the clock started
    assert bench.seconds < 0.05


class Accelerator:
    """A stand-in for ``torch.cuda`` with two devices, of which the second was never used."""

    def __init__(self) -> None:
        self.waited_for: list[int] = []

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def synchronize(self, index: int) -> None:
        self.waited_for.append(index)


def test_only_accelerators_in_use_are_synchronized(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    fake = Accelerator()
    monkeypatch.setattr(torch, "cuda", fake)
    monkeypatch.setattr(
        torch._C, "_cuda_hasPrimaryContext", lambda index: index == 0, raising=False
    )
    with Benchmark("both", quiet=True):
        assert fake.waited_for == [0]
    assert fake.waited_for == [0, 0]


def test_output_has_the_format_of_the_chapter(capsys: pytest.CaptureFixture[str]) -> None:
    with paceline.Benchmark("Without torchscript") as bench:
        pass
    with paceline.Benchmark():
        pass
    assert capsys.readouterr().out == f"Without torchscript: {bench.seconds:.4f} sec\n" + (
        "Done: 0.0000 sec\n"
    )


def test_inner_benchmarks_count_in_the_outer_and_print_indented(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Benchmark("outer") as outer, Benchmark("inner") as inner:
        time.sleep(0.001)
    assert outer.seconds >= inner.seconds >= 0.001
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("  inner: ")
    assert second.startswith("outer: ")


def test_warm_ups_are_labelled_and_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    bench = Benchmark("step", warmup=2)
    for _ in range(5):
        with bench:
            pass
    assert len(bench.timing.samples_s) == 3
    lines = capsys.readouterr().out.splitlines()
    assert ["warm-up" in line for line in lines] == [True, True, False, False, False]


def test_decorated_function_is_repeated_and_returns_its_result(
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[int] = []
    bench = Benchmark("step", warmup=2, repeat=3)

    @bench
    def step(number: int) -> int:
        calls.append(number)
        return 2 * number

    assert step(4) == 8
    assert len(calls) == 5
    assert len(bench.timing.samples_s) == 3
    step(5)
    assert len(calls) == 8  # warmed up already
    assert step.__name__ == "step"
    first, _ = capsys.readouterr().out.splitlines()
    assert "sec (median of 3, 0." in first


def test_decorated_function_may_be_recursive() -> None:
    bench = Benchmark("factorial", quiet=True)

    @bench
    def factorial(n: int) -> int:
        return n * factorial(n - 1) if n else 1

    assert factorial(4) == 24
    samples_s = bench.timing.samples_s
    assert sorted(samples_s) == list(samples_s)  # the inner calls end first


def test_block_that_raises_is_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    bench = Benchmark("broken")
    with pytest.raises(ValueError, match="mine"), bench:
        raise ValueError("mine")
    with pytest.raises(ConfigError, match="nothing has been measured"):
        _ = bench.seconds
    with Benchmark("after"):
        pass
    assert capsys.readouterr().out.startswith("after: ")  # the depth is restored


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Benchmark(warmup=-1), "warmup must be >= 0"),
        (lambda: Benchmark(repeat=0), "repeat must be >= 1"),
        (lambda: WorkQueue(depth=1), "depth must be >= 2"),
    ],
)
def test_invalid_arguments_are_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


def test_doctests_pass() -> None:
    assert doctest.testmod(clock).failed == 0
