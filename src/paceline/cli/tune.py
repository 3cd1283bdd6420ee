"""``paceline tune``: find a batch size or a learning rate by measuring."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from ..errors import ConfigError
from .flags import Json, draw, parse_memory, say, show, writable

tune = App(name="tune", help="Find settings by measuring: batch-size, lr.")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SearchFlags:
    """Flags of the search for the largest mini-batch.

    Parameters
    ----------
    workers
        Number of workers, which share the memory of this machine or of their device.
    precision
        Number format of forward passes: fp32, or autocast to bf16 or fp16.
    memory
        Memory for all workers, as 512MiB or 2GiB; on a CPU it is that of the batch alone, without
        Python, torch, the model and its optimizer [default: 80 % of what is free].
    most
        The largest mini-batch to try.
    """

    workers: int = 1
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    memory: str | None = None
    most: int = 65_536


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class NoiseFlags:
    """Flags that compare batch sizes.

    Parameters
    ----------
    noise
        Measure the gradient noise scale instead (McCandlish et al. 2018), with one worker in fp32.
    target_accuracy
        With --noise, train to this test accuracy with each of --batch-sizes.
    batch_sizes
        With --target-accuracy, batch sizes to train with, as 8,32,128 [default: the task's own, a
        quarter to four times].
    after
        Measure the noise after this many updates.
    seeds
        How many times to train with each batch size.
    plot
        With --noise, draw noise, throughput and time to accuracy against batch size into this SVG
        file.
    """

    noise: Annotated[bool, Parameter(negative=())] = False
    target_accuracy: float | None = None
    batch_sizes: str | None = None
    after: int = 100
    seeds: int = 3
    plot: Path | None = None


NO_SEARCH, NO_NOISE = SearchFlags(), NoiseFlags()


@tune.command(name="batch-size")
def batch_size(
    task: str,
    /,
    *,
    search: SearchFlags = NO_SEARCH,
    worth: NoiseFlags = NO_NOISE,
    device: str = "auto",
    json: Json = False,
) -> None:
    """Find the largest mini-batch that fits by training with it; or compare batch sizes.

    Example: paceline tune batch-size lenet --workers 2 --memory 2GiB
    Example: paceline tune batch-size softmax --noise --target-accuracy 0.85 --plot batch.svg

    Parameters
    ----------
    task
        A built-in task or package.module:task.
    device
        Where to compute: auto (an accelerator, if one is here), cpu, cuda, cuda:1 ...
    """
    _refuse_idle(search, worth)
    if worth.noise:
        _compare(task, device, worth, is_json=json)
    else:
        _search(task, device, search, is_json=json)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RangeFlags:
    """Flags of the learning-rate range test.

    Parameters
    ----------
    workers
        Number of workers that make each update.
    protocol
        When the workers' gradients are combined.
    batch_size
        Number of samples in an update, over all workers [default: the task's].
    mini_batch_size
        Number of samples a worker takes at once; give this or --batch-size.
    lowest
        The rate of the first update.
    highest
        The rate of the last update; the test ends early at a loss of four times its minimum.
    updates
        Number of updates from the lowest rate to the highest.
    init
        Weights at the start: default is torch's; otherwise the task's own.
    seed
        Seed of the weights and of the data's order.
    plot
        Draw loss against rate into this SVG file.
    """

    workers: int = 1
    protocol: str = "full-sync"
    batch_size: int | None = None
    mini_batch_size: int | None = None
    lowest: float = 1e-5
    highest: float = 10.0
    updates: int = 100
    init: str | None = None
    seed: int = 0
    plot: Path | None = None


NO_RANGE = RangeFlags()


@tune.command(name="lr")
def lr(
    task: str,
    /,
    *args: str,
    flags: RangeFlags = NO_RANGE,
    device: str = "auto",
    json: Json = False,
) -> None:
    """Find a learning rate by a range test over N workers (Smith 2017): it grows each update.

    Example: paceline tune lr lenet --workers 2 --plot rates.svg

    Parameters
    ----------
    task
        A built-in task, package.module:task, or a script, which ends after --updates updates.
    args
        The script's own arguments, after --.
    device
        Where to compute: auto (an accelerator, if one is here), cpu, cuda, cuda:1 ...
    """
    from ..bench.lr_range import LrQuestion, draw_range, measure_range, range_json, render_range
    from ..bench.lr_worker import LrRamp

    if flags.batch_size is not None and flags.mini_batch_size is not None:
        raise ConfigError("--batch-size and --mini-batch-size exclude each other; give one")
    size = flags.batch_size if flags.mini_batch_size is None else flags.mini_batch_size
    if size is not None and size < 1:
        flag = "--batch-size" if flags.mini_batch_size is None else "--mini-batch-size"
        raise ConfigError(f"{flag} must be >= 1, got {size}")
    writable(flags.plot)
    ramp = LrRamp(
        spec=task, lowest=flags.lowest, highest=flags.highest, updates=flags.updates,
        batch_size=size, init=flags.init,
        batch="global" if flags.mini_batch_size is None else "per-worker",
    )  # fmt: skip
    question = LrQuestion(
        ramp=ramp, args=args, workers=flags.workers, protocol=flags.protocol, device=device,
        seed=flags.seed,
    )  # fmt: skip
    say(f"{task}: {flags.updates} updates at rates from {flags.lowest:g} to {flags.highest:g}")
    result = measure_range(question)
    draw(flags.plot, lambda: draw_range(result))
    show(json, lambda: range_json(result), lambda: render_range(result))


def _refuse_idle(search: SearchFlags, worth: NoiseFlags) -> None:
    """Refuse flags that would have no effect."""
    if worth.noise and worth.target_accuracy is None:
        trainings = (worth.batch_sizes, worth.seeds)
        if trainings != (NO_NOISE.batch_sizes, NO_NOISE.seeds):
            raise ConfigError("--batch-sizes and --seeds need --target-accuracy")
    flags, others = (search, NO_SEARCH) if worth.noise else (worth, NO_NOISE)
    idle = [
        "--" + field.name.replace("_", "-")
        for field in fields(flags)
        if getattr(flags, field.name) != getattr(others, field.name)
    ]
    if idle:
        how = "not with" if worth.noise else "only with"
        raise ConfigError(f"{', '.join(idle)}: {how} --noise")


def _search(task: str, device: str, flags: SearchFlags, *, is_json: bool) -> None:
    """Search for the largest mini-batch that fits, and print it."""
    from ..bench.batch_size import Trials, do_fit_together, largest_batch
    from ..bench.device import chosen_device, free_bytes
    from ..config import refuse_too_many

    workers, most = flags.workers, flags.most
    refuse_too_many(workers, "--workers")
    if workers < 1 or most < 1:
        raise ConfigError(f"--workers and --most must be >= 1, got {workers} and {most}")
    chosen = chosen_device(device)
    total_bytes = parse_memory(flags.memory) if flags.memory else free_bytes(chosen)
    each_bytes = total_bytes // workers
    arguments = {
        "spec": task, "precision": flags.precision, "device": chosen, "threads": 1,
        "limit_bytes": each_bytes,
    }  # fmt: skip
    with Trials(arguments, say) as trials:
        result = largest_batch(trials.does_fit, most)
    while workers > 1 and result.fits and not do_fit_together(arguments, result.fits, workers):
        say(f"batch {result.fits:,}: does not fit for {workers} workers at once")
        result = replace(
            result, fits=min(result.fits - 1, int(0.95 * result.fits)), ends=result.fits
        )
    if not result.fits:
        raise ConfigError(f"not even one sample of {task} fits into {each_bytes:,} bytes")
    end = f"{result.ends:,} do not" if result.ends else f"the search ended at {most:,}"
    fields = {
        "task": task, "device": chosen, "workers": workers, "precision": flags.precision,
        "memory_bytes": total_bytes, "a_worker_bytes": each_bytes,
        "mini_batch_size": result.fits, "does_not_fit": result.ends, "tried": result.tried,
    }  # fmt: skip
    together = f"{workers} workers at once" if workers > 1 else "one worker"
    line = (
        f"--mini-batch-size {result.fits}: fits on {chosen}, {together}, {end}; "
        f"an update of full-sync averages {result.fits * workers:,} samples"
    )
    show(is_json, lambda: fields, lambda: [line])


def _compare(task: str, device: str, flags: NoiseFlags, *, is_json: bool) -> None:
    """Measure and print gradient noise, throughput and time to accuracy of each batch size."""
    from ..bench.batch_choice import (
        BatchSizeQuestion,
        choices_json,
        compare_batch_sizes,
        draw_choices,
        render_choices,
    )
    from ..bench.device import chosen_device

    writable(flags.plot)
    question = BatchSizeQuestion(
        spec=task,
        device=chosen_device(device),
        batch_sizes=_sizes(flags.batch_sizes or ""),
        target=flags.target_accuracy,
        after=flags.after,
        seeds=flags.seeds,
    )
    result = compare_batch_sizes(question, say)
    draw(flags.plot, lambda: draw_choices(result))
    show(is_json, lambda: choices_json(result), lambda: render_choices(result))


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(",") if word)
    except ValueError:
        raise ConfigError(
            f"--batch-sizes must be whole numbers such as 8,32,128, got {text!r}"
        ) from None
