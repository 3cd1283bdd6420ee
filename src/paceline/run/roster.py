"""The members of a run, and what each one's time was spent on.

A member is one life of one worker; its seat is the worker's number. This module must not know
messages or decisions.
"""

import math
from dataclasses import dataclass, field, replace

from ..events import Ticket


@dataclass(slots=True)
class RosterEntry:
    """One life of one worker, as the controller sees it."""

    number: int
    seat: int
    pid: int = 0
    is_alive: bool = True
    is_done: bool = False
    is_over: bool = False
    """Whether its script ended by itself."""
    end: str = ""
    """How it ended, if not by itself."""
    is_starting: bool = False
    """Whether it is a newcomer that the run does not count on yet."""
    first_epoch: int = 0
    """The first epoch that it takes part in."""
    has_arrived: bool = True
    """Whether its script came to its first epoch; False only for a newcomer."""
    has_joined: bool = True
    """Whether it takes part; False only for a newcomer that has not entered yet."""
    ticket: Ticket | None = None
    """The work that it was granted last."""
    left_loop_at: int = -1
    """The version at which it last heard the end of an epoch or of the run."""
    pushes: int = 0
    samples: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    push_s: float = 0.0
    input_s: float = 0.0
    """Of ``compute_s``."""
    superseded_s: float = 0.0
    staleness_versions: int = 0
    """Summed over its pushes."""

    def count(
        self, num_samples: int, compute_s: float, wait_s: float, push_s: float, input_s: float
    ) -> None:
        self.pushes += 1
        self.samples += num_samples
        self.compute_s += compute_s
        self.wait_s += wait_s
        self.push_s += push_s
        self.input_s += input_s

    @property
    def usual_s(self) -> float:
        """Mean seconds of computing a push."""
        return self.compute_s / self.pushes if self.pushes else math.nan


@dataclass(slots=True)
class Roster:
    """All members that the run has had."""

    members: dict[int, RosterEntry] = field(default_factory=dict)

    def join(self, number: int, seat: int, pid: int) -> RosterEntry:
        self.members[number] = RosterEntry(number, seat, pid)
        return self.members[number]

    def expect(self, number: int, seat: int) -> RosterEntry:
        """Add a newcomer on this seat, which the run does not count on yet; return it."""
        entry = RosterEntry(number, seat, is_starting=True, has_arrived=False, has_joined=False)
        self.members[number] = entry
        return entry

    @property
    def live(self) -> list[RosterEntry]:
        """Members that are alive and that the run counts on."""
        return [
            entry for entry in self.members.values() if entry.is_alive and not entry.is_starting
        ]

    @property
    def starting(self) -> list[RosterEntry]:
        """Newcomers that the run does not count on yet."""
        return [entry for entry in self.members.values() if entry.is_alive and entry.is_starting]

    @property
    def has_ended_one(self) -> bool:
        """Whether a member's script is over."""
        return any(entry.is_over for entry in self.members.values())

    def on_seat(self, seat: int) -> RosterEntry:
        """The newest member on this seat."""
        return next(entry for entry in reversed(self.members.values()) if entry.seat == seat)

    def worker(self, seat: int) -> RosterEntry:
        """The newest member on this seat, with the counts of all its lives."""
        lives = [entry for entry in self.members.values() if entry.seat == seat]
        return replace(
            lives[-1],
            pushes=sum(life.pushes for life in lives),
            samples=sum(life.samples for life in lives),
            compute_s=sum(life.compute_s for life in lives),
            wait_s=sum(life.wait_s for life in lives),
            push_s=sum(life.push_s for life in lives),
            input_s=sum(life.input_s for life in lives),
            superseded_s=sum(life.superseded_s for life in lives),
            staleness_versions=sum(life.staleness_versions for life in lives),
        )

    def __getitem__(self, number: int) -> RosterEntry:
        return self.members[number]
