"""Statistics of timings, and turns in which each contender goes first."""

import pytest

from paceline.bench.samples import Timing, take_turns
from paceline.errors import ConfigError


def test_statistics_of_known_times_are_right() -> None:
    timing = Timing(name="known", samples_s=(3.0, 1.0, 2.0, 10.0, 4.0))
    assert (timing.median_s, timing.mean_s, timing.least_s, timing.most_s) == (3.0, 4.0, 1.0, 10.0)
    assert timing.quartiles_s == (2.0, 4.0)
    assert timing.to_json()["quartiles_s"] == [2.0, 4.0]
    assert Timing(name="one", samples_s=(7.0,)).quartiles_s == (7.0, 7.0)


def test_timing_needs_samples() -> None:
    with pytest.raises(ConfigError, match="nothing has been measured"):
        Timing(name="none", samples_s=())


def test_contenders_take_turns_and_each_goes_first_once() -> None:
    order: list[str] = []

    def measure(name: str) -> float:
        order.append(name)
        return float(len(order))

    result = take_turns({name: lambda name=name: measure(name) for name in "abc"}, 3)
    assert "".join(order) == "abcbcacab"
    assert result["a"].samples_s == (1.0, 6.0, 8.0)
