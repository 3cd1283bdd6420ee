"""From figures to ``results/paper.md``: settings, plots, and our numbers beside the paper's.

It must not know any figure, nor how one is made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .figures.base import Claim, Drawn, Figure, Source

HEADER = "| what | {} | ours | off by | tolerance | agrees |"
COLUMNS = 6
INTRODUCTION = (
    'Dutta, Joshi, Ghosh, Dube, Nagpurkar, "Slow and Stale Gradients Can Win the Race", AISTATS',
    "2018 (PMLR 84:803-812). Every number of ours comes from the parts of `paceline simulate`, in",
    "virtual time: the protocols are those of a live run, the gradients are true. X is the time of",
    "one mini-batch, P the workers, K the gradients an update averages, m the samples of one, eta",
    'the step. "±" is a standard error; brackets are the least and the most of the seeds.',
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A figure, what came of it, and the seconds that it took."""

    figure: Figure
    drawn: Drawn
    wall_s: float
    cpu_s: float
    """Of one core; less than ``wall_s`` where others used the machine, too."""


def picture_name(figure: Figure) -> str:
    """Where its picture lies below the page's folder."""
    return f"paper/figure_{int(figure.number):02}.svg"


def write_page(path: Path, made: Sequence[Made], machine: str, command: str) -> None:
    """Write the page and its pictures."""
    (path.parent / "paper").mkdir(parents=True, exist_ok=True)
    for one in made:
        if one.drawn.svg:
            (path.parent / picture_name(one.figure)).write_text(one.drawn.svg)
    path.write_text("\n".join(page(made, machine, command)) + "\n")


def page(made: Sequence[Made], machine: str, command: str) -> list[str]:
    """The lines of the page."""
    wall_s, cpu_s = sum(one.wall_s for one in made), sum(one.cpu_s for one in made)
    lines = [
        "# The paper's figures, made again",
        "",
        f"`{command}`: {wall_s:.0f} s, of which it computed {cpu_s:.0f} s on one core; {machine}.",
        "",
        *INTRODUCTION,
        "",
        *counted(made),
    ]
    for one in made:
        lines += ["", *_section(one)]
    return lines


def counted(made: Sequence[Made]) -> list[str]:
    """How many agree, by who says it; before them, what does not."""
    claims = [(one.figure, claim) for one in made for claim in one.drawn.claims]
    lines = [
        f"**Not so here**, figure {figure.number}: {claim.what}: the {claim.source.value} has "
        f"{claim.theirs}, ours is {claim.ours}.\n"
        for figure, claim in claims
        if claim.is_comparable and not claim.agrees
    ]
    for source, words in ((Source.PAPER, "what the paper prints"), (Source.THEORY, "theory")):
        found = [one for _, one in claims if one.is_comparable and one.source is source]
        held = sum(one.agrees for one in found)
        lines.append(f"- beside {words}: **{held} of {len(found)}** within their tolerance")
    if other := sum(not one.is_comparable for _, one in claims):
        lines.append(f"- measured on other data than the paper's, which proves nothing: {other}")
    return lines


def _section(one: Made) -> list[str]:
    figure, drawn = one.figure, one.drawn
    name = f"Figure {figure.number}: {figure.title}" if drawn.svg else figure.title
    lines = [f"## {name}", "", f"Stated: {figure.stated}"]
    if figure.chosen:
        lines += ["", f"Chosen: {figure.chosen}"]
    if drawn.data:
        lines += ["", f"Data: {drawn.data}."]
    if drawn.svg:
        lines += ["", f"![{name}]({picture_name(figure)})"]
    for source in Source:
        if rows := [_row(claim) for claim in drawn.claims if claim.source is source]:
            lines += ["", HEADER.format(source.value), "|" + "---|" * COLUMNS, *rows]
    return [*lines, "", f"({one.wall_s:.0f} s, computing {one.cpu_s:.0f} s)"]


def _row(claim: Claim) -> str:
    cells = (claim.what, claim.theirs, claim.ours, claim.off, claim.tolerance, claim.verdict)
    return "| " + " | ".join(cells) + " |"
