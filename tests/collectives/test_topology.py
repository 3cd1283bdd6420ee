"""Paths, cuts and rings of a topology equal those found by brute force."""

import itertools
from collections import Counter

import numpy as np
import pytest

from paceline.collectives import parse
from paceline.collectives.cost import cost_on
from paceline.collectives.optimum import least_s_per_byte, share_of_optimum
from paceline.collectives.proof import prove
from paceline.collectives.ring_search import find_rings, planned_rings
from paceline.collectives.rings import ParallelRings
from paceline.collectives.topology import (
    NetworkLink,
    Topology,
    circle,
    dgx,
    flat,
    hosts,
    pcie_cards,
    two_hosts,
)
from paceline.collectives.transfers import Operation
from paceline.errors import ConfigError

RECORDED = [dgx(), dgx(has_nvlink=False), pcie_cards(), two_hosts(), two_hosts(has_nvlink=False)]
RECORDED_IDS = [one.name for one in RECORDED]


def uneven() -> Topology:
    """Five ranks on links of all widths, and a switch."""
    widths = {(0, 1): 9e9, (1, 2): 4e9, (2, 3): 7e9, (3, 4): 5e9, (4, 0): 3e9, (0, 2): 6e9}
    links = [
        NetworkLink(source=a, destination=b, bytes_per_s=width)
        for pair, width in widths.items()
        for a, b in (pair, pair[::-1])
    ]
    for rank in range(5):
        links.append(NetworkLink(source=rank, destination=5, bytes_per_s=2e9))
        links.append(NetworkLink(source=5, destination=rank, bytes_per_s=3e9))
    return Topology(name="uneven", num_ranks=5, num_switches=1, links=tuple(links))


# Paths.


def test_path_has_the_fewest_links_and_among_those_the_widest() -> None:
    topology = uneven()
    assert [topology.links[place].destination for place in topology.way(0, 1)] == [1]
    assert [topology.links[place].destination for place in topology.way(1, 4)] == [5, 4]
    wide = NetworkLink(source=2, destination=3, bytes_per_s=2.0)
    two = Topology(
        name="two switches",
        num_ranks=2,
        num_switches=2,
        links=(
            NetworkLink(source=0, destination=2, bytes_per_s=1.0),
            NetworkLink(source=2, destination=1, bytes_per_s=9.0),
            NetworkLink(source=0, destination=3, bytes_per_s=2.0),
            NetworkLink(source=3, destination=1, bytes_per_s=2.0),
            NetworkLink(source=1, destination=0, bytes_per_s=1.0),
            wide,
        ),
    )
    assert [two.links[place].destination for place in two.way(0, 1)] == [3, 1]


def test_no_path_leads_through_a_rank() -> None:
    links = [
        NetworkLink(source=a, destination=b, bytes_per_s=1.0)
        for a, b in ((0, 1), (1, 0), (1, 2), (2, 1))
    ]
    line = Topology(name="line", num_ranks=3, num_switches=0, links=tuple(links))
    with pytest.raises(ConfigError, match="line: no path from rank 0 to rank 2"):
        line.way(0, 1)


@pytest.mark.parametrize(
    ("links", "said"),
    [
        ([(0, 4, 1.0)], "a link from 0 to 4, but its vertices are 0 to 2"),
        ([(1, 1, 1.0)], "a link from 1 to 1, but its vertices are 0 to 2, and a link joins two"),
        ([(0, 1, 0.0)], "needs bytes_per_s > 0 and latency_s >= 0, got 0.0 and 0.0"),
        ([(0, 1, 1.0), (0, 1, 2.0)], "two links from 0 to 1; write one, as wide as both together"),
    ],
)
def test_invalid_topology_is_refused(links: list[tuple[int, int, float]], said: str) -> None:
    made = tuple(NetworkLink(source=a, destination=b, bytes_per_s=width) for a, b, width in links)
    with pytest.raises(ConfigError) as caught:
        Topology(name="odd", num_ranks=2, num_switches=1, links=made)
    assert said in str(caught.value)


