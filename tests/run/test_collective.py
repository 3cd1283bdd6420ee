"""Which collective a run uses: the requested one, else the fastest measured; or one sentence."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.collectives.host import HostCost, kinds_of
from paceline.collectives.transfers import Action
from paceline.config import RunSettings
from paceline.engines.base import Traits
from paceline.errors import ConfigError
from paceline.launch.launcher import train
from paceline.protocols import parse
from paceline.run.collective import (
    KnownCosts,
    bucket_sizes,
    collective_of,
    keep_measured,
    measured_for,
    path_of,
    read_measured,
    refuse_if_split,
    why_not_shared,
)
from paceline.system.processors import num_cores

RANKS = Traits(name="torchrun", cancels=False, loses_members=False, has_store=False, is_spmd=True)


def settings(**given: Any) -> RunSettings:
    return RunSettings(**{"workers": 4, "device": "cpu", **given})


def path(**given: Any) -> str:
    chosen = settings(**given)
    return path_of(chosen, parse(chosen.protocol, chosen.workers))


def cost(
    num_ranks: int = 4, native_s: float = 1.0, beside: Mapping[str, float] | None = None
) -> HostCost:
    """Each message takes 10 us plus 1 ns a byte, alone or not; torch takes a second or more.

    Args:
        beside: by collective, what a sum adds to a rank that computes.
    """
    curve = tuple((size, 10e-6 + size * 1e-9) for size in (1 << 6, 1 << 24))
    keys = [(kind, action) for kind in kinds_of(num_ranks) for action in Action]
    native = tuple((size, native_s) for size in (1 << 10, 1 << 24))
    return HostCost(
        num_ranks=num_ranks, rounds=dict.fromkeys(keys, curve), native_s=native,
        beside_s={name: ((1 << 10, s), (1 << 24, s)) for name, s in (beside or {}).items()},
    )  # fmt: skip


def test_each_collective_has_its_path() -> None:
    assert path() == "auto"
    assert path(collective="shared") == "peers"
    assert path(collective="native") == path(collective="tree") == "collective"
    assert path(collective="ring", protocol="local-sgd:8") == "collective"
    assert path(collective="ring", path="collective") == "collective"
    assert path(engine="torchrun") == path(engine="torchrun", collective="bine") == "collective"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"collective": "rings"}, "unknown collective 'rings'; did you mean 'ring'?"),
        ({"collective": "nativ"}, "did you mean 'native'? Known: auto, "),
        ({"collective": "share"}, "did you mean 'shared'?"),
        ({"collective": "hierarchical:3"}, "hierarchical:3"),
        ({"collective": "hierarchical"}, "needs a whole number"),
        ({"collective": "hub:7"}, "hub:7"),
        ({"collective": "ring", "path": "store"}, "path 'store' and collective 'ring' exclude"),
        ({"collective": "shared", "path": "collective"}, "--path peers"),
        ({"collective": "tree", "path": "peers"}, "--path collective"),
        ({"collective": "ring", "protocol": "async"}, "protocol async decides after each push"),
        ({"collective": "native", "protocol": "k-sync:2"}, "--protocol full-sync or local-sgd:H"),
        ({"collective": "ring", "engine": "inline"}, "engine inline runs its members in turn"),
    ],
)
def test_unsupported_combinations_are_refused_in_one_sentence(
    given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as error:
        path(**given)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_an_impossible_collective_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="exclude each other"):
        train("softmax", workers=2, collective="ring", path="store", device="cpu")
    assert list(tmp_path.iterdir()) == []


def test_the_requested_collective_is_used() -> None:
    assert collective_of(settings(), "store") == ("", "")
    assert collective_of(settings(collective="star"), "collective")[0] == "hub"
    assert collective_of(settings(collective="shared"), "peers") == ("shared", "as asked for")
    native = settings(collective="native")
    assert collective_of(native, "collective", 100, KnownCosts(cost=cost()))[0] == "native"
    assert collective_of(settings(), "peers")[0] == "shared"


@pytest.mark.parametrize(
    ("given", "unmapped", "device", "why"),
    [
        ({}, "", "cpu", ""),
        ({"deterministic": True}, "", "cpu", ""),
        ({"collective": "shared"}, "", "cpu", ""),
        ({}, "on 2 machines", "cpu", "cannot map each other's memory (on 2 machines)"),
        ({}, "", "cuda:0", "the model lies on cuda:0"),
        ({"compress": "int8"}, "", "cpu", "compressed gradients are sent as messages"),
        ({"engine": "local"}, "", "cpu", "not ranks"),
    ],
)
def test_ranks_of_one_machine_sum_in_memory_that_all_map(
    given: dict[str, Any], unmapped: str, device: str, why: str
) -> None:
    chosen = settings(**{"engine": "torchrun", **given})
    reason = why_not_shared(chosen, replace(RANKS, why_unmapped=unmapped), device)
    assert bool(reason) == bool(why)
    assert why in reason
    measured = KnownCosts(cost=cost(), day="today")
    if not why:
        assert collective_of(chosen, "collective", 100, measured, reason)[0] == "shared"
        native = replace(chosen, collective="native")
        assert collective_of(native, "collective", 100, measured, reason)[0] == "native"
        return
    assert collective_of(chosen, "collective", 100, measured, reason)[0] != "shared"
    with pytest.raises(ConfigError, match="collective 'shared' cannot be used: "):
        collective_of(replace(chosen, collective="shared"), "collective", 100, measured, reason)


def test_sums_that_overlap_local_steps_are_sent() -> None:
    mapped = replace(RANKS, why_unmapped="")
    assert why_not_shared(settings(engine="torchrun"), mapped, "cpu", 0) == ""
    assert "overlap 4: " in why_not_shared(settings(engine="torchrun"), mapped, "cpu", 4)


def test_the_fastest_measured_collective_is_used() -> None:
    small, large = 1000, 10_000_000
    measured = KnownCosts(cost=cost(), day="2026-11-25")

    def chosen(num_bytes: int, engine: str = "local") -> tuple[str, str]:
        return collective_of(settings(engine=engine), "collective", num_bytes, measured)

    name, why = chosen(small)
    assert name in ("hub", "fully-connected")  # two rounds
    assert why.endswith("by what messages took here on 2026-11-25")
    assert "for 1,000 B, native 1.0 s" in why
    assert chosen(large)[0] not in ("hub", "tree")  # which send all of it at once


def test_a_schedules_cost_beside_a_backward_pass_counts() -> None:
    """Alone each is a thousand times as fast as torch's own sum; its thread may be slower."""

    def chosen(num_bytes: int, **beside: float) -> tuple[str, str]:
        measured = KnownCosts(cost=cost(beside=beside), day="today")
        return collective_of(settings(engine="torchrun"), "collective", num_bytes, measured)

    several = 10_000_000
    assert len(bucket_sizes(several)) > 1
    assert chosen(several, native=1e-3, ring=2e-3)[0] == "ring"  # its last bucket's second
    assert chosen(several, native=1e-3, ring=1.0)[0] == "native"
    assert chosen(several, native=1e-3, ring=1.0, tree=2e-3)[0] == "tree"
    name, why = chosen(several)
    assert name == "native"
    assert "beside a backward pass are not measured here: paceline bench collectives" in why
    assert chosen(1000)[0] != "native"  # one bucket, which is waited for at once


