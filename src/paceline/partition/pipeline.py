"""Describe what a cut is for: the workers, the link between two, micro-batches, their schedule.

This module must not know models.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..collectives.base import LinkCost
from ..errors import ConfigError, unknown
from .schedules import SCHEDULES, live_micro_batches

MICRO_BATCHES_EACH = (1, 2, 4)
"""Numbers of micro-batches per worker's mini-batch that a run chooses from."""


class EndSizes(NamedTuple):
    """The sizes of an update's very first and very last micro-batch.

    Each is relative to the other micro-batches of its rank, where the micro-batches of one rank
    follow those of another. A rank with only one is given two if it has an end that is smaller.
    """

    first: float = 1.0
    last: float = 1.0


ALIKE = EndSizes()


def micro_batch_shares(
    ranks: int, each: int, ends: EndSizes = ALIKE
) -> tuple[tuple[float, ...], ...]:
    """Return, for each rank, the share of its mini-batch that each of its micro-batches is.

    Args:
        each: micro-batches per rank.

    Example:
        >>> micro_batch_shares(2, 2, EndSizes(0.25, 1.0))
        ((0.2, 0.8), (0.5, 0.5))
        >>> micro_batch_shares(2, 1, EndSizes(0.25, 1.0))
        ((0.2, 0.8), (1.0,))
    """
    rank_sizes = [[1.0] * each for _ in range(ranks)]
    if each == 1:
        rank_sizes[0] += [1.0] * (ends.first != 1.0)
        rank_sizes[-1] += [1.0] * (ends.last != 1.0)
    rank_sizes[0][0] *= ends.first
    rank_sizes[-1][-1] *= ends.last
    return tuple(tuple(size / sum(sizes) for size in sizes) for sizes in rank_sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineWorker:
    """One worker: its speed and its memory.

    Args:
        speed: relative to the worker that the costs were measured on.
        memory_bytes: limit on what it may hold; None: no limit.
    """

    speed: float = 1.0
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.speed < float("inf"):
            raise ConfigError(f"the speed of a worker must be > 0, got {self.speed:g}")
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise ConfigError(f"the memory of a worker must be > 0, got {self.memory_bytes}")


def workers(
    num: int, memory_bytes: int | None = None, speeds: Sequence[float] = ()
) -> tuple[PipelineWorker, ...]:
    """Return ``num`` workers that differ at most in speed.

    Raises:
        ConfigError: ``num`` is less than 1, or is not the number of speeds.
    """
    if num < 1:
        raise ConfigError(f"-n must be >= 1, got {num}")
    if speeds and len(speeds) != num:
        raise ConfigError(f"--speeds needs one for each of {num} workers, got {len(speeds)}")
    return tuple(
        PipelineWorker(speed=speed, memory_bytes=memory_bytes) for speed in speeds or [1.0] * num
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The setting that a model is cut for.

    Args:
        workers: the worker of each part.
        link: cost of a message between two workers; both are busy for its seconds.
        micro_batches: M, per update.
        schedule: a name in `SCHEDULES`; it determines how many micro-batches are alive in a part.
        state_copies: k, the optimizer's copies of the parameters: 1 with momentum, 2 for Adam.
        update_s_per_byte: the optimizer's seconds per byte of parameters, once per update.
        keeps_ties: never separate nodes that share a parameter.
        trains_each: require parameters in every part.
        parts_each: parts per worker; ``workers`` lists all P of them, then all P again, ...
    """

    workers: tuple[PipelineWorker, ...]
    link: LinkCost = field(default_factory=lambda: LinkCost(latency_s=0.0, s_per_byte=0.0))
    micro_batches: int = 1
    schedule: str = "1f1b"
    state_copies: int = 0
    update_s_per_byte: float = 0.0
    keeps_ties: bool = False
    trains_each: bool = False
    parts_each: int = 1

    def __post_init__(self) -> None:
        if not self.workers:
            raise ConfigError("a pipeline needs at least one worker")
        if self.micro_batches < 1:
            raise ConfigError(f"--micro-batches must be >= 1, got {self.micro_batches}")
        if self.schedule not in SCHEDULES:
            raise unknown("schedule", self.schedule, SCHEDULES)

    @property
    def num_parts(self) -> int:
        return len(self.workers)

    @property
    def num_workers(self) -> int:
        return self.num_parts // self.parts_each

    def of(self, workers: tuple[PipelineWorker, ...]) -> "Pipeline":
        """Return a copy of this pipeline for other workers."""
        return replace(self, workers=workers)

    def live(self, part: int) -> int:
        """The largest number of micro-batches alive in a part at once."""
        return live_micro_batches(self.schedule, part, self.num_parts, self.micro_batches)

    def message_s(self, num_bytes: int) -> float:
        """Seconds to send one tensor; an empty tensor is not sent."""
        return self.link.round_s(1, num_bytes) if num_bytes else 0.0
