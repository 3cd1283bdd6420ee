"""Throughput as a table and as a picture; this module must not know how it was measured."""

import itertools
import math
from collections.abc import Sequence

from ..report.summary import Point
from ..report.svg import FAINT, LEFT, RIGHT, WIDTH, Panel, frame, head, line, rule, text
from .lines import size, table
from .throughput import ThroughputRow, days

_COLOURS = ("#1b4f8f", "#b5541c", "#2d7a3e", "#7a2d6f", "#6b5b00", "#333333")
_DASHES = ("", "7 4", "2 3")
_TOP, _HEIGHT = 64, 260


def render_throughput(rows: Sequence[ThroughputRow], images: int, epochs: int) -> list[str]:
    """The table, and for each model how long ``images`` times ``epochs`` take at its best."""
    is_several = len({row.machine for row in rows}) > 1
    cells = [
        (
            *((row.machine,) if is_several else ()),
            row.model,
            row.device,
            row.precision,
            f"{row.batch_size:,}",
            *_figures(row),
        )
        for row in rows
    ]
    header = ("model", "device", "numbers", "batch", "images/s", "least to most", "peak memory")
    lines = table(("machine", *header) if is_several else header, cells)
    ends = [
        f"{row.model} {row.precision} batch {row.batch_size:,}{_on(rows, row.machine)}: {row.ended}"
        for row in rows
        if row.ended
    ]
    return [*lines, "", *ends, *crossings(rows), *_days(rows, images, epochs)]


def crossings(rows: Sequence[ThroughputRow]) -> list[str]:
    """The batch from which on one device is ahead of its machine's CPU, by model and precision."""
    speeds: dict[tuple[str, str, str, str], dict[int, float]] = {}
    for row in rows:
        key = (row.machine, row.model, row.precision, row.device)
        if row.images_per_s:
            speeds.setdefault(key, {})[row.batch_size] = row.images_per_s
    lines = []
    for (machine, model, precision, device), there in speeds.items():
        here = speeds.get((machine, model, precision, "cpu"), {})
        both = sorted(there.keys() & here.keys(), reverse=True)
        if device == "cpu" or not both:
            continue
        gains = [(batch, there[batch] > here[batch]) for batch in both]
        ahead = [batch for batch, is_ahead in itertools.takewhile(lambda one: one[1], gains)]
        where = f"from batch {ahead[-1]:,} on" if ahead else "at no large batch measured"
        on = _on(rows, machine)
        lines.append(f"{model} {precision}{on}: {device} is ahead of the CPU {where}")
    return lines


def _on(rows: Sequence[ThroughputRow], machine: str) -> str:
    """The machine, where the table has several."""
    return f" on {machine}" if len({row.machine for row in rows}) > 1 else ""


def _of(rows: Sequence[ThroughputRow], machine: str) -> str:
    return _on(rows, machine).replace(" on ", " of ")


def _figures(row: ThroughputRow) -> tuple[str, str, str]:
    if row.images_per_s is None:
        return "-", "-", "-"
    return (
        f"{row.images_per_s:,.0f}",
        f"{row.least_per_s:,.0f} to {row.most_per_s:,.0f}",
        size(row.peak_bytes),
    )


def _days(rows: Sequence[ThroughputRow], images: int, epochs: int) -> list[str]:
    best: dict[tuple[str, ...], ThroughputRow] = {}
    for row in rows:
        key = (row.machine, row.device, row.model, row.precision)
        if _speed(row) > (_speed(best[key]) if key in best else 0.0):
            best[key] = row
    work = f"{images:,} images x {epochs} epochs"
    return [
        f"{row.model} on {row.device}{_of(rows, row.machine)}, {row.precision}, "
        f"batch {row.batch_size:,}: {work} take {days(images, epochs, _speed(row)):.2g} days"
        for row in best.values()
    ]


def _speed(row: ThroughputRow) -> float:
    return row.images_per_s or 0.0


def draw_throughput(rows: Sequence[ThroughputRow]) -> str:
    """The text of an SVG file: images a second against the batch size, a line a series.

    Both axes are logarithmic: of a LeNet and a ResNet one could only see the one.
    """
    series: dict[tuple[str, ...], list[ThroughputRow]] = {}
    for row in rows:
        if row.images_per_s:
            named = (row.model, row.device, row.precision, row.machine)
            series.setdefault(named, []).append(row)
    largest = max((row.batch_size for row in rows), default=1)
    speeds = [row.images_per_s for row in rows if row.images_per_s] or [1.0]
    ticks = range(math.floor(math.log10(min(speeds))), math.ceil(math.log10(max(speeds))) + 1)
    low, high = ticks[0], max(ticks[-1], ticks[0] + 1)
    stop = max(1.0, math.log2(largest))
    panel = Panel(top=_TOP, low=low, high=high, stop=stop, height=_HEIGHT)
    height = _TOP + _HEIGHT + 70 + 18 * len(series)
    parts = [*head("throughput", height), *frame(panel, "images a second", ticks, is_log10=True)]
    for number, (key, found) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        dash = _DASHES[number % len(_DASHES)]
        points = [
            Point(t=math.log2(row.batch_size), value=math.log10(_speed(row))) for row in found
        ]
        parts += line(panel, points, colour, dash)
        y = _TOP + _HEIGHT + 66 + 18 * number
        parts += [
            rule(LEFT, y - 4, LEFT + 24, y - 4, colour, dash),
            text(LEFT + 32, y, ", ".join(key)),
        ]
    return "\n".join([*parts, *_batch_axis(panel, largest), "</svg>"]) + "\n"


def _batch_axis(panel: Panel, largest: int) -> list[str]:
    parts = [rule(LEFT, panel.bottom, WIDTH - RIGHT, panel.bottom, FAINT)]
    for power in range(0, math.floor(math.log2(largest)) + 1, 2):
        x = panel.x(power)
        parts.append(rule(x, panel.bottom, x, panel.bottom + 5, FAINT))
        parts.append(text(x, panel.bottom + 20, f"{2**power:,}", anchor="middle"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [*parts, text(middle, panel.bottom + 40, "samples a batch", anchor="middle")]
