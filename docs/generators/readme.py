"""README.md between its marks: the protocols, the output of a first run, figures of results/."""

import re
from collections.abc import Sequence

from . import protocols
from .parts import RESULTS, ROOT, rows_of

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
    parts = {"worth": worth, "protocols": protocols.table, "first_run": first_run}
    for name in (*parts, *FIGURES):
        begin, end = BEGIN.format(name), END.format(name)
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        made = parts[name]() if name in parts else figures(name)
        text = f"{before}{begin}\n{made}{end}{after}"
    return text


def worth() -> str:
    """The table of headline figures, one of each kind, as results/ has them."""
    faster = _range_of([row["DDP : Paceline [95 %]"] for row in rows_of("limit")])
    as_ranks = _range_of([row["DDP : Paceline"] for row in rows_of("torchrun")])
    slowdowns = {row["protocol"]: row["ratio"].split()[0] for row in rows_of("stragglers")}
    overhead, control = (row["median ratio"] for row in rows_of("overhead"))
    goodput = {row["protocol"]: row["goodput"] for row in rows_of("goodput")}
    faults, minutes = re.findall(r"\d+", (RESULTS / "goodput.md").read_text())[:2]
    killed = rows_of("checkpoints")[0]
    likely = rows_of("likely")[-1]
    cells = {
        "limit": ("two workers, full-sync, against DDP over gloo at its best settings", faster),
        "torchrun": ("under torchrun, two ranks, against DDP at the better of two settings",
                     as_ranks),
        "overhead": ("the four lines with one worker, against the bare loop",
                     f"{overhead} of its time per step (the bare loop again: {control})"),
        "stragglers": ("one of four workers five times as slow",
                       f"k-sync:3 takes {slowdowns['k-sync:3']} times as long, "
                       f"full-sync {slowdowns['full-sync']}"),
        "goodput": (f"{faults} kills and stops in {minutes} minutes, eight workers",
                    f"under k-sync:6 {goodput['k-sync:6']} of the updates remain, under full-sync "
                    f"{goodput['full-sync']}; each sample once"),
        "checkpoints": (f"{killed['runs killed']} runs killed while they save, and started again",
                        f"{killed['resumed from a checkpoint']} resumed from a checkpoint, "
                        f"{killed['went on to their end']} finished, {killed['samples lost']} "
                        f"samples lost, {killed['other weights']} ended with other weights"),
        "likely": ("the time of a run, predicted as a range from a short profile",
                   f"held in {likely['runs within what was likely']} runs, "
                   f"{likely['its width, of the predicted']} wide"),
    }  # fmt: skip
    rows = [
        f"| {what} | {figure} | [{name}](results/{name}.md) |"
        for name, (what, figure) in cells.items()
    ]
    return "\n".join(["| what | measured | page |", "|---|---|---|", *rows, ""])


def _range_of(ratios: Sequence[str]) -> str:
    """The least and the most of ratios with their intervals, in words."""
    medians = [float(ratio.split()[0]) for ratio in ratios]
    ends = [float(end) for ratio in ratios for end in re.findall(r"[\d.]+", ratio)[1:]]
    return (
        f"{min(medians):.2f} to {max(medians):.2f} times as fast, {len(medians)} models "
        f"(95 % intervals from {min(ends):.2f} to {max(ends):.2f})"
    )


def figures(page: str) -> str:
    """Chosen columns of a page of results/."""
    names = FIGURES[page]
    rows = [[row[name] for name in names] for row in rows_of(page)]
    table = [list(names.values()), ["---"] * len(names), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in table)


def first_run() -> str:
    """The output of the first run, without the middle."""
    _, _, rest = (RESULTS / "first_run.md").read_text().partition("```text\n")
    lines = rest.partition("```")[0].splitlines()
    epochs = [number for number, line in enumerate(lines) if line.startswith("epoch ")]
    lines[epochs[0] + 1 : epochs[-1]] = ["..."]
    return "\n".join(["```text", *lines, "```", ""])
