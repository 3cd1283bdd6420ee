"""Images a second by model, batch size and precision, until memory runs out.

Every model and precision has a process of its own (`batch_size.Stepper`); its batch grows until
memory runs out or a step takes more than ten seconds. The tables of several machines can be merged:
each row of the JSON has the machine's name. Question, measurement and table are one file, slightly
above 300 lines. This module must not know how a step is made.
"""

import itertools
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..errors import ConfigError, PacelineError
from ..fields import many, record, refuse_constant
from ..machine.ceilings import read_matmul
from ..plan import format_bytes
from ..report.chart import FAINT, LEFT, RIGHT, WIDTH, Panel, frame, head, line, rule, text
from ..report.text import Point, or_dash, table
from ..tuning.candidates import DTYPES
from ..workloads import load_task
from .apart import Apart
from .batch_size import refuse_fp16, stepper_apart
from .device import free_bytes

_BLOCKS = 5
_MEMORY, _NOT_TRIED = "memory ends", "not tried"
_SIZES = tuple(4**power for power in range(10))
_LONG_S = 10.0
"""A longer step is the last one: with four times the batch it would take most of a minute."""
_COLOURS = ("#1b4f8f", "#b5541c", "#2d7a3e", "#7a2d6f", "#6b5b00", "#333333")
_DASHES = ("", "7 4", "2 3")
_TOP, _HEIGHT = 64, 260


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputRow:
    """One model at one batch size.

    Args:
        images_per_s: median of the blocks; None if memory ran out or it failed.
        least_per_s, most_per_s: the spread.
        peak_bytes: on a GPU of the allocator, on a CPU of the process.
        peak_share: share of the device's matrix-product rate by `paceline probe`; None: unknown.
        ended: why there is no figure, or "".
    """

    machine: str
    device: str
    model: str
    precision: str
    batch_size: int
    images_per_s: float | None = None
    least_per_s: float | None = None
    most_per_s: float | None = None
    peak_bytes: int | None = None
    peak_share: float | None = None
    ended: str = ""

    @property
    def series(self) -> tuple[str, str, str, str]:
        """The values that all rows of one series share."""
        return self.model, self.device, self.precision, self.machine

    @property
    def speed(self) -> float:
        """Images a second; 0 without a figure."""
        return self.images_per_s or 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputQuestion:
    """The question.

    Args:
        models: tasks.
        precisions: names of DTYPES.
        batch_sizes: from small to large, until memory runs out; None: 1, 4, 16 ..., until memory
            runs out or a step takes more than ten seconds.
        seconds: about the time of each cell.
        limit_bytes: memory limit of a `Stepper`; None: 80 % of the free memory.
    """

    models: tuple[str, ...]
    precisions: tuple[str, ...] = ("fp32",)
    batch_sizes: tuple[int, ...] | None = None
    seconds: float = 2.0
    device: str = "cpu"
    threads: int = 1
    limit_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in self.precisions:
            if name not in DTYPES:
                raise ConfigError(f"--precision {name}: known are {', '.join(DTYPES)}")
            refuse_fp16(name, self.device)
        if self.batch_sizes is not None and min(self.batch_sizes, default=0) < 1:
            raise ConfigError(f"--batch-sizes must be >= 1, got {self.batch_sizes}")
        if not 0 < self.seconds < math.inf:
            raise ConfigError(f"--seconds must be > 0 and finite, got {self.seconds}")


def sweep(
    question: ThroughputQuestion, machine: str, say: Callable[[str], None]
) -> list[ThroughputRow]:
    """Measure every model, precision and batch size, and return a row for each.

    Raises:
        ConfigError: a task is unknown.
    """
    for model in question.models:
        load_task(model)
    rows: list[ThroughputRow] = []
    for model in question.models:
        for precision in question.precisions:
            for row in _column(question, machine, model, precision):
                rows.append(row)
                figure = f"{row.images_per_s:,.0f} images/s" if row.images_per_s else row.ended
                say(f"{model} {precision} batch {row.batch_size}: {figure}")
    return rows


