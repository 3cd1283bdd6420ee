"""The memory of a worker: savings by more workers and higher stages."""

from paceline.partition.memory import copy_bytes, shard_bytes

SIZE, LARGEST = 1000, 10


def test_memory_of_a_copy_falls_with_workers_to_its_parameters() -> None:
    held = [copy_bytes(SIZE, 1, num, LARGEST) for num in (2, 3, 100)]
    assert held == sorted(held, reverse=True)
    assert held[-1] > 4 * SIZE


def test_single_worker_keeps_no_memory_for_exchanges() -> None:
    """Parameters twice, gradients, optimizer state, and one gradient in transit."""
    assert copy_bytes(SIZE, 1, 1, LARGEST) == 4 * SIZE + LARGEST


def test_each_shard_stage_saves_what_it_divides() -> None:
    """Stage 2 divides the gradients, stage 3 the parameters."""
    first, second, third = (shard_bytes(stage, SIZE, 1, 2, 0) for stage in (1, 2, 3))
    assert (first - second, second - third) == (SIZE, SIZE)
    assert third == 3 * SIZE / 2
    assert shard_bytes(3, SIZE, 1, 2, LARGEST) <= 0.6 * copy_bytes(SIZE, 1, 2, LARGEST)
