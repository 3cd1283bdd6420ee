"""Staleness rules: how a stale gradient is weighted between a protocol's decision and its update.

A push has lag L = j - tau, in versions: it was computed at version tau and is applied to version j.
Nothing happens between its arrival and its update that changes j, so L is known when it arrives.

    none         whole, however stale
    inverse      scaled by 1 / (L + 1)
    drop:S       not used if L > S; its leases return, and its worker goes on at the newest
                 version
    distance:C   step of at most C / ||w_j - w_tau||^2, however many versions that is

What flows where (files below src/paceline):

    Pushed --> protocols/base.py: answer()  --drop--> Discard, Release     the protocol never
                    | react()                                              sees it: for it the
                    v                                                      worker is still working
               Apply(tickets, weights)   --inverse--> weights x scale      the trace has them
                    |
                    v
               core/jobs.py           add, finish: the same scale, set on arrival, because
                    |                    pushes are summed on arrival; checked against the weights
                    v
               store/parameter_store.py           gradient x scale; buffers are averaged unscaled
                    ^
               store/means.py            --distance--> scale, measured where the job is executed:
                                         only there are tensors; the trace gets it afterwards

A scale is a factor on the gradient, before momentum, decay and everything else that the optimizer
does. For SGD without momentum that is a factor on the learning rate, as in the papers; Adam, which
divides a gradient by its usual size, weighs stale gradients less than fresh ones.

Sources. inverse: W. Zhang, S. Gupta, X. Lian, J. Liu, "Staleness-aware Async-SGD for Distributed
Deep Learning", IJCAI 2016, whose step is alpha_0 / staleness; changed: over staleness + 1, so that
0 needs no exception and a lag of 1 does not count as fresh. distance: S. Dutta, G. Joshi, S. Ghosh,
P. Dube, P. Nagpurkar, "Slow and Stale Gradients Can Win the Race", AISTATS 2018, eq. 13:
eta_j = min(C / ||w_j - w_tau(j)||^2, eta_max), where the paper prints max; changed: eta_max is the
optimizer's largest learning rate of now, and where an update averages K pushes each has its own
factor eta_j / eta_max. drop: the bound on staleness of Q. Ho et al., NIPS 2013, held by leaving out
what breaks it instead of by waiting.

This module must not know protocols, tensors or clocks.
"""

import abc
import math
from typing import ClassVar

from ..errors import ConfigError, unknown


class StalenessRule(abc.ABC):
    """Weights pushes by their lag.

    Invariant: a push at the newest version is used whole (tests/protocols/test_staleness.py).
    """

    name: ClassVar[str]
    spelling: ClassVar[str]  # as in drop:S
    summary: ClassVar[str]  # what happens to a push, for the plan
    scales: ClassVar[bool] = False  # whether the weights of an update may sum to less than 1
    drops: ClassVar[bool] = False  # whether pushes may be left out
    distance_limit: float = 0.0
    """C of distance:C; 0: distances are not measured."""

    def scale(self, lag_versions: int) -> float:
        """Return the factor on the gradient of a push: above 0, at most 1."""
        return 1.0

    def is_dropped(self, lag_versions: int) -> bool:
        """Return whether such a push is left out."""
        return False

    def __str__(self) -> str:
        return self.name


class Whole(StalenessRule):
    """No rule."""

    name = spelling = "none"
    summary = "a push counts whole, however stale"


class Inverse(StalenessRule):
    """1 / (lag + 1)."""

    name = spelling = "inverse"
    summary = "a push counts 1 / (its staleness + 1)"
    scales = True

    def scale(self, lag_versions: int) -> float:
        return 1.0 / (lag_versions + 1)


class Distance(StalenessRule):
    """min(C / ||w_j - w_tau||^2, eta_max), measured where the update is executed.

    Args:
        limit: C, over 0; learning rate times squared distance of parameters.
    """

    name = "distance"
    spelling = "distance:C"
    summary = "a push steps at most C / (distance that the parameters have moved, squared)"

    def __init__(self, limit: float) -> None:
        self.distance_limit = limit

    def __str__(self) -> str:
        short = f"{self.distance_limit:g}"
        exact = short if float(short) == self.distance_limit else repr(self.distance_limit)
        return f"{self.name}:{exact}"


class Drop(StalenessRule):
    """Leaves out pushes that are staler than so many versions.

    Args:
        most_versions: S, at least 0.
    """

    name = "drop"
    spelling = "drop:S"
    summary = "a push that is staler than S versions is not used, its samples return"
    drops = True

    def __init__(self, most_versions: int) -> None:
        self.most_versions = most_versions

    def is_dropped(self, lag_versions: int) -> bool:
        return lag_versions > self.most_versions

    def __str__(self) -> str:
        return f"{self.name}:{self.most_versions}"


RULES: dict[str, type[StalenessRule]] = {
    "none": Whole,
    "inverse": Inverse,
    "distance": Distance,
    "drop": Drop,
}
WHOLE = Whole()


def parse_staleness(text: str) -> StalenessRule:
    """Return the rule that ``name`` or ``name:number`` means.

    Raises:
        ConfigError: the name is unknown, or the number is missing, invalid or out of range.

    Example:
        >>> parse_staleness("inverse").scale(3)
        0.25
        >>> parse_staleness("drop:2").is_dropped(3)
        True
    """
    name, colon, number = text.strip().partition(":")
    if name not in RULES:
        raise unknown("staleness rule", name, [rule.spelling for rule in RULES.values()])
    if name == "distance":
        return Distance(_limit(text, number))
    if name == "drop":
        return Drop(_most_versions(text, number))
    if colon:
        raise ConfigError(f"staleness {name} takes no number, got {text!r}; write {name}")
    return Inverse() if name == "inverse" else WHOLE


def _limit(text: str, number: str) -> float:
    try:
        limit = float(number)
    except ValueError:
        limit = math.nan
    if not 0 < limit < math.inf:
        raise ConfigError(
            "staleness distance:C needs a number C > 0 (learning rate times squared distance), "
            f"got {text!r}; write for example distance:5e-05"
        )
    return limit


def _most_versions(text: str, number: str) -> int:
    try:
        most_versions = int(number)
    except ValueError:
        most_versions = -1
    if most_versions < 0:
        raise ConfigError(
            "staleness drop:S needs a whole number S >= 0 (versions a push may lag behind), "
            f"got {text!r}; write for example drop:4"
        )
    return most_versions