# Cuts.


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 12])
def test_bound_of_a_flat_topology_is_the_time_of_a_ring(num_ranks: int) -> None:
    topology = flat(num_ranks, latency_s=1e-5, bytes_per_s=1e9)
    least = least_s_per_byte(topology, Operation.ALL_REDUCE)
    assert least.s_per_byte == pytest.approx(2 * (num_ranks - 1) / num_ranks / 1e9)
    for name in ("ring", "halving-doubling", "fully-connected"):
        share = share_of_optimum(topology, parse(name, num_ranks), Operation.ALL_REDUCE)
        is_power_of_two = num_ranks & (num_ranks - 1) == 0
        if name != "halving-doubling" or is_power_of_two:
            assert share == pytest.approx(1.0, rel=1e-6)
        else:
            assert share < 0.7
    share = share_of_optimum(topology, parse("hub", num_ranks), Operation.ALL_REDUCE)
    assert share == pytest.approx(1 / num_ranks, rel=1e-6)


def test_bound_is_the_worst_cut_computed_by_hand() -> None:
    """Two hosts of two: the bound is a rank's port or the link between the hosts."""
    for inner, outer in ((4e9, 1e9), (1e9, 4e9), (3e9, 2e9)):
        topology = hosts(2, 2, inner_bytes_per_s=inner, outer_bytes_per_s=outer)
        # A quarter leaves each rank, three quarters enter its port from the others, and half
        # leaves a host.
        expected = max(0.25 / inner, 0.75 / inner, 0.5 / outer)
        gather = least_s_per_byte(topology, Operation.ALL_GATHER)
        assert gather.s_per_byte == pytest.approx(expected)
        assert least_s_per_byte(topology, Operation.REDUCE_SCATTER).s_per_byte == expected
        spread = least_s_per_byte(topology, Operation.BROADCAST, root=3)
        assert spread.s_per_byte == pytest.approx(1 / min(inner, outer))


@pytest.mark.parametrize("topology", [*RECORDED, uneven()], ids=[*RECORDED_IDS, "uneven"])
def test_no_schedule_beats_the_bound(topology: Topology) -> None:
    size = topology.num_ranks
    names = ["ring", "bidirectional-ring", "tree", "hub", "fully-connected", "halving-doubling"]
    names += ["bine", "double-tree:64"] + (["hierarchical:2", "hierarchical:4"] * (size == 8))
    for name in names:
        member = parse(name, size)
        share = share_of_optimum(topology, member, Operation.ALL_REDUCE, size_bytes=1 << 24)
        assert 0.0 < share <= 1.0 + 1e-4, name


def test_two_levels_between_hosts_are_nearer_the_optimum_than_a_tree() -> None:
    topology = two_hosts(has_nvlink=False)
    share = {
        name: share_of_optimum(topology, parse(name, 8), Operation.ALL_REDUCE)
        for name in ("tree", "hierarchical:4", "ring")
    }
    assert share["hierarchical:4"] > 2 * share["tree"]
    assert share["ring"] > 2 * share["tree"]


def test_topology_with_too_many_vertices_has_no_bound() -> None:
    with pytest.raises(ConfigError, match="flat has 17 vertices, but all cuts are tried only"):
        least_s_per_byte(flat(16, latency_s=0.0, bytes_per_s=1.0), Operation.ALL_REDUCE)
    with pytest.raises(ConfigError, match="no bound is known for all-to-all"):
        least_s_per_byte(flat(4, latency_s=0.0, bytes_per_s=1.0), Operation.ALL_TO_ALL)


# Rings.


def loads_of_all_rings(topology: Topology) -> np.ndarray:
    """How often each ring (rows) crosses each link (columns), for all rings."""
    rows = []
    for order in itertools.permutations(range(1, topology.num_ranks)):
        row = [0.0] * len(topology.links)
        for a, b in zip((0, *order), (*order, 0), strict=True):
            for place in topology.way(a, b):
                row[place] += 1
        rows.append(row)
    return np.array(rows)


def best_by_brute_force(topology: Topology, most: int) -> float:
    """Bytes per second of the best one or two rings, found by trying each pair."""
    widths = np.array([link.bytes_per_s for link in topology.links])
    loads = loads_of_all_rings(topology)
    with np.errstate(divide="ignore"):
        best = float((widths / loads).min(axis=1).max())
        if most > 1:
            unique = np.unique(loads, axis=0)  # rings of equal load are equivalent here
            for number, load in enumerate(unique):
                together = (widths / (unique[number:] + load)).min(axis=1).max()
                best = max(best, 2 * float(together))
    return best


@pytest.mark.parametrize("topology", [*RECORDED, uneven()], ids=[*RECORDED_IDS, "uneven"])
def test_found_ring_is_the_best_by_brute_force(topology: Topology) -> None:
    result = find_rings(topology)
    assert len(result.rings) == 1
    assert result.total_bytes_per_s == pytest.approx(best_by_brute_force(topology, 1))
    assert_they_fit(topology, result.rings, result.each_bytes_per_s)


