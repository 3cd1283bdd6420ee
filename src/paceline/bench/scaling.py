"""How training gains by more workers: real runs of one task by 1, 2, 4 ... of them, in turn.

    one worker   mini-batch B             full-sync, which is plain training
    weak         n workers, B each        the batch grows with them
    strong       n workers, B / n each    the batch stays as it is

    speed-up     samples a second of n workers over one worker's, in the same round
    efficiency   speed-up / n: where all wait for all and mini-batches are the same, one worker's
                 time for an iteration over that of n

A round is a run of each; rounds differ in their order, so what else the machine does meets all of
them. A run counts once it is warm, and only within epochs (`Tally.warm`); only samples that are in
updates count. Every worker has the same number of threads, whatever n is. Above 300 lines, since
question, measurement, table and picture are one file, as of the others here. This module must not
know how a run is carried out.

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
"""Of each worker, while it fills caches and allocates."""
_IDEAL_POINTS = 32
"""Of the curve that is straight but for its axis, which is logarithmic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingQuestion:
    """What is measured.

    Args:
        workers: how many of them, without 1, which is always measured.
        kinds: WEAK, STRONG or both.
        batch_size: B, samples of one worker; None: those of the task.
        updates: of one worker, and so about the steps that each worker makes, >= 10.
        rounds: runs of each, >= 1.
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
                "torchrun starts its workers itself; bench scaling starts new ones for each run: "
                "use --engine local"
            )
        for number in self.workers:
            parse(self.protocol, number)


class ScalingCase(NamedTuple):
    """One row: a number of workers, and each one's share of the batch."""

    kind: str
    workers: int
    mini_batch_size: int

    @property
    def label(self) -> str:
        return "1 worker" if self.workers == 1 else f"{self.workers} workers, {self.kind}"


class ScalingSample(NamedTuple):
    """What one run came to; `steps_s`: from a worker's push to its next."""

    samples_per_s: float
    updates_per_s: float
    steps_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow(Measured):
    """One row of the result; lists have an entry a round, other figures are medians over rounds."""

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
        places: workers that can compute at the same time: cores over threads, or accelerators.
        one_worker_run: where the first run of one worker lies, for later runs to be compared with.
        interrupted_in: the round and row that the user ended it in, or "".
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
    """1, 2, 4 ..., up to as many as compute at the same time; 2 at least."""
    most = max(2, _places(device, threads))
    return tuple(2**power for power in range(most.bit_length()))


def _places(device: str, threads: int) -> int:
    """Workers that can compute at the same time: accelerators, or cores over threads."""
    return count_accelerators(device) or max(1, num_cores() // max(1, threads))


def cases(question: ScalingQuestion, batch_size: int) -> list[ScalingCase]:
    """The rows, one worker first.

    Raises:
        ConfigError: a worker would have no sample of the batch.
    """
    found = [ScalingCase("", 1, batch_size)]
    for number in question.workers:
        for kind in question.kinds:
            size = batch_size if kind == WEAK else batch_size // number
            if not size:
                raise ConfigError(
                    f"a batch of {batch_size} has no sample for each of {number} workers; give a "
                    "larger --batch-size, or leave out --strong"
                )
            found.append(ScalingCase(kind, number, size))
    return found


def measure_scaling(
    question: ScalingQuestion, say: Callable[[str], None] = lambda line: None
) -> MeasuredScaling:
    """Run all of it.

    Raises:
        ConfigError: the task is unknown, a run cannot be as asked, or an epoch is too short.
        WorkerError: a worker failed.
        Interrupted: the user ended it after one worker's run and another were measured.
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
    """One run; its files are thrown away unless they are to be kept there."""
    protocol = parse(question.protocol if case.workers > 1 else "full-sync", case.workers)
    pushes = protocol.num_pushes * protocol.num_steps
    updates = max(10, math.ceil(question.updates * case.workers / pushes))
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        run = Path(keep or f"{folder}/run")
        settings = RunSettings(
            workers=case.workers, protocol=str(protocol), engine=question.engine,  # type: ignore[arg-type]  # one of the engines, asked for as a word
            mini_batch_size=case.mini_batch_size, updates=updates,
            epochs=updates * protocol.num_steps,  # an epoch makes one update at least
            threads=question.threads, device=question.device, seed=question.seed,
            run_dir=str(run), checkpoint_every="never", nonfinite="skip",
        )  # fmt: skip
        launch_run(TaskProgram(task=question.task), settings, QuietObserver())
        return read_sample(run, about)


def read_sample(run: Path, about: dict[str, str]) -> ScalingSample:
    """What the trace of a run says of its speed; ``about`` is told its device and data.

    Raises:
        ConfigError: no epoch has two updates, so there is nothing between them.
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
            "updates: nothing between updates can be measured; give a smaller --batch-size"
        )
    return ScalingSample(tally.warm.samples / warm_s, tally.warm.updates / warm_s, tuple(steps_s))


