"""Writes what pages repeat: protocols from docstrings, messages from types, figures from results.

docs/protocols.md, docs/collectives.md, docs/compression.md, docs/messages.md, docs/rules.md, and in
README.md all between the marks.

    python docs/generate.py            write what has changed
    python docs/generate.py --check    say whether anything would change; exit 1 if so

A page that is written twice is wrong once, so the docstring is the only place where a protocol or a
collective is described, a message's type the only place for its fields, and a page of results/ the
only one for what was measured. tests/test_docs.py holds that all are current.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args, get_type_hints

from paceline import collectives, compression
from paceline.collectives.base import Collective, LinkCost
from paceline.collectives.choose import candidates, choose
from paceline.collectives.optimum import share_of_optimum
from paceline.collectives.proof import prove
from paceline.collectives.ring_search import find_rings, planned_rings
from paceline.collectives.topology import dgx, pcie_cards, two_hosts
from paceline.collectives.transfers import Operation
from paceline.doctor.catalogue import GROUPS
from paceline.doctor.rule import ScriptRule
from paceline.fields import spelled
from paceline.plan import format_bytes
from paceline.protocols import ALIASES, PROTOCOLS, outer, spelling, streaming
from paceline.protocols.base import SyncProtocol
from paceline.protocols.outer import SPELLINGS as OUTERS
from paceline.report.chart import Curve, Diagram, draw_chart
from paceline.report.text import Point
from paceline.wire.messages import FromMember, ToMember

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "protocols.md"
PICTURE = ROOT / "docs" / "pictures" / "collectives.svg"
COLLECTIVES = ROOT / "docs" / "collectives.md"
COMPRESSION = ROOT / "docs" / "compression.md"
MESSAGES = ROOT / "docs" / "messages.md"
RULES = ROOT / "docs" / "rules.md"
README = ROOT / "README.md"
RESULTS = ROOT / "results"
BEGIN, END = "<!-- {}: made by docs/generate.py -->", "<!-- end of {} -->"
FIGURES = {
    "limit": {
        "model, global batch": "model, global batch", "Paceline ms a step": "Paceline, ms a step",
        "DDP ms": "DDP, ms", "one process, 2 threads, ms": "one process, ms",
        "bound ms": "no exchange, ms", "DDP : Paceline [95 %]": "DDP : Paceline [95 %]",
    },
    "stragglers": {
        "protocol": "protocol", "s without": "100 updates without it, s",
        "s with one 5x slow": "with it, s", "ratio": "ratio",
    },
}  # fmt: skip
"""Page -> its column -> the name it has in README.md."""

HEAD = """\
# The protocols

Made from the docstrings in `src/paceline/protocols/` by `docs/generate.py`; edit those. How to add
one: [add-a-protocol.md](add-a-protocol.md).

P is the number of workers, K the pushes an update averages, X the time of one step; `X_{K:P}` is
the K-th fastest of P. In the drawings a line `|` is an update and time goes to the right.

"""


COLLECTIVES_HEAD = """\
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
`native` is torch.distributed's own all-reduce, `shared` the memory that workers of a machine
share; a schedule of which somebody has died cannot be mended, shared memory can. Members come to
the same bits by each, but not to the same as by another one: sums are made in other orders.

`auto` is shared memory where there is one. Where there is none, as under torchrun, it is the
fastest by what messages take on this machine, for as many bytes as a worker's gradients have;
native where nobody has measured. `paceline bench collectives --workers 4` measures that and keeps
it in `~/.cache/paceline/ceilings.json`. Processes that share cores are not as ranks of a network:
with more of them than cores a round takes what all its messages take together, so whole rounds
are measured (`collectives/host.py:HostCost`). The command shows each collective's time beside the
predicted one, gloo's own, and where one takes over from another, measured and predicted.

P ranks, n bytes; α latency of a message, o what it costs each end, β seconds a byte, γ seconds of
adding a byte. The formulas are of an all-reduce between ranks of one full-duplex port each.

"""

STREAMING_SAID = """\
Every path computes the same (`tests/equivalences/test_fragments.py`). What an exchange costs is
hidden where bytes go by `torch.distributed`, under torchrun and on path `collective`: the sum of a
fragment is begun at the boundary and waited for O steps later; of a compressor the first operation
is waited for after half of them, and the second one begins. Workers still meet at each boundary,
for a few hundred bytes, so who is slow is waited for. In shared memory, through the store and
between peers, an exchange is a copy, and is over before anybody goes on. In virtual time a link is
waited for after O steps; times that were measured (`--like`) have no link to hide.

