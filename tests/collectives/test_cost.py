"""The virtual time of a schedule equals its formula, where the formula holds."""

import math
from dataclasses import replace

import pytest

from paceline.collectives import COLLECTIVES, parse
from paceline.collectives.base import Collective, LinkCost
from paceline.collectives.choose import candidates
from paceline.collectives.cost import cost_between_equals, cost_on
from paceline.collectives.straggler import StragglerAware
from paceline.collectives.topology import circle, flat, hosts
from paceline.collectives.transfers import Operation
from paceline.errors import ConfigError

LINK = LinkCost(latency_s=30e-6, s_per_byte=1e-9, overhead_s=4e-6, reduce_s_per_byte=0.3e-9)
WORLDS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 16, 17)


def even_size(member: Collective, operation: Operation) -> int:
    """A number of bytes that divides into chunks without a remainder."""
    return 1000 * math.lcm(member.num_ranks, member.num_chunks(operation))


@pytest.mark.parametrize("num_ranks", WORLDS)
@pytest.mark.parametrize("gamma", [0.0, LINK.reduce_s_per_byte], ids=["", "with-reduction"])
def test_simulated_cost_equals_the_formula(num_ranks: int, gamma: float) -> None:
    link = replace(LINK, reduce_s_per_byte=gamma)
    for text in candidates(num_ranks, late=num_ranks // 2):
        member = parse(text, num_ranks)
        for operation in member.operations:
            try:
                member.check(operation)
            except ConfigError:
                continue
            size = even_size(member, operation)
            took_s = cost_between_equals(member, operation, size, link).seconds
            formula_s = member.formula_s(operation, size, link)
            if member.is_bound:
                assert took_s <= formula_s * (1 + 1e-12)
                assert took_s >= 0.6 * formula_s, (text, num_ranks, took_s, formula_s)
            else:
                assert took_s == pytest.approx(formula_s, rel=1e-9), (text, num_ranks, operation)


def test_only_the_formula_of_the_double_tree_is_a_bound() -> None:
    assert [name for name, kind in COLLECTIVES.items() if kind.is_bound] == ["double-tree"]


def test_double_tree_with_many_segments_nears_the_bandwidth_bound() -> None:
    link = LinkCost(latency_s=0.0, s_per_byte=1e-9)
    took_s = cost_between_equals(
        parse("double-tree:512", 16), Operation.ALL_REDUCE, 1024**3, link
    ).seconds
    assert took_s == pytest.approx(2 * 1024**3 * 1e-9, rel=0.02)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8, 16])
def test_double_tree_cuts_small_buffers_into_few_segments(num_ranks: int) -> None:
    """With 16 segments it took 16 times as many rounds of almost no bytes."""

    def took_s(text: str, size: int) -> float:
        member = parse(text, num_ranks)
        return cost_between_equals(member, Operation.ALL_REDUCE, size, LINK).seconds

    for size in (4, 1 << 14, 1 << 17):
        assert took_s("double-tree", size) == took_s("double-tree:1", size)
        assert took_s("double-tree", size) < 0.55 * took_s("double-tree:16", size)
        assert took_s("double-tree", size) < 2.6 * took_s("tree", size)
    many = "double-tree:1" if num_ranks < 4 else "double-tree:16"
    assert took_s("double-tree", 1 << 24) == took_s(many, 1 << 24)
    assert [str(parse(text, num_ranks)) for text in ("double-tree", "double-tree:16")] == [
        "double-tree", "double-tree:16",
    ]  # fmt: skip


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16, 5, 12])
def test_late_rank_finishes_by_the_formula_after_its_arrival(num_ranks: int) -> None:
    late = num_ranks - 1
    member = parse(f"straggler-aware:{late}", num_ranks)
    assert isinstance(member, StragglerAware)
    size = even_size(member, Operation.ALL_REDUCE)
    late_s = member.formula_s(Operation.ALL_REDUCE, size, LINK)  # long after the others are done
    ready_s = [late_s if rank == late else 0.0 for rank in range(num_ranks)]
    took = cost_between_equals(member, Operation.ALL_REDUCE, size, LINK, ready_s=ready_s)
    assert took.seconds - late_s == pytest.approx(member.after_arrival_s(size, LINK), rel=1e-9)
    if num_ranks > 4 and num_ranks == 1 << (num_ranks.bit_length() - 1):
        ring = cost_between_equals(
            parse("ring", num_ranks), Operation.ALL_REDUCE, size, LINK, ready_s=ready_s
        )
        assert took.seconds < ring.seconds


