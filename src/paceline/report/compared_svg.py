"""The picture of a comparison: error against time, a curve a protocol.

    comparison -> diagrams of curves -> chart.py -> SVG

The legend says when each protocol reached the target; the thick line is the typical run and the
thin ones are the other seeds. Where a run has fewer than 3 evaluations the training loss stands in
a second diagram, and its label says so. This module must not know runs.
"""

from .chart import Curve, Diagram, draw_chart
from .compared import ComparedProtocol, Comparison, RunOutcome, finite
from .summary import Point
from .terminal import format_duration

_HIGH, _LOW = 300, 170
"""Pixels: a diagram by itself, one of two."""


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
