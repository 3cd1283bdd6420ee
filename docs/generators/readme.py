"""README.md between its marks: the protocols, what a first run prints, figures of results/."""

from . import protocols
from .parts import RESULTS, ROOT

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


def page() -> str:
    text = (ROOT / "README.md").read_text()
    parts = {"protocols": protocols.table, "first_run": first_run}
    for name in ("protocols", "first_run", *FIGURES):
        begin, end = BEGIN.format(name), END.format(name)
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        made = parts[name]() if name in parts else figures(name)
        text = f"{before}{begin}\n{made}{end}{after}"
    return text


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
