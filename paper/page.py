"""Write ``results/paper.md``: settings, plots, and our numbers beside the paper's.

It must not know any figure, nor how one is made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .figures.base import Claim, Drawing, Figure, Source

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
class FigureResult:
    """A figure, its result, and the seconds that it took."""

    figure: Figure
    drawing: Drawing
    wall_s: float
    cpu_s: float
    """Of one core; less than ``wall_s`` if other processes used the machine, too."""


def picture_name(figure: Figure) -> str:
    """Return the path of its picture below the page's folder."""
    return f"paper/figure_{int(figure.number):02}.svg"


def write_page(path: Path, results: Sequence[FigureResult], machine: str, command: str) -> None:
    """Write the page and its pictures."""
    (path.parent / "paper").mkdir(parents=True, exist_ok=True)
    for result in results:
        if result.drawing.svg:
            (path.parent / picture_name(result.figure)).write_text(result.drawing.svg)
    path.write_text("\n".join(page(results, machine, command)) + "\n")


def page(results: Sequence[FigureResult], machine: str, command: str) -> list[str]:
    """Return the lines of the page."""
    wall_s, cpu_s = (
        sum(result.wall_s for result in results),
        sum(result.cpu_s for result in results),
    )
    lines = [
        "# The paper's figures, made again",
        "",
        f"`{command}`: {wall_s:.0f} s, of which it computed {cpu_s:.0f} s on one core; {machine}.",
        "",
        *INTRODUCTION,
        "",
        *summarise(results),
    ]
    for result in results:
        lines += ["", *_section(result)]
    return lines


def summarise(results: Sequence[FigureResult]) -> list[str]:
    """Return lines with the claims that disagree, then the number that agree by source."""
    claims = [(result.figure, claim) for result in results for claim in result.drawing.claims]
    lines = [
        f"**Not so here**, figure {figure.number}: {claim.label}: the {claim.source.value} has "
        f"{claim.reference}, ours is {claim.ours}.\n"
        for figure, claim in claims
        if claim.is_comparable and not claim.agrees
    ]
    for source, origin in ((Source.PAPER, "what the paper prints"), (Source.THEORY, "theory")):
        of_source = [claim for _, claim in claims if claim.is_comparable and claim.source is source]
        num_agreeing = sum(claim.agrees for claim in of_source)
        lines.append(
            f"- beside {origin}: **{num_agreeing} of {len(of_source)}** within their tolerance"
        )
    if num_others := sum(not claim.is_comparable for _, claim in claims):
        lines.append(
            f"- measured on other data than the paper's, which proves nothing: {num_others}"
        )
    return lines


def _section(result: FigureResult) -> list[str]:
    figure, drawing = result.figure, result.drawing
    name = f"Figure {figure.number}: {figure.title}" if drawing.svg else figure.title
    lines = [f"## {name}", "", f"Stated: {figure.stated}"]
    if figure.chosen:
        lines += ["", f"Chosen: {figure.chosen}"]
    if drawing.data:
        lines += ["", f"Data: {drawing.data}."]
    if drawing.svg:
        lines += ["", f"![{name}]({picture_name(figure)})"]
    for source in Source:
        if rows := [_row(claim) for claim in drawing.claims if claim.source is source]:
            lines += ["", HEADER.format(source.value), "|" + "---|" * COLUMNS, *rows]
    return [*lines, "", f"({result.wall_s:.0f} s, computing {result.cpu_s:.0f} s)"]


def _row(claim: Claim) -> str:
    cells = (
        claim.label,
        claim.reference,
        claim.ours,
        claim.deviation,
        claim.tolerance,
        claim.verdict,
    )
    return "| " + " | ".join(cells) + " |"
