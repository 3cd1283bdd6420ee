"""docs/collectives.md and its picture: schedules proved, priced and drawn."""

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

How many buffers become one sum, as schedules: who sends which part to whom, round by round. Made
from the docstrings in `src/paceline/collectives/` by `docs/generate.py`; edit those. How to add
one: [add-a-collective.md](add-a-collective.md). A schedule is a pure generator of rounds of
transfers, so one and the same is proved on sets of contributors (`collectives/proof.py:prove`),
priced on a topology (`collectives/cost.py:cost_on`), compared with the least that the topology
allows (`collectives/optimum.py:least_s_per_byte`), and run on tensors
(`exchange/scheduled.py:ScheduledCollective`).

A run takes one by its name: `paceline train softmax --workers 4 --collective ring`, under
full-sync and local-sgd, on this machine and under torchrun (there during the backward pass).
`native` is torch.distributed's own all-reduce (what ranks of one machine wait for, of at most 1
MiB, goes along a tree: fewer threads wake), `shared` the memory that workers of a machine
share; a schedule of which somebody has died cannot be mended, shared memory can. Members come
to the same bits by each, but not to the same as by another one: sums are made in other orders.

`auto` is shared memory where there is one. Where there is none, as under torchrun, it is the
fastest by what messages take on this machine, for as many bytes as a worker's gradients have;
native where nobody has measured, between several machines, on GPUs and with `--deterministic`.
`paceline bench collectives --workers 4` measures that and keeps it in
`~/.cache/paceline/ceilings.json`, unless `--names` or `--sizes` leave out what a run goes by.
Buckets that are summed beside a backward pass count as what they add to it there, measured
beside computing: torch's own sum has threads without Python, a schedule has one that takes
turns with the script, which can cost more than its messages. Processes that share cores are not
as ranks of a network: with more of them than cores a round takes what all its messages take
together, so whole rounds are measured (`collectives/host.py:HostCost`). The command shows each
collective's time beside the predicted one, gloo's own, and where one takes over from another,
measured and predicted.

P ranks, n bytes; α latency of a message, o what it costs each end, β seconds a byte, γ seconds of
adding a byte. The formulas are of an all-reduce between ranks of one full-duplex port each.

"""


SCHEDULES_SAID = """\
An all-reduce of eight ranks, counted by the proof."""


TOPOLOGIES_SAID = """\
The share of a topology's optimum that an all-reduce of 1 GiB reaches, bandwidth alone: the bound
is the worst of all cuts. Ranks stand in the order of their numbers, but for the rings at the end,
which are searched: the best one, and the best set of at most eight at once. Between two hosts a
ring sends (P - 1) / P of the buffer each way where half of it would do. Computed on topologies as
their makers describe them; nothing here is measured."""


CHOICES_SAID = """\
What `collectives/choose.py:choose` answers for three links, and from which size on another takes
over: the closed formulas, not measurements. Of all collectives that is mostly fully-connected, if a
rank may have P - 1 messages under way at once; here are those that send one at a time."""


EXAMPLES = {
    "100 Gbit/s Ethernet": LinkCost(latency_s=20e-6, s_per_byte=8e-11, overhead_s=2e-6),
    "1 Gbit/s Ethernet": LinkCost(latency_s=60e-6, s_per_byte=8e-9, overhead_s=5e-6),
    "100 Mbit/s, 10 ms away": LinkCost(latency_s=10e-3, s_per_byte=8e-8, overhead_s=10e-6),
}
"""Links as they are sold; what a machine's are has to be measured."""


def page() -> str:
    """docs/collectives.md."""
    parts = [
        HEAD + table(),
        f"## Eight ranks\n\n{SCHEDULES_SAID}\n\n{schedules_table(8)}",
        f"## Topologies\n\n{TOPOLOGIES_SAID}\n\n{topologies_table()}",
        f"## Which is the fastest\n\n{CHOICES_SAID}\n\n{choices_table()}",
        "![bus bandwidth against size](pictures/collectives.svg)\n",
        *[section(name, kind) for name, kind in collectives.COLLECTIVES.items()],
    ]
    return "\n".join(parts)


def table() -> str:
    rows = ["| collective | all-reduce | its formula | also called |", "|---|---|---|---|"]
    for name, kind in collectives.COLLECTIVES.items():
        aliases = collectives.ALIASES.items()
        also = ", ".join(f"`{alias}`" for alias, meant in aliases if meant == name)
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
    rows = [f"| | {' | '.join(one.name for one in topologies)} |", "|---" * 6 + "|"]
    for text in candidates(8):
        member = collectives.parse(text, 8)
        cells = [f"{share_of_optimum(one, member, Operation.ALL_REDUCE):.0%}" for one in topologies]
        rows.append(f"| `{text}` | {' | '.join(cells)} |")
    for words, most in (("the best ring", 1), ("the best rings at once", 8)):
        planned = [planned_rings(one, most) for one in topologies]
        cells = [
            f"{share_of_optimum(one, member, Operation.ALL_REDUCE):.0%}"
            for one, member in zip(topologies, planned, strict=True)
        ]
        rows.append(f"| {words} | {' | '.join(cells)} |")
    for words, most in (("width of that ring", 1), ("of those rings", 8)):
        found = [find_rings(one, most=most) for one in topologies]
        cells = [
            f"{len(one.rings)} x {one.each_bytes_per_s / 1e9:g} GB/s"
            if len(one.rings) > 1
            else f"{one.each_bytes_per_s / 1e9:g} GB/s"
            for one in found
        ]
        rows.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def choices_table() -> str:
    rows = ["| link | ranks | smallest buffers | from | then | from | then |"]
    rows.append("|---|---|---|---|---|---|---|")
    for words, link in EXAMPLES.items():
        for num_ranks in (2, 4, 8, 12):
            members = [collectives.parse(text, num_ranks) for text in candidates(num_ranks)]
            names = [str(one) for one in members if one.num_ports(Operation.ALL_REDUCE) == 1]
            choice = choose(1 << 20, num_ranks, link, names=names)
            crossovers = choice.crossovers
            first = crossovers[0].below if crossovers else choice.name
            cells = [f"`{first}`"]
            for one in crossovers[:2]:
                cells += [format_bytes(one.size_bytes), f"`{one.above}`"]
            cells += [""] * (5 - len(cells))
            rows.append(f"| {words} | {num_ranks} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def section(name: str, kind: type[Collective]) -> str:
    """One collective: its operations, and its part of the docstring of its file."""
    path = Path(inspect.getfile(kind)).name
    text = said_of(name, kind, collectives.COLLECTIVES)
    have = ", ".join(one.value for one in kind.operations)
    lines = [
        f"## `{collectives.spelling(name)}`",
        "",
        f"[`collectives/{path}`](../src/paceline/collectives/{path}): {have}.",
        "",
        *indented(text),
        "",
    ]
    return "\n".join(lines)


def picture() -> str:
    """docs/pictures/collectives.svg: bus bandwidth against size, by the formulas."""
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
