"""``paceline bench``: what one device does, measured: compilers, asynchrony, overlap."""

import json as json_format
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

Json = Annotated[bool, Parameter(negative=(), help="One JSON object.")]


def register(app: App) -> None:
    """Put the verb into the application."""
    verb = App(name="bench", help="What one device does: compilers, asynchrony, overlap.")
    verb.command(compile_, name="compile")
    verb.command(async_, name="async")
    verb.command(overlap)
    verb.command(parallel)
    verb.command(throughput)
    app.command(verb)


def compile_(
    task: str = "chapter-mlp",
    /,
    *,
    ways: str | None = None,
    batch_size: int = 1,
    calls: int | None = None,
    device: str = "auto",
    threads: int | None = None,
    json: Json = False,
) -> None:
    """Eager, TorchScript, torch.compile, export and AOTInductor on the same work.

    Example: paceline bench compile lenet --batch-size 256

    Parameters
    ----------
    task
        chapter-mlp (512-256-128-2), a built-in task, package.module:task, or a run's folder.
    ways
        Only these: eager,script,trace,compile,export,aoti [default: all].
    batch_size
        Samples a call.
    calls
        Of each way [default: 1,000, or fewer where they take more than a few seconds].
    device
        cpu, cuda, cuda:1 ...
    threads
        Of torch [default: as torch chooses].
    """
    from ..bench.compiling import Question, compare_ways
    from ..bench.compiling_lines import render_ways
    from ..bench.ways import WAYS
    from ..bench.where import chosen_device, chosen_threads

    question = Question(
        subject=task,
        ways=tuple(ways.split(",")) if ways else tuple(WAYS),
        batch_size=batch_size,
        calls=calls,
        device=chosen_device(device),
        threads=chosen_threads(threads),
    )
    found = compare_ways(question, _say)
    if json:
        print(json_format.dumps(found.to_json(), allow_nan=False))
    else:
        print("\n".join(render_ways(found)))


def async_(*, calls: int = 10_000, device: str = "auto", json: Json = False) -> None:
    """What queueing saves: t1, t2, t3 of an operation, n calls blocking and queued, the depth.

    Example: paceline bench async --calls 2000

    Parameters
    ----------
    calls
        n, of both kinds.
    device
        cpu, cuda, cuda:1 ...
    """
    import torch

    from ..bench.asynchrony import measure_asynchrony, numpy_and_torch
    from ..bench.asynchrony_lines import render_asynchrony
    from ..bench.where import chosen_device

    chosen = torch.device(chosen_device(device))
    found = measure_asynchrony(chosen, calls)
    toy = numpy_and_torch(chosen)
    if json:
        chapter = [one.to_json() for one in toy.values()]
        print(json_format.dumps({"device": str(chosen), **found.to_json(), "chapter": chapter}))
    else:
        print("\n".join(render_asynchrony(found, toy, chosen.type)))


def overlap(
    *, size: int | None = None, count: int = 50, device: str = "auto", json: Json = False
) -> None:
    """Computing alone, copying alone, and both: how much of the shorter one is hidden.

    Example: paceline bench overlap --size 500 --count 20

    Parameters
    ----------
    size
        Rows of the square matrices [default: 4000 on a GPU, as the chapter has it; 512 on a CPU].
    count
        Products, and copies.
    device
        cpu, cuda, cuda:1 ...
    """
    import torch

    from ..bench.overlap import measure_overlap
    from ..bench.together import render_together
    from ..bench.where import chosen_device

    chosen = torch.device(chosen_device(device))
    found = measure_overlap(chosen, _size(size, chosen.type), count)
    if json:
        print(json_format.dumps({"device": str(chosen), **found.to_json()}))
    else:
        table = render_together(found.rows, "computing", "copying")
        print("\n".join([f"{found.work}, {chosen}", "", *table, "", *found.notes]))


def parallel(
    *, size: int | None = None, count: int = 50, device: str = "auto", json: Json = False
) -> None:
    """Independent work on two devices (or two streams, or two processes), alone and at once.

    Example: paceline bench parallel --device cpu

    Parameters
    ----------
    size
        Rows of the square matrices [default: 4000 on a GPU, as the chapter has it; 512 on a CPU].
    count
        Products at each place.
    device
        cpu, cuda, cuda:1 ...
    """
    import torch

    from ..bench.parallel import measure_parallel
    from ..bench.together import render_together
    from ..bench.where import chosen_device

    chosen = torch.device(chosen_device(device))
    found = measure_parallel(chosen, _size(size, chosen.type), count)
    if json:
        print(json_format.dumps({"device": str(chosen), **found.to_json()}))
    else:
        table = render_together((found.result,), "one", "other")
        print("\n".join([found.places, found.work, "", *table]))


def throughput(
    models: str = "lenet",
    /,
    *,
    batch_sizes: str = "1,4,16,64,256,1024",
    precision: str = "fp32",
    seconds: float = 2.0,
    images: int = 2_500_000,
    epochs: int = 90,
    device: str = "auto",
    threads: int | None = None,
    merge: list[Path] | None = None,
    machine: str | None = None,
    plot: Path | None = None,
    json: Json = False,
) -> None:
    """Images a second and memory against batch size and precision, up to where memory ends.

    Example: paceline bench throughput lenet,resnet18 --precision fp32,bf16 --plot speed.svg

    Parameters
    ----------
    models
        Tasks, with commas between.
    batch_sizes
        From small to large.
    precision
        fp32, bf16, fp16, with commas between.
    seconds
        Of each cell, about.
    images, epochs
        How many days so much training takes [default: Places, 90 epochs].
    device
        cpu, cuda, cuda:1, or several with commas between: cpu,cuda says where they cross.
    threads
        Of torch [default: as torch chooses].
    merge
        Tables of other machines: files that --json wrote.
    machine
        What this one is called in the table [default: its name].
    plot
        Draw the picture into this SVG file.
    """
    import platform

    from ..bench.throughput import Sweep, merged, sweep, to_json
    from ..bench.throughput_lines import draw_throughput, render_throughput
    from ..bench.where import chosen_device, chosen_threads

    name = machine or platform.node() or "here"
    rows = []
    for kind in device.split(","):
        asked = Sweep(
            models=tuple(models.split(",")),
            precisions=tuple(precision.split(",")),
            batch_sizes=_numbers(batch_sizes),
            seconds=seconds,
            device=chosen_device(kind),
            threads=chosen_threads(threads),
        )
        rows += sweep(asked, name, _say)
    whole = merged(merge or [], rows)
    if plot is not None:
        plot.write_text(draw_throughput(whole), encoding="utf-8")
    if json:
        print(json_format.dumps(to_json(whole), allow_nan=False))
    else:
        print("\n".join(render_throughput(whole, images, epochs)))


def _numbers(text: str) -> tuple[int, ...]:
    from ..errors import ConfigError

    try:
        return tuple(sorted(int(number) for number in text.split(",")))
    except ValueError:
        raise ConfigError(f"--batch-sizes {text!r} must read as 1,16,256") from None


def _size(size: int | None, kind: str) -> int:
    """The chapter's matrices on a GPU; on a CPU they would take a minute."""
    return size if size is not None else 512 if kind == "cpu" else 4000


def _say(line: str) -> None:
    """What is being done goes to standard error: the result stands alone on standard output."""
    print(line, file=sys.stderr, flush=True)