H has to be a multiple of F, O below H/F, and the model must have F parameters, since a fragment is
whole ones; anything else is refused before the first step, and so are a stream (the end of a pass
is not known before), one worker, and `--overlap` with `--nonfinite skip` where the sum is on its
way while workers go on. A weight of a push is the samples of its last H/F steps. A worker without a
mini-batch in the last update of an epoch adds nothing to it. `pace.stop()` and Ctrl-C between peers
lose nothing; through the store a worker whose step is called off goes on from the global copy.
"""

RULES_HEAD = """\
# The rules of the doctor

Made from the docstrings in `src/paceline/doctor/` by `docs/generate.py`; edit those. What the
command does with them: [doctor.md](doctor.md).

Each rule's sick and healthy examples are its tests. No rule has a figure: what a finding is worth
depends on the model and the machine, and reading measures neither.
"""
RULES_SAY = {"bug": "a bug", "cost": "could cost, not measured", "note": "a note"}

COMPRESSION_HEAD = """\
# Fewer bytes: `--compress`

Made from the docstrings in `src/paceline/compression/` by `docs/generate.py`; edit those.

    torchrun --nproc-per-node 2 train.py          with PACELINE_COMPRESS=int8
    paceline train mlp --workers 2 --path collective --compress topk:1%

Where `torch.distributed` carries gradients (engine torchrun, and path `collective`), workers send
less than they have computed; under local-sgd, less of their differences of parameters. What one has
not sent is not lost: it is added to its next gradient (error feedback). It is in checkpoints: as
many workers as before go on with their own, another number with the sum of all, in the first. A
worker without a mini-batch sends what it had left. It takes two numbers a parameter in memory, of
float32, or float64 where the gradient is that. All workers come to the same bits. Buffers (of
batch norm) are sent whole; an update that is not finite changes nothing of what was left; clips
act on the mean that has come.

Everywhere else it is refused by name: workers that share memory send nothing, so fewer bytes win
nothing; the asynchronous protocols go through that memory, too.

n numbers of s bytes (4, or 8 of float64), P workers; k numbers, R columns.

"""

COMPRESSION_SAID = """\
## When it wins

Where the link is slow: what it saves there has to be more than what encoding and decoding take on
the processor that computes the gradients. Few set-ups are so (Agarwal et al., MLSys 2022). So it is
priced before the run: every worker encodes and decodes gradients of this model's own size, all of
them together time two sizes of an all-reduce, and the plan says

    compress  int8: 22.2 MiB -> 5.6 MiB that a worker sends an update; compressing loses here:
              82.2 ms saved, 669 ms spent (link: 212.2 MB/s, 64 us a message, measured)

A dry run has one worker, so the link is not known to it. The verdict is of an update as if nothing
overlapped. Under torchrun each bucket is encoded, and its first operation begins, while the
backward pass computes the next one; encoding competes with it for the same cores. The summary says
what a worker sent, and the first line of the trace has the price.
"""


EXAMPLES = {
    "100 Gbit/s Ethernet": LinkCost(latency_s=20e-6, s_per_byte=8e-11, overhead_s=2e-6),
    "1 Gbit/s Ethernet": LinkCost(latency_s=60e-6, s_per_byte=8e-9, overhead_s=5e-6),
    "100 Mbit/s, 10 ms away": LinkCost(latency_s=10e-3, s_per_byte=8e-8, overhead_s=10e-6),
}
"""Links as they are sold; what a machine's are has to be measured."""


MESSAGES_HEAD = """\
# The messages

Everything that members and the coordinator say to each other, made from the types in
`src/paceline/wire/messages.py` by `docs/generate.py`; edit those. How they become bytes stands in
`src/paceline/wire/codec.py`. Who does not speak the same table is refused by name.
"""


def table() -> str:
    """All protocols, a row each."""
    rows = ["| `--protocol` | an update | also called |", "|---|---|---|"]
    for name, protocol in PROTOCOLS.items():
        also = ", ".join(f"`{alias}`" for alias, meant in ALIASES.items() if meant == name)
        rows.append(f"| `{spelling(name)}` | {protocol.summary} | {also} |")
    return "\n".join(rows) + "\n"


def collectives_page() -> str:
    """docs/collectives.md."""
    parts = [
        COLLECTIVES_HEAD + collectives_table(),
        f"## Eight ranks\n\n{SCHEDULES_SAID}\n\n{schedules_table(8)}",
        f"## Topologies\n\n{TOPOLOGIES_SAID}\n\n{topologies_table()}",
        f"## Which is the fastest\n\n{CHOICES_SAID}\n\n{choices_table()}",
        "![bus bandwidth against size](pictures/collectives.svg)\n",
        *[collective_section(name, kind) for name, kind in collectives.COLLECTIVES.items()],
    ]
    return "\n".join(parts)


def collectives_picture() -> str:
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


def collectives_table() -> str:
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


