"""Parse the names that ``--split`` accepts for ways to divide a model, as in the table of prices.

data, none   a whole copy on each worker          network[:N]  N parts, one after the other
AxB          A parts, in B copies                 shard[:S]    shards of all: ZeRO 1, 2, 3 (3)
layer[:N]    layers divided over their channels

A schedule may follow a name that has parts: ``network:interleaved``, ``network:3:gpipe``,
``2x2:1f1b``.
"""

import re
from dataclasses import dataclass

from ..errors import ConfigError, unknown
from .schedules import SCHEDULES

PARTS_EACH = 2
"""Parts per worker with the interleaved schedule."""
CARRIED = ("data", "network", "layer", "AxB (2x2)", "shard:1, 2, 3")


@dataclass(frozen=True, slots=True)
class SplitName:
    """A way to divide a model over workers.

    Args:
        parts: number of parts that a copy is cut into, one worker each.
        copies: number of copies of the whole model.
        stage: stage of ZeRO, where parts are shards of all parameters; 0: parts are layers.
        is_layer: whether parts are channels of all layers.
        schedule: of a pipeline; empty: 1f1b where the loss is known, else gpipe.
    """

    parts: int
    copies: int
    stage: int = 0
    is_layer: bool = False
    schedule: str = ""

    @property
    def size(self) -> int:
        """The number of workers in all copies."""
        return self.parts * self.copies

    @property
    def parts_each(self) -> int:
        """The number of network parts per worker of a copy: rank r holds parts r, r + P, ..."""
        return PARTS_EACH if self.schedule == "interleaved" else 1

    def __str__(self) -> str:
        if self.stage:
            return f"shard:{self.stage}"
        if self.is_layer:
            return f"layer:{self.parts}"
        name = f"{self.parts}x{self.copies}" if self.copies > 1 else f"network:{self.parts}"
        return f"{name}:{self.schedule}" if self.schedule else name

    def copy_of(self, worker: int) -> tuple[int, ...]:
        """Return the workers that hold one copy together with this one, in the order of parts.

        Example:
            >>> SplitName(2, 2).copy_of(3)
            (2, 3)
        """
        first = worker - worker % self.parts
        return tuple(range(first, first + self.parts))

    def twins_of(self, worker: int) -> tuple[int, ...]:
        """Return the workers that hold the same part as this one, in the order of copies.

        Example:
            >>> SplitName(2, 2).twins_of(3)
            (1, 3)
        """
        return tuple(range(worker % self.parts, self.size, self.parts))


def divides(text: str) -> bool:
    """Whether this split gives each worker a part of the model, as it is written.

    Example:
        >>> divides("network:2"), divides("data"), divides("none")
        (True, False, False)
    """
    return text.strip() not in ("data", "none")


def read_split(text: str, num_workers: int) -> SplitName | None:
    """Parse the name of a split; None: each worker holds a whole copy.

    Raises:
        ConfigError: the name is unknown or not supported, or is for another number of workers.

    Example:
        >>> read_split("2x2", 4)
        SplitName(parts=2, copies=2, stage=0, is_layer=False, schedule='')
    """
    text = text.strip()
    if not divides(text):
        return None
    before, _, last = text.rpartition(":")
    schedule, kind = (last, before) if last in SCHEDULES else ("", text)
    name, _, number = kind.partition(":")
    if match := re.fullmatch(r"(\d+)x(\d+)", kind):
        split = SplitName(int(match[1]), int(match[2]), schedule=schedule)
    elif name.partition("-")[0] == "shard":
        split = SplitName(num_workers, 1, _stage(text))
    elif name in ("network", "layer") and (not number or number.isdecimal()):
        parts = int(number) if number else num_workers
        split = SplitName(parts, 1, is_layer=name == "layer", schedule=schedule)
    else:
        raise unknown(
            "split", text, ("data", "none", "network", "network:2", "layer", "2x2", "shard:3")
        )
    if split.parts < 1 or split.copies < 1:
        raise ConfigError(f"split {text!r} needs at least one part and one copy")
    if schedule and split.is_layer:
        raise ConfigError(
            f"split {text!r}: {schedule} is a schedule for parts of a pipeline, as in "
            f"network:{schedule}; leave it out"
        )
    if split.size != num_workers:
        raise ConfigError(
            f"split {text!r} is for {split.size} workers, but there are {num_workers}: write "
            f"{'layer' if split.is_layer else 'network'}:{num_workers}, or start {split.size}"
        )
    return None if split.parts == 1 else split


def _stage(name: str) -> int:
    """Return the stage of ZeRO; raise ConfigError where there is no such stage."""
    stage = name.replace("-", ":").removeprefix("shard").removeprefix(":")
    if name == "shard":
        return 3
    if stage not in ("1", "2", "3"):
        raise ConfigError(
            f"split {name!r}: write shard:1 (optimizer state in pieces), shard:2 (and gradients) "
            "or shard:3 (and parameters)"
        )
    return int(stage)
