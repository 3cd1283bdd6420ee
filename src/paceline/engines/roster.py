"""Who takes part in a run, and where each member's time went.

A member is one life of one worker; its seat is the worker's number. This module must not know
messages or decisions.
"""

import math
from dataclasses import dataclass, field

from ..events import Ticket


@dataclass(slots=True)
class Member:
    """One life of one worker, as the conductor sees it."""

    number: int
    seat: int
    pid: int = 0
    is_alive: bool = True
    is_done: bool = False
    ticket: Ticket | None = None
    """What it works on."""
    pushes: int = 0
    samples: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    push_s: float = 0.0
    superseded_s: float = 0.0
    staleness_versions: int = 0
    """Summed over its pushes."""

    def count(self, num_samples: int, clock: tuple[float, float, float]) -> None:
        self.pushes += 1
        self.samples += num_samples
        self.compute_s += clock[0]
        self.wait_s += clock[1]
        self.push_s += clock[2]

    @property
    def usual_s(self) -> float:
        """Mean seconds of computing a push."""
        return self.compute_s / self.pushes if self.pushes else math.nan


@dataclass(slots=True)
class Roster:
    """All members that ever were."""

    members: dict[int, Member] = field(default_factory=dict)

    def join(self, number: int, seat: int, pid: int) -> Member:
        self.members[number] = Member(number, seat, pid)
        return self.members[number]

    @property
    def live(self) -> list[Member]:
        return [one for one in self.members.values() if one.is_alive]

    def __getitem__(self, number: int) -> Member:
        return self.members[number]
