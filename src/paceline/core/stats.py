"""Counters of a run while it goes: cheap numbers for the live table, the forecast and the tests.

The trace has everything; these are for use during the run, or in virtual time without a trace. They
must cost next to nothing: one addition an event. Which of a script's own metrics is the accuracy is
found by its name. Above 300 lines with the statistics of live workers. This module must not know
how a run is driven.
"""

import math
import statistics
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from statistics import median
from typing import Any, NamedTuple

from ..events import Ticket


class Stats:
    """The counters of a run."""

    __slots__ = ("cancelled", "discarded", "late", "staleness_versions", "updates")

    def __init__(self) -> None:
        self.updates = 0
        self.late = 0
        self.discarded = 0
        self.cancelled = 0
        self.staleness_versions: dict[
            int, int
        ] = {}  # lag of a push at its update -> number of pushes

    def state(self) -> dict[str, Any]:
        """The whole state, as JSON."""
        counters = {name: getattr(self, name) for name in self.__slots__}
        return counters | {"staleness_versions": sorted(map(list, self.staleness_versions.items()))}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a `state()`."""
        for name in self.__slots__:
            setattr(self, name, state[name])
        self.staleness_versions = dict(state["staleness_versions"])


class SlowWorker(NamedTuple):
    """A worker whose typical step takes longer than the others'; medians, in seconds.

    Attributes:
        input_s, others_input_s: the part of a step that waits for its batches.
    """

    worker: int
    usual_s: float
    others_s: float
    input_s: float = 0.0
    others_input_s: float = 0.0

    @property
    def factor(self) -> float:
        """Ratio of its step time to the others'."""
        return self.usual_s / self.others_s if self.others_s else math.inf

    @property
    def is_by_input(self) -> bool:
        """Whether most of the extra time is input."""
        return 2.0 * (self.input_s - self.others_input_s) >= self.usual_s - self.others_s


