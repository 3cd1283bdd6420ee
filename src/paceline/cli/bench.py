"""``paceline bench``: measure compilers, overlap, collectives, scaling and splits.

One command and its flags for each measurement, so above 300 lines.
"""

import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from ..errors import ConfigError, Interrupted
from .flags import Json, draw, say, show, writable

if TYPE_CHECKING:
    from ..bench.scaling import MeasuredScaling, ScalingQuestion
    from ..bench.throughput import ThroughputRow
    from ..report.live_splits import LiveSplits

bench = App(
    name="bench",
    help="Measure one device, collectives between processes, and the gain of more workers.",
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CallFlags:
    """Which ways to call a model are measured, and how often.

    Parameters
    ----------
    ways
        Which ways to measure, separated by commas: eager,script,trace,compile,export,aoti [default:
        all].
    batch_size
        Number of samples in each call.
    calls
        How many calls to make in each way [default: 1,000, or fewer where they take more than a few
        seconds].
    device
        Where to compute: auto (an accelerator, if one is here), cpu, cuda, cuda:1 ...
    threads
        Number of threads that torch computes with [default: torch's choice].
    """

    ways: str | None = None
    batch_size: int = 1
    calls: int | None = None
    device: str = "auto"
    threads: int | None = None


NO_CALLS = CallFlags()


@bench.command(name="compile")
def compile_(
    task: str = "chapter-mlp", /, *, flags: CallFlags = NO_CALLS, json: Json = False
) -> None:
    """Compare eager, TorchScript, torch.compile, export and AOTInductor on the same work.

    Example: paceline bench compile lenet --batch-size 256

    Parameters
    ----------
    task
        chapter-mlp (512-256-128-2), a built-in task, package.module:task, or a run's folder.
    """
    from ..bench.compiling import WaysQuestion, compare_ways, render_ways
    from ..bench.device import chosen_device, chosen_threads
    from ..bench.ways import WAYS

    question = WaysQuestion(
        subject=task,
        ways=tuple(flags.ways.split(",")) if flags.ways else tuple(WAYS),
        batch_size=flags.batch_size,
        calls=flags.calls,
        device=chosen_device(flags.device),
        threads=chosen_threads(flags.threads),
    )
    result = compare_ways(question, say)
    show(json, result.to_json, lambda: render_ways(result))


@bench.command(name="async")
def async_(*, calls: int = 10_000, device: str = "auto", json: Json = False) -> None:
    """Measure what queueing saves: t1, t2, t3 of an operation, n blocking and queued calls, depth.

    Example: paceline bench async --calls 2000

    Parameters
    ----------
    calls
        How many calls to make, both blocking and queued.
    device
        Where to compute: auto (an accelerator, if one is here), cpu, cuda, cuda:1 ...
    """
    import torch

    from ..bench.asynchrony import measure_asynchrony, numpy_and_torch, render_asynchrony
    from ..bench.device import chosen_device

    chosen = torch.device(chosen_device(device))
    result = measure_asynchrony(chosen, calls)
    toy = numpy_and_torch(chosen)
    chapter = [row.to_json() for row in toy.values()]
    show(
        json,
        lambda: {"device": str(chosen), **result.to_json(), "chapter": chapter},
        lambda: render_asynchrony(result, toy, chosen.type),
    )


@bench.command
def concurrency(*, jobs: int = 8, at_once: int | None = None, json: Json = False) -> None:
    """Time jobs that wait, run Python or call a library, as coroutines, threads and processes.

    Example: paceline bench concurrency --jobs 16 --at-once 4

    Parameters
    ----------
    jobs
        How many jobs of each kind to run; one takes about 50 ms.
    at_once
        Number of threads, and of processes [default: as many as cores, at most 64].
    """
    from ..probe.concurrency import MOST_AT_ONCE, measure_concurrency, render_concurrency
    from ..system.processors import num_cores

    usual = min(MOST_AT_ONCE, num_cores())
    result = measure_concurrency(jobs, usual if at_once is None else at_once, say)
    show(json, result.to_json, lambda: render_concurrency(result))


@bench.command
def copies(
    spec: str = "lenet",
    /,
    *,
    input: list[str] | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    json: Json = False,
) -> None:
    """Measure pinned memory, non_blocking and channels last on a model, on a CPU or a device.

    Example: paceline bench copies resnet18 --batch-size 32

    Parameters
    ----------
    spec
        A task, a run's folder, or package.module:function that returns a model.
    input
        Shape of one input of your own model, batch first (repeat it for several inputs): 1,3,32,32.
    batch_size
        Number of samples in a batch [default: the task's, or 32].
    device
        Where to compute: auto (an accelerator, if one is here), cpu, cuda, cuda:1 ...
    """
    import torch

    from ..bench.device import chosen_device
    from ..exports.subject import parse_input
    from ..predict.split_models import SplitQuestion, find_model
    from ..probe.copies import measure_copies, render_copies

    shapes = tuple(parse_input(text) for text in input or ())
    subject = find_model(SplitQuestion(spec=spec, num_workers=1, inputs=shapes))
    usual = subject.task.batch_size if subject.task else 32
    batch = usual if batch_size is None else batch_size
    result = measure_copies(subject, batch, torch.device(chosen_device(device)), say)
    show(json, result.to_json, lambda: render_copies(result))


@bench.command
def overlap(
    *, size: int | None = None, count: int = 50, device: str = "auto", json: Json = False
) -> None:
    """Time computing, copying and both at once, and how much of the shorter one is hidden.

    Example: paceline bench overlap --size 500 --count 20

    Parameters
    ----------
    size
        Rows of the square matrices [default: 4000 on a GPU, as in the chapter; 512 on a CPU].
    count
        How many products to compute, and how many copies to make.
    device
        Where to compute: auto (an accelerator, if one is here), cpu, cuda, cuda:1 ...
    """
    import torch

    from ..bench.device import chosen_device
    from ..bench.overlap import measure_overlap
    from ..bench.samples import render_together

    chosen = torch.device(chosen_device(device))
    result = measure_overlap(chosen, _size(size, chosen.type), count)
    table = render_together(result.ways, "computing", "copying")
    show(
        json,
        lambda: {"device": str(chosen), **result.to_json()},
        lambda: [f"{result.work}, {chosen}", "", *table, "", *result.notes],
    )


@bench.command
def parallel(
    *, size: int | None = None, count: int = 50, device: str = "auto", json: Json = False
) -> None:
    """Time independent work on two devices (or streams, or processes), alone and at once.

    Example: paceline bench parallel --device cpu

    Parameters
    ----------
    size
        Rows of the square matrices [default: 4000 on a GPU, as in the chapter; 512 on a CPU].
    count
        How many products to compute on each device.
    device
        Where to compute: auto (an accelerator, if one is here), cpu, cuda, cuda:1 ...
    """
    import torch

    from ..bench.device import chosen_device
    from ..bench.overlap import measure_parallel
    from ..bench.samples import render_together

    chosen = torch.device(chosen_device(device))
    result = measure_parallel(chosen, _size(size, chosen.type), count)
    table = render_together((result.result,), "one", "other")
    show(
        json,
        lambda: {"device": str(chosen), **result.to_json()},
        lambda: [result.places, result.work, "", *table],
    )


@bench.command
def collectives(
    operation: str = "all-reduce",
    /,
    *,
    workers: int = 2,
    names: str | None = None,
    sizes: str = "1KiB,16KiB,256KiB,4MiB",
    rounds: int = 5,
    json: Json = False,
) -> None:
    """Time sums between processes of this machine: each collective, gloo's own, and predictions.

    Message costs are kept in ~/.cache/paceline/ceilings.json for --collective auto, unless --names
    or --sizes exclude what it needs.

    Example: paceline bench collectives --workers 4 --names ring,tree,hub --sizes 1KiB,1MiB

    Parameters
    ----------
    operation
        Operation to measure: all-reduce, reduce-scatter, all-gather, broadcast, reduce, scatter,
        gather or all-to-all.
    workers
        Number of processes, of one thread each.
    names
        Which collectives to measure, separated by commas [default: all that can do the operation
        with this number of processes].
    sizes
        Sizes of the whole buffer, separated by commas: 1KiB,1MiB.
    rounds
        How many rounds to measure; each round runs all of them in turn.
    """
    from ..bench.collectives import (
        NOT_KEPT,
        CollectivesQuestion,
        measure_collectives,
        render_collectives,
    )
    from ..run.collective import tell_kept

    question = CollectivesQuestion.read(
        operation, workers=workers, names=names, sizes=sizes, rounds=rounds
    )
    result = measure_collectives(question, say)
    if result.cost.native_s:  # of an all-reduce, which runs make
        say(tell_kept(result.cost) if question.is_whole else NOT_KEPT)
    show(json, result.to_json, lambda: render_collectives(result))


@bench.command
def links(
    *,
    topology: str | None = None,
    cores: str | None = None,
    mib: int | None = None,
    json: Json = False,
) -> None:
    """Measure the links between cores: latency, bandwidth, NUMA nodes; rings over them.

    Example: paceline bench links --topology dgx1

    Parameters
    ----------
    topology
        Show a recorded machine instead of measuring: dgx1, pcie8, hosts2x4.
    cores
        Which cores to measure, separated by commas [default: up to eight of the available ones,
        spread evenly].
    mib
        Size of the buffer that is copied, in MiB [default: 16].
    """
    from ..bench.links import (
        measure_links,
        recorded,
        recorded_json,
        render_links,
        render_recorded,
        usual_cores,
    )

    if topology is not None:
        if cores is not None or mib is not None:
            idle = "--mib" if cores is None else "--cores"
            raise ConfigError(
                f"--topology {topology} measures nothing, so {idle} has no effect; leave one out"
            )
        machines = recorded(topology)
        show(json, lambda: recorded_json(machines), lambda: render_recorded(machines))
        return
    size = 16 if mib is None else mib
    if not 1 <= size <= 1 << 20:
        raise ConfigError(f"--mib must be >= 1 and at most 1048576, got {size}")
    chosen = usual_cores() if cores is None else _numbers(cores, "--cores", "0,1")
    result = measure_links(chosen, size << 20, say)
    show(json, result.to_json, lambda: render_links(result))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ScalingFlags:
    """Which runs are measured, and for how long.

    Parameters
    ----------
    workers
        Numbers of workers, separated by commas [default: 1,2,4 ... up to as many as can compute at
        once].
    protocol
        When gradients are combined in runs with more than one worker.
    weak
        Measure only runs in which each worker takes a whole batch; default: both kinds.
    strong
        Measure only runs in which the workers share a batch.
    batch_size
        Samples that one worker takes at once, and that n workers share [default: the task's].
    updates
        How many updates the run of one worker makes; with more workers each makes about as many
        steps.
    rounds
        How many rounds to measure; each round runs all of them in turn.
    engine
        Where workers run: local (processes) or inline (one process).
    threads
        Number of threads of each worker, however many workers there are.
    device
        Where to compute: auto (an accelerator, if one is here), cpu, cuda, cuda:1 ...
    seed
        Seed of the weights and of the data's order.
    plot
        Draw the picture into this SVG file.
    """

    workers: str | None = None
    protocol: str = "full-sync"
    weak: Annotated[bool, Parameter(negative=())] = False
    strong: Annotated[bool, Parameter(negative=())] = False
    batch_size: int | None = None
    updates: int = 60
    rounds: int = 5
    engine: str = "local"
    threads: int = 1
    device: str = "auto"
    seed: int = 0
    plot: Path | None = None


NO_SCALING = ScalingFlags()


@bench.command
def scaling(task: str, /, *, flags: ScalingFlags = NO_SCALING, json: Json = False) -> None:
    """Measure throughput, speed-up, efficiency and steps of real runs by number of workers.

    Example: paceline bench scaling lenet -n 1,2,4 --plot scaling.svg

    Parameters
    ----------
    task
        A built-in task or package.module:task.
    """
    from ..bench.scaling import measure_scaling

    writable(flags.plot)
    try:
        result = measure_scaling(_scaling_question(task, flags), say)
    except Interrupted as end:
        _show_scaling(end.summary, flags.plot, is_json=json)
        raise
    _show_scaling(result, flags.plot, is_json=json)


def _show_scaling(result: "MeasuredScaling", plot: Path | None, *, is_json: bool) -> None:
    from ..bench.scaling import draw_scaling, render_scaling

    draw(plot, lambda: draw_scaling(result))
    show(is_json, result.to_json, lambda: render_scaling(result))


def _scaling_question(task: str, flags: ScalingFlags) -> "ScalingQuestion":
    from ..bench.scaling import STRONG, WEAK, ScalingQuestion, usual_workers

    numbers = usual_workers(flags.device, flags.threads)
    if flags.workers is not None:
        numbers = _numbers(flags.workers, "--workers", "1,2,4")
    kinds = (WEAK,) * flags.weak + (STRONG,) * flags.strong
    return ScalingQuestion(
        task=task,
        workers=tuple(number for number in numbers if number != 1),
        kinds=kinds or (WEAK, STRONG),
        protocol=flags.protocol,
        batch_size=flags.batch_size,
        updates=flags.updates,
        rounds=flags.rounds,
        engine=flags.engine,
        threads=flags.threads,
        device=flags.device,
        seed=flags.seed,
    )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SplitFlags:
    """Which splits are run, and for how long.

    Parameters
    ----------
    workers
        Number of workers of each split but `none`; also -n.
    only
        Measure only this split, by its name in the table (repeat it for several): none, data,
        network, 2x2 [default: all].
    updates
        How many updates each run makes.
    rounds
        How many rounds to measure; each round runs all of them in turn.
    batch_size
        Number of samples in an update [default: the task's].
    plot
        Draw the picture into this SVG file.
    """

    workers: int = 2
    only: list[str] | None = None
    updates: int = 12
    rounds: int = 1
    batch_size: int | None = None
    plot: Path | None = None


NO_SPLITS = SplitFlags()


@bench.command
def splits(task: str, /, *, flags: SplitFlags = NO_SPLITS, json: Json = False) -> None:
    """Run every possible split for a few steps, beside the predictions of `plan --memory`.

    Example: paceline bench splits mlp -n 2 --only data --only network --plot splits.svg

    Parameters
    ----------
    task
        A built-in task or package.module:task.
    """
    from ..bench.splits import LiveSplitsQuestion, measure_splits

    writable(flags.plot)
    question = LiveSplitsQuestion(
        task=task, workers=flags.workers, only=tuple(flags.only or ()), updates=flags.updates,
        rounds=flags.rounds, batch_size=flags.batch_size,
    )  # fmt: skip
    try:
        result = measure_splits(question, say)
    except Interrupted as end:
        _show_splits(end.summary, flags.plot, is_json=json)
        raise
    _show_splits(result, flags.plot, is_json=json)


def _show_splits(result: "LiveSplits", plot: Path | None, *, is_json: bool) -> None:
    from ..report.live_splits import draw_live_splits, render_live_splits

    draw(plot, lambda: draw_live_splits(result))
    show(is_json, result.to_json, lambda: render_live_splits(result))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SweepFlags:
    """What to measure.

    Parameters
    ----------
    batch_sizes
        Batch sizes to measure, from small to large, separated by commas [default: 1, 4, 16 ...
        until memory runs out, or a step takes 10 s].
    precision
        Number formats to measure, separated by commas: fp32,bf16,fp16.
    seconds
        About how many seconds to measure each cell of the table.
    device
        Where to compute: cpu, cuda, cuda:1, or several separated by commas; cpu,cuda shows where
        one overtakes the other.
    threads
        Number of threads that torch computes with [default: torch's choice].
    machine
        What to call this machine in the table [default: its name].
    """

    batch_sizes: str | None = None
    precision: str = "fp32"
    seconds: float = 2.0
    device: str = "auto"
    threads: int | None = None
    machine: str | None = None


NO_SWEEP = SweepFlags()


@bench.command
def throughput(
    models: str | None = None,
    /,
    *,
    here: SweepFlags = NO_SWEEP,
    merge: list[Path] | None = None,
    images: int = 2_500_000,
    epochs: int = 90,
    plot: Path | None = None,
    json: Json = False,
) -> None:
    """Measure images a second and memory by batch size and precision, until memory runs out.

    Example: paceline bench throughput lenet,resnet18 --precision fp32,bf16 --plot speed.svg

    Parameters
    ----------
    models
        Tasks to measure, separated by commas; leave them out with --merge alone.
    merge
        A table of another machine to show beside this one's: a file that --json wrote (repeat it
        for several).
    images
        Number of images in a data set; the table shows how many days --epochs over it take. The
        default is that of Places.
    epochs
        Number of passes over that data set.
    plot
        Draw the picture into this SVG file.
    """
    from ..bench.throughput import draw_throughput, render_throughput, to_json

    if images < 1 or epochs < 1:
        raise ConfigError(f"--images and --epochs must be >= 1, got {images} and {epochs}")
    writable(plot)
    whole = _table(models, here, merge or [])
    draw(plot, lambda: draw_throughput(whole))
    show(json, lambda: to_json(whole), lambda: render_throughput(whole, images, epochs))


def _table(models: str | None, here: SweepFlags, files: list[Path]) -> "list[ThroughputRow]":
    """Rows of other machines' files, and this machine's unless only files are named."""
    from ..bench.throughput import merged

    others = merged(files, [])  # an unreadable file is an error before the work
    if models is None and files:
        if here != NO_SWEEP:
            raise ConfigError(
                "--merge alone measures nothing here; name the models to measure as well"
            )
        return others
    return merged([], [*others, *_swept(models or "lenet", here)])


def _swept(models: str, here: SweepFlags) -> "list[ThroughputRow]":
    """This machine's rows of the table."""
    from ..bench.device import chosen_device, chosen_threads
    from ..bench.throughput import ThroughputQuestion, sweep

    name = here.machine or platform.node() or "here"
    rows = []
    for kind in here.device.split(","):
        question = ThroughputQuestion(
            models=tuple(models.split(",")),
            precisions=tuple(here.precision.split(",")),
            seconds=here.seconds,
            device=chosen_device(kind),
            threads=chosen_threads(here.threads),
        )
        if here.batch_sizes is not None:
            sizes = _numbers(here.batch_sizes, "--batch-sizes", "1,16,256")
            question = replace(question, batch_sizes=sizes)
        rows += sweep(question, name, say)
    return rows


def _numbers(text: str, flag: str, example: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(number) for number in text.split(",")}))
    except ValueError:
        raise ConfigError(f"{flag} must be whole numbers such as {example}, got {text!r}") from None


def _size(size: int | None, kind: str) -> int:
    """Rows of the matrices: the chapter's on a GPU; fewer on a CPU, where those take a minute."""
    return size if size is not None else 512 if kind == "cpu" else 4000
