"""A comparison as lines of plain text: the table, what is to be said to it, a small chart.

    protocol            to target  test error   updates  an update ...
    k-sync:6                 12 s       0.193       640      40 ms          the median
      least                  11 s       0.191       640      39 ms          where there are
      most                   14 s       0.201       640      41 ms          several seeds

No line is wider than 80 columns, where a protocol's name has at most 15. This
module must not know runs.
"""

import textwrap
from collections.abc import Callable
from typing import NamedTuple

from .compared import ComparedProtocol, Comparison, finite
from .summary import Point
from .terminal import Series, format_duration, loss_range, plot

_MARKS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Column(NamedTuple):
    """A column of the table: which figure, and how it is written."""

    title: str
    figure: str
    width: int
    form: Callable[[float], str]
    missing: str = "-"


def _count(value: float) -> str:
    return f"{value:,.0f}"


_REST = (
    Column("updates", "updates", 8, _count),
    Column("an update", "time_per_update_s", 10, format_duration),
    Column("staleness", "mean_staleness_versions", 10, "{:.2f}".format),
    Column("dropped", "dropped_samples", 8, _count),
    Column("unused", "unused_pushes", 7, _count),
)
_EXPLAINED = (
    "staleness: versions in the mean; dropped: samples in no update; unused: pushes in no update"
)


def render_comparison(one: Comparison, columns: int = 80) -> list[str]:
    """The whole of it."""
    target = "" if one.target_accuracy is None else f", target accuracy {one.target_accuracy:g}"
    seeds = "" if one.repeats == 1 else f"; medians of {one.repeats} seeds"
    return [
        f"{one.task}, {one.workers} workers{target}, in {one.clock}{seeds}",
        *([one.conditions] if one.conditions else []),
        "",
        *_table(one),
        *(line for text in _remarks(one) for line in textwrap.wrap(text, columns) or [""]),
        "",
        *_chart(one, min(60, columns - 16)),
        f"files: {one.folder}",
    ]


def _columns(one: Comparison) -> tuple[Column, ...]:
    figure = "test_error" if one.measure == "test error" else "test_loss"
    first = Column(one.measure, figure, 11, "{:.4g}".format)
    if one.target_accuracy is None:
        return (Column("time", "trained_s", 11, format_duration), first, *_REST)
    return (Column("to target", "target_s", 11, format_duration, "never"), first, *_REST)


def _table(one: Comparison) -> list[str]:
    shown = _columns(one)
    rows = [("protocol", [column.title for column in shown])]
    for contender in one.contenders:
        if not contender.outcomes:
            rows.append((contender.protocol, ["-"] * len(shown)))
            continue
        ranges = [contender.figure(column.figure) for column in shown]
        rows.append((contender.protocol, _cells(shown, [found.median for found in ranges])))
        if len(contender.outcomes) > 1:
            rows.append(("  least", _cells(shown, [found.least for found in ranges])))
            rows.append(("  most", _cells(shown, [found.most for found in ranges])))
    names = max(len(name) for name, _ in rows)
    return [
        f"{name:<{names}}"
        + "".join(f"{cell:>{column.width}}" for column, cell in zip(shown, cells, strict=True))
        for name, cells in rows
    ]


def _cells(shown: tuple[Column, ...], values: list[float | None]) -> list[str]:
    return [
        column.missing if value is None else column.form(value)
        for column, value in zip(shown, values, strict=True)
    ]


def _remarks(one: Comparison) -> list[str]:
    """What a table cannot say: who did not get there, who failed, what was cut off."""
    lines = ["", _EXPLAINED]
    for contender in one.contenders:
        lines += [f"{contender.protocol} {text}" for text in _of_contender(one, contender)]
    if one.interrupted_in:
        lines.append(f"interrupted in {one.interrupted_in}: that run is not in the table")
    return lines


def _of_contender(one: Comparison, contender: ComparedProtocol) -> list[str]:
    lines = [f"failed: {failure}" for failure in contender.failures]
    if one.target_accuracy is None or not contender.outcomes:
        return lines
    missed = [outcome for outcome in contender.outcomes if outcome.target_s is None]
    if missed:
        best = max(missed, key=lambda outcome: outcome.best_accuracy or 0.0)
        how = "was never measured"
        if best.best_accuracy is not None:
            how = f"best {best.best_accuracy:.4f} in {format_duration(best.trained_s)} of training"
        seeds = f" in {len(missed)} of {len(contender.outcomes)} seeds" * (one.repeats > 1)
        lines.append(f"did not reach {one.target_accuracy:g}{seeds}: {how} ({best.ended})")
    return lines


def _chart(one: Comparison, width: int) -> list[str]:
    """The typical run of each protocol as a curve of letters; nothing where there is none."""
    label = (
        f"{one.measure} against {one.clock}"
        if one.has_curves
        else (f"training loss against {one.clock}: fewer than 3 evaluations within a run")
    )
    curves: list[tuple[str, tuple[Point, ...]]] = []
    for contender in one.contenders:
        if (run := contender.typical) is not None:
            points = finite(run.errors if one.has_curves else run.losses)
            curves += [(contender.protocol, points)] if points else []
    if not curves:
        return []
    low, high = loss_range([point for _, points in curves for point in points])
    series, legend = [], []
    for (protocol, points), mark in zip(curves, _MARKS, strict=False):
        series.append(Series(points=points, mark=mark, low=low, high=high, is_joined=True))
        legend.append(f"{mark} {protocol}")
    return [label, *plot(series, width, legend), ""]
