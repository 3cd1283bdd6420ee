"""Compare batch sizes by gradient noise, throughput and time to accuracy.

noise (at the task's own batch size) -> a learning rate for each batch size
      -> real trainings to the target, several seeds each -> one row a batch size
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import ConfigError
from ..report.chart import Curve, Diagram, draw_chart
from ..report.text import Point, table, three_figures
from ..workloads import load_task
from .training import Noise, Reached, TrainingRun, noise_of, scaled_rate, train_to

_DRAWS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizeQuestion:
    """The question.

    Args:
        spec: a task.
        device: torch's name of it.
        batch_sizes: to train with, each from 1 to all samples; empty: a quarter to four times the
            task's own, at most all samples.
        target: test accuracy, 0 < target <= 1; None: measure only the noise.
        after: updates before the noise is measured.
        seeds: trainings of each batch size.
    """

    spec: str
    device: str
    batch_sizes: tuple[int, ...] = ()
    target: float | None = None
    after: int = 100
    seeds: int = 3

    def __post_init__(self) -> None:
        if min(self.batch_sizes, default=1) < 1:
            raise ConfigError(f"--batch-sizes must be >= 1, got {list(self.batch_sizes)}")
        if self.target is not None and not 0 < self.target <= 1:
            raise ConfigError(f"--target-accuracy must be > 0 and <= 1, got {self.target}")
        if self.after < 0 or self.seeds < 1:
            raise ConfigError(
                f"--after must be >= 0 and --seeds >= 1, got {self.after} and {self.seeds}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChoice:
    """The trainings with one batch size, one a seed."""

    batch_size: int
    learning_rate: float
    runs: tuple[Reached, ...]

    @property
    def samples_per_s(self) -> float:
        return statistics.median(run.samples_per_s for run in self.runs)

    @property
    def updates(self) -> int:
        return round(statistics.median(run.updates for run in self.runs))

    @property
    def seconds(self) -> float | None:
        """Median over the seeds; None if one of them did not reach the target."""
        times = [run.seconds for run in self.runs if run.seconds is not None]
        return statistics.median(times) if len(times) == len(self.runs) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """All measurements; ``rows`` is empty without a target."""

    question: BatchSizeQuestion
    task: str
    source: str
    own_batch_size: int
    own_rate: float
    noise: Noise
    rows: tuple[BatchChoice, ...]

    @property
    def quickest(self) -> BatchChoice | None:
        """The row with the least time to the target; None if no row reached it."""
        done = [row for row in self.rows if row.seconds is not None]
        return min(done, key=lambda row: row.seconds or 0.0) if done else None


def compare_batch_sizes(question: BatchSizeQuestion, say: Callable[[str], None]) -> Choices:
    """Measure the noise, train with each batch size, and return the results.

    Raises:
        ConfigError: the task is unknown, has no accuracy to reach or diverges, or a batch is
            larger than its data.
    """
    task = load_task(question.spec)
    splits = task.splits()
    num_samples = len(splits.train)  # type: ignore[arg-type]  # a map-style data set has a length
    sizes = _sizes(question, task.batch_size, num_samples) if question.target is not None else []
    say(f"{task.name}: gradient noise after {question.after:,} updates")
    noise = noise_of(task, splits, question.device, after=question.after, draws=_DRAWS)
    if not (math.isfinite(noise.signal) and math.isfinite(noise.trace)):
        raise ConfigError(
            f"{task.name} diverges: after {question.after:,} updates its gradients are not finite; "
            f"use a smaller --after, or give the task a lower learning rate"
        )
    rows = []
    for batch_size in sizes:
        rate = scaled_rate(task.learning_rate, task.batch_size, batch_size, noise.scale)
        say(f"{task.name}: training with batch {batch_size:,}, lr {rate:.3g}")
        runs: list[Reached] = []
        for seed in range(question.seeds):
            if runs and runs[-1].seconds is None:
                break  # a batch size must reach the target with every seed
            training = TrainingRun(task, splits, question.device, batch_size, rate, seed)
            assert question.target is not None
            runs.append(train_to(training, question.target, num_samples, task.epochs))
        rows.append(BatchChoice(batch_size=batch_size, learning_rate=rate, runs=tuple(runs)))
    return Choices(
        question=question, task=task.name, source=splits.source, own_batch_size=task.batch_size,
        own_rate=task.learning_rate, noise=noise, rows=tuple(rows),
    )  # fmt: skip


def _sizes(question: BatchSizeQuestion, own: int, num_samples: int) -> list[int]:
    """Return the batch sizes to train with, each at most all samples."""
    largest = max(question.batch_sizes, default=0)
    if largest > num_samples:
        raise ConfigError(
            f"--batch-sizes {largest}: {question.spec} has {num_samples:,} samples to train "
            "on, and no batch can be larger"
        )
    sizes = question.batch_sizes or [max(1, own * factor // 4) for factor in (1, 2, 4, 8, 16)]
    return sorted({min(size, num_samples) for size in sizes})


_BAR = 16
_HEIGHT = 150.0


def render_choices(choices: Choices) -> list[str]:
    """Return the lines of the report: the noise, then a row for each batch size."""
    low, high = (_samples(value) for value in choices.noise.interval)
    lines = [
        f"noise scale  {_samples(choices.noise.scale)} samples (95 %: {low} to {high}; "
        f"{choices.noise.draws} draws of {max(choices.noise.squared):,} samples, after "
        f"{choices.question.after:,} updates)",
        "             at that batch half of a gradient's square is noise; well above it, a larger "
        "batch saves few updates",
        "",
    ]
    if not choices.rows:
        noise = choices.noise
        shares = [
            (f"{size:,}", f"{noise.measured_share(size):.0%}", _bar(noise.share(size), 1.0))
            for size in noise.squared
        ]
        return [*lines, *table(("batch", "noise", ""), shares)]
    times = [row.seconds for row in choices.rows if row.seconds is not None]
    cells = [_cells(choices, row, max(times, default=1.0)) for row in choices.rows]
    target = f"time to {choices.question.target:g}"
    head = ("batch", "lr", "noise", "samples/s", "updates", target, "")
    best = choices.quickest
    advice = (
        f"quickest     --batch-size {best.batch_size} --lr {best.learning_rate:.3g}"
        if best is not None
        else "quickest     none: no batch size reached the target with every seed"
    )
    rule = (
        f"lr: {choices.own_rate:g} at the task's own batch {choices.own_batch_size:,}, then in "
        "proportion to 1 / (1 + noise scale / batch)"
    )
    return [*lines, *table(head, cells), "", advice, rule]


def _cells(choices: Choices, row: BatchChoice, longest_s: float) -> tuple[str, ...]:
    seconds = row.seconds
    if seconds is None:
        reached = sum(run.seconds is not None for run in row.runs)
        time = f"{reached} of {len(row.runs)} seeds"
    else:
        spread = [run.seconds or 0.0 for run in row.runs]
        least, most = three_figures(min(spread)), three_figures(max(spread))
        time = f"{three_figures(seconds)} ({least} to {most})"
    return (
        f"{row.batch_size:,}",
        f"{row.learning_rate:.3g}",
        f"{choices.noise.share(row.batch_size):.0%}",
        f"{row.samples_per_s:,.0f}",
        f"{row.updates:,}",
        time,
        _bar(seconds or 0.0, longest_s),
    )


def _bar(value: float, most: float) -> str:
    return f"{'#' * round(_BAR * value / most):<{_BAR}}|"


def _samples(value: float) -> str:
    return "infinitely many" if math.isinf(value) else f"{value:,.0f}"


def choices_json(choices: Choices) -> dict[str, object]:
    """Return the result as one JSON object; infinite values are null."""
    return {
        "task": choices.task,
        "source": choices.source,
        "device": choices.question.device,
        "noise_scale": _finite(choices.noise.scale),
        "noise_scale_interval": [_finite(value) for value in choices.noise.interval],
        "signal": choices.noise.signal,
        "trace": choices.noise.trace,
        "after_updates": choices.question.after,
        "noise_shares": {
            str(size): choices.noise.measured_share(size) for size in choices.noise.squared
        },
        "target_accuracy": choices.question.target,
        "rows": [
            {
                "batch_size": row.batch_size,
                "learning_rate": row.learning_rate,
                "noise_share": choices.noise.share(row.batch_size),
                "samples_per_s": row.samples_per_s,
                "updates": [run.updates for run in row.runs],
                "seconds": [run.seconds for run in row.runs],
                "accuracy": [run.accuracy for run in row.runs],
            }
            for row in choices.rows
        ],
    }


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else value


def draw_choices(choices: Choices) -> str:
    """Return an SVG file's text: noise, and with a target speed and time, over the batch size."""
    sizes = sorted({*choices.noise.squared, *(row.batch_size for row in choices.rows)})
    noise = Curve(
        name="noise (dots), 1 / (1 + batch / scale)",
        points=tuple(_at(size, 100 * choices.noise.share(size)) for size in sizes),
        dots=tuple(
            _at(size, 100 * choices.noise.measured_share(size)) for size in choices.noise.squared
        ),
    )
    diagrams = [("noise in a gradient's square (%)", noise)]
    if choices.rows:
        speed = tuple(_at(row.batch_size, row.samples_per_s) for row in choices.rows)
        times = tuple(
            _at(row.batch_size, row.seconds) for row in choices.rows if row.seconds is not None
        )
        diagrams += [
            ("samples a second", Curve(name="throughput", points=speed, dots=speed)),
            (
                f"seconds of training to test accuracy {choices.question.target:g}",
                Curve(name="time to accuracy (median)", points=times, dots=times),
            ),
        ]
    last = len(diagrams) - 1
    return draw_chart(
        f"{choices.task}: comparison of batch sizes",
        f"{choices.source}; {choices.question.device}; noise scale "
        f"{_samples(choices.noise.scale)} samples",
        [
            Diagram(
                label=label,
                curves=(curve,),
                x_label="samples a batch" if number == last else "",
                height=_HEIGHT,
                from_zero=True,
                is_log2=True,
                stop=math.log2(sizes[-1]) if number == last else None,
            )
            for number, (label, curve) in enumerate(diagrams)
        ],
    )


def _at(size: int, value: float) -> Point:
    return Point(t=math.log2(size), value=value)