def test_bidirectional_ring_uses_both_links_of_a_circle() -> None:
    """The formula with two links: half of the ring's bytes through each, in half the rounds."""
    for num_ranks in (4, 5, 8):
        size = 1000 * num_ranks
        topology = circle(num_ranks, latency_s=LINK.latency_s, bytes_per_s=1 / LINK.s_per_byte)
        took_s = {
            name: cost_on(topology, parse(name, num_ranks), Operation.ALL_REDUCE, size).seconds
            for name in ("ring", "bidirectional-ring")
        }
        round_s = LINK.latency_s + size / num_ranks * LINK.s_per_byte
        assert took_s["ring"] == pytest.approx(2 * (num_ranks - 1) * round_s)
        assert took_s["bidirectional-ring"] == pytest.approx(2 * (num_ranks // 2) * round_s)


@pytest.mark.parametrize(("num_hosts", "host_size"), [(2, 4), (4, 2), (3, 3), (1, 4), (4, 1)])
def test_hierarchical_cost_matches_the_two_level_formula(num_hosts: int, host_size: int) -> None:
    num_ranks, size = num_hosts * host_size, 3600 * num_hosts * host_size
    topology = hosts(
        num_hosts,
        host_size,
        inner_bytes_per_s=10e9,
        outer_bytes_per_s=1e9,
        inner_latency_s=5e-6,
        outer_latency_s=50e-6,
    )
    member = parse(f"hierarchical:{host_size}", num_ranks)
    took = cost_on(topology, member, Operation.ALL_REDUCE, size)
    within_s = 2 * (host_size - 1) * (5e-6 + size / host_size / 10e9)
    between_s = 2 * (num_hosts - 1) * (50e-6 + size / num_hosts / 1e9)
    assert took.seconds == pytest.approx(within_s + between_s)


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 17])
def test_ring_rank_sends_2_times_p_minus_1_over_p_of_the_buffer(num_ranks: int) -> None:
    size = 1_000_003  # not a multiple: chunks differ by a byte
    took = cost_between_equals(parse("ring", num_ranks), Operation.ALL_REDUCE, size, LINK)
    exact = 2 * (num_ranks - 1) / num_ranks * size
    assert all(abs(sent - exact) <= 2 * num_ranks for sent in took.sent_bytes)


def test_transfers_share_the_bandwidth_of_a_link() -> None:
    """Four ranks of a host send to four of another through one link: four times as long."""
    topology = hosts(2, 4, inner_bytes_per_s=1e9, outer_bytes_per_s=1e9)
    link = LinkCost(latency_s=0.0, s_per_byte=1e-9)
    member = parse("halving-doubling", 8)
    alone_s = cost_between_equals(member, Operation.ALL_REDUCE, 8000, link).seconds
    # The last round of the reduce-scatter and the first of the all-gather cross hosts.
    shared_s = cost_on(topology, member, Operation.ALL_REDUCE, 8000).seconds
    assert shared_s - alone_s == pytest.approx(2 * 3 * 1000 / 1e9)


def test_differing_numbers_of_ranks_are_refused() -> None:
    topology = flat(4, latency_s=0.0, bytes_per_s=1e9)
    with pytest.raises(ConfigError, match="flat has 4 ranks, but ring has 3"):
        cost_on(topology, parse("ring", 3), Operation.ALL_REDUCE, 8)
    with pytest.raises(ConfigError, match="ready_s needs one time for each of 4 ranks, got 2"):
        cost_on(topology, parse("ring", 4), Operation.ALL_REDUCE, 8, ready_s=[0.0, 0.0])
