"""What a cut is for: the workers, the link between two, the micro-batches and their schedule.

This module must not know models.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..collectives.base import LinkCost
from ..errors import ConfigError, unknown
from .schedules import SCHEDULES, live_micro_batches

MICRO_BATCHES_EACH = (1, 2, 4)
"""Of a worker's mini-batch: what a run chooses from."""


class EndSizes(NamedTuple):
    """How many times as large as the others of their rank the first micro-batch of all is, and the
    last, where one rank's follow another's."""

    first: float = 1.0
    last: float = 1.0


ALIKE = EndSizes()


def micro_batch_shares(
    ranks: int, each: int, ends: EndSizes = ALIKE
) -> tuple[tuple[float, ...], ...]:
    """Of each rank's mini-batch, what share each of its micro-batches is.

    Example:
        >>> micro_batch_shares(2, 2, EndSizes(0.25, 1.0))
        ((0.2, 0.8), (0.5, 0.5))
    """
    sizes = [[1.0] * each for _ in range(ranks)]
    sizes[0][0] *= ends.first
    sizes[-1][-1] *= ends.last
    return tuple(tuple(one / sum(own) for one in own) for own in sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineWorker:
    """One worker: its speed beside those the costs were measured on, and what it may hold."""

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
    """So many, alike but for their speeds.

    Raises:
        ConfigError: fewer than 1, or speeds for another number.
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
    """What a cut is for.

    Args:
        workers: one for each part.
        link: what a message between two of them takes; its seconds are charged to both.
        micro_batches: M, of an update.
        schedule: of the table of schedules; it says how many micro-batches are alive in a part.
        state_copies: k, of the optimizer: 1 with momentum, 2 for Adam.
        update_s_per_byte: what the optimizer takes for a byte of parameters, once an update.
        keeps_ties: never cut nodes apart that share a parameter.
        trains_each: every part has parameters.
        parts_each: of a worker, which is listed once for each: P workers, P more of the same, ...
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
        """This pipeline over other workers."""
        return replace(self, workers=workers)

    def live(self, part: int) -> int:
        """Micro-batches that are alive in a part at most."""
        return live_micro_batches(self.schedule, part, self.num_parts, self.micro_batches)

    def message_s(self, num_bytes: int) -> float:
        """Of one tensor; nothing is sent where there is nothing."""
        return self.link.round_s(1, num_bytes) if num_bytes else 0.0