def collective_section(name: str, kind: type[Collective]) -> str:
    """One collective: its operations, and its part of the docstring of its file."""
    path = Path(inspect.getfile(kind)).name
    text = said_of(name, kind, collectives.COLLECTIVES)
    have = ", ".join(one.value for one in kind.operations)
    lines = [
        f"## `{collectives.spelling(name)}`",
        "",
        f"[`collectives/{path}`](../src/paceline/collectives/{path}): {have}.",
        "",
        *[f"    {line}".rstrip() for line in text.splitlines()],
        "",
    ]
    return "\n".join(lines)


def compression_page() -> str:
    """docs/compression.md."""
    rows = [
        "| `--compress` | what is sent | bytes that a worker sends an update |",
        "|---|---|---|",
    ]
    for name, one in compression.COMPRESSORS.items():
        rows.append(f"| `{spelled(name, one.arguments)}` | {one.summary} | {one.sends} |")
    rows.append("| `none` | all of it | 2 (P-1)/P sn |")
    parts = [COMPRESSION_HEAD + "\n".join(rows) + "\n", COMPRESSION_SAID, measured_compression()]
    modules = dict.fromkeys(
        f"{one.made_by.partition(':')[0]}" for one in compression.COMPRESSORS.values()
    )
    for module in modules:
        text = inspect.getdoc(importlib.import_module(f"paceline.compression.{module}")) or ""
        path = f"[`compression/{module}.py`](../src/paceline/compression/{module}.py)"
        lines = [f"    {line}".rstrip() for line in text.splitlines()]
        parts.append("\n".join([f"## {path}", "", *lines, ""]))
    return "\n".join(parts)


def measured_compression() -> str:
    """What bench/compression.py has measured, and its command."""
    path = RESULTS / "compression.md"
    if not path.is_file():
        return "`python bench/compression.py --write` measures both, beside what runs take.\n"
    _, _, measured = path.read_text().partition("\n")
    return f"## Measured\n{measured}"


def section(name: str, protocol: type[SyncProtocol]) -> str:
    """One protocol: what it needs, as data, and its part of the docstring of its file."""
    text = said_of(name, protocol, PROTOCOLS)
    path = Path(inspect.getfile(protocol)).name
    facts = [
        "calls work off" if protocol.cancels else "never calls work off",
        "between peers or through the store" if protocol.is_spmd else "through the store",
    ]
    for argument in reversed(protocol.arguments):
        limit = ", at most the workers" if argument.is_at_most_workers else ""
        meaning = f"{argument.symbol}: {argument.meaning}, at least {argument.minimum}{limit}"
        facts.insert(0, meaning)
    lines = [
        f"## `{spelling(name)}`",
        "",
        f"[`protocols/{path}`](../src/paceline/protocols/{path}): {'; '.join(facts)}.",
        "",
        *[f"    {line}".rstrip() for line in text.splitlines()],
        "",
    ]
    return "\n".join(lines)


def said_of(name: str, member: type, family: Iterable[str]) -> str:
    """From the line that begins with its name to that of its sister, or to the end."""
    text = inspect.getdoc(inspect.getmodule(member)) or ""
    parts = re.split(rf"^(?=(?:{'|'.join(family)}): )", text, flags=re.MULTILINE)
    (mine,) = [part for part in parts if part.startswith(f"{name}: ")]
    return mine.rstrip()


def page() -> str:
    """docs/protocols.md."""
    sections = [section(name, protocol) for name, protocol in PROTOCOLS.items()]
    return HEAD + table() + "\n" + "\n".join([*sections, outer_section(), streaming_section()])


def outer_section() -> str:
    """The outer optimizer, which is a setting of the protocols with local steps."""
    carried = [spelling(name) for name, one in PROTOCOLS.items() if one.update_rule == "mean"]
    lines = [
        "## `--outer`",
        "",
        "[`protocols/outer.py`](../src/paceline/protocols/outer.py): "
        f"{', '.join(OUTERS.values())}; under {', '.join(f'`{one}`' for one in carried)}. "
        "Of one protocol alone: `local-sgd:8+nesterov:0.7,0.9`.",
        "",
        *[f"    {line}".rstrip() for line in (inspect.getdoc(outer) or "").splitlines()],
        "",
    ]
    return "\n".join(lines)


def streaming_section() -> str:
    """Fragments and overlap, which are settings of the protocols whose H stays."""
    carried = [spelling(name) for name, one in PROTOCOLS.items() if one.can_stream]
    lines = [
        "## `--fragments` and `--overlap`",
        "",
        "[`protocols/streaming.py`](../src/paceline/protocols/streaming.py): "
        f"`--fragments F --overlap O`; under {', '.join(f'`{one}`' for one in carried)}. "
        "Of one protocol alone: `local-sgd:8+fragments:4,1`.",
        "",
        *[f"    {line}".rstrip() for line in (inspect.getdoc(streaming) or "").splitlines()],
        "",
        STREAMING_SAID,
    ]
    return "\n".join(lines)


