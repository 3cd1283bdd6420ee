"""Reports of a cut and of all ways to split a model, as text; and the cut as a picture.

    inputs -> [ 0 .. 3 ] ==2.1 MiB=> [ 4 .. 8 ] ==1.2 MiB=> [ 9 .. 12 ] -> outputs

This module must not know how anything was measured.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..partition.graph import WorkGraph
from ..partition.placement import Placement
from ..partition.prices import SplitPrice, SplitTable
from ..partition.schedules import FORWARD, ScheduleRun
from ..plan import format_bytes
from .chart import COLOURS, FAINT, LEFT, RIGHT, WIDTH, head, nice_ticks, rule, text
from .text import table, three_figures

_ROW, _BAR = 34, 22
"""Heights in pixels of a worker's row in the picture, and of its bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRow:
    """A cut and its cost.

    Args:
        run: a step under the requested schedule.
        other: a step under the other schedule.
        update_s: seconds of the update after the step, for the slowest part.
        fits: whether each part fits into its worker's memory.
    """

    name: str
    placement: Placement
    run: ScheduleRun
    other: ScheduleRun
    update_s: float
    fits: bool

    @property
    def step_s(self) -> float:
        return self.run.seconds + self.update_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionReport:
    """The cut of a model.

    Args:
        about: rows of a label and its text.
        graph: the work of a micro-batch.
        rows: the best cut first, then those that it is compared with.
        alone_s: seconds of a step of one worker without a cut.
        is_exact: whether all cuts were searched, and not only those along the order of computing.
        num_borders, search_s: borders that were considered, and seconds of the search.
    """

    about: tuple[tuple[str, str], ...]
    graph: WorkGraph
    schedule: str
    rows: tuple[CutRow, ...]
    alone_s: float
    is_exact: bool
    num_borders: int
    search_s: float

    @property
    def found(self) -> CutRow:
        return self.rows[0]

    @property
    def verdict(self) -> str:
        """Whether the cut is worth it."""
        step_s = self.found.step_s
        if len(self.found.placement.parts) == 1:
            return "one worker alone, with its batch in micro-batches"
        if step_s < self.alone_s:
            return f"{self.alone_s / step_s:.2f} times as fast as one worker alone"
        ratio = step_s / self.alone_s
        return f"do not split for speed: this takes {ratio:.2f} times as long as one worker alone"

    def to_json(self) -> dict[str, object]:
        """The parts of the best cut, and the step time of every cut."""
        placement = self.found.placement
        return {
            "about": dict(self.about),
            "schedule": self.schedule,
            "parts": [
                {
                    "worker": part.worker,
                    "layers": [self.graph.nodes[i].name for i in part.nodes],
                    "parameter_bytes": part.parameter_bytes,
                    "forward_s": part.forward_s,
                    "backward_s": part.backward_s + part.late_s,
                    "activation_bytes": part.activation_bytes,
                    "memory_bytes": part.memory_bytes,
                    "out_bytes": part.out_bytes,
                    "shared_parameters": list(part.cut_ties),
                }
                for part in placement.parts
            ],
            "balance": placement.balance,
            "cut_bytes": placement.cut_bytes,
            "bubble": self.found.run.bubble,
            "step_s": {row.name: row.step_s for row in self.rows},
            "alone_s": self.alone_s,
            "is_exact": self.is_exact,
            "verdict": self.verdict,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitReport:
    """The table of all ways to split a model."""

    about: tuple[tuple[str, str], ...]
    table: SplitTable
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """A row per split, and the advised split."""
        return {
            "about": dict(self.about),
            "notes": list(self.notes),
            "splits": [
                {
                    "split": price.name, "step_s": price.step_s, "sent_bytes": price.sent_bytes,
                    "memory_bytes": price.memory_bytes, "balance": price.balance,
                    "fits": price.fits, "why": price.why,
                }
                for price in self.table.prices
            ],
            "advised": self.table.advised.name,
            "reason": self.table.reason,
        }  # fmt: skip


def render_partition(report: PartitionReport) -> list[str]:
    """Return a diagram of the cut, its parts, the other cuts and the verdict as lines of text."""
    lines = [*_labelled(report.about), "", *_diagram(report), "", *_parts(report), ""]
    rows = [
        (
            row.name, three_figures(row.step_s), f"{row.run.bubble:.0%}",
            f"{row.placement.balance:.2f}", format_bytes(row.placement.cut_bytes),
            format_bytes(row.placement.memory_bytes) + ("" if row.fits else " (too much)"),
            three_figures(row.other.seconds + row.update_s),
        )
        for row in report.rows
    ]  # fmt: skip
    other = "gpipe" if report.schedule == "1f1b" else "1f1b"
    names = ("cut", "a step", "bubble", "balance", "bytes over it", "memory", f"by {other}")
    lines += table(names, [*rows, ("none", three_figures(report.alone_s), *["-"] * 5)])
    searched = "all cuts" if report.is_exact else "the cuts along the order of computing"
    return [
        *lines,
        "",
        f"best of {searched} ({report.num_borders} borders, {three_figures(report.search_s)}); "
        f"steps predicted for {report.schedule}",
        report.verdict,
    ]


def _labelled(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(label) for label, _ in rows)
    return [f"{label:<{width}}  {words}" for label, words in rows]


def _diagram(report: PartitionReport) -> Iterator[str]:
    """Yield lines with the parts in order and the bytes that cross each border."""
    parts = report.found.placement.parts
    line = "inputs -> "
    for number, part in enumerate(parts):
        piece = f"[ {_names(report.graph, part.nodes)} ]"
        piece += (
            " -> outputs" if number == len(parts) - 1 else f" ={format_bytes(part.out_bytes)}=> "
        )
        if len(line) + len(piece) > 100:
            yield line.rstrip()
            line = "   "
        line += piece
    yield line


def _names(graph: WorkGraph, nodes: Sequence[int]) -> str:
    first, last = graph.nodes[nodes[0]].name, graph.nodes[nodes[-1]].name
    return first.split(" .. ")[0] if first == last else f"{first.split(' .. ')[0]} .. {last}"


def _parts(report: PartitionReport) -> list[str]:
    parts = report.found.placement.parts
    rows = [
        (
            f"{number} on worker {part.worker}",
            f"{sum(report.graph.nodes[i].num_layers for i in part.nodes)}",
            format_bytes(part.parameter_bytes), three_figures(part.forward_s),
            three_figures(part.backward_s + part.late_s), format_bytes(part.activation_bytes),
            f"{part.live}", format_bytes(part.memory_bytes), format_bytes(part.out_bytes),
        )
        for number, part in enumerate(parts)
    ]  # fmt: skip
    cols = ("part", "layers", "parameters", "forward", "backward", "kept", "alive", "memory", "on")
    shared = {
        name: [str(number) for number, part in enumerate(parts) if name in part.cut_ties]
        for name in dict.fromkeys(name for part in parts for name in part.cut_ties)
    }
    return [
        *table(cols, rows),
        "forward, backward, kept, on: per micro-batch; alive: most micro-batches at a time",
        *(f"parts {' and '.join(numbers)} share {name}" for name, numbers in shared.items()),
    ]


def render_splits(report: SplitReport) -> list[str]:
    """Return the table of splits, the advice and its reason as lines of text."""
    rows = [_row(price) for price in report.table.prices]
    impossible = [price for price in report.table.prices if price.step_s is None]
    advised = report.table.advised
    advice = "do not split" if advised.name == "none" else f"--split {advised.name}"
    reason = report.table.reason.removeprefix("do not split: ")
    return [
        *_labelled(report.about),
        *(f"note: {note}" for note in report.notes),
        "",
        *table(("split", "a step", "bytes an update", "memory a worker", "balance", ""), rows),
        *(f"{price.name}: {price.why}" for price in impossible),
        "",
        f"advice: {advice}",
        f"why: {reason}",
    ]


def _row(price: SplitPrice) -> tuple[str, ...]:
    if price.step_s is None:
        return (price.name, "-", "-", "-", "-", "not possible")
    return (
        price.name, three_figures(price.step_s), format_bytes(price.sent_bytes),
        format_bytes(price.memory_bytes), f"{price.balance:.2f}",
        "" if price.fits else "too much memory",
    )  # fmt: skip


# -- the picture -----------------------------------------------------------------------------------


def draw_partition(report: PartitionReport) -> str:
    """Return an SVG file as text: the pieces by part, then the timeline of the workers."""
    rows = {span.action.rank for span in report.found.run.spans}
    height = 150 + _ROW * len(rows) + 80
    parts = head(f"A cut into {len(rows)} parts", height)
    parts.append(text(LEFT, 44, dict(report.about)["model"]))
    parts += _draw_pieces(report, 84.0)
    parts += _draw_timeline(report, 170.0)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _draw_pieces(report: PartitionReport, top: float) -> Iterator[str]:
    """Yield a bar per piece, as wide as its time, in the colour of its part."""
    part_of = report.found.placement.part_of()
    order = sorted(part_of, key=lambda node: (part_of[node], node))
    whole_s = report.graph.work_s or 1.0
    x = float(LEFT)
    yield text(LEFT, top - 12, "pieces: width is time, colour is the part", weight="bold")
    for node in order:
        width = report.graph.nodes[node].work_s / whole_s * (WIDTH - LEFT - RIGHT)
        colour = COLOURS[part_of[node] % len(COLOURS)]
        yield (
            f'<rect x="{x:.1f}" y="{top:.0f}" width="{width:.2f}" height="{_BAR}" fill="{colour}" '
            f'stroke="#ffffff" stroke-width="0.5"/>'
        )
        x += width


def _draw_timeline(report: PartitionReport, top: float) -> Iterator[str]:
    """Yield a row per worker: forward dark, backward pale."""
    run = report.found.run
    scale = (WIDTH - LEFT - RIGHT) / (run.seconds or 1.0)
    yield text(
        LEFT, top - 14, f"{report.schedule}: forward dark, backward pale, bubble {run.bubble:.0%}",
        weight="bold",
    )  # fmt: skip
    ranks = sorted({span.action.rank for span in run.spans})
    for rank in ranks:
        yield text(LEFT - 8, top + _ROW * rank + 16, f"part {rank}", anchor="end")
    for action, start_s, stop_s in run.spans:
        colour = COLOURS[action.rank % len(COLOURS)]
        opacity = "1" if action.kind == FORWARD else "0.45"
        yield (
            f'<rect x="{LEFT + start_s * scale:.1f}" y="{top + _ROW * action.rank:.0f}" '
            f'width="{(stop_s - start_s) * scale:.2f}" height="{_BAR}" fill="{colour}" '
            f'fill-opacity="{opacity}" stroke="#ffffff" stroke-width="0.5"/>'
        )
    bottom = top + _ROW * len(ranks)
    yield rule(LEFT, bottom, WIDTH - RIGHT, bottom, FAINT)
    for tick in nice_ticks(0.0, run.seconds * 1e3, 6):
        if tick <= run.seconds * 1e3 * 1.001:
            yield text(LEFT + tick * 1e-3 * scale, bottom + 18, f"{tick:g}", anchor="middle")
    yield text((LEFT + WIDTH - RIGHT) / 2, bottom + 38, "ms of a step", anchor="middle")
