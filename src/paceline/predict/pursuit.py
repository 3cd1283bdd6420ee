"""Protocols that race to a target in virtual time, with real gradients: which reaches it first.

    all contenders      measured every 2 % later     the worse half leaves as the budget runs down
    the first eight     again with other seeds       the median of their times; after three seeds
                                                     those clearly behind the best leave

A training loss is reached when the mean over the pushes of the last fifth of the time is, as a live
run would report it; a test accuracy when the mean of four measurements is, each over some test
samples. If no protocol reaches the target within the budget, the nearest comes first. The budget
counts computing time, as in race.py. This module must not know where the conditions come from, nor
how it is shown.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from ..conditions.world import Conditions
from ..errors import ConfigError
from ..report.ranking import Standing
from .race import Racer, Training, count_wins, ranked

NUM_FINALISTS, MOST_SEEDS, FEWEST_SEEDS = 8, 9, 3
"""One seed is not enough: times to a loss differ by a tenth and more from seed to seed."""
_STRETCH = 1.02
"""Factor by which the time grows from one measurement of a loss to the next."""
_NUM_ACCURACIES, _ACCURACY_STRETCH = 4, 1.05
"""How many accuracies are averaged, and the factor between their times."""
_FIRST_PUSHES = 4
"""Pushes of each worker before the first measurement, about."""
_LEAVE_AT = (0.15, 0.3, 0.45)
"""Shares of the budget at which the worse half leaves, if not enough have reached the target."""
_BEHIND, _CLEAR = 1.2, 0.75
"""A finalist leaves whose median is this many times the best one's, which was ahead of it with this
share of the seeds: of three times of ``async`` two can be short and the third twice as long."""
_ROUND_SHARE = 0.6
"""Share of the budget for the first round; the rest is for the finalists' other seeds."""
_TIME = attrgetter("to_target_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A test accuracy (0 to 1) or a training loss; exactly one of them."""

    accuracy: float | None = None
    loss: float | None = None

    def __post_init__(self) -> None:
        if (self.accuracy is None) == (self.loss is None):
            raise ConfigError("give one target, --target-accuracy or --target-loss, not both")
        if self.accuracy is not None and not 0.0 < self.accuracy <= 1.0:
            raise ConfigError(f"an accuracy must be above 0 and at most 1, got {self.accuracy:g}")
        if not math.isfinite(self.value):
            raise ConfigError(f"a target must be finite, got {self.value}")

    @property
    def name(self) -> str:
        return "loss" if self.accuracy is None else "accuracy"

    @property
    def value(self) -> float:
        target = self.loss if self.accuracy is None else self.accuracy
        assert target is not None
        return target

    @property
    def num_measurements(self) -> int:
        """How many measurements are averaged; a loss is already a mean."""
        return 1 if self.accuracy is None else _NUM_ACCURACIES

    @property
    def stretch(self) -> float:
        """The factor by which the time grows from one measurement to the next."""
        return _STRETCH if self.accuracy is None else _ACCURACY_STRETCH

    def measure(self, contender: Racer) -> float:
        """The loss of the contender, or the accuracy of its newest version."""
        return contender.standing.loss if self.accuracy is None else contender.accuracy()

    def missing(self, value: float) -> float:
        """The distance of this value from the target; 0 or less: reached."""
        return value - self.value if self.accuracy is None else self.value - value


class Pursuer:
    """One protocol with one seed on its way to the target."""

    def __init__(
        self, protocol: str, training: Training, conditions: Conditions, goal: Goal
    ) -> None:
        self._contender = Racer(protocol, training, conditions)
        self._goal = goal
        self._measured: deque[float] = deque(maxlen=goal.num_measurements)
        self.standing = self._contender.standing
        self.reached_s = math.inf

    @property
    def value(self) -> float:
        """The mean of the last measurements."""
        return statistics.fmean(self._measured) if self._measured else math.nan

    @property
    def rank_key(self) -> tuple[float, float]:
        """Sorts by the time to the target, then by the distance from it."""
        missing = self._goal.missing(self.value)
        return self.reached_s, missing if math.isfinite(missing) else math.inf

    def advance(self, until_s: float) -> None:
        """Train until the virtual time and measure; does nothing once the target is reached."""
        if self.reached_s < math.inf:
            return
        goal, contender = self._goal, self._contender
        before = self.standing.updates
        contender.advance(until_s)
        if self.standing.updates == before:
            return  # each measurement is of another version
        self._measured.append(goal.measure(contender))
        value, best = self.value, self.standing.best
        if math.isfinite(value) and (best is None or goal.missing(value) < goal.missing(best)):
            self.standing.best = value
        is_judged = goal.accuracy is not None or contender.is_judged
        is_full = len(self._measured) == goal.num_measurements
        if is_judged and is_full and goal.missing(value) <= 0:
            self.reached_s = contender.virtual_s

    def run(self, start_s: float, limit_s: float) -> float:
        """The time to the target; inf if it is not reached within the limit."""
        until_s = start_s
        while self.reached_s == math.inf and until_s < limit_s:
            self.advance(until_s)
            until_s *= self._goal.stretch
        return self.reached_s


def pursue(
    protocols: Sequence[str],
    training: Training,
    conditions: Conditions,
    goal: Goal,
    budget_s: float,
    say: Callable[[str], None] = lambda text: None,
) -> list[Standing]:
    """Let protocols race to the target.

    Args:
        budget_s: about how many seconds of computing it may take.

    Returns:
        The first to reach it first; ``target_s`` has a time per seed of those that reached it.
    """
    field = [Pursuer(text, training, conditions, goal) for text in protocols]
    begun_s = time.thread_time()

    def share() -> float:
        """The share of the budget that is used."""
        return (time.thread_time() - begun_s) / budget_s

    steps_s = [conditions.mean_step_s(worker) for worker in range(conditions.num_workers)]
    first_s = _FIRST_PUSHES * statistics.fmean(steps_s)
    field, out = _first_round(field, first_s, goal.stretch, share, say)
    ranking = [pursuer.standing for pursuer in (*field, *out)]
    there = [pursuer for pursuer in field if pursuer.reached_s < math.inf]
    finalists = there[:NUM_FINALISTS]
    if finalists:
        ordered = _finals(finalists, training, conditions, goal, first_s, share, say)
        ranking[: len(finalists)] = ordered
        if len(ordered) > 1:
            count_wins(ordered, [standing.target_s for standing in ordered[:2]])
    else:
        _go_on(field[0], goal.stretch, share, say)
    return ranked(ranking)


def _first_round(
    field: list[Pursuer],
    first_s: float,
    stretch: float,
    share: Callable[[], float],
    say: Callable[[str], None],
) -> tuple[list[Pursuer], list[Pursuer]]:
    """Advance all until enough have reached the target; return those left and those that left."""
    until_s, out, leave_at = first_s, list[Pursuer](), list(_LEAVE_AT)
    while True:
        for pursuer in field:
            pursuer.advance(until_s)
        num_there = sum(pursuer.reached_s < math.inf for pursuer in field)
        field.sort(key=lambda pursuer: pursuer.rank_key)
        if num_there >= min(NUM_FINALISTS, len(field)) or share() > _ROUND_SHARE:
            say(f"{num_there} of {len(field)} have reached the target after {until_s:.3g} virtual "
                "seconds")  # fmt: skip
            return field, out
        if leave_at and share() > leave_at[0]:
            leave_at.pop(0)
            keep = max(2, num_there, math.ceil(len(field) / 2))
            say(f"{field[0].standing.protocol} is ahead of {len(field) - 1} after {until_s:.3g} "
                "virtual seconds")  # fmt: skip
            out = field[keep:] + out
            field = field[:keep]
        until_s *= stretch


def _finals(
    finalists: list[Pursuer], training: Training, conditions: Conditions, goal: Goal,
    first_s: float, share: Callable[[], float], say: Callable[[str], None],
) -> list[Standing]:  # fmt: skip
    """Run those that reached the target with other seeds; return their standings, best first."""
    limit_s = 2.0 * max(finalist.reached_s for finalist in finalists)
    field, out = [finalist.standing for finalist in finalists], list[Standing]()
    for finalist in finalists:
        finalist.standing.target_s = (finalist.reached_s,)
    for extra in range(1, MOST_SEEDS):
        if extra >= FEWEST_SEEDS:
            best = min(field, key=_TIME)
            behind = [standing for standing in field if is_clearly_behind(standing, best)]
            out = sorted(behind, key=_TIME) + out
            field = [standing for standing in field if standing not in behind]
            if share() > 1.0 or len(field) == 1:
                break
        seed = training.seed + extra
        say(f"{' and '.join(standing.protocol for standing in field)}: seed {seed}")
        again = replace(training, seed=seed)
        reseeded = replace(conditions, seed=conditions.seed + extra)
        for standing in field:
            pursuer = Pursuer(standing.protocol, again, reseeded, goal)
            standing.target_s += (pursuer.run(first_s, limit_s),)
    return sorted(field, key=_TIME) + out


def is_clearly_behind(standing: Standing, best: Standing) -> bool:
    """Whether more seeds would not bring it before ``best``; both have run with the same seeds."""
    pairs = list(zip(best.target_s, standing.target_s, strict=True))
    num_ahead = sum(best_s < other_s for best_s, other_s in pairs)
    is_far = standing.to_target_s > _BEHIND * best.to_target_s
    return is_far and num_ahead >= _CLEAR * len(pairs)


def _go_on(
    leader: Pursuer, stretch: float, share: Callable[[], float], say: Callable[[str], None]
) -> None:
    """None has reached the target yet: advance the leader alone, for as long again."""
    until_s = leader.standing.virtual_s
    while leader.reached_s == math.inf and share() < 2.0:
        until_s *= stretch
        leader.advance(until_s)
    if leader.reached_s < math.inf:
        leader.standing.target_s = (leader.reached_s,)
    say(f"{leader.standing.protocol} alone: {leader.value:.4f} after {until_s:.3g} virtual seconds")
