"""WorkQueue runs operations in order, is bounded, and raises errors in who waits."""

import threading
from collections.abc import Callable

import pytest

from paceline.bench.queues import WorkQueue
from paceline.errors import ConfigError


def test_operations_run_in_order() -> None:
    done: list[int] = []
    with WorkQueue(depth=4) as queue:
        for number in range(100):
            queue.put(lambda number=number: done.append(number))
        queue.synchronize()
        assert done == list(range(100))


def test_full_queue_blocks_until_it_is_half_empty() -> None:
    gate, began = threading.Event(), threading.Event()

    def hold() -> None:
        began.set()
        gate.wait()

    with WorkQueue(depth=4) as queue:
        queue.put(hold)
        began.wait()
        assert [queue.put(gate.wait, timeout_s=0.01) for _ in range(5)] == [True] * 4 + [False]
        gate.set()
        assert queue.put(gate.wait)
        queue.synchronize()


def test_synchronize_raises_the_error_of_an_operation() -> None:
    def fail() -> None:
        raise ValueError("mine")

    done: list[int] = []
    with WorkQueue() as queue:
        queue.put(fail)
        queue.put(lambda: done.append(1))
        with pytest.raises(ValueError, match="mine"):
            queue.synchronize()
        assert done == [1]
        queue.synchronize()  # raised only once


def test_close_refuses_a_put_that_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, began, waits = threading.Event(), threading.Event(), threading.Event()
    done: list[int] = []
    errors: list[ConfigError] = []

    def hold() -> None:
        began.set()
        gate.wait()

    queue = WorkQueue(depth=2)
    wait_for = queue._has_room.wait_for

    def noted_wait_for(predicate: Callable[[], bool], timeout_s: float | None) -> bool:
        waits.set()  # the lock is held until the wait has begun
        return wait_for(predicate, timeout_s)

    def put() -> None:
        try:
            queue.put(lambda: done.append(3))
        except ConfigError as error:
            errors.append(error)

    monkeypatch.setattr(queue._has_room, "wait_for", noted_wait_for)
    queue.put(hold)
    began.wait()
    for number in range(2):
        queue.put(lambda number=number: done.append(number))
    putter = threading.Thread(target=put, daemon=True)
    putter.start()
    waits.wait()
    closer = threading.Thread(target=queue.close, daemon=True)
    closer.start()
    putter.join(timeout=10)  # the gate is still shut: close() wakes the put
    gate.set()
    closer.join()
    queue.synchronize()
    assert [str(error) for error in errors] == ["this WorkQueue is closed; create a new one"]
    assert done == [0, 1]


def test_close_runs_queued_operations_and_accepts_no_more() -> None:
    done: list[int] = []
    queue = WorkQueue()
    for number in range(10):
        queue.put(lambda number=number: done.append(number))
    queue.close()
    queue.close()
    assert len(done) == 10
    with pytest.raises(ConfigError, match="closed"):
        queue.put(lambda: None)
