"""A comparison as lines of plain text, with a small chart, and as a picture.

    protocol            to target  test error   updates  an update ...
    k-sync:6                 12 s       0.193       640      40 ms          the median
      least                  11 s       0.191       640      39 ms          where there are
      most                   14 s       0.201       640      41 ms          several seeds

No line is wider than 80 columns if protocol names have at most 15. The picture shows error
against time, with one curve per protocol: the legend says when each reached the target; the thick
line is the typical run and the thin lines are the other seeds. If a run has fewer than 3
evaluations, a second diagram shows the training loss. This module must not know runs.
"""

import textwrap
from collections.abc import Callable
from typing import NamedTuple

from .chart import Curve, Diagram, draw_chart
from .compared import ComparedProtocol, Comparison, RunOutcome, finite
from .text import Point, Series, format_duration, loss_range, plot

_MARKS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Column(NamedTuple):
    """A column of the table: its figure and format."""

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
_EXPLAINED = "staleness: mean versions; dropped: samples in no update; unused: pushes in no update"


def render_comparison(comparison: Comparison, columns: int = 80) -> list[str]:
    """Return the comparison as lines of text."""
    target = (
        ""
        if comparison.target_accuracy is None
        else f", target accuracy {comparison.target_accuracy:g}"
    )
    seeds = "" if comparison.repeats == 1 else f"; medians of {comparison.repeats} seeds"
    return [
        f"{comparison.task}, {comparison.workers} workers{target}, in {comparison.clock}{seeds}",
        *([comparison.conditions] if comparison.conditions else []),
        "",
        *_table(comparison),
        *(line for text in _remarks(comparison) for line in textwrap.wrap(text, columns) or [""]),
        "",
        *_chart(comparison, min(60, columns - 16)),
        f"files: {comparison.folder}",
    ]


def _columns(comparison: Comparison) -> tuple[Column, ...]:
    figure = "test_error" if comparison.measure == "test error" else "test_loss"
    first = Column(comparison.measure, figure, 11, "{:.4g}".format)
    if comparison.target_accuracy is None:
        return (Column("time", "trained_s", 11, format_duration), first, *_REST)
    return (Column("to target", "target_s", 11, format_duration, "never"), first, *_REST)


def _table(comparison: Comparison) -> list[str]:
    columns = _columns(comparison)
    rows = [("protocol", [column.title for column in columns])]
    for contender in comparison.contenders:
        if not contender.outcomes:
            rows.append((contender.protocol, ["-"] * len(columns)))
            continue
        spreads = [contender.figure(column.figure) for column in columns]
        rows.append((contender.protocol, _cells(columns, [spread.median for spread in spreads])))
        if len(contender.outcomes) > 1:
            rows.append(("  least", _cells(columns, [spread.least for spread in spreads])))
            rows.append(("  most", _cells(columns, [spread.most for spread in spreads])))
    width = max(len(name) for name, _ in rows)
    return [
        f"{name:<{width}}"
        + "".join(f"{cell:>{column.width}}" for column, cell in zip(columns, cells, strict=True))
        for name, cells in rows
    ]


def _cells(columns: tuple[Column, ...], values: list[float | None]) -> list[str]:
    return [
        column.missing if value is None else column.form(value)
        for column, value in zip(columns, values, strict=True)
    ]


def _remarks(comparison: Comparison) -> list[str]:
    """Return notes on protocols that missed the target and on failed or interrupted runs."""
    lines = ["", _EXPLAINED]
    for contender in comparison.contenders:
        lines += [f"{contender.protocol} {text}" for text in _of_contender(comparison, contender)]
    if comparison.interrupted_in:
        lines.append(f"interrupted in {comparison.interrupted_in}: that run is not in the table")
    return lines


