"""docs/collectives.md and its picture: schedules, their proofs, prices and drawings."""

import inspect
from pathlib import Path

from paceline import collectives
from paceline.collectives.base import Collective, LinkCost
from paceline.collectives.choose import candidates, choose
from paceline.collectives.optimum import share_of_optimum
from paceline.collectives.proof import prove
from paceline.collectives.ring_search import find_rings, planned_rings
from paceline.collectives.topology import dgx, pcie_cards, two_hosts
from paceline.collectives.transfers import Operation
from paceline.plan import format_bytes
from paceline.report.chart import Curve, Diagram, draw_chart
from paceline.report.text import Point

from .parts import indented, said_of

HEAD = """\
# The collectives

How many buffers become one sum, as schedules: which rank sends which part to which, round by round.
Made from the docstrings in `src/paceline/collectives/` by `docs/generate.py`; edit those. How to
add one: [add-a-collective.md](add-a-collective.md). A schedule is a pure generator of rounds of
transfers. So the same schedule is proved on sets of contributors (`collectives/proof.py:prove`),
priced on a topology (`collectives/cost.py:cost_on`), compared with the minimum that the topology
allows (`collectives/optimum.py:least_s_per_byte`), and run on tensors
(`exchange/scheduled.py:ScheduledCollective`).

A run selects one by name: `paceline train softmax --workers 4 --collective ring`, under
full-sync and local-sgd, on this machine and under torchrun (there during the backward pass).
`native` is torch.distributed's own all-reduce (sums of at most 1 MiB that ranks of one machine wait
for go along a tree, which wakes fewer threads), `shared` the memory that workers of a machine
share: each adds up its part of the gradients for all. Under torchrun ranks map each other's memory
for that (`engines/torchrun/symmetric_memory.py`), if they are on one machine, in one container and
of one user. After a death workers of `paceline launch` go on in it; a schedule cannot be repaired.
All members get the same bits with each collective, but not the same as with another one, since the
order of the sums differs.

`auto` is shared memory if there is any. If there is none, it is the fastest one by the measured
cost of messages on this machine, for the size of a worker's gradients. It is native without a
measurement, between several machines, on GPUs and with `--deterministic`.
`paceline bench collectives --workers 4` measures the costs and keeps them in
`~/.cache/paceline/ceilings.json`, unless `--names` or `--sizes` leave out what a run needs.
Buckets that are summed during a backward pass count as the time that they add to it, measured
beside computing: torch's own sum has threads without Python, a schedule has one that takes
turns with the script, which can cost more than its messages. Processes that share cores differ
from ranks of a network: with more of them than cores a round takes as long as all its messages
together, so whole rounds are measured (`collectives/host.py:HostCost`). The command shows each
collective's time beside the predicted one, gloo's own, that of shared memory, and the sizes at
which another one becomes faster, measured and predicted.

P ranks, n bytes; α latency of a message, o what it costs each end, β seconds per byte, γ seconds
for adding a byte. The formulas are for an all-reduce between ranks with one full-duplex port each.

"""


SCHEDULES_TEXT = """\
An all-reduce of eight ranks, counted by the proof."""


TOPOLOGIES_TEXT = """\
The share of a topology's optimum that an all-reduce of 1 GiB reaches, by bandwidth alone: the bound
is the worst of all cuts. Ranks are in numerical order, except for the searched rings at the end:
the best one, and the best set of at most eight at once. Between two hosts a
ring sends (P - 1) / P of the buffer each way where half of it would do. Computed on topologies as
their makers describe them; nothing here is measured."""


CHOICES_TEXT = """\
The answers of `collectives/choose.py:choose` for three links, and the size from which another one
is faster, by the closed formulas, not measurements. Among all collectives that is mostly
fully-connected, if a rank may have P - 1 messages in progress at once; this table has only those
that send one at a time."""


EXAMPLES = {
    "100 Gbit/s Ethernet": LinkCost(latency_s=20e-6, s_per_byte=8e-11, overhead_s=2e-6),
    "1 Gbit/s Ethernet": LinkCost(latency_s=60e-6, s_per_byte=8e-9, overhead_s=5e-6),
    "100 Mbit/s, 10 ms away": LinkCost(latency_s=10e-3, s_per_byte=8e-8, overhead_s=10e-6),
}
"""Nominal figures of links; those of a machine have to be measured."""


def page() -> str:
    """Return docs/collectives.md."""
    parts = [
        HEAD + table(),
        f"## Eight ranks\n\n{SCHEDULES_TEXT}\n\n{schedules_table(8)}",
        f"## Topologies\n\n{TOPOLOGIES_TEXT}\n\n{topologies_table()}",
        f"## Which is the fastest\n\n{CHOICES_TEXT}\n\n{choices_table()}",
        "![bus bandwidth against size](pictures/collectives.svg)\n",
        *[section(name, kind) for name, kind in collectives.COLLECTIVES.items()],
    ]
    return "\n".join(parts)


