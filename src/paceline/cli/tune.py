"""``paceline tune``: settings that are found by measuring."""

import json as json_format
import sys
from typing import Annotated, Literal

from cyclopts import App, Parameter

_UNITS = {"kib": 2**10, "mib": 2**20, "gib": 2**30}


def register(app: App) -> None:
    """Put the verb into the application."""
    verb = App(name="tune", help="Settings that are found by measuring: batch-size.")
    verb.command(batch_size, name="batch-size")
    app.command(verb)


def batch_size(
    task: str,
    /,
    *,
    workers: int = 1,
    precision: Literal["fp32", "bf16", "fp16"] = "fp32",
    memory: str | None = None,
    most: int = 65_536,
    device: str = "auto",
    json: Annotated[bool, Parameter(negative=(), help="One JSON object.")] = False,
) -> None:
    """The largest mini-batch that fits: found by training with it.

    Example: paceline tune batch-size lenet --workers 2 --memory 2GiB

    Parameters
    ----------
    task
        A built-in task or package.module:task.
    workers
        They share the memory of this machine (of the device, where they share one).
    precision
        fp32, or autocast to bf16 or fp16.
    memory
        For all workers, as 512MiB or 2GiB [default: 80 % of what is free].
    most
        Where the search stops.
    device
        cpu, cuda, cuda:1 ...
    """
    from ..bench.batch_size import largest_batch
    from ..bench.fitting import Trials
    from ..bench.throughput import free_bytes
    from ..bench.where import chosen_device
    from ..errors import ConfigError

    if workers < 1 or most < 1:
        raise ConfigError(f"--workers and --most must be >= 1, got {workers} and {most}")
    chosen = chosen_device(device)
    total_bytes = _bytes(memory) if memory else free_bytes(chosen)
    arguments = {
        "spec": task,
        "precision": precision,
        "device": chosen,
        "threads": 1,
        "limit_bytes": total_bytes // workers,
    }
    with Trials(arguments, lambda line: print(line, file=sys.stderr, flush=True)) as trials:
        found = largest_batch(trials.does_fit, most)
    if not found.fits:
        raise ConfigError(
            f"not even one sample of {task} fits into {total_bytes // workers:,} bytes"
        )
    if json:
        fields = {"task": task, "device": chosen, "workers": workers, "precision": precision}
        memory_bytes = {"memory_bytes": total_bytes, "a_worker_bytes": total_bytes // workers}
        result = {"mini_batch_size": found.fits, "does_not_fit": found.ends, "tried": found.tried}
        print(json_format.dumps({**fields, **memory_bytes, **result}))
        return
    end = f"{found.ends:,} do not" if found.ends else f"the search ended at {most:,}"
    print(
        f"--mini-batch-size {found.fits}: fits on {chosen} for each of {workers} worker(s), {end}; "
        f"an update of full-sync averages {found.fits * workers:,} samples"
    )


def _bytes(text: str) -> int:
    from ..errors import ConfigError

    number, unit = text[:-3], text[-3:].lower()
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if unit not in _UNITS or value <= 0:
        raise ConfigError(f"--memory {text!r} must read as 512MiB or 2GiB")
    return int(value * _UNITS[unit])
