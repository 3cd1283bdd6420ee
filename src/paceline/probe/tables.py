"""A probe as a table: what is here beside what the textbook says. It must not measure."""

from collections.abc import Iterator

from ..report.text import format_duration, table
from .figures import Figure, Group
from .probing import Probe

_UNSURE = 1.3
"""The median of what was measured is that far from the best: something else ran meanwhile."""


def render_probe(probe: Probe) -> list[str]:
    """In lines: a table a group, then what was not measured."""
    lines = [
        f"{probe.processor or 'a processor without a name'}, {probe.cores} cores; measured in "
        f"{format_duration(probe.took_s)}, load before {probe.load:.1f}"
    ]
    if probe.is_disturbed:
        lines.append("others computed here meanwhile: what is below is less than this machine does")
    for group in Group:
        figures = [one for one in probe.figures if one.group is group]
        if any(one.samples for one in figures):
            rows = [_row(one) for one in figures if one.samples]
            header = (group.value, "best", "median", "textbook", "beside it", "how")
            lines += ["", *_left(table(header, rows), rows, header)]
    missing = [
        *(f"{one.what}: {one.why_not}" for one in probe.figures if not one.samples),
        *probe.missing,
    ]
    if missing:
        lines += ["", "not measured", *(f"  {one}" for one in missing)]
    return lines


def _row(figure: Figure) -> tuple[str, ...]:
    best, median = figure.best, figure.median
    assert best is not None
    assert median is not None
    unit = figure.unit
    mark = "~" if max(best, median) > _UNSURE * min(best, median) else ""
    textbook, beside = "", ""
    if figure.textbook is not None:
        low, high = figure.textbook
        textbook = unit.render(low)
        if high > low:
            textbook += f" to {unit.render(high)}"
        beside = _beside(best, low, high)
    return (
        figure.what, unit.render(best), mark + unit.render(median), textbook, beside, figure.how,
    )  # fmt: skip


def _beside(value: float, low: float, high: float) -> str:
    """How far from what the textbook says: ``x 1.4``, or inside of it."""
    if low <= value <= high:
        return "inside"
    return f"x {value / (high if value > high else low):.2g}"


def _left(lines: list[str], rows: list[tuple[str, ...]], header: tuple[str, ...]) -> Iterator[str]:
    """The last column to the left: it is words."""
    width = max(len(row[-1]) for row in (header, *rows))
    for line, row in zip(lines, (header, *rows), strict=True):
        kept = len(lines[0]) if row is header else len(line)
        start = max(map(len, lines)) - width
        yield f"{line[: min(start, kept)]}{row[-1]}".rstrip() if row[-1] else line[:start].rstrip()