def test_native_is_kept_where_it_is_as_fast() -> None:
    measured = KnownCosts(cost=cost(native_s=21e-6), day="today")
    name, why = collective_of(settings(), "collective", 1000, measured)
    assert name == "native"
    assert why.startswith("21 us for 1,000 B, ")


def test_missing_measurements_are_reported() -> None:
    name, why = collective_of(settings(), "collective", 1000, read_measured(4, None, ""))
    assert name == "native"
    assert why.endswith("4 processes are not measured here: paceline bench collectives --workers 4")


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({}, "4 processes are not measured"),
        ({"4": {"cores": num_cores() + 1, "day": "", "cost": {}}}, "it was measured on"),
        ({"4": {"cores": num_cores(), "day": "", "cost": {}}}, "no valid times"),
        ({"4": {"cores": num_cores(), "day": "", "cost": cost(3).write()}}, "no valid times"),
        ({"4": 3}, "no valid times"),
        ([1], "no valid times"),
        ("4", "no valid times"),
    ],
    ids=range(7),
)
def test_measurements_of_other_conditions_are_ignored(section: Any, said: str) -> None:
    result = read_measured(4, section, "")
    assert result.cost is None
    assert said in result.why_not


def test_saved_measurements_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_measured(cost(3))
    keep_measured(cost())
    auto = settings(engine="torchrun")
    assert measured_for(auto, RANKS, "cpu").cost == cost()
    assert measured_for(settings(workers=3, engine="torchrun"), RANKS, "cpu").cost == cost(3)
    assert measured_for(settings(collective="ring"), RANKS, "cpu").cost is None
    steady = settings(engine="torchrun", deterministic=True)
    assert "another order" in measured_for(steady, RANKS, "cpu").why_not
    assert "between CPUs only" in measured_for(auto, RANKS, "cuda:0").why_not
    apart = Traits(
        name="torchrun", cancels=False, loses_members=False, has_store=False, is_spmd=True,
        is_one_machine=False,
    )  # fmt: skip
    assert "between these machines" in measured_for(auto, apart, "cpu").why_not


def test_bucket_sizes_are_those_of_the_ranks() -> None:
    assert bucket_sizes(3) == [3]
    assert bucket_sizes(60 << 20) == [1 << 20, *[4 << 20] * 14, 3 << 20]
    assert sum(bucket_sizes(123_456_789)) == 123_456_789


def test_parts_of_a_split_model_use_no_collective_of_the_settings() -> None:
    for collective in ("auto", "native"):
        refuse_if_split(settings(collective=collective))
    with pytest.raises(ConfigError, match=r"'ring' is not supported with a split model"):
        refuse_if_split(settings(collective="ring"))
