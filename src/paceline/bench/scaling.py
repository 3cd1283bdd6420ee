"""Scaling of training over workers: real runs of one task with 1, 2, 4 ... of them, in turns.

    one worker   mini-batch B             full-sync, which is plain training
    weak         n workers, B each        the batch grows with n
    strong       n workers, B / n each    the batch stays the same

    speed-up     samples a second of n workers over one worker's, in the same round
    efficiency   speed-up / n: with full-sync and equal mini-batches, one worker's iteration time
                 over that of n

A round is one run of each case. The order changes from round to round, so that other work on the
machine affects all cases. Steps count once a run is warm, and only within epochs (`Tally.warm`);
only samples in updates count. Every worker has the same number of threads for every n. Above
300 lines, since question, measurement, table and picture are one file, as in the other benchmarks.
This module must not know how a run is carried out.

Source: J. L. Gustafson, "Reevaluating Amdahl's Law", Communications of the ACM 31(5), 1988, for the
difference between weak (scaled) and strong (fixed) speed-up.
"""

import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..config import RunSettings
from ..engines.local.client import warm
from ..errors import ConfigError, Interrupted
from ..events import EpochEnd
from ..launch.launcher import launch_run
from ..program import TaskProgram
from ..protocols import parse
from ..report.chart import Curve, Diagram, draw_chart
from ..report.live import QuietObserver
from ..report.tally import Tally
from ..report.text import Point, format_duration, table
from ..run_dir import fresh_folder
from ..system.processors import count_accelerators, num_cores
from ..trace import FILE_NAME, read_trace
from ..trace.records import Handed, Ordered
from ..workloads import load_task
from .samples import Measured

WEAK, STRONG = "weak", "strong"
_WARM_UP_STEPS = 2
"""First steps of each worker, in which it fills caches and allocates."""
_IDEAL_POINTS = 32
"""Points of the ideal line, which is curved on the logarithmic axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingQuestion:
    """The question.

    Args:
        workers: numbers of workers, without 1, which is always measured.
        kinds: WEAK, STRONG or both.
        batch_size: B, mini-batch of one worker alone; None: the task's batch.
        updates: of the run of one worker, and so about the steps of each worker, >= 10.
        rounds: runs of each case, >= 1.
        threads: of each worker.
    """

    task: str
    workers: tuple[int, ...]
    kinds: tuple[str, ...] = (WEAK, STRONG)
    protocol: str = "full-sync"
    batch_size: int | None = None
    updates: int = 60
    rounds: int = 5
    engine: str = "local"
    threads: int = 1
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.workers, default=0) < 2:
            raise ConfigError(
                f"bench scaling needs -n with more than one worker, got {self.workers or '1'}; "
                "write -n 1,2,4"
            )
        for name, least in (("rounds", 1), ("updates", 10), ("threads", 1), ("batch_size", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} must be >= {least}, got {value}")
        if self.engine == "torchrun":
            raise ConfigError(
                "bench scaling starts new workers for each run, but torchrun starts its own: "
                "use --engine local"
            )
        for number in self.workers:
            parse(self.protocol, number)


class ScalingCase(NamedTuple):
    """One row: a number of workers and the mini-batch of each."""

    kind: str
    workers: int
    mini_batch_size: int

    @property
    def label(self) -> str:
        return "1 worker" if self.workers == 1 else f"{self.workers} workers, {self.kind}"


class ScalingSample(NamedTuple):
    """The speed of one run; ``steps_s``: seconds between a worker's pushes."""

    samples_per_s: float
    updates_per_s: float
    steps_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow(Measured):
    """One row of the result; tuples have one value a round, other figures are medians of rounds."""

    kind: str
    workers: int
    mini_batch_size: int
    samples_per_s: tuple[float, ...]
    speedups: tuple[float, ...]
    efficiencies: tuple[float, ...]
    step_s: float
    p95_step_s: float
    updates_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredScaling(Measured):
    """All rows; the first is one worker's.

    Args:
        places: workers that can compute at the same time: accelerators, or cores over threads.
        one_worker_run: folder of the first run of one worker, which later runs are compared with.
        interrupted_in: the round and row in which the user interrupted it, or "".
    """

    task: str
    protocol: str
    engine: str
    device: str
    source: str
    threads: int
    places: int
    rounds: int
    updates: int
    one_worker_run: str
    rows: tuple[ScalingRow, ...]
    interrupted_in: str = ""


