"""What a worker holds, by name: what more workers and higher stages save."""

from paceline.partition.memory import copy_bytes, shard_bytes

SIZE, LARGEST = 1000, 10


def test_more_workers_hold_less_each_and_a_copy_never_less_than_its_parameters() -> None:
    held = [copy_bytes(SIZE, 1, num, LARGEST) for num in (2, 3, 100)]
    assert held == sorted(held, reverse=True)
    assert held[-1] > 4 * SIZE


def test_one_alone_keeps_nothing_for_others() -> None:
    """Parameters twice, a gradient, the optimizer's state, and a gradient under way."""
    assert copy_bytes(SIZE, 1, 1, LARGEST) == 4 * SIZE + LARGEST


def test_each_stage_saves_what_it_divides() -> None:
    """Gradients from the first to the second, parameters from there to the third."""
    first, second, third = (shard_bytes(stage, SIZE, 1, 2, 0) for stage in (1, 2, 3))
    assert (first - second, second - third) == (SIZE, SIZE)
    assert third == 3 * SIZE / 2
    assert shard_bytes(3, SIZE, 1, 2, LARGEST) <= 0.6 * copy_bytes(SIZE, 1, 2, LARGEST)