def small() -> list[Topology]:
    """Topologies small enough for every pair of rings."""
    half = {pair: lanes for pair, lanes in ((p, n) for p, n in CUBE.items()) if max(pair) < 6}
    links = [
        NetworkLink(source=a, destination=b, bytes_per_s=lanes * 25e9)
        for pair, lanes in half.items()
        for a, b in (pair, pair[::-1])
    ]
    for rank in range(6):
        links.append(NetworkLink(source=rank, destination=6, bytes_per_s=12e9))
        links.append(NetworkLink(source=6, destination=rank, bytes_per_s=12e9))
    part = Topology(name="six of a DGX-1", num_ranks=6, num_switches=1, links=tuple(links))
    line = hosts(2, 3, inner_bytes_per_s=12e9, outer_bytes_per_s=12.5e9)
    return [part, line, uneven(), circle(5, latency_s=0.0, bytes_per_s=1e9)]


CUBE = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2,
    (4, 5): 1,
}  # fmt: skip


@pytest.mark.parametrize(
    "topology",
    [*small(), *RECORDED],
    ids=["six of a DGX-1", "2 hosts of 3", "uneven", "circle", *RECORDED_IDS],
)
def test_two_simultaneous_rings_are_the_best_by_brute_force(topology: Topology) -> None:
    result = find_rings(topology, most=2)
    assert result.total_bytes_per_s == pytest.approx(best_by_brute_force(topology, 2))
    assert_they_fit(topology, result.rings, result.each_bytes_per_s)


def test_dgx_has_six_rings_that_use_every_nvlink() -> None:
    """One for each NVLink of a GPU, which no set of rings without PCIe can exceed."""
    result = find_rings(dgx(), most=6)
    assert len(result.rings) == 6
    assert result.each_bytes_per_s == 25e9
    assert_they_fit(dgx(), result.rings, result.each_bytes_per_s)
    without = find_rings(dgx(has_nvlink=False), most=6)
    assert without.total_bytes_per_s == pytest.approx(12e9)


@pytest.mark.parametrize("topology", [*RECORDED, uneven()], ids=[*RECORDED_IDS, "uneven"])
def test_planned_rings_run_at_their_total_bandwidth(topology: Topology) -> None:
    result = find_rings(topology, most=6)
    member = planned_rings(topology, most=6)
    size, num_ranks = 840 * topology.num_ranks * len(result.rings), topology.num_ranks
    for operation in member.operations:
        proof = prove(member, operation)
        assert proof.most_sent == len(result.rings)
    took = cost_on(topology, member, Operation.ALL_REDUCE, size)
    at_most_s = 2 * (num_ranks - 1) / num_ranks * size / result.total_bytes_per_s
    assert took.seconds <= at_most_s * (1 + 1e-9)
    share = share_of_optimum(topology, member, Operation.ALL_REDUCE, 1 << 24)
    ring = share_of_optimum(topology, parse("ring", num_ranks), Operation.ALL_REDUCE, 1 << 24)
    assert share >= ring * (1 - 1e-4)


def test_ring_that_omits_a_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a ring holds each of 3 ranks once, got \[0, 1, 1\]"):
        ParallelRings([(0, 1, 2), (0, 1, 1)])


def test_rings_over_two_hosts_are_as_wide_as_the_network() -> None:
    assert find_rings(two_hosts(), most=2).total_bytes_per_s == pytest.approx(12.5e9)
    assert find_rings(two_hosts(has_nvlink=False), most=2).total_bytes_per_s == 12e9


def assert_they_fit(
    topology: Topology, rings: tuple[tuple[int, ...], ...], each_bytes_per_s: float
) -> None:
    crossed: Counter[int] = Counter()
    for ring in rings:
        assert sorted(ring) == list(range(topology.num_ranks))
        for a, b in zip(ring, (*ring[1:], ring[0]), strict=True):
            crossed.update(topology.way(a, b))
    for place, times in crossed.items():
        width = topology.links[place].bytes_per_s
        assert times * each_bytes_per_s <= width * (1 + 1e-6)


def test_rings_of_too_many_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="between 2 and 8 ranks, got 9; for more, search within"):
        find_rings(flat(9, latency_s=0.0, bytes_per_s=1.0))
    with pytest.raises(ConfigError, match="rings at once must be at least 1, got 0"):
        find_rings(dgx(), most=0)
