"""Every schedule of `collectives/` for 1 to 17 ranks, on paper: rows of bench/collectives.py.

Each is proved on sets of contributors and on numbers of 0 to 1000 elements, its formula stands
beside the interpreter of costs; on recorded machines the share of what their narrowest cut allows,
and the rings that a search of all orders finds. A proof that fails ends the program with 1.
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

MOST_RANKS = 17
MOST_OFF = 0.01
LENGTHS = (0, 1, 2, 7, 16, 17, 100, 1000)


def on_paper() -> list[list[str]]:
    return [*map(schedule_row, COLLECTIVES), *optimum_rows(), *ring_rows()]


def members_of(name: str) -> list[Collective]:
    """The members of this name for 1 to 17 ranks."""
    found = []
    for ranks in range(1, MOST_RANKS + 1):
        texts = [one for one in candidates(ranks, late=0) if one.partition(":")[0] == name]
        for text in texts:
            try:
                found.append(parse(text, ranks))
            except ConfigError:
                continue  # not for so many
    return found


def schedule_row(name: str) -> list[str]:
    """Proofs, sums of whole numbers, and costs of all its members."""
    members, rng = members_of(name), random.Random(0)
    num_sums, furthest = 0, 0.0
    link = LinkCost(latency_s=2e-5, s_per_byte=1e-9)
    for member in members:
        prove(member, Operation.ALL_REDUCE)
        for length in LENGTHS:
            buffers = [
                [rng.randrange(-99, 99) for _ in range(length)] for _ in range(member.num_ranks)
            ]
            wanted = [sum(column) for column in zip(*buffers, strict=True)]
            if any(one != wanted for one in on_numbers(member, Operation.ALL_REDUCE, buffers)):
                sys.exit(f"{member} of {member.num_ranks}: another sum of {length} numbers")
            num_sums += 1
        size = 4 * 5040 * member.num_ranks**2
        formula = member.formula_s(Operation.ALL_REDUCE, size, link)
        cost = cost_between_equals(member, Operation.ALL_REDUCE, size, link).seconds
        if cost or formula:
            off = formula / cost - 1
            if member.is_bound and off < -MOST_OFF:
                sys.exit(f"{member} of {member.num_ranks} takes more than its bound")
            furthest = max(furthest, abs(off))
    ranks = sorted({member.num_ranks for member in members})
    what = f"{name}: all-reduce for {ranks[0]} to {ranks[-1]} ranks, {len(members)} schedules"
    kind = COLLECTIVES[name]
    formula_is = "bound above" if kind.is_bound else "formula off"
    proved = f"proved, {num_sums} sums right; {formula_is} its costs by at most {furthest:.1%}"
    if kind.is_bound:
        return [what, proved, "all, none above its bound", "yes"]
    return [what, proved, f"all, <= {MOST_OFF:.0%}", "yes" if furthest <= MOST_OFF else "no"]


def optimum_rows() -> list[list[str]]:
    """What the best schedule reaches of the bound of the narrowest cut."""
    rows = []
    for topology in recorded():
        ranks = topology.num_ranks
        members = [*(parse(text, ranks) for text in candidates(ranks)), planned_rings(topology)]
        shares = {
            str(one): share_of_optimum(topology, one, Operation.ALL_REDUCE) for one in members
        }
        best = sorted(shares, key=lambda one: -shares[one])[:3]
        text = ", ".join(f"{one} {shares[one]:.2f}" for one in best)
        rows.append([f"{topology.name}: share of its optimum", text, "", ""])
    return rows


def recorded() -> list[Topology]:
    return [one for several in RECORDED.values() for one in several]


def ring_rows() -> list[list[str]]:
    """The widest ring that the search finds, beside that of all orders of the ranks."""
    rows = []
    for topology in recorded():
        found, best = find_rings(topology).total_bytes_per_s, widest(topology)
        text = f"{found / 1e9:.3g} GB/s; of all {math.factorial(topology.num_ranks - 1):,} orders "
        rows.append([
            f"{topology.name}: widest ring", text + f"{best / 1e9:.3g}", "equal",
            "yes" if math.isclose(found, best) else "no",
        ])  # fmt: skip
    return rows


def widest(topology: Topology) -> float:
    """By every order: the narrowest of its hops, each link shared by the hops that pass it."""
    best = 0.0
    for rest in itertools.permutations(range(1, topology.num_ranks)):
        load: dict[int, int] = {}
        ring = (0, *rest)
        for one, other in zip(ring, (*rest, 0), strict=True):
            for link in topology.way(one, other):
                load[link] = load.get(link, 0) + 1
        best = max(best, min(topology.links[link].bytes_per_s / n for link, n in load.items()))
    return best
