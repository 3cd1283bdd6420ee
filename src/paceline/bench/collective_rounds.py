"""What rounds take between processes of this machine: measured, and kept for who plans a run.

    every kind of round, size   blocks in turns, the slowest rank counts -> HostCost
    -> ~/.cache/paceline/ceilings.json, by the number of processes

A round goes the way that a run's do: `ScheduledCollective`, along a schedule of one round. This
module must not know what is predicted with it.
"""

import time
from collections.abc import Callable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Final

from ..collectives.host import Curve, HostCost, RoundOfKind, kinds_of
from ..collectives.transfers import Action
from ..run.collective import SECTION
from ..system.ceilings import read_ceilings, write_ceilings
from ..system.processors import num_cores
from .samples import take_turns

_SIZES: Final = tuple(1 << power for power in (6, 10, 13, 16, 18, 20, 22, 24))
"""Bytes of a message: as many as its time bends at, on loopback."""
_NUM_ROUNDS = 3

Block = Callable[[str, str, int], Callable[[], float]]
"""Of a kind, an action and bytes a message: what measures a call of it."""


def measure_rounds(
    num_ranks: int, largest_bytes: int, block: Block, say: Callable[[str], None]
) -> Mapping[tuple[str, Action], Curve]:
    """Seconds of each kind of round at sizes up to that of the largest message."""
    smaller = takewhile(lambda size: size < largest_bytes, _SIZES[:-1])
    sizes = [*smaller, min(largest_bytes, _SIZES[-1])]
    keys = [(kind, action) for kind in kinds_of(num_ranks) for action in Action]
    curves: dict[tuple[str, Action], list[tuple[int, float]]] = {key: [] for key in keys}
    for size in sizes:
        say(f"messages of {size:,} B")
        blocks = {
            f"{kind} {action.value}": block(kind, action.value, size) for kind, action in keys
        }
        took = take_turns(blocks, _NUM_ROUNDS)
        for kind, action in keys:
            num_rounds = RoundOfKind(num_ranks, kind, action).num_rounds
            median_s = took[f"{kind} {action.value}"].median_s
            curves[kind, action].append((size, median_s / num_rounds))
    return {key: tuple(points) for key, points in curves.items()}


def keep(cost: HostCost) -> Path:
    """For whoever plans a run of so many processes here; where it was put.

    Raises:
        FileError: it cannot be written there.
    """
    section, _ = read_ceilings(SECTION)
    known = section if isinstance(section, dict) else {}
    day = time.strftime("%Y-%m-%d")
    own = {"cores": num_cores(), "day": day, "cost": cost.write()}
    return write_ceilings(SECTION, {**known, str(cost.num_ranks): own})
