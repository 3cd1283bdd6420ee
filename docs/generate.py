"""Writes docs/protocols.md and the table of protocols in README.md from the protocols' docstrings.

    python docs/generate.py            write what has changed
    python docs/generate.py --check    say whether anything would change; exit 1 if so

A page that is written twice is wrong once, so the docstring is the only place where a protocol is
described. tests/test_docs.py holds that both are current.
"""

import inspect
import sys
from pathlib import Path

from paceline.protocols import ALIASES, PROTOCOLS, spelling
from paceline.protocols.base import SyncProtocol

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "protocols.md"
README = ROOT / "README.md"
BEGIN = "<!-- protocols: made by docs/generate.py -->"
END = "<!-- end of protocols -->"

HEAD = """\
# The protocols

Made from the docstrings in `src/paceline/protocols/` by `docs/generate.py`; edit those. How to add
one: [add-a-protocol.md](add-a-protocol.md).

P is the number of workers, K the pushes an update averages, X the time of one step; `X_{K:P}` is
the K-th fastest of P. In the drawings a line `|` is an update and time goes to the right.

"""


def table() -> str:
    """All protocols, a row each."""
    rows = ["| `--protocol` | an update | also called |", "|---|---|---|"]
    for name, protocol in PROTOCOLS.items():
        also = ", ".join(f"`{alias}`" for alias, meant in ALIASES.items() if meant == name)
        rows.append(f"| `{spelling(name)}` | {protocol.summary} | {also} |")
    return "\n".join(rows) + "\n"


def section(name: str, protocol: type[SyncProtocol]) -> str:
    """One protocol: what it needs, as data, and the docstring of its file."""
    module = inspect.getmodule(protocol)
    assert module is not None
    text = inspect.getdoc(module)
    assert text is not None
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


def page() -> str:
    """docs/protocols.md."""
    sections = [section(name, protocol) for name, protocol in PROTOCOLS.items()]
    return HEAD + table() + "\n" + "\n".join(sections)


def readme(text: str) -> str:
    """README.md with a current table between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}{END}{after}"


def main() -> int:
    stale = False
    for path, wanted in ((PAGE, page()), (README, readme(README.read_text()))):
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
