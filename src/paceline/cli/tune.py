"""``paceline tune``: settings that are found by measuring."""

import json as json_format
import sys
from pathlib import Path
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
    noise: Annotated[bool, Parameter(negative=())] = False,
    target_accuracy: float | None = None,
    batch_sizes: str | None = None,
    after: int = 100,
    seeds: int = 3,
    plot: Path | None = None,
    json: Annotated[bool, Parameter(negative=(), help="One JSON object.")] = False,
) -> None:
    """The largest mini-batch that fits, found by training with it; or what each is worth.

    Example: paceline tune batch-size lenet --workers 2 --memory 2GiB
    Example: paceline tune batch-size softmax --noise --target-accuracy 0.85 --plot batch.svg

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
    noise
        Instead: the gradient noise scale (McCandlish et al. 2018), one worker in fp32.
    target_accuracy
        With --noise: train to this test accuracy with each of --batch-sizes.
    batch_sizes
        With --target-accuracy, as 8,32,128 [default: the task's own, a quarter to four times].
    after
        Updates before the noise is measured.
    seeds
        Trainings of each batch size.
    plot
        With --noise: noise, throughput and time to accuracy against batch size, as .svg.
    """
    if noise:
        wish = (task, device, batch_sizes, target_accuracy, after, seeds)
        _noise(*wish, plot=plot, is_json=json)
        return
    from ..bench.batch_size import largest_batch
    from ..bench.fitting import Trials
    from ..bench.throughput import free_bytes
    from ..bench.where import chosen_device
    from ..errors import ConfigError

    if target_accuracy is not None or plot is not None:
        raise ConfigError("--target-accuracy and --plot go with --noise")
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


def _noise(
    task: str,
    device: str,
    batch_sizes: str | None,
    target: float | None,
    after: int,
    seeds: int,
    *,
    plot: Path | None,
    is_json: bool,
) -> None:
    from ..bench.batch_choice import Wish, compare_batch_sizes
    from ..bench.batch_choice_lines import choices_json, draw_choices, render_choices
    from ..bench.where import chosen_device
    from ..errors import ConfigError

    try:
        sizes = tuple(int(word) for word in (batch_sizes or "").split(",") if word)
    except ValueError:
        raise ConfigError(
            f"--batch-sizes {batch_sizes!r} must be whole numbers such as 8,32,128"
        ) from None
    wish = Wish(
        spec=task,
        device=chosen_device(device),
        batch_sizes=sizes,
        target=target,
        after=after,
        seeds=seeds,
    )
    found = compare_batch_sizes(wish, lambda line: print(line, file=sys.stderr, flush=True))
    if plot is not None:
        plot.write_text(draw_choices(found))
    if is_json:
        print(json_format.dumps(choices_json(found)))
    else:
        print("\n".join(render_choices(found)))


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