def messages_page() -> str:
    """docs/messages.md."""
    directions = {
        "From a member to the coordinator": get_args(FromMember),
        "From the coordinator to a member": get_args(ToMember),
    }
    said = {kind for kinds in directions.values() for kind in kinds}
    parts = {one for kind in said for one in records_in(kind)} - said
    ordered = sorted(parts, key=lambda one: one.__name__)
    tables = {**directions, "What they are made of": ordered}
    pages = [f"\n\n## {title}\n\n{message_table(kinds)}" for title, kinds in tables.items()]
    return MESSAGES_HEAD + "".join(pages)


def message_table(kinds: Any) -> str:
    rows = ["| message | fields | what it says |", "|---|---|---|"]
    for kind in kinds:
        fields = [f"`{name}`: {type_name(hint)}" for name, hint in get_type_hints(kind).items()]
        says = (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")
        rows.append(f"| `{kind.__name__}` | {', '.join(fields)} | {says.replace('``', '`')} |")
    return "\n".join(rows) + "\n"


def records_in(kind: Any) -> set[Any]:
    """The NamedTuples among the types of its fields, however deep."""
    found = set()
    for hint in get_type_hints(kind).values() if hasattr(kind, "_fields") else get_args(kind):
        own = {hint} if hasattr(hint, "_fields") else set()
        found |= own | records_in(hint)
    return found


def type_name(hint: Any) -> str:
    """As it stands in the code, without where it comes from."""
    text = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    return re.sub(r"[a-z_.]+\.(?=[A-Z])", "", text).replace("|", "or")


def figures(page: str) -> str:
    """Chosen columns of a page of results/."""
    lines = [line for line in (RESULTS / f"{page}.md").read_text().splitlines() if line[:1] == "|"]
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    places = [header.index(name) for name in FIGURES[page]]
    names = list(FIGURES[page].values())
    chosen = [names, ["---"] * len(names), *([row[i] for i in places] for row in rows)]
    return "".join(f"| {' | '.join(row)} |\n" for row in chosen)


def first_run() -> str:
    """What the first run printed, without the middle."""
    _, _, rest = (RESULTS / "first_run.md").read_text().partition("```text\n")
    lines = rest.partition("```")[0].splitlines()
    epochs = [number for number, line in enumerate(lines) if line.startswith("epoch ")]
    lines[epochs[0] + 1 : epochs[-1]] = ["..."]
    return "\n".join(["```text", *lines, "```", ""])


def readme(text: str) -> str:
    """README.md with what is current between its marks."""
    parts = {"protocols": table, "first_run": first_run}
    for name in ("protocols", "first_run", *FIGURES):
        begin, end = BEGIN.format(name), END.format(name)
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        made = parts[name]() if name in parts else figures(name)
        text = f"{before}{begin}\n{made}{end}{after}"
    return text


def rules_page() -> str:
    """docs/rules.md."""
    parts = [RULES_HEAD]
    for group, rules in GROUPS.items():
        module = importlib.import_module(f"paceline.doctor.{group}")
        title = (inspect.getdoc(module) or "").partition("\n")[0].rstrip(".")
        parts.append(f"## {title}\n")
        parts += [_rule_section(rule) for rule in rules]
    return "\n".join(parts)


def _rule_section(rule: ScriptRule) -> str:
    """One rule, with the first of its sick examples and the first of its healthy ones."""
    path = f"doctor/{rule.group}/{rule.name.replace('-', '_')}.py"
    lines = [
        f"### {rule.name}", "",
        f"{rule.what}. ({RULES_SAY[rule.severity.value]}; [`{path}`](../src/paceline/{path}))", "",
        rule.why, "", f"Fix: {rule.fix}", "", f"Source: {rule.source}", "", "Sick:", "",
        *_code(rule.sick[0]), "", "Healthy:", "", *_code(rule.healthy[0]), "",
    ]  # fmt: skip
    return "\n".join(lines)


def _code(text: str) -> list[str]:
    return [f"    {line}".rstrip() for line in text.strip("\n").splitlines()]


def main() -> int:
    stale = False
    pages = (
        (PAGE, page()),
        (COLLECTIVES, collectives_page()),
        (PICTURE, collectives_picture()),
        (COMPRESSION, compression_page()),
        (MESSAGES, messages_page()),
        (RULES, rules_page()),
        (README, readme(README.read_text())),
    )
    for path, wanted in pages:
        if not path.exists() or path.read_text() != wanted:
            stale = True
            if "--check" in sys.argv:
                print(f"{path.relative_to(ROOT)} is not current: run python docs/generate.py")
            else:
                path.write_text(wanted)
                print(f"wrote {path.relative_to(ROOT)}")
    return int(stale and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