class ServiceTimes:
    """The step times of each worker, and which workers are slow.

    A worker is slow if its median step takes at least 1.5 times the others' median, if three
    quarters of its steps also take longer than three quarters of theirs, and if chance would hardly
    rank its steps so high (4 standard deviations of the Mann-Whitney statistic): neither a few long
    steps nor a high variance in all workers make a worker slow.

    Args:
        num_kept: newest steps of each worker that count.
    """

    _LEAST_STEPS, _LEAST_FACTOR, _LEAST_DEVIATIONS = 8, 1.5, 4.0

    def __init__(self, num_kept: int = 32) -> None:
        self._num_kept = num_kept
        self._steps_s: dict[int, deque[float]] = {}
        self._inputs_s: dict[int, deque[float]] = {}

    def add(self, worker: int, step_s: float, input_s: float = 0.0) -> None:
        """Add a step of this worker; ``input_s``: its wait for batches."""
        steps_s = self._steps_s.get(worker)
        if steps_s is None:
            steps_s = self._steps_s[worker] = deque(maxlen=self._num_kept)
            self._inputs_s[worker] = deque(maxlen=self._num_kept)
        steps_s.append(step_s)
        self._inputs_s[worker].append(input_s)

    def slow(self) -> list[SlowWorker]:
        """The workers that are slow now, in order."""
        known = {
            worker: sorted(steps_s)
            for worker, steps_s in sorted(self._steps_s.items())
            if len(steps_s) >= self._LEAST_STEPS
        }
        slow_workers = []
        for worker, own in known.items():
            others = [steps_s for other, steps_s in known.items() if other != worker]
            if not others:
                continue
            candidate = SlowWorker(worker, median(own), median(map(median, others)))
            upper = median(steps_s[len(steps_s) * 3 // 4] for steps_s in others)
            is_longer = candidate.factor >= self._LEAST_FACTOR and own[len(own) // 4] > upper
            if is_longer and _deviations(own, others) >= self._LEAST_DEVIATIONS:
                input_s, *others_input_s = (
                    median(self._inputs_s[number])
                    for number in (worker, *(other for other in known if other != worker))
                )
                slow_workers.append(
                    candidate._replace(input_s=input_s, others_input_s=median(others_input_s))
                )
        return slow_workers


def _deviations(own: list[float], others: list[list[float]]) -> float:
    """How many standard deviations ``own`` ranks above the others, if all had one distribution.

    Source: H. B. Mann, D. R. Whitney, "On a test of whether one of two random variables is
    stochastically larger than the other", Annals of Mathematical Statistics 18(1), 1947.
    """
    pooled = sorted(value for values in others for value in values)
    wins = sum(bisect_left(pooled, value) + bisect_right(pooled, value) for value in own) / 2
    num_pairs = len(own) * len(pooled)
    variance = num_pairs * (len(own) + len(pooled) + 1) / 12
    return (wins - num_pairs / 2) / math.sqrt(variance)


class Limits(NamedTuple):
    """How long a worker may be silent, in seconds.

    Attributes:
        named_s: until it is reported.
        again_s: until a sleeping worker is reported again.
        stopped_s: until a worker stopped by a signal counts as stalled.
        asleep_s: until a sleeping worker counts as stalled; infinite: never.
    """

    named_s: float
    again_s: float
    stopped_s: float
    asleep_s: float

    @property
    def least_s(self) -> float:
        """The shortest silence with a consequence."""
        return min(self.named_s, self.stopped_s, self.asleep_s)


class Patience:
    """How long to wait for a silent worker, from the recent steps of the run.

    The usual step is the median of the last 64 steps of all workers. For a process that the kernel
    has stopped: 3 usual steps, at least half a second, or 5 seconds before the first step. A worker
    without a sign of life is reported after 100 usual steps and 4 times the longest of the last
    ones, at least a minute, or two before its first step; it is not given up, since it may save,
    validate or compile, unless a time is set.

    Args:
        given_s: wait exactly this long instead, and then give up a sleeping worker; None: as above.
    """

    _STOPPED_STEPS, _SILENT_STEPS, _LONGEST = 3.0, 100.0, 4.0
    _STOPPED_LEAST_S, _STOPPED_UNKNOWN_S = 0.5, 5.0
    _SILENT_LEAST_S, _FIRST_STEP_S, _AGAIN_S = 60.0, 120.0, 60.0

    def __init__(self, given_s: float | None = None) -> None:
        self.given_s = given_s
        self._steps_s: deque[float] = deque(maxlen=64)

    def add(self, step_s: float) -> None:
        """Add the time of a step."""
        self._steps_s.append(step_s)

    @property
    def usual_s(self) -> float:
        """The median of the last steps; nan before the first."""
        return median(self._steps_s) if self._steps_s else math.nan

    @property
    def stopped_s(self) -> float:
        """The limit for a stopped process."""
        if self.given_s is not None:
            return self.given_s
        if not self._steps_s:
            return self._STOPPED_UNKNOWN_S
        return max(self._STOPPED_LEAST_S, self._STOPPED_STEPS * self.usual_s)

    @property
    def silent_s(self) -> float:
        """The time until a worker without a sign of life is reported."""
        if self.given_s is not None:
            return self.given_s
        if not self._steps_s:
            return self._FIRST_STEP_S
        longest_s = self._LONGEST * max(self._steps_s)
        return max(self._SILENT_LEAST_S, self._SILENT_STEPS * self.usual_s, longest_s)

    def limits(self, *, has_stepped: bool, may_sleep: bool) -> Limits:
        """The limits for one worker.

        Args:
            has_stepped: whether it made a step; before that it may compile, or read its data.
            may_sleep: the script wants it to be waited for without a limit.
        """
        named_s = self.silent_s
        if not has_stepped and self.given_s is None:
            named_s = max(self._FIRST_STEP_S, named_s)
        asleep_s = math.inf if self.given_s is None or may_sleep else self.given_s
        return Limits(named_s, self._AGAIN_S, self.stopped_s, asleep_s)


_NAMES = ("acc", "accuracy")


def accuracy_among(names: Collection[str]) -> str | None:
    """``acc``, else ``accuracy``, else the only name that ends in one of them; None: none.

    Example:
        >>> accuracy_among(["loss", "val_acc"])
        'val_acc'
    """
    for name in _NAMES:
        if name in names:
            return name
    ending = [name for name in names if name.lower().endswith(_NAMES)]
    return ending[0] if len(ending) == 1 else None


def accuracy_in(totals: Mapping[str, tuple[float, float]]) -> tuple[float, float] | None:
    """The accuracy's (sum over samples, number of samples); None: there is none."""
    name = accuracy_among(totals)
    return None if name is None else totals[name]


def better_of(totals: dict[str, tuple[float, float]]) -> float | None:
    """A score that grows as a model gets better: accuracy, or minus the loss; None: neither.

    Args:
        totals: name -> (sum over samples, number of samples).
    """
    name, sign = accuracy_among(totals), 1.0
    if name is None:
        name, sign = "loss", -1.0
    value, count = totals.get(name, (0.0, 0.0))
    return sign * value / count if count else None


_VERSION = itemgetter(Ticket._fields.index("version"))
_NUM_BATCHES = 20
"""Batches for the standard error: gaps between updates are correlated, batch means hardly."""


class Counts:
    """Sums over one run."""

    __slots__ = (
        "cancelled", "discarded", "lost", "pauses", "pushes", "staleness", "there_s", "times_s",
        "used_s", "wasted_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.times_s = array("d")  # of each update
        self.pauses: list[tuple[int, float]] = []  # (number of updates before it, seconds)
        self.pushes = 0  # used in updates
        self.staleness: dict[int, int] = {}  # lag in versions -> pushes
        self.cancelled = 0  # work called off
        self.discarded = 0  # pushes not used
        self.lost = 0  # work that ended with its worker
        self.used_s = 0.0  # computed for pushes
        self.wasted_s = 0.0  # computed for nothing: cancelled, lost
        self.there_s = 0.0  # presence of all workers, summed

    @property
    def updates(self) -> int:
        return len(self.times_s)

    def applied(self, tickets: Sequence[Ticket], version: int, at_s: float) -> None:
        """Count the update to ``version`` + 1."""
        staleness = self.staleness
        for pulled, count in Counter(map(_VERSION, tickets)).items():
            lag = version - pulled
            staleness[lag] = staleness.get(lag, 0) + count
        self.pushes += len(tickets)
        self.times_s.append(at_s)

    def paused(self, pause_s: float) -> None:
        """Note a pause of training after the updates so far."""
        self.pauses.append((self.updates, pause_s))

    def trained_s(self, num_updates: int) -> float:
        """Seconds of training for the first ``num_updates`` updates, without pauses."""
        paused_s = sum(pause_s for after, pause_s in self.pauses if after < num_updates)
        return self.times_s[num_updates - 1] - paused_s

    def mean_update_s(self) -> float:
        """Mean seconds of training per update, from the start."""
        return self.trained_s(self.updates) / self.updates if self.times_s else math.nan

    def error_update_s(self) -> float:
        """Standard error of the mean from 20 batch means; nan for fewer than 40 updates."""
        size = len(self.times_s) // _NUM_BATCHES
        if size < 2:
            return math.nan
        ends = range(size, size * _NUM_BATCHES + 1, size)
        borders = [0.0, *map(self.trained_s, ends)]
        means = [(after - before) / size for before, after in pairwise(borders)]
        return statistics.stdev(means) / math.sqrt(_NUM_BATCHES)
