"""The chosen collective is the fastest, and the choice changes at the stated crossovers."""

import pytest

from paceline.collectives import parse
from paceline.collectives.base import LinkCost
from paceline.collectives.choose import candidates, choose
from paceline.collectives.cost import cost_between_equals
from paceline.collectives.rings import ParallelRings
from paceline.collectives.topology import dgx, hosts, two_hosts
from paceline.collectives.transfers import Operation
from paceline.errors import ConfigError

ETHERNET = LinkCost(
    latency_s=50e-6, s_per_byte=8e-9, overhead_s=10e-6, reduce_s_per_byte=0.1e-9
)  # 1 Gbit/s


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 12])
@pytest.mark.parametrize("size_bytes", [0, 1, 1000, 100_000, 100_000_000])
def test_chosen_collective_is_the_fastest(num_ranks: int, size_bytes: int) -> None:
    choice = choose(size_bytes, num_ranks, ETHERNET)
    took_s = {
        name: cost_between_equals(
            parse(name, num_ranks), Operation.ALL_REDUCE, size_bytes, ETHERNET
        ).seconds
        for name in candidates(num_ranks)
    }
    # The double tree's formula is a bound, and some chunks are a byte longer.
    slack_s = 2 * num_ranks * ETHERNET.s_per_byte
    others = {name: s for name, s in took_s.items() if not name.startswith("double-tree")}
    assert took_s[choice.name] <= min(others.values()) + slack_s
    assert choice.name == next(iter(choice.seconds_of))
    assert choice.seconds_of.keys() == set(candidates(num_ranks))


def test_small_buffers_choose_few_rounds_and_large_ones_few_bytes() -> None:
    names = ("tree", "ring")
    assert choose(100, 6, ETHERNET, names=names).name == "tree"
    assert choose(100_000_000, 6, ETHERNET, names=names).name == "ring"


def test_choice_changes_at_each_crossover() -> None:
    choice = choose(1000, 6, ETHERNET, names=("tree", "ring", "hub"))
    assert [crossover.above for crossover in choice.crossovers][-1] == "ring"
    assert choice.crossovers
    for one in choice.crossovers:
        before = choose(int(one.size_bytes * 0.97), 6, ETHERNET, names=("tree", "ring", "hub"))
        after = choose(int(one.size_bytes * 1.01) + 1, 6, ETHERNET, names=("tree", "ring", "hub"))
        assert before.name == one.below
        assert after.name == one.above


def test_crossover_is_where_the_formulas_meet() -> None:
    """Tree and ring, P = 8: 6 (a + o + n b) = 14 (a + o + n b / 8), so n = 8 (a + o) / 4.25 b."""
    link = LinkCost(latency_s=50e-6, s_per_byte=8e-9, overhead_s=10e-6)
    (crossover,) = choose(1, 8, link, names=("tree", "ring")).crossovers
    assert crossover.size_bytes == pytest.approx(8 * 60e-6 / (4.25 * 8e-9), rel=0.02)


def test_reason_is_one_sentence_and_names_the_next_best() -> None:
    choice = choose(4 << 20, 8, ETHERNET, names=("ring", "tree"))
    assert choice.reason == (
        "ring takes 59.9 ms for 4.0 MiB between 8 ranks, 99% of it bytes; the next, tree, would "
        "take 203 ms"
    )
    assert "latency" in choose(100, 8, ETHERNET, names=("ring", "tree")).reason
    assert choose(8, 1, ETHERNET).reason == "ring: 8 B between 1 ranks take no time"
    only = choose(1000, 4, ETHERNET, names=("ring",))
    assert only.reason.endswith("there is no other candidate")
    assert only.crossovers == ()


def test_choice_on_a_topology_simulates_the_schedules() -> None:
    topology = hosts(
        4, 4, inner_bytes_per_s=10e9, outer_bytes_per_s=1e9, inner_latency_s=5e-6,
        outer_latency_s=50e-6,
    )  # fmt: skip
    names = ("ring", "hierarchical:4", "tree")
    assert choose(1 << 24, 16, topology, names=names).name == "hierarchical:4"
    assert choose(1 << 24, 8, two_hosts(), names=("ring", "tree")).name == "ring"
    planned = choose(1 << 24, 8, dgx()).collective
    assert isinstance(planned, ParallelRings)
    assert len(planned.rings) > 1
    with pytest.raises(ConfigError, match="2 hosts of 4 has 8 ranks, but 4 take part"):
        choose(1000, 4, two_hosts())


def test_late_rank_selects_a_straggler_aware_schedule() -> None:
    link = LinkCost(latency_s=20e-6, s_per_byte=1e-9)
    size = 8 << 20
    names = ("ring", "halving-doubling", "straggler-aware:3")
    late = choose(size, 8, link, names=names, late=3, late_s=0.1)
    assert late.name == "straggler-aware:3"
    assert late.seconds > 0.1
    assert "of it waiting for the late rank; the next, " in late.reason
    assert choose(size, 8, link, names=names, late=3, late_s=0.0).name != "straggler-aware:3"
    assert "straggler-aware:3" in candidates(8, late=3)
    with pytest.raises(ConfigError, match="rank 8 is late, but ranks are 0 to 7"):
        choose(size, 8, link, late=8)