def usual_workers(device: str, threads: int) -> tuple[int, ...]:
    """Return 1, 2, 4 ... up to the workers that can compute at the same time, but at least 1, 2."""
    most = max(2, _places(device, threads))
    return tuple(2**power for power in range(most.bit_length()))


def _places(device: str, threads: int) -> int:
    """Return how many workers compute at the same time: accelerators, or cores over threads."""
    return count_accelerators(device) or max(1, num_cores() // max(1, threads))


def cases(question: ScalingQuestion, batch_size: int) -> list[ScalingCase]:
    """Return the cases, one worker first.

    Raises:
        ConfigError: a worker would have no sample of the batch.
    """
    rows = [ScalingCase("", 1, batch_size)]
    for number in question.workers:
        for kind in question.kinds:
            size = batch_size if kind == WEAK else batch_size // number
            if not size:
                raise ConfigError(
                    f"a batch of {batch_size} has no sample for each of {number} workers; use a "
                    "larger --batch-size, or omit --strong"
                )
            rows.append(ScalingCase(kind, number, size))
    return rows


def measure_scaling(
    question: ScalingQuestion, say: Callable[[str], None] = lambda line: None
) -> MeasuredScaling:
    """Run all cases and return their speeds.

    Raises:
        ConfigError: the task is unknown, a run's settings are invalid, or an epoch is too short.
        WorkerError: a worker failed.
        Interrupted: the user interrupted it once one worker and another case were measured.
    """
    batch_size = question.batch_size or load_task(question.task).batch_size
    rows = cases(question, batch_size)
    kept = fresh_folder(f"one-worker-{question.task}")  # of its own: runs/latest stays as it was
    try:
        return _measure_rows(question, rows, {"kept": str(kept)}, say)
    finally:
        with suppress(OSError):  # a folder that holds a run stays
            kept.rmdir()


def _measure_rows(
    question: ScalingQuestion,
    rows: Sequence[ScalingCase],
    about: dict[str, str],
    say: Callable[[str], None],
) -> MeasuredScaling:
    """Run all rounds.

    Args:
        about: "kept": the folder for the first run of one worker; gets the device and the data.
    """
    samples: dict[ScalingCase, dict[int, ScalingSample]] = {case: {} for case in rows}
    with warm():
        for number in range(question.rounds):
            first = number % len(rows)
            for case in (*rows[first:], *rows[:first]):
                where = f"round {number + 1} of {question.rounds}: {case.label}"
                keep = about["kept"] if case.workers == 1 and not number else None
                try:
                    sample = _measure(question, case, about, keep)
                except KeyboardInterrupt:
                    if not any(set(samples[rows[0]]) & set(samples[row]) for row in rows[1:]):
                        raise KeyboardInterrupt from None  # one run's summary is no comparison
                    raise Interrupted(_result(question, samples, about, where)) from None
                samples[case][number] = sample
                say(f"{where}: {sample.samples_per_s:,.0f} samples/s")
    return _result(question, samples, about)


def _measure(
    question: ScalingQuestion, case: ScalingCase, about: dict[str, str], keep: str | None
) -> ScalingSample:
    """Make one run and return its speed.

    Args:
        about: gets the device and the data.
        keep: folder of the run; None: a temporary one.
    """
    protocol = parse(question.protocol if case.workers > 1 else "full-sync", case.workers)
    pushes = protocol.num_pushes * protocol.num_steps
    updates = max(10, math.ceil(question.updates * case.workers / pushes))
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        run = Path(keep or f"{folder}/run")
        settings = RunSettings(
            workers=case.workers, protocol=str(protocol), engine=question.engine,  # type: ignore[arg-type]  # the name of an engine
            mini_batch_size=case.mini_batch_size, updates=updates,
            epochs=updates * protocol.num_steps,  # an epoch makes at least one update
            threads=question.threads, device=question.device, seed=question.seed,
            run_dir=str(run), checkpoint_every="never", nonfinite="skip",
        )  # fmt: skip
        launch_run(TaskProgram(task=question.task), settings, QuietObserver())
        return read_sample(run, about)


def read_sample(run: Path, about: dict[str, str]) -> ScalingSample:
    """Return the speed of a run, from its trace.

    Args:
        about: gets the device and the data.

    Raises:
        ConfigError: epochs have too few updates to time anything between them.
    """
    tally, steps_s = Tally(), list[float]()
    last_s: dict[int, float] = {}
    num_steps: dict[int, int] = {}
    for record in read_trace(run / FILE_NAME):
        tally.add(record)
        if isinstance(record, Ordered) and isinstance(record.order, EpochEnd):
            last_s.clear()
        elif isinstance(record, Handed):
            member, at_s = record.fact.ticket.member, record.fact.at_s
            num_steps[member] = num_steps.get(member, 0) + 1
            if member in last_s and num_steps[member] > _WARM_UP_STEPS:
                steps_s.append(at_s - last_s[member])
            last_s[member] = at_s
    assert tally.header is not None
    about.update(device=tally.header.text("device"), source=tally.header.text("source"))
    warm_s = tally.warm.seconds
    if not warm_s or not steps_s:
        raise ConfigError(
            f"an epoch of {tally.header.number('num_samples'):,} samples has only one or two "
            "updates: the time between updates cannot be measured; use a smaller --batch-size"
        )
    return ScalingSample(tally.warm.samples / warm_s, tally.warm.updates / warm_s, tuple(steps_s))


def _result(
    question: ScalingQuestion,
    samples: Mapping[ScalingCase, Mapping[int, ScalingSample]],
    about: Mapping[str, str],
    interrupted_in: str = "",
) -> MeasuredScaling:
    (alone, *_) = samples.values()
    device = about["device"].partition(":")[0]
    return MeasuredScaling(
        task=question.task, protocol=question.protocol, engine=question.engine, device=device,
        source=about["source"], threads=question.threads, places=_places(device, question.threads),
        rounds=question.rounds, updates=question.updates, one_worker_run=about["kept"],
        rows=tuple(_row(case, alone, runs) for case, runs in samples.items() if runs),
        interrupted_in=interrupted_in,
    )  # fmt: skip


def _row(
    case: ScalingCase, alone: Mapping[int, ScalingSample], runs: Mapping[int, ScalingSample]
) -> ScalingRow:
    speedups = tuple(
        sample.samples_per_s / alone[number].samples_per_s
        for number, sample in runs.items() if number in alone
    )  # fmt: skip
    samples = runs.values()
    return ScalingRow(
        kind=case.kind, workers=case.workers, mini_batch_size=case.mini_batch_size,
        samples_per_s=tuple(sample.samples_per_s for sample in samples),
        speedups=speedups, efficiencies=tuple(speedup / case.workers for speedup in speedups),
        step_s=statistics.median(statistics.median(sample.steps_s) for sample in samples),
        p95_step_s=statistics.median(_p95(sample.steps_s) for sample in samples),
        updates_per_s=statistics.median(sample.updates_per_s for sample in samples),
    )  # fmt: skip


def _p95(values: Sequence[float]) -> float:
    """Return the smallest value that at least 95 % of the values do not exceed."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def render_scaling(result: MeasuredScaling) -> list[str]:
    """Return the lines of the report: settings, table and notes."""
    header = ("", "mini-batch", "samples/s", "speed-up", "efficiency", "least to most", "step",
              "95 % within", "updates/s")  # fmt: skip
    rows = [
        (
            ScalingCase(row.kind, row.workers, row.mini_batch_size).label,
            f"{row.mini_batch_size:,}",
            f"{statistics.median(row.samples_per_s):,.0f}",
            _median(row.speedups, 2),
            _median(row.efficiencies, 3),
            _spread(row),
            format_duration(row.step_s),
            format_duration(row.p95_step_s),
            f"{row.updates_per_s:,.1f}",
        )
        for row in result.rows
    ]
    threads = f"{result.threads} thread{'s' * (result.threads != 1)}"
    rounds = f"{result.rounds} round{'s' * (result.rounds != 1)}"
    lines = [
        f"{result.task}, {result.protocol}, {result.engine} engine on {result.device}; "
        f"{result.source}",
        f"{threads} a worker; {rounds} of {result.updates} steps a worker, in turn; medians",
        "",
        *table(header, rows),
        "",
        *_shared(result),
    ]
    if result.engine != "inline":  # later runs are not compared with an inline one
        lines.append(
            f"one worker's first run is in {result.one_worker_run}: runs of more workers with "
            f"--mini-batch-size {result.rows[0].mini_batch_size} --threads {result.threads} report "
            "their efficiency against it"
        )
    if result.interrupted_in:
        lines.append(f"interrupted in {result.interrupted_in}")
    return lines


def _median(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f}" if values else "-"


def _spread(row: ScalingRow) -> str:
    """Return the spread of the efficiency; for one worker, of its speed over the median."""
    values: Sequence[float] = row.efficiencies
    if row.workers == 1:
        middle = statistics.median(row.samples_per_s)
        values = [rate / middle for rate in row.samples_per_s]
    return f"{min(values):.3f} to {max(values):.3f}" if values else "-"


def _shared(result: MeasuredScaling) -> Iterator[str]:
    """Yield a note if workers share cores or accelerators, which makes efficiency mean little."""
    crowded = [row.workers for row in result.rows if row.workers > result.places]
    if crowded:
        if result.device == "cpu":
            places = f"{num_cores()} core{'s' * (num_cores() != 1)}"
        else:
            places = f"{result.places} accelerator{'s' * (result.places != 1)}"
        yield (
            f"{min(crowded)} or more workers share {places}: their efficiency shows the sharing "
            "rather than how the task scales"
        )


def draw_scaling(result: MeasuredScaling) -> str:
    """Return an SVG file's text: samples a second and efficiency over the number of workers."""
    alone = result.rows[0]
    alone_per_s = statistics.median(alone.samples_per_s)
    longest = math.log2(max(row.workers for row in result.rows))
    logs = [longest * number / _IDEAL_POINTS for number in range(_IDEAL_POINTS + 1)]
    ideal = tuple(Point(t=t, value=2**t * alone_per_s) for t in logs)
    even = tuple(Point(t=t, value=1.0) for t in (0.0, longest))
    speeds = [Curve(name="n times one worker", points=ideal)]
    shares = [Curve(name="n times one worker", points=even)]
    for kind in dict.fromkeys(row.kind for row in result.rows[1:]):
        rows = [alone, *(row for row in result.rows if row.kind == kind and row.efficiencies)]
        speeds.append(_curve(kind, rows, lambda row: row.samples_per_s))
        shares.append(_curve(kind, rows, lambda row: row.efficiencies))
    return draw_chart(
        f"{result.task}: scaling over workers",
        f"{result.protocol}, {result.engine} engine, {result.device}, threads a worker: "
        f"{result.threads}; medians of {result.rounds} rounds; dots: each round",
        [
            Diagram(label="samples a second", curves=tuple(speeds), from_zero=True),
            Diagram(
                label="efficiency: speed-up / workers", curves=tuple(shares), from_zero=True,
                height=200.0, x_label="workers", is_log2=True,
            ),
        ],
    )  # fmt: skip


def _curve(
    name: str, rows: Sequence[ScalingRow], values: Callable[[ScalingRow], Sequence[float]]
) -> Curve:
    """Return the curve of medians over the number of workers, with a dot for each round."""
    return Curve(
        name=name,
        points=tuple(
            Point(t=math.log2(row.workers), value=statistics.median(values(row))) for row in rows
        ),
        dots=tuple(
            Point(t=math.log2(row.workers), value=value) for row in rows for value in values(row)
        ),
    )
