"""``paceline simulate``: run a protocol in virtual time, without any workers."""

import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from ..config import RunSettings, flag_of, of_flags
from ..errors import ConfigError, Interrupted
from ..protocols.streaming import Streaming
from .flags import Json, say, show

if TYPE_CHECKING:
    from ..predict.simulation import World

_EVERY_S = 2.0
_DEFAULT_UPDATES = 10_000


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class WorldFlags:
    """Stragglers, links and times of the workers.

    Parameters
    ----------
    delay
        How long a step takes: 20ms, exp:20ms, 10ms+exp:5ms, pareto:2,10ms, lognormal:0.5,10ms,
        weibull:1.5,10ms, list:8ms,9ms,30ms; 1=exp:20ms for worker 1 alone.
    slow
        Make a worker slow: 1=5x always; 1=5x@60s/10s for 10 s about every 60 s; *=5x@60s/10s all
        workers.
    away
        Take a worker away: 3=10s..60s, 3=..10s (starts late), 3=60s.. (for good).
    link
        Latency and rate of each worker's link: 1ms,100MB/s.
    server
        Rate of the server's link, shared by all workers: 1GB/s.
    bytes
        Number of bytes in a push, and in a pull: 500kB.
    like
        Draw times of computing and exchanges from those measured in this run (runs/latest), with
        its stragglers, or those of --delay and --slow.
    cores
        With --like, number of cores that the workers share [default: as many as in that run].
    seed
        Seed of all random draws.
    """

    delay: list[str] | None = None
    slow: list[str] | None = None
    away: list[str] | None = None
    link: str | None = None
    server: str | None = None
    bytes: str | None = None
    like: Path | None = None
    cores: int | None = None
    seed: int = 0


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TrainingFlags:
    """What is trained, if a task is named.

    Parameters
    ----------
    batch_size
        Number of samples in an update, over all workers [default: the task's].
    mini_batch_size
        Number of samples a worker takes at once; an update averages K times as many.
    lr
        Learning rate [default: the task's].
    epochs
        Stop after this many passes over the data [default: the task's].
    seconds
        Stop after this many seconds; virtual seconds are checked when an epoch ends.
    target_accuracy
        Stop at the end of the epoch that reaches this test accuracy (0 to 1).
    dropped
        What happens to abandoned mini-batches: train them later (requeue), or drop them as in
        the papers (skip).
    nonfinite
        What happens after a gradient that is not finite: the run ends (error), or the update is
        skipped (skip).
    init
        Weights at the start: default is torch's; otherwise the task's own.
    """

    batch_size: int | None = None
    mini_batch_size: int | None = None
    lr: float | None = None
    epochs: int | None = None
    seconds: float | None = None
    target_accuracy: float | None = None
    dropped: str | None = None
    nonfinite: str | None = None
    init: str | None = None


NO_WORLD, NO_TRAINING = WorldFlags(), TrainingFlags()


def world_of(flags: WorldFlags) -> "World":
    """The flags as a ``World``."""
    from ..predict.simulation import World

    return World(
        delay=tuple(flags.delay or ()), slow=tuple(flags.slow or ()), away=tuple(flags.away or ()),
        link=flags.link, server=flags.server, num_bytes=flags.bytes, like=flags.like,
        cores=flags.cores, seed=flags.seed,
    )  # fmt: skip