def _column(
    question: ThroughputQuestion, machine: str, model: str, precision: str
) -> list[ThroughputRow]:
    """Measure one model and precision with growing batches, and return the rows."""
    rows: list[ThroughputRow] = []
    blank = ThroughputRow(
        machine=machine, device=question.device, model=model, precision=precision, batch_size=0
    )
    arguments = {
        "spec": model, "precision": precision, "device": question.device,
        "threads": question.threads,
        "limit_bytes": question.limit_bytes or free_bytes(question.device),
    }  # fmt: skip
    with stepper_apart(arguments) as seat:
        for batch_size in question.batch_sizes or _SIZES:
            row = replace(blank, batch_size=batch_size)
            step_s = rows[-1].batch_size / (rows[-1].speed or math.inf) if rows else 0.0
            if question.batch_sizes is None and step_s > _LONG_S:
                ended = f"{_NOT_TRIED}: a step of {rows[-1].batch_size:,} takes {step_s:.0f} s"
                rows.append(replace(row, ended=ended))
            else:
                rows.append(_measured(row, seat, question))
            is_over = rows[-1].ended.startswith((_MEMORY, _NOT_TRIED)) or seat.has_ended
            if is_over:  # other failures may depend on the size, such as batch norm of one sample
                break
    return rows


def _measured(row: ThroughputRow, seat: Apart, question: ThroughputQuestion) -> ThroughputRow:
    """Return the row with its figures, or with the reason why there are none."""
    try:
        options = {"seconds": question.seconds, "blocks": _BLOCKS}
        answer = seat.ask("measure", batch_size=row.batch_size, **options)
    except PacelineError as error:
        return replace(row, ended=str(error))
    if "ended" in answer:
        return replace(row, ended=f"{_MEMORY}: {answer['ended']}")
    per_s = [float(value) for value in answer["per_s"]]
    op_per_s = statistics.median(per_s) * float(answer["op_per_sample"])
    most_op_per_s, _ = read_matmul(row.device, row.precision, question.threads)
    return replace(
        row, images_per_s=statistics.median(per_s), least_per_s=min(per_s), most_per_s=max(per_s),
        peak_bytes=int(answer["peak_bytes"]),
        peak_share=op_per_s / most_op_per_s if most_op_per_s and op_per_s else None,
    )  # fmt: skip


def days(images: int, epochs: int, images_per_s: float) -> float:
    """Return how many days ``epochs`` passes over ``images`` images take.

    Example: AlexNet on Places, 2.5 million images, was 6 days on a K40 (notes on GPU training).
        >>> round(days(2_500_000, 90, 434.0), 1)
        6.0
    """
    return images * epochs / images_per_s / 86_400


def to_json(rows: Sequence[ThroughputRow]) -> dict[str, object]:
    """Return the table as one JSON object, which `merged` reads."""
    return {"rows": [asdict(row) for row in rows]}


def merged(files: Sequence[Path], rows: Sequence[ThroughputRow]) -> list[ThroughputRow]:
    """Return the rows of other machines' tables, then these; a later row replaces an equal cell.

    Raises:
        ConfigError: a file cannot be read or has no such table.
    """
    others: list[ThroughputRow] = []
    for file in files:
        try:
            cells = json.loads(file.read_text(), parse_constant=refuse_constant)["rows"]
            others += many(lambda cell: record(ThroughputRow, cell))(cells)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{file} is no table of paceline bench throughput --json: {error}"
            ) from error
    return list({(*row.series, row.batch_size): row for row in (*others, *rows)}.values())


