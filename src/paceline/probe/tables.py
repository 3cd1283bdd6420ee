"""A probe as a table: measured values beside the textbook's. It must not measure."""

from collections.abc import Iterator

from ..report.text import format_duration, table
from .figures import Figure, Group
from .probing import Probe

_UNSURE = 1.3
"""A median this many times away from the best means that something else ran meanwhile."""


def render_probe(probe: Probe) -> list[str]:
    """Return the lines: a table for each group, then what was not measured."""
    lines = [
        f"{probe.processor or 'a processor without a name'}, {probe.cores} cores; measured in "
        f"{format_duration(probe.took_s)}, load before {probe.load:.1f}"
    ]
    if probe.is_disturbed:
        lines.append(
            "other programs were running: this machine can do better than the figures below"
        )
    for group in Group:
        figures = [figure for figure in probe.figures if figure.group is group]
        if any(figure.samples for figure in figures):
            rows = [_row(figure) for figure in figures if figure.samples]
            header = (group.value, "best", "median", "textbook", "beside it", "how")
            lines += ["", *_left(table(header, rows), rows, header)]
    missing = [
        *(f"{figure.what}: {figure.why_not}" for figure in probe.figures if not figure.samples),
        *probe.missing,
    ]
    if missing:
        lines += ["", "not measured", *(f"  {sentence}" for sentence in missing)]
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
    """Return the ratio to the textbook's range, such as ``x 1.4``, or ``inside``."""
    if low <= value <= high:
        return "inside"
    return f"x {value / (high if value > high else low):.2g}"


def _left(lines: list[str], rows: list[tuple[str, ...]], header: tuple[str, ...]) -> Iterator[str]:
    """Align the last column to the left, since it holds words."""
    width = max(len(row[-1]) for row in (header, *rows))
    for line, row in zip(lines, (header, *rows), strict=True):
        kept = len(lines[0]) if row is header else len(line)
        start = max(map(len, lines)) - width
        yield f"{line[: min(start, kept)]}{row[-1]}".rstrip() if row[-1] else line[:start].rstrip()
