"""Writes what pages repeat: protocols from docstrings, messages from types, figures from results.

docs/protocols.md, docs/messages.md, and in README.md all between the marks.

    python docs/generate.py            write what has changed
    python docs/generate.py --check    say whether anything would change; exit 1 if so

A page that is written twice is wrong once, so the docstring is the only place where a protocol is
described, a message's type the only place for its fields, and a page of results/ the only one for
what was measured. tests/test_docs.py holds that all are current.
"""

import inspect
import re
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

from paceline.protocols import ALIASES, PROTOCOLS, spelling
from paceline.protocols.base import SyncProtocol
from paceline.wire.messages import FromMember, ToMember

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "protocols.md"
MESSAGES = ROOT / "docs" / "messages.md"
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


def section(name: str, protocol: type[SyncProtocol]) -> str:
    """One protocol: what it needs, as data, and its part of the docstring of its file."""
    text = said_of(name, protocol)
    path = Path(inspect.getfile(protocol)).name
    argument = protocol.argument
    facts = [
        "calls work off" if protocol.cancels else "never calls work off",
        "between peers or through the store" if protocol.is_spmd else "through the store",
    ]
    if argument is not None:
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


def said_of(name: str, protocol: type[SyncProtocol]) -> str:
    """From the line that begins with its name to that of its sister, or to the end."""
    text = inspect.getdoc(inspect.getmodule(protocol)) or ""
    parts = re.split(rf"^(?=(?:{'|'.join(PROTOCOLS)}): )", text, flags=re.MULTILINE)
    (mine,) = [part for part in parts if part.startswith(f"{name}: ")]
    return mine.rstrip()


def page() -> str:
    """docs/protocols.md."""
    sections = [section(name, protocol) for name, protocol in PROTOCOLS.items()]
    return HEAD + table() + "\n" + "\n".join(sections)


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


def main() -> int:
    stale = False
    pages = ((PAGE, page()), (MESSAGES, messages_page()), (README, readme(README.read_text())))
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