def _of_contender(comparison: Comparison, contender: ComparedProtocol) -> list[str]:
    lines = [f"failed: {failure}" for failure in contender.failures]
    if comparison.target_accuracy is None or not contender.outcomes:
        return lines
    missed = [outcome for outcome in contender.outcomes if outcome.target_s is None]
    if missed:
        best = max(missed, key=lambda outcome: outcome.best_accuracy or 0.0)
        measured = "was never measured"
        if best.best_accuracy is not None:
            measured = (
                f"best {best.best_accuracy:.4f} in {format_duration(best.trained_s)} of training"
            )
        seeds = f" in {len(missed)} of {len(contender.outcomes)} seeds" * (comparison.repeats > 1)
        lines.append(
            f"did not reach {comparison.target_accuracy:g}{seeds}: {measured} ({best.ended})"
        )
    return lines


def _chart(comparison: Comparison, width: int) -> list[str]:
    """Plot the typical run of each protocol as letters; no lines without runs."""
    label = (
        f"{comparison.measure} against {comparison.clock}"
        if comparison.has_curves
        else (f"training loss against {comparison.clock}: fewer than 3 evaluations in a run")
    )
    curves: list[tuple[str, tuple[Point, ...]]] = []
    for contender in comparison.contenders:
        if (run := contender.typical) is not None:
            points = finite(run.errors if comparison.has_curves else run.losses)
            curves += [(contender.protocol, points)] if points else []
    if not curves:
        return []
    low, high = loss_range([point for _, points in curves for point in points])
    series, legend = [], []
    for (protocol, points), mark in zip(curves, _MARKS, strict=False):
        series.append(Series(points=points, mark=mark, low=low, high=high, is_joined=True))
        legend.append(f"{mark} {protocol}")
    return [label, *plot(series, width, legend), ""]


_HIGH, _LOW = 300, 170
"""Heights in pixels: of a single diagram, and of each of two."""


def draw_comparison(comparison: Comparison) -> str:
    """Return the picture as the text of an SVG file."""
    labels = [_error_label(comparison)]
    if not comparison.has_curves:
        labels.append("training loss (mean of neighbouring updates; a run has < 3 evaluations)")
    diagrams = [
        Diagram(
            label=label,
            curves=tuple(
                _curve(comparison, contender, is_loss=number == 1)
                for contender in comparison.contenders
            ),
            x_label=_time_label(comparison) if number == len(labels) - 1 else "",
            height=_HIGH if comparison.has_curves else _LOW,
            from_zero=number == 0,
            mark=_target(comparison) if number == 0 else None,
        )
        for number, label in enumerate(labels)
    ]
    return draw_chart(
        f"{comparison.task}, {comparison.workers} workers", comparison.conditions, diagrams
    )


def _error_label(comparison: Comparison) -> str:
    if comparison.measure == "test error":
        return "test error (share of the test samples that are wrong)"
    return "test loss (mean over the test samples)"


def _time_label(comparison: Comparison) -> str:
    if comparison.is_simulated:
        return "virtual seconds since the first step"
    return "seconds of training (evaluations do not count)"


def _reached(comparison: Comparison, contender: ComparedProtocol) -> str:
    if not contender.outcomes:
        return ", failed" if contender.failures else ", not run"
    if comparison.target_accuracy is None:
        return ""
    median_s = contender.figure("target_s").median
    if median_s is None:
        return ", not reached"
    return f", target at {format_duration(median_s)}"


def _target(comparison: Comparison) -> tuple[float, str] | None:
    if comparison.target_accuracy is None or comparison.measure != "test error":
        return None
    return 1.0 - comparison.target_accuracy, f"target: {1.0 - comparison.target_accuracy:.3g}"


def _curve(comparison: Comparison, contender: ComparedProtocol, *, is_loss: bool) -> Curve:
    """Return the curve of a protocol's runs; the typical run has dots at its evaluations."""

    def points(run: RunOutcome | None) -> tuple[Point, ...]:
        return () if run is None else finite(run.losses if is_loss else run.errors)

    typical = points(contender.typical)
    return Curve(
        name=f"{contender.protocol}{_reached(comparison, contender)}",
        points=typical,
        dots=() if is_loss else typical,
        others=tuple(points(run) for run in contender.outcomes if run is not contender.typical),
    )