def simulate(
    task: Annotated[str | None, Parameter(show=True)] = None,
    /,
    *,
    workers: int = 1,
    protocol: str = "full-sync",
    staleness: str = "none",
    outer: str = "none",
    fragments: int = 1,
    overlap: int = 0,
    world: WorldFlags = NO_WORLD,
    training: TrainingFlags = NO_TRAINING,
    updates: int | None = None,
    batched: Annotated[bool, Parameter(negative=())] = False,
    run_dir: Path | None = None,
    json: Json = False,
) -> None:
    """Simulate a protocol in virtual time, and report its times beside theory.

    Parameters
    ----------
    task
        A task to train with real gradients, each at exactly the stale parameters that its worker
        would have [default: none, only time is simulated].
    workers
        Number of simulated workers; thousands are fine.
    protocol
        When gradients are combined, as for train: full-sync, k-sync:K, k-batch-sync:K, async,
        k-async:K, ...
    staleness
        What a stale gradient is worth: inverse, distance:C, drop:S or none.
    outer
        Under local-sgd, the step on the mean of the workers' differences: sgd:LR, momentum:LR,B,
        nesterov:LR,B.
    fragments
        Under local-sgd:H, exchange the parameters in this many parts, one every H/F local steps.
    overlap
        Number of local steps that workers continue during such an exchange.
    updates
        Stop after this many updates [default: 10,000 where only time is simulated].
    batched
        Compute the gradients of workers with equal parameters in one go (torch.func.vmap): faster
        for small models; equal within 1e-5 of a gradient's largest entry, not bit for bit.
    run_dir
        Write the run's trace here, for paceline report [default: with a task runs/NAME].
    """
    conditions = world_of(world)
    chosen = {name: value for name, value in asdict(training).items() if value is not None}
    if task is None:
        if chosen or batched:
            flag = flag_of(next(iter(chosen), "batched"))
            raise ConfigError(f"{flag} is for training: name a task, as in paceline simulate lenet")
        settings = RunSettings(
            workers=workers, protocol=protocol, staleness=staleness, outer=outer,
            fragments=fragments, overlap=overlap,
        )  # fmt: skip
        _simulate_time(settings, conditions, updates, run_dir, json)
    else:
        places = {
            "workers": workers, "protocol": protocol, "staleness": staleness, "outer": outer,
            "fragments": fragments, "overlap": overlap, "updates": updates, "seed": world.seed,
        }  # fmt: skip
        settings = of_flags({**chosen, **places})
        _simulate_training(task, settings, conditions, run_dir, json, batched)


def _simulate_time(
    settings: RunSettings, world: "World", updates: int | None,
    run_dir: Path | None, wants_json: bool,
) -> None:  # fmt: skip
    from ..predict.simulation import forecast
    from ..report.forecast import render_forecast

    num_updates = _DEFAULT_UPDATES if updates is None else updates
    progress = _Progress(num_updates)
    streaming = Streaming(num_fragments=settings.fragments, overlap_steps=settings.overlap)
    result = forecast(
        settings.protocol, settings.workers, world, num_updates, staleness=settings.staleness,
        outer=settings.outer, streaming=streaming, run_dir=run_dir,
        on_progress=progress.progress,
    )  # fmt: skip
    show(wants_json, result.to_json, lambda: render_forecast(result))


def _simulate_training(
    task: str, settings: RunSettings, world: "World", run_dir: Path | None, wants_json: bool,
    is_batched: bool,
) -> None:  # fmt: skip
    from ..predict.rehearsal import refuse_target, rehearse
    from ..protocols import protocol_of
    from ..report.forecast import render_forecast
    from ..report.terminal import render_summary
    from ..workloads import find_task

    find_task(task)
    protocol_of(settings)
    world.conditions(settings.workers, 1.0)  # invalid conditions are refused before torch is loaded
    refuse_target(task, settings)
    folder = run_dir or _new_folder(settings, f"simulated-{task}")
    progress = _Progress(settings.updates, wants_json)
    try:
        result = rehearse(task, settings, world, folder, progress, is_batched=is_batched)
    except Interrupted as end:
        summary = end.summary
        show(wants_json, summary.to_json, lambda: render_summary(summary))
        raise
    except ConfigError:
        if run_dir is None:
            with suppress(OSError):  # the run had started and left files
                folder.rmdir()
        raise
    show(
        wants_json,
        lambda: {**result.summary.to_json(), "forecast": result.forecast.to_json()},
        lambda: [*render_summary(result.summary), "", *render_forecast(result.forecast)],
    )


def _new_folder(settings: RunSettings, name: str) -> Path:
    from ..run_dir import make_folder

    with closing(make_folder(settings, name, is_latest=False)) as folder:
        return folder.path


class _Progress:
    """Prints progress: updates every two seconds on standard error, and each evaluation on
    standard output."""

    def __init__(self, num_updates: int | None, is_quiet: bool = False) -> None:
        self._num_updates = num_updates
        self._is_quiet = is_quiet
        self._start_s = time.perf_counter()
        self._next_s = self._start_s + _EVERY_S

    def progress(self, done: int) -> None:
        now_s = time.perf_counter()
        if now_s < self._next_s or not done:
            return
        self._next_s = now_s + _EVERY_S
        text = f"{done:,} updates"
        if self._num_updates:
            left_s = (now_s - self._start_s) * (self._num_updates / done - 1.0)
            text = f"{done:,} of {self._num_updates:,} updates, {left_s:.0f} s left"
        say(text)

    def evaluated(self, epoch: int, at_s: float, metrics: Mapping[str, float]) -> None:
        from ..report.live import format_metrics
        from ..report.text import format_duration

        if not self._is_quiet:
            print(
                f"{format_metrics(epoch, metrics, None)} after {format_duration(at_s)}", flush=True
            )
