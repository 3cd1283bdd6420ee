"""What a batch size is worth: gradient noise, throughput and time to accuracy, side by side.

    noise (at the task's own batch size) -> a learning rate for each batch size
          -> real trainings to the target, several seeds each -> one row a batch size

It must not know how it is shown.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import ConfigError
from ..workloads import load_task
from .noise import Noise, scaled_rate
from .to_accuracy import Reached, Training, noise_of, train_to

_DRAWS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked for.

    Args:
        spec: a task.
        device: as torch writes it.
        batch_sizes: to be trained with, each >= 1; none: the task's own, a quarter to four times.
        target: test accuracy, 0 < target <= 1; None: noise alone.
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
class Choice:
    """One batch size: its trainings, one a seed."""

    batch_size: int
    learning_rate: float
    runs: tuple[Reached, ...]

    @property
    def samples_per_s(self) -> float:
        return statistics.median(one.samples_per_s for one in self.runs)

    @property
    def updates(self) -> int:
        return round(statistics.median(one.updates for one in self.runs))

    @property
    def seconds(self) -> float | None:
        """Median over the seeds; None where one of them did not reach the target."""
        found = [one.seconds for one in self.runs if one.seconds is not None]
        return statistics.median(found) if len(found) == len(self.runs) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """All that was measured; ``rows`` is empty without a target."""

    task: str
    source: str
    device: str
    after: int
    own_batch_size: int
    own_rate: float
    target: float | None
    noise: Noise
    rows: tuple[Choice, ...]

    @property
    def quickest(self) -> Choice | None:
        """The row that reached the target first."""
        done = [one for one in self.rows if one.seconds is not None]
        return min(done, key=lambda one: one.seconds or 0.0) if done else None


def compare_batch_sizes(wish: Wish, say: Callable[[str], None]) -> Choices:
    """Measure the noise, then train.

    Raises:
        ConfigError: the task is unknown, or has no accuracy to reach.
    """
    task = load_task(wish.spec)
    splits = task.splits()
    num_samples = len(splits.train)  # type: ignore[arg-type]  # a map-style data set has a length
    say(f"{task.name}: gradient noise after {wish.after:,} updates")
    noise = noise_of(task, splits, wish.device, after=wish.after, draws=_DRAWS)
    rows = []
    own = task.batch_size
    sizes = wish.batch_sizes or tuple(max(1, own * times // 4) for times in (1, 2, 4, 8, 16))
    for batch_size in sorted(set(sizes)) if wish.target is not None else ():
        rate = scaled_rate(task.learning_rate, task.batch_size, batch_size, noise.scale)
        say(f"{task.name}: training with batch {batch_size:,}, lr {rate:.3g}")
        runs: list[Reached] = []
        for seed in range(wish.seeds):
            if runs and runs[-1].seconds is None:
                break  # another seed would not make it a batch size to take
            training = Training(task, splits, wish.device, batch_size, rate, seed)
            assert wish.target is not None
            runs.append(train_to(training, wish.target, num_samples, task.epochs))
        rows.append(Choice(batch_size=batch_size, learning_rate=rate, runs=tuple(runs)))
    return Choices(
        task=task.name,
        source=splits.source,
        device=wish.device,
        after=wish.after,
        own_batch_size=task.batch_size,
        own_rate=task.learning_rate,
        target=wish.target,
        noise=noise,
        rows=tuple(rows),
    )