def table() -> str:
    rows = ["| collective | all-reduce | its formula | also called |", "|---|---|---|---|"]
    for name, kind in collectives.COLLECTIVES.items():
        aliases = collectives.ALIASES.items()
        also = ", ".join(f"`{alias}`" for alias, target in aliases if target == name)
        summary = f"{collectives.spelling(name)}` | {kind.summary} | {kind.formula} | {also} |"
        rows.append(f"| `{summary}")
    return "\n".join(rows) + "\n"


def schedules_table(num_ranks: int) -> str:
    rows = ["| collective | rounds | messages | most of the buffer that a rank sends | ports |"]
    rows.append("|---|---|---|---|---|")
    for text in candidates(num_ranks, late=num_ranks - 1):
        member = collectives.parse(text, num_ranks)
        proof = prove(member, Operation.ALL_REDUCE)
        sent = max(proof.chunks_sent) / member.num_chunks(Operation.ALL_REDUCE)
        ports = max(proof.most_sent, proof.most_received)
        rows.append(
            f"| `{text}` | {proof.num_rounds} | {proof.num_messages} | {sent:.2f} n | {ports} |"
        )
    return "\n".join(rows) + "\n"


def topologies_table() -> str:
    topologies = [
        dgx(), dgx(has_nvlink=False), pcie_cards(), two_hosts(), two_hosts(has_nvlink=False),
    ]  # fmt: skip
    rows = [f"| | {' | '.join(topology.name for topology in topologies)} |", "|---" * 6 + "|"]
    for text in candidates(8):
        member = collectives.parse(text, 8)
        shares = [share_of_optimum(place, member, Operation.ALL_REDUCE) for place in topologies]
        cells = [f"{share:.0%}" for share in shares]
        rows.append(f"| `{text}` | {' | '.join(cells)} |")
    for words, most in (("the best ring", 1), ("the best rings at once", 8)):
        planned = [planned_rings(topology, most) for topology in topologies]
        cells = [
            f"{share_of_optimum(topology, member, Operation.ALL_REDUCE):.0%}"
            for topology, member in zip(topologies, planned, strict=True)
        ]
        rows.append(f"| {words} | {' | '.join(cells)} |")
    for words, most in (("width of that ring", 1), ("of those rings", 8)):
        searches = [find_rings(topology, most=most) for topology in topologies]
        cells = [
            f"{len(found.rings)} x {found.each_bytes_per_s / 1e9:g} GB/s"
            if len(found.rings) > 1
            else f"{found.each_bytes_per_s / 1e9:g} GB/s"
            for found in searches
        ]
        rows.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def choices_table() -> str:
    rows = ["| link | ranks | smallest buffers | from | then | from | then |"]
    rows.append("|---|---|---|---|---|---|---|")
    for words, link in EXAMPLES.items():
        for num_ranks in (2, 4, 8, 12):
            members = [collectives.parse(text, num_ranks) for text in candidates(num_ranks)]
            names = [str(kind) for kind in members if kind.num_ports(Operation.ALL_REDUCE) == 1]
            choice = choose(1 << 20, num_ranks, link, names=names)
            crossovers = choice.crossovers
            first = crossovers[0].below if crossovers else choice.name
            cells = [f"`{first}`"]
            for crossover in crossovers[:2]:
                cells += [format_bytes(crossover.size_bytes), f"`{crossover.above}`"]
            cells += [""] * (5 - len(cells))
            rows.append(f"| {words} | {num_ranks} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def section(name: str, kind: type[Collective]) -> str:
    """Return the section of one collective: its operations, and its part of the docstring."""
    path = Path(inspect.getfile(kind)).name
    text = said_of(name, kind, collectives.COLLECTIVES)
    operations = ", ".join(operation.value for operation in kind.operations)
    lines = [
        f"## `{collectives.spelling(name)}`",
        "",
        f"[`collectives/{path}`](../src/paceline/collectives/{path}): {operations}.",
        "",
        *indented(text),
        "",
    ]
    return "\n".join(lines)


def picture() -> str:
    """Return docs/pictures/collectives.svg: bus bandwidth against size, by the formulas."""
    names, words = ("ring", "halving-doubling", "double-tree", "tree", "hub"), "1 Gbit/s Ethernet"
    link, num_ranks = EXAMPLES[words], 8
    curves = []
    for text in names:
        member = collectives.parse(text, num_ranks)
        points = []
        for step in range(57):  # four a doubling
            size = 2.0 ** (10 + step / 4)
            took_s = member.formula_s(Operation.ALL_REDUCE, size, link)
            moved = 2 * (num_ranks - 1) / num_ranks * size
            points.append(Point(t=step / 4, value=moved / took_s / 1e6))
        curves.append(Curve(name=text, points=tuple(points)))
    return draw_chart(
        "An all-reduce between eight ranks, by the closed formulas",
        f"{words}: a message 60 us, 5 us more at each end; computed, not measured",
        [
            Diagram(
                label="bus bandwidth (MB/s)",
                curves=tuple(curves),
                x_label="buffer (KiB)",
                from_zero=True,
                is_log2=True,
                mark=(125.0, "what the link carries"),
            )
        ],
    )
