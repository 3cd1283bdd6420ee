"""What a batch size is worth, as a table, as JSON and as a picture of three diagrams.

This module must not know how it was measured.
"""

import math

from ..report.chart import Curve, Diagram, draw_chart
from ..report.summary import Point
from .batch_choice import Choice, Choices
from .lines import duration, table

_BAR = 16
_HEIGHT = 150.0


def render_choices(one: Choices) -> list[str]:
    """The noise in a sentence or two, then a row a batch size."""
    low, high = (_samples(value) for value in one.noise.interval)
    lines = [
        f"noise scale  {_samples(one.noise.scale)} samples (95 %: {low} to {high}; "
        f"{one.noise.draws} draws of {one.noise.big:,} samples, after {one.after:,} updates)",
        "             at that batch half of a gradient's square is noise; well above it, a larger "
        "batch saves few updates",
        "",
    ]
    if not one.rows:
        shares = [
            (f"{size:,}", f"{one.noise.measured_share(size):.0%}", _bar(one.noise.share(size), 1.0))
            for size in one.noise.squared
        ]
        return [*lines, *table(("batch", "noise", ""), shares)]
    times = [row.seconds for row in one.rows if row.seconds is not None]
    cells = [_cells(one, row, max(times, default=1.0)) for row in one.rows]
    head = ("batch", "lr", "noise", "samples/s", "updates", f"time to {one.target:g}", "")
    best = one.quickest
    told = (
        f"quickest     --batch-size {best.batch_size} --lr {best.learning_rate:.3g}"
        if best is not None
        else "quickest     none: no batch size reached the target with every seed"
    )
    rule = (
        f"lr: {one.own_rate:g} at the task's own batch {one.own_batch_size:,}, then in proportion "
        f"to 1 / (1 + noise scale / batch)"
    )
    return [*lines, *table(head, cells), "", told, rule]


def _cells(one: Choices, row: Choice, longest_s: float) -> tuple[str, ...]:
    seconds = row.seconds
    if seconds is None:
        reached = sum(run.seconds is not None for run in row.runs)
        time = f"{reached} of {len(row.runs)} seeds"
    else:
        spread = [run.seconds or 0.0 for run in row.runs]
        time = f"{duration(seconds)} ({duration(min(spread))} to {duration(max(spread))})"
    return (
        f"{row.batch_size:,}",
        f"{row.learning_rate:.3g}",
        f"{one.noise.share(row.batch_size):.0%}",
        f"{row.samples_per_s:,.0f}",
        f"{row.updates:,}",
        time,
        _bar(seconds or 0.0, longest_s),
    )


def _bar(value: float, most: float) -> str:
    return f"{'#' * round(_BAR * value / most):<{_BAR}}|"


def _samples(value: float) -> str:
    return "infinitely many" if math.isinf(value) else f"{value:,.0f}"


def choices_json(one: Choices) -> dict[str, object]:
    """As one JSON object; what is infinite is null."""
    return {
        "task": one.task,
        "source": one.source,
        "device": one.device,
        "noise_scale": _finite(one.noise.scale),
        "noise_scale_interval": [_finite(value) for value in one.noise.interval],
        "signal": one.noise.signal,
        "trace": one.noise.trace,
        "after_updates": one.after,
        "noise_shares": {str(size): one.noise.measured_share(size) for size in one.noise.squared},
        "target_accuracy": one.target,
        "rows": [
            {
                "batch_size": row.batch_size,
                "learning_rate": row.learning_rate,
                "noise_share": one.noise.share(row.batch_size),
                "samples_per_s": row.samples_per_s,
                "updates": [run.updates for run in row.runs],
                "seconds": [run.seconds for run in row.runs],
                "accuracy": [run.accuracy for run in row.runs],
            }
            for row in one.rows
        ],
    }


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else value


def draw_choices(one: Choices) -> str:
    """The text of an SVG file: three diagrams over one axis of batch sizes."""
    sizes = sorted({*one.noise.squared, *(row.batch_size for row in one.rows)})
    noise = Curve(
        name="noise (dots), 1 / (1 + batch / scale)",
        points=tuple(_at(size, 100 * one.noise.share(size)) for size in sizes),
        dots=tuple(_at(size, 100 * one.noise.measured_share(size)) for size in one.noise.squared),
    )
    diagrams = [("noise in a gradient's square (%)", noise)]
    if one.rows:
        speed = tuple(_at(row.batch_size, row.samples_per_s) for row in one.rows)
        times = tuple(
            _at(row.batch_size, row.seconds) for row in one.rows if row.seconds is not None
        )
        diagrams += [
            ("samples a second", Curve(name="throughput", points=speed, dots=speed)),
            (
                f"seconds of training to test accuracy {one.target:g}",
                Curve(name="time to accuracy (median)", points=times, dots=times),
            ),
        ]
    last = len(diagrams) - 1
    return draw_chart(
        f"{one.task}: what a batch size is worth",
        f"{one.source}; {one.device}; noise scale {_samples(one.noise.scale)} samples",
        [
            Diagram(
                label=label,
                curves=(curve,),
                x_label="samples a batch" if number == last else "",
                height=_HEIGHT,
                from_zero=True,
                is_log2=True,
                stop=math.log2(sizes[-1]) if number == last else None,
            )
            for number, (label, curve) in enumerate(diagrams)
        ],
    )


def _at(size: int, value: float) -> Point:
    return Point(t=math.log2(size), value=value)
