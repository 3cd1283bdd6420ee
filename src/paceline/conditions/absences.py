"""Workers that start late, leave, and return.

    3=10s..60s      worker 3 is away from second 10 to second 60
    3=..10s         it starts 10 seconds late
    3=60s..         it leaves for good

Who returns is a new member of the run at the old seat. It must not know what others do meanwhile.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..errors import ConfigError
from .delays import parse_seconds, parse_worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """``worker`` is not there from ``from_s`` until ``until_s`` (inf: for good)."""

    worker: int
    from_s: float
    until_s: float


def parse_absences(values: Sequence[str], num_workers: int) -> tuple[Absence, ...]:
    """Who is away when, in the order of the workers and of time.

    Raises:
        ConfigError: not of this form, for no worker of the run, or two of one worker overlap.

    Example:
        >>> parse_absences(["1=5s..8s"], num_workers=2)
        (Absence(worker=1, from_s=5.0, until_s=8.0),)
    """
    found = [_absence(value, num_workers) for value in values]
    found.sort(key=lambda one: (one.worker, one.from_s))
    for before, after in pairwise(found):
        if before.worker == after.worker and before.until_s >= after.from_s:
            raise ConfigError(
                f"away: worker {before.worker} is away from {before.from_s:g}s to "
                f"{before.until_s:g}s and again from {after.from_s:g}s; leave time between them"
            )
    return tuple(found)


def _absence(value: str, num_workers: int) -> Absence:
    head, _, span = value.replace(" ", "").partition("=")
    first, dots, last = span.partition("..")
    if not dots or not (first or last):
        raise ConfigError(
            f"away must read WORKER=FROM..UNTIL, got {value!r}; 3=10s..60s, 3=..10s (starts late) "
            "or 3=60s.. (for good)"
        )
    absence = Absence(
        worker=parse_worker(head, value, "away", num_workers),
        from_s=parse_seconds(first, value, "away") if first else 0.0,
        until_s=parse_seconds(last, value, "away") if last else math.inf,
    )
    if absence.from_s >= absence.until_s:
        raise ConfigError(f"away {value!r}: it ends before it begins; write the earlier time first")
    return absence