def _result(
    question: ScalingQuestion,
    found: Mapping[ScalingCase, Mapping[int, ScalingSample]],
    about: Mapping[str, str],
    interrupted_in: str = "",
) -> MeasuredScaling:
    (alone, *_) = found.values()
    device = about["device"].partition(":")[0]
    return MeasuredScaling(
        task=question.task, protocol=question.protocol, engine=question.engine, device=device,
        source=about["source"], threads=question.threads, places=_places(device, question.threads),
        rounds=question.rounds, updates=question.updates, one_worker_run=about["kept"],
        rows=tuple(_row(case, alone, runs) for case, runs in found.items() if runs),
        interrupted_in=interrupted_in,
    )  # fmt: skip


def _row(
    case: ScalingCase, alone: Mapping[int, ScalingSample], runs: Mapping[int, ScalingSample]
) -> ScalingRow:
    speedups = tuple(
        one.samples_per_s / alone[number].samples_per_s
        for number, one in runs.items() if number in alone
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
    """The least value that at least 95 % of them do not exceed."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def render_scaling(result: MeasuredScaling) -> list[str]:
    """What was measured, the table, and what the figures do not say."""
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
    if result.engine != "inline":  # no run goes by one whose workers were in one process
        lines.append(
            f"one worker's first run lies in {result.one_worker_run}: runs of more workers with "
            f"--mini-batch-size {result.rows[0].mini_batch_size} --threads {result.threads} say "
            "their efficiency by it"
        )
    if result.interrupted_in:
        lines.append(f"interrupted in {result.interrupted_in}")
    return lines


def _median(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f}" if values else "-"


def _spread(row: ScalingRow) -> str:
    """Of the efficiency; of one worker, whose efficiency is 1, of its samples a second."""
    values: Sequence[float] = row.efficiencies
    if row.workers == 1:
        middle = statistics.median(row.samples_per_s)
        values = [rate / middle for rate in row.samples_per_s]
    return f"{min(values):.3f} to {max(values):.3f}" if values else "-"


def _shared(result: MeasuredScaling) -> Iterator[str]:
    """One sentence where more workers than places make a figure that means little."""
    many = [row.workers for row in result.rows if row.workers > result.places]
    if many:
        if result.device == "cpu":
            what = f"core{'s' * (num_cores() != 1)}"
            places = f"{num_cores()} {what}"
        else:
            places = f"{result.places} accelerator{'s' * (result.places != 1)}"
        yield (
            f"{min(many)} workers and more share {places}: their efficiency says how these are "
            "shared, and little of how the task scales"
        )


def draw_scaling(result: MeasuredScaling) -> str:
    """The text of an SVG file: samples a second and efficiency against the number of workers."""
    alone = result.rows[0]
    one_per_s = statistics.median(alone.samples_per_s)
    longest = math.log2(max(row.workers for row in result.rows))
    places = [longest * number / _IDEAL_POINTS for number in range(_IDEAL_POINTS + 1)]
    ideal = tuple(Point(t=t, value=2**t * one_per_s) for t in places)
    even = tuple(Point(t=t, value=1.0) for t in (0.0, longest))
    speeds = [Curve(name="n times one worker", points=ideal)]
    shares = [Curve(name="n times one worker", points=even)]
    for kind in dict.fromkeys(row.kind for row in result.rows[1:]):
        rows = [alone, *(row for row in result.rows if row.kind == kind and row.efficiencies)]
        speeds.append(_curve(kind, rows, lambda one: one.samples_per_s))
        shares.append(_curve(kind, rows, lambda one: one.efficiencies))
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
    """Medians over the workers, and each round as a dot."""
    return Curve(
        name=name,
        points=tuple(
            Point(t=math.log2(row.workers), value=statistics.median(values(row))) for row in rows
        ),
        dots=tuple(
            Point(t=math.log2(row.workers), value=value) for row in rows for value in values(row)
        ),
    )
