"""Rounds of processes that share cores: measured times are returned, others interpolated."""

import doctest
import json

import pytest

from paceline.collectives import host, parse
from paceline.collectives.base import Collective
from paceline.collectives.choose import candidates
from paceline.collectives.host import Curve, HostCost, RoundOfKind, at, kinds_of
from paceline.collectives.transfers import Action, Operation
from paceline.errors import ConfigError

ALL_REDUCE = Operation.ALL_REDUCE


def curve(fixed_s: float, s_per_byte: float) -> Curve:
    return tuple((size, fixed_s + size * s_per_byte) for size in (1 << 10, 1 << 16, 1 << 24))


def cost(num_ranks: int, num_cores: int) -> HostCost:
    """A machine whose messages take 20 us of a core and 1 ns per byte at each end."""
    many = num_ranks - 1
    seconds = {
        "alone": (40e-6, 2e-9),
        "ring": (2 * num_ranks / num_cores * 20e-6, 2 * num_ranks / num_cores * 1e-9),
        "fan": (40e-6 + (many - 1) * 20e-6, 2e-9 + (many - 1) * 1e-9),
        "all": (2 * num_ranks * many / num_cores * 20e-6, 2 * num_ranks * many / num_cores * 1e-9),
    }
    return HostCost(
        num_ranks=num_ranks,
        rounds={
            (kind, action): curve(*seconds[kind])
            for kind in kinds_of(num_ranks)
            for action in Action
        },
    )


def test_doctests_pass() -> None:
    assert doctest.testmod(host).failed == 0


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("action", list(Action))
def test_each_kind_of_round_takes_its_measured_time(num_ranks: int, action: Action) -> None:
    actual = cost(num_ranks, num_cores=2)
    for kind in kinds_of(num_ranks):
        member = RoundOfKind(num_ranks, kind, action)
        for size in (1 << 10, 5000, 1 << 16, 1 << 20):
            expected = member.num_rounds * at(actual.rounds[kind, action], size)
            took = actual.seconds(member, ALL_REDUCE, num_ranks * size)
            assert took == pytest.approx(expected, rel=1e-9), (kind, size)


def test_fewest_messages_win_with_more_processes_than_cores() -> None:
    """A ring of 8 on 2 cores has 112 messages, of which two can run at once; a tree has 14."""

    def takes(found: HostCost, name: str, size: int) -> float:
        return found.seconds(parse(name, 8), ALL_REDUCE, size)

    many_cores, two_cores, small, large = cost(8, 16), cost(8, 2), 1 << 10, 1 << 24
    assert takes(two_cores, "ring", small) > 3 * takes(two_cores, "tree", small)
    assert takes(two_cores, "ring", small) > 3 * takes(many_cores, "ring", small)
    assert takes(two_cores, "tree", small) < 1.5 * takes(many_cores, "tree", small)
    assert takes(many_cores, "ring", large) < 0.7 * takes(many_cores, "tree", large)


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8])
def test_more_bytes_never_take_less_time(num_ranks: int) -> None:
    result = cost(num_ranks, num_cores=2)
    for name in candidates(num_ranks):
        took = [result.seconds(parse(name, num_ranks), ALL_REDUCE, 4**n) for n in range(4, 13)]
        assert took == sorted(took), name
        assert took[0] > 0


def test_host_cost_survives_a_round_trip_through_json() -> None:
    result = HostCost(
        num_ranks=3, rounds=cost(3, 2).rounds, native_s=((10, 1e-4), (20, 2e-4)),
        beside_s={"native": ((10, 3e-4),), "tree": ((10, 4e-4), (20, 5e-4))},
    )  # fmt: skip
    again = HostCost.read(json.loads(json.dumps(result.write())))
    assert again == result
    of_before = result.write()
    del of_before["beside_s"]  # written before this was measured
    assert not HostCost.read(json.loads(json.dumps(of_before))).beside_s
    assert again.native_reduce_s(15) == pytest.approx(1.5e-4)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda values: values.pop("rounds"),
        lambda values: values["rounds"].pop(),
        lambda values: values.update(num_ranks=2),
        lambda values: values.update(native_s=[[20, 1.0], [10, 2.0]]),
        lambda values: values.update(native_s=[[10, float("nan")]]),
        lambda values: values.update(native_s=[[10, -1.0]]),
        lambda values: values.update(native_s=[[10, 1e300]]),
        lambda values: values.update(native_s=[[10, 10**400]]),
        lambda values: values.update(native_s=[[10, 1.0], [10**400, 1.0]]),
        lambda values: values.update(native_s=[[float("inf"), 1.0]]),
        lambda values: values.update(num_ranks=float("inf")),
        lambda values: values.update(beside_s={"tree": [[10, 0.0]]}),
        lambda values: values.update(beside_s={"tree": []}),
        lambda values: values.update(beside_s=[]),
        lambda values: values["rounds"][0].__setitem__(2, []),
        lambda values: values["rounds"][0].__setitem__(0, "pair"),
        lambda values: values["rounds"][0].__setitem__(1, "add"),
    ],
)
def test_invalid_host_cost_is_refused(spoil: object) -> None:
    values = json.loads(json.dumps(cost(3, 2).write()))
    assert callable(spoil)
    spoil(values)
    with pytest.raises((ValueError, TypeError, KeyError, ConfigError)):
        HostCost.read(values)


def test_unmeasured_number_of_ranks_is_refused() -> None:
    ring: Collective = parse("ring", 4)
    with pytest.raises(ConfigError, match=r"ring is for 4 ranks; 3 were measured"):
        cost(3, 2).seconds(ring, ALL_REDUCE, 100)
