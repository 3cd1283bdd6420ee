"""What a worker holds, by name: what more workers and higher stages save."""

from paceline.partition.memory import copy_bytes, shard_bytes

SIZE, LARGEST = 1000, 10


def test_memory_of_a_copy_falls_with_workers_to_its_parameters() -> None:
    held = [copy_bytes(SIZE, 1, num, LARGEST) for num in (2, 3, 100)]
    assert held == sorted(held, reverse=True)
    assert held[-1] > 4 * SIZE


def test_single_worker_keeps_no_memory_for_exchanges() -> None:
    """Parameters twice, a gradient, the optimizer's state, and a gradient under way."""
    assert copy_bytes(SIZE, 1, 1, LARGEST) == 4 * SIZE + LARGEST


def test_each_shard_stage_saves_what_it_divides() -> None:
    """Gradients from the first to the second, parameters from there to the third."""
    first, second, third = (shard_bytes(stage, SIZE, 1, 2, 0) for stage in (1, 2, 3))
    assert (first - second, second - third) == (SIZE, SIZE)
    assert third == 3 * SIZE / 2
    assert shard_bytes(3, SIZE, 1, 2, LARGEST) <= 0.6 * copy_bytes(SIZE, 1, 2, LARGEST)
