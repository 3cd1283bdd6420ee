"""Images a second against model, batch size and precision, up to where memory ends.

Every model and precision has a process of its own (`stepping.py`); its batch grows until memory
ends or a step takes very long. The tables of several machines merge into one: they are
the same JSON with the machine's name in each row. This module must not know how it is printed.
"""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from ..errors import ConfigError, PacelineError
from ..fields import many, record, refuse_constant
from ..workloads import load_task
from .apart import Apart
from .stepping import DTYPES

SHARE = 0.8
"""Of the memory that is free: what a search may use."""
_BLOCKS = 5
_MEMORY, _NOT_TRIED = "memory ends", "not tried"
_SIZES = tuple(4**power for power in range(10))
_LONG_S = 10.0
"""A step that takes longer is the last: one of four times the batch would take a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputRow:
    """One model at one batch size.

    Args:
        images_per_s: median of the blocks; None where memory ended or it failed.
        least_per_s, most_per_s: the spread.
        peak_bytes: on a GPU of the allocator, on a CPU of the process.
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
    ended: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What is to be measured.

    Args:
        models: tasks.
        precisions: names of DTYPES.
        batch_sizes: from small to large, until memory ends; None: 1, 4, 16 ..., until memory ends
            or a step takes more than ten seconds.
        seconds: of each cell, about.
        limit_bytes: of memory for model and batch; None: 80 % of what is free.
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
        if self.batch_sizes is not None and min(self.batch_sizes, default=0) < 1:
            raise ConfigError(f"--batch-sizes must be >= 1, got {self.batch_sizes}")
        if self.seconds <= 0:
            raise ConfigError(f"--seconds must be > 0, got {self.seconds}")


def free_bytes(device: str) -> int:
    """Memory that a search may use: a share of what is free here, or on the GPU."""
    if device.startswith("cuda"):
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        return int(free * SHARE)
    free = psutil.virtual_memory().available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return int(free * SHARE)


def sweep(asked: Sweep, machine: str, say: Callable[[str], None]) -> list[ThroughputRow]:
    """Measure every model, precision and batch size; smaller batches first.

    Raises:
        ConfigError: there is no such task.
    """
    for model in asked.models:
        load_task(model)
    rows: list[ThroughputRow] = []
    for model in asked.models:
        for precision in asked.precisions:
            for row in _column(asked, machine, model, precision):
                rows.append(row)
                said = f"{row.images_per_s:,.0f} images/s" if row.images_per_s else row.ended
                say(f"{model} {precision} batch {row.batch_size}: {said}")
    return rows


def _column(asked: Sweep, machine: str, model: str, precision: str) -> list[ThroughputRow]:
    rows: list[ThroughputRow] = []
    place = {"machine": machine, "device": asked.device, "model": model, "precision": precision}
    limit_bytes = asked.limit_bytes or free_bytes(asked.device)
    arguments = {
        "spec": model,
        "precision": precision,
        "device": asked.device,
        "threads": asked.threads,
        "limit_bytes": limit_bytes,
    }
    with Apart("paceline.bench.stepping:Stepper", arguments) as seat:
        for batch_size in asked.batch_sizes or _SIZES:
            step_s = rows[-1].batch_size / (rows[-1].images_per_s or math.inf) if rows else 0.0
            if asked.batch_sizes is None and step_s > _LONG_S:
                ended = f"{_NOT_TRIED}: a step of {rows[-1].batch_size:,} takes {step_s:.0f} s"
                rows.append(ThroughputRow(**place, batch_size=batch_size, ended=ended))  # type: ignore[arg-type]
            else:
                rows.append(_row(seat, place, batch_size, asked.seconds))
            is_over = rows[-1].ended.startswith((_MEMORY, _NOT_TRIED)) or seat.has_ended
            if is_over:  # what else fails may be of this size: batch norm of one sample
                break
    return rows


def _row(seat: Apart, place: Mapping[str, str], batch_size: int, seconds: float) -> ThroughputRow:
    try:
        answer = seat.ask("measure", batch_size=batch_size, seconds=seconds, blocks=_BLOCKS)
    except PacelineError as error:
        return ThroughputRow(**place, batch_size=batch_size, ended=str(error))  # type: ignore[arg-type]
    if "ended" in answer:
        ended = f"{_MEMORY}: {answer['ended']}"
        return ThroughputRow(**place, batch_size=batch_size, ended=ended)  # type: ignore[arg-type]
    per_s = [float(value) for value in answer["per_s"]]
    return ThroughputRow(
        **place,
        batch_size=batch_size,
        images_per_s=statistics.median(per_s),
        least_per_s=min(per_s),
        most_per_s=max(per_s),
        peak_bytes=int(answer["peak_bytes"]),
    )


def days(images: int, epochs: int, images_per_s: float) -> float:
    """How many days so many images take, so many times.

    Example: AlexNet on Places, 2.5 million images, was 6 days on a K40 (notes on GPU training).
        >>> round(days(2_500_000, 90, 434.0), 1)
        6.0
    """
    return images * epochs / images_per_s / 86_400


def to_json(rows: Sequence[ThroughputRow]) -> dict[str, object]:
    """As one JSON object, which `merged` reads."""
    return {"rows": [asdict(row) for row in rows]}


def merged(files: Sequence[Path], rows: Sequence[ThroughputRow]) -> list[ThroughputRow]:
    """The rows of other machines' tables, then ours; of equal cells the last one counts.

    Raises:
        ConfigError: a file cannot be read or is no such table.
    """
    found: list[ThroughputRow] = []
    for file in files:
        try:
            rows_there = json.loads(file.read_text(), parse_constant=refuse_constant)["rows"]
            found += many(lambda one: record(ThroughputRow, one))(rows_there)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{file} is no table of paceline bench throughput --json: {error}"
            ) from error
    cells = {
        (row.machine, row.device, row.model, row.precision, row.batch_size): row
        for row in (*found, *rows)
    }
    return list(cells.values())
