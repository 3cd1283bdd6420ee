"""The network between ranks: links with a bandwidth and a latency, between ranks and switches.

    flat               hosts(2, 2)                     circle
    0   1   2   3      0   1     2   3                 0 === 1
     \\  |   |  /        \\ /       \\ /                  |     |
      [switch]         [host]    [host]                3 === 2
                           \\      /
                           [network]

A link goes one way, so a full-duplex port is two links. All messages that share a link share its
bandwidth: a rank's one port is the link to its switch. A message takes the path with the fewest
links, the widest of several, and never passes through another rank: which rank passes chunks on is
up to the schedule.

The machines below are described as their makers publish them; what a machine really achieves has to
be measured (bandwidths are per direction, in bytes per second).

Sources: NVIDIA, "NVIDIA DGX-1 With Tesla V100 System Architecture", whitepaper WP-08437-002, 2017
(hybrid cube mesh of six NVLinks a GPU, 25 GB/s each way; two GPUs a PCIe switch, two switches a
processor); PCIe 3.0 x16: 15.75 GB/s, of which about 12 arrive; QPI at 9.6 GT/s: 19.2 GB/s.
"""

import heapq
from dataclasses import dataclass, replace
from functools import cache

from ..errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLink:
    """A link in one direction. Ranks are the vertices 0 to P - 1, switches come after them."""

    source: int
    destination: int
    bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Ranks, switches, and the links between them.

    Raises:
        ConfigError: a link is from or to no vertex, has no bandwidth, or is listed twice; or a rank
            cannot reach another (raised by `way`).
    """

    name: str
    num_ranks: int
    num_switches: int
    links: tuple[NetworkLink, ...]

    def __post_init__(self) -> None:
        seen = set()
        for link in self.links:
            ends = (link.source, link.destination)
            if not all(0 <= end < self.num_vertices for end in ends) or ends[0] == ends[1]:
                raise ConfigError(
                    f"{self.name}: a link from {ends[0]} to {ends[1]}, but its vertices are "
                    f"0 to {self.num_vertices - 1}, and a link joins two"
                )
            if not link.bytes_per_s > 0.0 or not link.latency_s >= 0.0:
                raise ConfigError(
                    f"{self.name}: the link from {ends[0]} to {ends[1]} needs bytes_per_s > 0 and "
                    f"latency_s >= 0, got {link.bytes_per_s} and {link.latency_s}"
                )
            if ends in seen:
                raise ConfigError(
                    f"{self.name}: two links from {ends[0]} to {ends[1]}; write one, as wide as "
                    f"both together"
                )
            seen.add(ends)

    @property
    def num_vertices(self) -> int:
        """The number of ranks and switches."""
        return self.num_ranks + self.num_switches

    def way(self, source: int, destination: int) -> tuple[int, ...]:
        """Return the path of a message between two ranks, as indices into ``links``."""
        return _all_paths(self)[source, destination]

    def without_latency(self) -> "Topology":
        """Return a copy whose links have no latency, so that only bandwidth counts."""
        return replace(self, links=tuple(replace(link, latency_s=0.0) for link in self.links))


@cache
def _all_paths(topology: Topology) -> dict[tuple[int, int], tuple[int, ...]]:
    leaving: dict[int, list[int]] = {}
    for index, link in enumerate(topology.links):
        leaving.setdefault(link.source, []).append(index)
    ways: dict[tuple[int, int], tuple[int, ...]] = {}
    for source in range(topology.num_ranks):
        paths = _paths_from(topology, source, leaving)
        unreachable = [
            rank for rank in range(topology.num_ranks) if rank not in paths and rank != source
        ]
        if unreachable:
            raise ConfigError(
                f"{topology.name}: no path from rank {source} to rank {unreachable[0]}"
            )
        ways |= {
            (source, rank): paths[rank] for rank in range(topology.num_ranks) if rank != source
        }
    return ways


def _paths_from(
    topology: Topology, source: int, leaving: dict[int, list[int]]
) -> dict[int, tuple[int, ...]]:
    """Return the path to every reachable vertex: the fewest links, and the widest of several."""
    paths: dict[int, tuple[int, ...]] = {}
    waiting: list[tuple[int, float, tuple[int, ...], int]] = [(0, -float("inf"), (), source)]
    while waiting:
        num_links, width, path, vertex = heapq.heappop(waiting)
        if vertex in paths:
            continue
        paths[vertex] = path
        if vertex != source and vertex < topology.num_ranks:
            continue  # a rank may only end a path
        for index in leaving.get(vertex, []):
            link = topology.links[index]
            narrower = max(width, -link.bytes_per_s)
            heapq.heappush(waiting, (num_links + 1, narrower, (*path, index), link.destination))
    return paths


def _both_ways(
    a: int, b: int, bytes_per_s: float, latency_s: float = 0.0
) -> tuple[NetworkLink, NetworkLink]:
    forth = NetworkLink(source=a, destination=b, bytes_per_s=bytes_per_s, latency_s=latency_s)
    return forth, replace(forth, source=b, destination=a)


def flat(num_ranks: int, *, latency_s: float, bytes_per_s: float) -> Topology:
    """Return the network of the closed formulas: one switch, one full-duplex port for each rank.

    Args:
        latency_s: from rank to rank.
    """
    links = [
        link
        for rank in range(num_ranks)
        for link in _both_ways(rank, num_ranks, bytes_per_s, latency_s / 2.0)
    ]
    return Topology(name="flat", num_ranks=num_ranks, num_switches=1, links=tuple(links))


def circle(num_ranks: int, *, latency_s: float, bytes_per_s: float) -> Topology:
    """Return ranks with a link to either neighbour, and a slow path to all others through a switch.

    The slow path has a thousandth of the bandwidth, and a hundred times the latency.
    """
    neighbours = {(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)}
    pairs = {tuple(sorted(pair)) for pair in neighbours if pair[0] != pair[1]}
    links = [link for a, b in sorted(pairs) for link in _both_ways(a, b, bytes_per_s, latency_s)]
    for rank in range(num_ranks):
        links += _both_ways(rank, num_ranks, bytes_per_s / 1000.0, 50.0 * latency_s)
    return Topology(name="circle", num_ranks=num_ranks, num_switches=1, links=tuple(links))


def hosts(
    num_hosts: int,
    host_size: int,
    *,
    inner_bytes_per_s: float,
    outer_bytes_per_s: float,
    inner_latency_s: float = 0.0,
    outer_latency_s: float = 0.0,
) -> Topology:
    """Return hosts whose ranks share one link to a network.

    Args:
        inner_latency_s, outer_latency_s: from rank to rank within a host, and between two hosts.
    """
    num_ranks = num_hosts * host_size
    network = num_ranks + num_hosts
    between_s = max(0.0, outer_latency_s - inner_latency_s) / 2.0
    links: list[NetworkLink] = []
    for host in range(num_hosts):
        switch = num_ranks + host
        for rank in range(host * host_size, (host + 1) * host_size):
            links += _both_ways(rank, switch, inner_bytes_per_s, inner_latency_s / 2.0)
        links += _both_ways(switch, network, outer_bytes_per_s, between_s)
    return Topology(
        name=f"{num_hosts} hosts of {host_size}",
        num_ranks=num_ranks,
        num_switches=num_hosts + 1,
        links=tuple(links),
    )


NVLINK_BYTES_PER_S, PCIE_BYTES_PER_S, QPI_BYTES_PER_S = 25e9, 12e9, 19.2e9
ETHERNET_BYTES_PER_S = 12.5e9  # 100 Gbit/s

CUBE_MESH = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2,
    (2, 6): 1, (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip
"""NVLinks between the GPUs of a DGX-1 with V100."""


def dgx(*, has_nvlink: bool = True) -> Topology:
    """A DGX-1: eight GPUs, NVLinks in a hybrid cube mesh, four PCIe switches and two processors."""
    links: list[NetworkLink] = []
    for (a, b), num_lanes in CUBE_MESH.items() if has_nvlink else ():
        links += _both_ways(a, b, num_lanes * NVLINK_BYTES_PER_S)
    for rank in range(8):
        links += _both_ways(rank, 8 + rank // 2, PCIE_BYTES_PER_S)
    for switch in range(4):
        links += _both_ways(8 + switch, 12 + switch // 2, PCIE_BYTES_PER_S)
    links += _both_ways(12, 13, QPI_BYTES_PER_S)
    name = "DGX-1" if has_nvlink else "DGX-1 without NVLink"
    return Topology(name=name, num_ranks=8, num_switches=6, links=tuple(links))


def pcie_cards() -> Topology:
    """Eight cards, four at the PCIe switch of each of two processors."""
    links: list[NetworkLink] = []
    for rank in range(8):
        links += _both_ways(rank, 8 + rank // 4, PCIE_BYTES_PER_S)
    for switch in range(2):
        links += _both_ways(8 + switch, 10 + switch, PCIE_BYTES_PER_S)
    links += _both_ways(10, 11, QPI_BYTES_PER_S)
    return Topology(name="8 PCIe cards", num_ranks=8, num_switches=4, links=tuple(links))


def two_hosts(*, has_nvlink: bool = True) -> Topology:
    """Two hosts of four GPUs on 100 Gbit/s; within a host an NVLink between any two, or PCIe."""
    plain = hosts(2, 4, inner_bytes_per_s=PCIE_BYTES_PER_S, outer_bytes_per_s=ETHERNET_BYTES_PER_S)
    if not has_nvlink:
        return replace(plain, name="2 hosts of 4 without NVLink")
    links = list(plain.links)
    for first in (0, 4):
        for a in range(first, first + 4):
            for b in range(a + 1, first + 4):
                links += _both_ways(a, b, NVLINK_BYTES_PER_S)
    return replace(plain, name="2 hosts of 4", links=tuple(links))


RECORDED: dict[str, tuple[Topology, ...]] = {
    "dgx1": (dgx(), dgx(has_nvlink=False)),
    "pcie8": (pcie_cards(),),
    "hosts2x4": (two_hosts(), two_hosts(has_nvlink=False)),
}
"""By the name that ``bench links --topology`` takes; machines with NVLink also without it."""
