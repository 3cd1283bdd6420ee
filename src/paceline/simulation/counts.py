"""What a simulated run adds up to, without keeping its trace.

It must not know how the run was driven: the lean driver and the one with the coordinator fill the
same counts.
"""

import math
import statistics
from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter

from ..events import Ticket

_VERSION = itemgetter(Ticket._fields.index("version"))
_NUM_BATCHES = 20
"""Batches for the standard error: gaps between updates hang together, their batch means hardly."""


class Counts:
    """Sums over one run."""

    __slots__ = (
        "cancelled", "discarded", "lost", "pushes", "staleness", "there_s", "times_s", "used_s",
        "wasted_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.times_s = array("d")  # of each update
        self.pushes = 0  # that made updates
        self.staleness: dict[int, int] = {}  # lag in versions -> pushes
        self.cancelled = 0  # work called off
        self.discarded = 0  # pushes not used
        self.lost = 0  # work that ended with its worker
        self.used_s = 0.0  # computed for pushes
        self.wasted_s = 0.0  # computed for nothing: cancelled, lost
        self.there_s = 0.0  # that workers were there, summed

    @property
    def updates(self) -> int:
        return len(self.times_s)

    def applied(self, tickets: Sequence[Ticket], version: int, at_s: float) -> None:
        """An update of ``version`` + 1."""
        staleness = self.staleness
        for begun_at, count in Counter(map(_VERSION, tickets)).items():
            lag = version - begun_at
            staleness[lag] = staleness.get(lag, 0) + count
        self.pushes += len(tickets)
        self.times_s.append(at_s)

    def mean_update_s(self) -> float:
        """Seconds an update, from the start."""
        return self.times_s[-1] / len(self.times_s) if self.times_s else math.nan

    def error_update_s(self) -> float:
        """Standard error of the mean from 20 batch means; nan for fewer than 40 updates."""
        size = len(self.times_s) // _NUM_BATCHES
        if size < 2:
            return math.nan
        borders = [0.0, *self.times_s[size - 1 : size * _NUM_BATCHES : size]]
        means = [(after - before) / size for before, after in pairwise(borders)]
        return statistics.stdev(means) / math.sqrt(_NUM_BATCHES)
