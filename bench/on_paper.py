"""Every schedule of `collectives/` for 1 to 17 ranks, on paper: rows of bench/collectives.py.

Each is proved on sets of contributors and on numbers of 0 to 1000 elements, and its formula is
compared with the interpreter of costs; on recorded machines come the share of the bound of their
narrowest cut, and the rings found by a search of all orders. If a proof fails, the exit code is 1.
"""

import itertools
import math
import random
import sys

from paceline.collectives import COLLECTIVES, parse
from paceline.collectives.base import Collective, LinkCost
from paceline.collectives.choose import candidates
from paceline.collectives.cost import cost_between_equals
from paceline.collectives.optimum import share_of_optimum
from paceline.collectives.proof import on_numbers, prove
from paceline.collectives.ring_search import find_rings, planned_rings
from paceline.collectives.topology import RECORDED, Topology
from paceline.collectives.transfers import Operation
from paceline.errors import ConfigError

MAX_RANKS = 17
MAX_DEVIATION = 0.01
LENGTHS = (0, 1, 2, 7, 16, 17, 100, 1000)


def on_paper() -> list[list[str]]:
    return [*map(schedule_row, COLLECTIVES), *optimum_rows(), *ring_rows()]


def members_of(name: str) -> list[Collective]:
    """Return the members of this name for 1 to 17 ranks."""
    members = []
    for ranks in range(1, MAX_RANKS + 1):
        texts = [text for text in candidates(ranks, late=0) if text.partition(":")[0] == name]
        for text in texts:
            try:
                members.append(parse(text, ranks))
            except ConfigError:
                continue  # not for this number of ranks
    return members


def schedule_row(name: str) -> list[str]:
    """Check proofs, sums of whole numbers, and costs of all members of a schedule."""
    members, rng = members_of(name), random.Random(0)
    num_sums, largest_deviation = 0, 0.0
    link = LinkCost(latency_s=2e-5, s_per_byte=1e-9)
    for member in members:
        prove(member, Operation.ALL_REDUCE)
        for length in LENGTHS:
            buffers = [
                [rng.randrange(-99, 99) for _ in range(length)] for _ in range(member.num_ranks)
            ]
            expected = [sum(column) for column in zip(*buffers, strict=True)]
            if any(
                result != expected for result in on_numbers(member, Operation.ALL_REDUCE, buffers)
            ):
                sys.exit(f"{member} of {member.num_ranks}: another sum of {length} numbers")
            num_sums += 1
        size = 4 * 5040 * member.num_ranks**2
        formula = member.formula_s(Operation.ALL_REDUCE, size, link)
        cost = cost_between_equals(member, Operation.ALL_REDUCE, size, link).seconds
        if cost or formula:
            deviation = formula / cost - 1
            if member.is_bound and deviation < -MAX_DEVIATION:
                sys.exit(f"{member} of {member.num_ranks} takes more than its bound")
            largest_deviation = max(largest_deviation, abs(deviation))
    ranks = sorted({member.num_ranks for member in members})
    title = f"{name}: all-reduce for {ranks[0]} to {ranks[-1]} ranks, {len(members)} schedules"
    collective = COLLECTIVES[name]
    formula_is = "bound above" if collective.is_bound else "formula off"
    proved = (
        f"proved, {num_sums} sums right; {formula_is} its costs by at most {largest_deviation:.1%}"
    )
    if collective.is_bound:
        return [title, proved, "all, none above its bound", "yes"]
    return [
        title,
        proved,
        f"all, <= {MAX_DEVIATION:.0%}",
        "yes" if largest_deviation <= MAX_DEVIATION else "no",
    ]


def optimum_rows() -> list[list[str]]:
    """Return the share of the bound of the narrowest cut that the best schedules reach."""
    rows = []
    for topology in recorded_topologies():
        ranks = topology.num_ranks
        members = [*(parse(text, ranks) for text in candidates(ranks)), planned_rings(topology)]
        shares = {
            str(member): share_of_optimum(topology, member, Operation.ALL_REDUCE)
            for member in members
        }
        best = sorted(shares, key=lambda name: -shares[name])[:3]
        text = ", ".join(f"{name} {shares[name]:.2f}" for name in best)
        rows.append([f"{topology.name}: share of its optimum", text, "", ""])
    return rows


def recorded_topologies() -> list[Topology]:
    return [topology for topologies in RECORDED.values() for topology in topologies]


def ring_rows() -> list[list[str]]:
    """Compare the widest ring of the search with that of all orders of the ranks."""
    rows = []
    for topology in recorded_topologies():
        found_bytes_per_s, best_bytes_per_s = (
            find_rings(topology).total_bytes_per_s,
            widest_ring(topology),
        )
        text = (
            f"{found_bytes_per_s / 1e9:.3g} GB/s; of all "
            f"{math.factorial(topology.num_ranks - 1):,} orders "
        )
        rows.append([
            f"{topology.name}: widest ring", text + f"{best_bytes_per_s / 1e9:.3g}", "equal",
            "yes" if math.isclose(found_bytes_per_s, best_bytes_per_s) else "no",
        ])  # fmt: skip
    return rows


def widest_ring(topology: Topology) -> float:
    """Return the best width over all orders: the narrowest hop, with links shared by their hops."""
    best = 0.0
    for rest in itertools.permutations(range(1, topology.num_ranks)):
        load: dict[int, int] = {}
        ring = (0, *rest)
        for rank, next_rank in zip(ring, (*rest, 0), strict=True):
            for link in topology.way(rank, next_rank):
                load[link] = load.get(link, 0) + 1
        best = max(best, min(topology.links[link].bytes_per_s / n for link, n in load.items()))
    return best