def render_throughput(rows: Sequence[ThroughputRow], images: int, epochs: int) -> list[str]:
    """Return the table, crossings, and the days that each series takes at its best batch."""
    is_several = len({row.machine for row in rows}) > 1
    cells = [
        (*[row.machine] * is_several, *row.series[:3], f"{row.batch_size:,}", *_figures(row))
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
    """Return lines with the batch from which a device is ahead of its machine's CPU."""
    speeds: dict[tuple[str, str, str, str], dict[int, float]] = {}
    for row in rows:
        if row.images_per_s:
            speeds.setdefault(row.series, {})[row.batch_size] = row.images_per_s
    lines = []
    for (model, device, precision, machine), device_per_s in speeds.items():
        cpu_per_s = speeds.get((model, "cpu", precision, machine), {})
        both = sorted(device_per_s.keys() & cpu_per_s.keys(), reverse=True)
        if device == "cpu" or not both:
            continue
        gains = [(batch, device_per_s[batch] > cpu_per_s[batch]) for batch in both]
        ahead = [batch for batch, is_ahead in itertools.takewhile(lambda gain: gain[1], gains)]
        where = f"from batch {ahead[-1]:,} on" if ahead else "at no large batch measured"
        on = _on(rows, machine)
        lines.append(f"{model} {precision}{on}: {device} is ahead of the CPU {where}")
    return lines


def _on(rows: Sequence[ThroughputRow], machine: str, word: str = "on") -> str:
    """Return the machine's name after ``word`` if the table has several machines, else ""."""
    return f" {word} {machine}" if len({row.machine for row in rows}) > 1 else ""


def _figures(row: ThroughputRow) -> tuple[str, str, str]:
    if row.images_per_s is None:
        return "-", "-", "-"
    spread = f"{row.least_per_s:,.0f} to {row.most_per_s:,.0f}"
    return f"{row.images_per_s:,.0f}", spread, or_dash(row.peak_bytes, format_bytes)


def _days(rows: Sequence[ThroughputRow], images: int, epochs: int) -> list[str]:
    best: dict[tuple[str, ...], ThroughputRow] = {}
    for row in rows:
        if row.speed:
            best[row.series] = max(best.get(row.series, row), row, key=lambda row: row.speed)
    work = f"{images:,} images x {epochs} epochs"
    return [
        f"{row.model} on {row.device}{_on(rows, row.machine, 'of')}, {row.precision}, "
        f"batch {row.batch_size:,}: {work} take {days(images, epochs, row.speed):.2g} days"
        + (f", at {row.peak_share:.1%} of matrix products' rate there" if row.peak_share else "")
        for row in best.values()
    ]


def draw_throughput(rows: Sequence[ThroughputRow]) -> str:
    """Return an SVG file's text: images a second over the batch size, a line for each series.

    Both axes are logarithmic, so that a LeNet and a ResNet fit in one picture.
    """
    series: dict[tuple[str, ...], list[ThroughputRow]] = {}
    for row in rows:
        if row.speed:
            series.setdefault(row.series, []).append(row)
    largest = max((row.batch_size for row in rows), default=1)
    speeds = [row.speed for row in rows if row.speed] or [1.0]
    ticks = range(math.floor(math.log10(min(speeds))), math.ceil(math.log10(max(speeds))) + 1)
    low, high = ticks[0], max(ticks[-1], ticks[0] + 1)
    stop = max(1.0, math.log2(largest))
    panel = Panel(top=_TOP, low=low, high=high, stop=stop, height=_HEIGHT)
    height = _TOP + _HEIGHT + 70 + 18 * len(series)
    parts = [*head("throughput", height), *frame(panel, "images a second", ticks, is_log10=True)]
    for number, (key, members) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        dash = _DASHES[number % len(_DASHES)]
        points = [
            Point(t=math.log2(row.batch_size), value=math.log10(row.speed)) for row in members
        ]
        parts += line(panel, points, colour, dash)
        y = _TOP + _HEIGHT + 66 + 18 * number
        parts += [
            rule(LEFT, y - 4, LEFT + 24, y - 4, colour, dash),
            text(LEFT + 32, y, ", ".join(key)),
        ]
    return "\n".join([*parts, *_batch_axis(panel, largest), "</svg>"]) + "\n"


def _batch_axis(panel: Panel, largest: int) -> list[str]:
    """Return the SVG elements of the axis of batch sizes."""
    parts = [rule(LEFT, panel.bottom, WIDTH - RIGHT, panel.bottom, FAINT)]
    for power in range(0, math.floor(math.log2(largest)) + 1, 2):
        x = panel.x(power)
        parts.append(rule(x, panel.bottom, x, panel.bottom + 5, FAINT))
        parts.append(text(x, panel.bottom + 20, f"{2**power:,}", anchor="middle"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [*parts, text(middle, panel.bottom + 40, "samples a batch", anchor="middle")]
