"""WorkQueue: in order, bounded, and an error is told to who waits."""

import threading

import pytest

from paceline.bench.queues import WorkQueue
from paceline.errors import ConfigError


def test_operations_are_done_in_order() -> None:
    done: list[int] = []
    with WorkQueue(depth=4) as queue:
        for number in range(100):
            queue.put(lambda number=number: done.append(number))
        queue.synchronize()
        assert done == list(range(100))


def test_a_full_queue_blocks_until_it_is_half_empty() -> None:
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


def test_what_an_operation_raises_comes_out_where_it_is_waited_for() -> None:
    def fail() -> None:
        raise ValueError("mine")

    done: list[int] = []
    with WorkQueue() as queue:
        queue.put(fail)
        queue.put(lambda: done.append(1))
        with pytest.raises(ValueError, match="mine"):
            queue.synchronize()
        assert done == [1]
        queue.synchronize()  # said once


def test_closing_does_what_is_queued_and_takes_no_more() -> None:
    done: list[int] = []
    queue = WorkQueue()
    for number in range(10):
        queue.put(lambda number=number: done.append(number))
    queue.close()
    queue.close()
    assert len(done) == 10
    with pytest.raises(ConfigError, match="closed"):
        queue.put(lambda: None)
