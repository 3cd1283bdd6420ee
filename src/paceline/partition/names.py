"""What ``--split`` is told: a name for how a model is divided, as the table of prices has it.

data, none   each worker a whole copy             network[:N]  N parts, one behind the other
AxB          A parts, in B copies                 shard[:S]    pieces of all: ZeRO 1, 2, 3 (3)
layer[:N]    layers divided over their channels

A schedule may follow what has parts: ``network:interleaved``, ``network:3:gpipe``, ``2x2:1f1b``.
"""

import re
from dataclasses import dataclass

from ..errors import ConfigError, unknown
from .schedules import SCHEDULES

PARTS_EACH = 2
"""Parts of a worker where the schedule is interleaved."""
CARRIED = ("data", "network", "layer", "AxB (2x2)", "shard:1, 2, 3")


@dataclass(frozen=True, slots=True)
class SplitName:
    """How a model is divided.

    Args:
        parts: that a copy is cut into, one worker each.
        copies: of the whole model.
        stage: of ZeRO, where parts are pieces of all parameters; 0: they are layers.
        is_layer: parts are channels of all layers.
        schedule: of a pipeline; empty: 1f1b where the loss is known, else gpipe.
    """

    parts: int
    copies: int
    stage: int = 0
    is_layer: bool = False
    schedule: str = ""

    @property
    def size(self) -> int:
        """Workers of all."""
        return self.parts * self.copies

    @property
    def parts_each(self) -> int:
        """Of the network, of a worker: its places in a copy are one behind the other."""
        return PARTS_EACH if self.schedule == "interleaved" else 1

    def __str__(self) -> str:
        if self.stage:
            return f"shard:{self.stage}"
        if self.is_layer:
            return f"layer:{self.parts}"
        found = f"{self.parts}x{self.copies}" if self.copies > 1 else f"network:{self.parts}"
        return f"{found}:{self.schedule}" if self.schedule else found

    def copy_of(self, worker: int) -> tuple[int, ...]:
        """Those who hold one copy with this worker, in the order of their parts.

        Example:
            >>> SplitName(2, 2).copy_of(3)
            (2, 3)
        """
        first = worker - worker % self.parts
        return tuple(range(first, first + self.parts))

    def twins_of(self, worker: int) -> tuple[int, ...]:
        """Those who hold the same part as this worker, in the order of their copies.

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
    """What a text says; None: each worker holds a whole copy.

    Raises:
        ConfigError: it says nothing that is known or carried, or is for another number of workers.

    Example:
        >>> read_split("2x2", 4)
        SplitName(parts=2, copies=2, stage=0, is_layer=False, schedule='')
    """
    given = text.strip()
    if not divides(given):
        return None
    before, _, last = given.rpartition(":")
    schedule, kind = (last, before) if last in SCHEDULES else ("", given)
    name, _, number = kind.partition(":")
    if match := re.fullmatch(r"(\d+)x(\d+)", kind):
        found = SplitName(int(match[1]), int(match[2]), schedule=schedule)
    elif name.partition("-")[0] == "shard":
        found = SplitName(num_workers, 1, _stage(given))
    elif name in ("network", "layer") and (not number or number.isdecimal()):
        parts = int(number) if number else num_workers
        found = SplitName(parts, 1, is_layer=name == "layer", schedule=schedule)
    else:
        raise unknown(
            "split", given, ("data", "none", "network", "network:2", "layer", "2x2", "shard:3")
        )
    if found.parts < 1 or found.copies < 1:
        raise ConfigError(f"split {given!r} needs at least one part and one copy")
    if schedule and found.is_layer:
        raise ConfigError(
            f"split {given!r}: {schedule} is a schedule of parts behind one another, as "
            f"network:{schedule}; leave it out"
        )
    if found.size != num_workers:
        raise ConfigError(
            f"split {given!r} is for {found.size} workers, and there are {num_workers}: write "
            f"{'layer' if found.is_layer else 'network'}:{num_workers}, or begin {found.size}"
        )
    return None if found.parts == 1 else found


def _stage(given: str) -> int:
    """Of ZeRO. ConfigError: there is no such stage."""
    text = given.replace("-", ":").removeprefix("shard").removeprefix(":")
    if given == "shard":
        return 3
    if text not in ("1", "2", "3"):
        raise ConfigError(
            f"split {given!r}: write shard:1 (optimizer state in pieces), shard:2 (and gradients) "
            "or shard:3 (and parameters)"
        )
    return int(text)
