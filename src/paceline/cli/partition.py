"""``paceline partition``: where to cut a model for n workers; and ``plan``'s table of splits."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from ..errors import ConfigError
from .flags import Json, draw, parse_memory, say, show, writable

if TYPE_CHECKING:
    from ..predict.split_models import SplitQuestion


_LONG_S = 5.0
"""From when on what is measured is said."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CutFlags:
    """How the model is cut, and for which workers.

    Parameters
    ----------
    workers
        Number of workers, one part each; also -n.
    memory
        Memory of each worker, as 512MiB or 2GiB [default: no limit].
    speeds
        Speed of each worker relative to this machine, separated by commas: 1,1,0.5 [default: 1].
    micro_batches
        Number of micro-batches that a batch is divided into [default: 8].
    batch_size
        Number of samples in an update [default: the task's, or 32].
    schedule
        Order in which workers compute micro-batches: 1f1b or gpipe.
    input
        Shape of one input of your own model, batch first (repeat it for several inputs): 1,3,32,32
        or 1,128:int64.
    """

    workers: int
    memory: str | None = None
    speeds: str | None = None
    micro_batches: int | None = None
    batch_size: int | None = None
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    input: list[str] | None = None


def partition(
    task: str,
    /,
    *,
    flags: CutFlags,
    plot: Annotated[Path | None, Parameter(help="Write the picture to this SVG file.")] = None,
    json: Json = False,
) -> None:
    """Cut a model into n parts by the measured cost of its layers; compare the even and best cuts.

    Example: paceline partition alexnet -n 4 --micro-batches 8

    Parameters
    ----------
    task
        A built-in task, package.module:task, or package.module:function that returns a model.
    """
    from ..predict.splitting import partition as cut
    from ..report.splits import draw_partition, render_partition

    writable(plot)
    question = _question(task, flags)
    result = cut(question, _Progress())
    draw(plot, lambda: draw_partition(result))
    show(json, result.to_json, lambda: render_partition(result))


def planned_splits(task: str, flags: CutFlags, json: bool, idle: str = "") -> bool:
    """Print the table of splits, with ``--memory`` or for a large model; return whether it was.

    Args:
        idle: flags that were given and have no effect on this table; empty: none.

    Raises:
        ConfigError: the table is needed and ``idle`` is not empty.
    """
    from ..predict.splitting import plan_splits, wants_splits
    from ..report.splits import render_splits

    question = replace(_question(task, flags), schedule="")
    if flags.memory is None and not wants_splits(question):
        return False
    if idle:
        raise ConfigError(
            f"{idle}: no effect for a model as large as {task}, where plan advises a split; "
            "leave them out"
        )
    report = plan_splits(question, _Progress())
    show(json, report.to_json, lambda: render_splits(report))
    return True


class _Progress:
    """Says that a measurement has begun, and what is measured if it takes longer."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        say("measuring")

    def __call__(self, what: str) -> None:
        if time.monotonic() - self._start_s >= _LONG_S:
            say(f"measuring {what}")


def _question(task: str, flags: CutFlags) -> "SplitQuestion":
    """The flags as a ``SplitQuestion``.

    Raises:
        ConfigError: a flag cannot be read or is out of range.
    """
    from ..exports.subject import parse_input
    from ..predict.split_models import SplitQuestion

    return SplitQuestion(
        spec=task, num_workers=flags.workers,
        inputs=tuple(parse_input(text) for text in flags.input or ()),
        memory_bytes=None if flags.memory is None else parse_memory(flags.memory),
        speeds=() if flags.speeds is None else parse_speeds(flags.speeds),
        micro_batches=flags.micro_batches, batch_size=flags.batch_size, schedule=flags.schedule,
    )  # fmt: skip


_MOST_SPEED = 1000.0
"""Largest speed relative to this machine's; the least is its inverse."""


def parse_speeds(text: str) -> tuple[float, ...]:
    """``1,1,0.5`` as numbers.

    Raises:
        ConfigError: they are not numbers, or differ from 1 by more than a factor of 1000.
    """
    try:
        speeds = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(f"--speeds must be numbers such as 1,1,0.5, got {text!r}") from None
    for speed in speeds:
        if 0.0 < speed < 1.0 / _MOST_SPEED or speed > _MOST_SPEED:
            raise ConfigError(
                f"--speeds are relative to this machine's 1, such as 1,1,0.5, got {speed:g}"
            )
    return speeds
