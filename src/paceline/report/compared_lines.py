"""A comparison as lines of plain text, with a small chart, and as a picture.

    protocol            to target  test error   updates  an update ...
    k-sync:6                 12 s       0.193       640      40 ms          the median
      least                  11 s       0.191       640      39 ms          where there are
      most                   14 s       0.201       640      41 ms          several seeds

No line is wider than 80 columns, where a protocol's name has at most 15. The picture shows error
against time, a curve a protocol: the legend says when each reached the target; the thick line is
the typical run and the thin ones are the other seeds. Where a run has fewer than 3 evaluations the
training loss stands in a second diagram, and its label says so. This module must not know runs.
"""

import textwrap
from collections.abc import Callable
from typing import NamedTuple

from .chart import Curve, Diagram, draw_chart
from .compared import ComparedProtocol, Comparison, RunOutcome, finite
from .text import Point, Series, format_duration, loss_range, plot

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
    """Notes: protocols that missed the target, runs that failed or were cut off."""
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


_HIGH, _LOW = 300, 170
"""Pixels: a single diagram, and one of two."""


def draw_comparison(one: Comparison) -> str:
    """The text of an SVG file."""
    labels = [_error_label(one)]
    if not one.has_curves:
        labels.append("training loss (mean of neighbouring updates; a run has < 3 test points)")
    diagrams = [
        Diagram(
            label=label,
            curves=tuple(
                _curve(one, contender, is_loss=number == 1) for contender in one.contenders
            ),
            x_label=_time_label(one) if number == len(labels) - 1 else "",
            height=_HIGH if one.has_curves else _LOW,
            from_zero=number == 0,
            mark=_target(one) if number == 0 else None,
        )
        for number, label in enumerate(labels)
    ]
    return draw_chart(f"{one.task}, {one.workers} workers", one.conditions, diagrams)


def _error_label(one: Comparison) -> str:
    if one.measure == "test error":
        return "test error (share of the test samples that are wrong)"
    return "test loss (mean over the test samples)"


def _time_label(one: Comparison) -> str:
    if one.is_simulated:
        return "virtual seconds since the first step"
    return "seconds of training (evaluations do not count)"


def _reached(one: Comparison, contender: ComparedProtocol) -> str:
    if not contender.outcomes:
        return ", failed" if contender.failures else ", not run"
    if one.target_accuracy is None:
        return ""
    median_s = contender.figure("target_s").median
    if median_s is None:
        return ", not reached"
    return f", target at {format_duration(median_s)}"


def _target(one: Comparison) -> tuple[float, str] | None:
    if one.target_accuracy is None or one.measure != "test error":
        return None
    return 1.0 - one.target_accuracy, f"target: {1.0 - one.target_accuracy:.3g}"


def _curve(one: Comparison, contender: ComparedProtocol, *, is_loss: bool) -> Curve:
    """Its runs; the evaluations of the typical one have dots."""

    def points(run: RunOutcome | None) -> tuple[Point, ...]:
        return () if run is None else finite(run.losses if is_loss else run.errors)

    typical = points(contender.typical)
    return Curve(
        name=f"{contender.protocol}{_reached(one, contender)}",
        points=typical,
        dots=() if is_loss else typical,
        others=tuple(points(run) for run in contender.outcomes if run is not contender.typical),
    )
