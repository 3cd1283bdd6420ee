"""Crossings of straight lines are found where the lines cross."""

import pytest

from paceline.collectives.crossings import Crossing, find_crossings, grid

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22)


def line(fixed_s: float, s_per_byte: float) -> dict[int, list[float]]:
    """Three blocks, one of them disturbed."""
    return {
        size: [noise * (fixed_s + size * s_per_byte) for noise in (1, 1.5, 1)] for size in SIZES
    }


def crossings_of(
    times: dict[str, dict[int, list[float]]], costs: dict[str, tuple[float, float]]
) -> list[Crossing]:
    def predicted(name: str, size: int) -> float:
        fixed_s, s_per_byte = costs[name]
        return fixed_s + size * s_per_byte

    return list(find_crossings(times, predicted))


def test_crossing_is_found_with_its_predicted_size() -> None:
    times = {"tree": line(100e-6, 4e-9), "ring": line(300e-6, 1e-9)}
    (one,) = crossings_of(times, {"tree": (100e-6, 4e-9), "ring": (300e-6, 1e-9)})
    assert (one.below, one.above) == ("tree", "ring")
    assert one.predicted_bytes == pytest.approx(200e-6 / 3e-9, rel=0.05)
    assert one.measured_bytes == pytest.approx(200e-6 / 3e-9, rel=0.3)  # four sizes, interpolated
    assert one.is_near


@pytest.mark.parametrize(
    ("ring", "is_near"),
    [((300e-6, 1e-9), True), ((800e-6, 1e-9), False), ((90e-6, 5e-9), False)],
    ids=["as measured", "three times as far", "never"],
)
def test_prediction_is_near_within_a_factor_of_2(ring: tuple[float, float], is_near: bool) -> None:
    times = {"tree": line(100e-6, 4e-9), "ring": line(300e-6, 1e-9)}
    (one,) = crossings_of(times, {"tree": (100e-6, 4e-9), "ring": ring})
    assert one.is_near is is_near


def test_crossing_must_be_clear_at_both_ends() -> None:
    costs = {"one": (100e-6, 4e-9), "other": (300e-6, 1e-9)}
    assert crossings_of({"one": line(100e-6, 1e-9), "other": line(105e-6, 0.9e-9)}, costs) == []
    assert crossings_of({"one": line(100e-6, 1e-9), "other": line(300e-6, 1e-9)}, costs) == []
    assert crossings_of({"one": line(100e-6, 1e-9)}, costs) == []


def test_single_deviating_block_makes_no_crossing() -> None:
    """Of two collectives with equal messages, one always has the faster median."""
    first, second = line(100e-6, 4e-9), line(300e-6, 1e-9)
    first[SIZES[0]][2] = 400e-6
    assert (
        crossings_of({"one": first, "other": second}, {"one": (1e-4, 4e-9), "other": (3e-4, 1e-9)})
        == []
    )


def test_grid_is_sorted_and_has_whole_elements() -> None:
    sizes = grid(64, 1 << 20)
    assert sizes == sorted(set(sizes))
    assert all(size % 4 == 0 for size in sizes)
    assert (sizes[0], sizes[-1]) == (64, 1 << 20)
