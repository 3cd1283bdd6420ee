"""Distributions of a time, one class each, with mean, draws and tail.

    class         written as        P(X > x)                              mean
    Constant      20ms              1 for x < value                       value
    Exponential   exp:20ms          exp(-x / mean)                        mean
    Pareto        pareto:a,x_m      (x_m / x)^a for x >= x_m              a x_m / (a - 1), a > 1
    LogNormal     lognormal:s,med   1 - Phi(log(x / med) / s)             med exp(s^2 / 2)
    Weibull       weibull:k,scale   exp(-(x / scale)^k)                   scale Gamma(1 + 1/k)
    Empirical     list:1ms,2ms,...  share of the values above x           their mean

``exceeded_s(q)`` inverts the tail: the time that is exceeded with probability q. It takes q and not
1 - q, so that the far end of a heavy tail keeps its digits. Randomness is an argument. It must not
know who is slow, nor how times are written.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

_NORMAL = NormalDist()


class Term(Protocol):
    """One summand of a delay."""

    @property
    def mean_s(self) -> float: ...

    def drawer(self, rng: random.Random) -> Callable[[], float]:
        """Return a function that makes one draw with ``rng`` per call."""

    def exceeded_s(self, share: float) -> float:
        """Return the time x with P(X > x) = share, 0 < share < 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """Always ``mean_s``; does not use the random generator."""

    mean_s: float

    def drawer(self, rng: random.Random) -> Callable[[], float]:
        mean_s = self.mean_s
        return lambda: mean_s

    def exceeded_s(self, share: float) -> float:
        return self.mean_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponential:
    """Density exp(-x / mean) / mean."""

    mean_s: float

    def drawer(self, rng: random.Random) -> Callable[[], float]:
        # As expovariate, but inline: half the time of a draw.
        uniform, log, rate_per_s = rng.random, math.log, 1.0 / self.mean_s
        return lambda: -log(1.0 - uniform()) / rate_per_s

    def exceeded_s(self, share: float) -> float:
        return -self.mean_s * math.log(share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pareto:
    """P(X > x) = (scale / x)^shape for x >= scale; the mean needs shape > 1."""

    shape: float
    scale_s: float

    @property
    def mean_s(self) -> float:
        return self.scale_s * self.shape / (self.shape - 1.0)

    def drawer(self, rng: random.Random) -> Callable[[], float]:
        scale_s, shape, draw = self.scale_s, self.shape, rng.paretovariate
        return lambda: scale_s * draw(shape)

    def exceeded_s(self, share: float) -> float:
        return float(self.scale_s * share ** (-1.0 / self.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """exp of a normal number: ``median_s`` exp(``sigma`` N(0, 1))."""

    sigma: float
    median_s: float

    @property
    def mean_s(self) -> float:
        return self.median_s * math.exp(self.sigma**2 / 2.0)

    def drawer(self, rng: random.Random) -> Callable[[], float]:
        median_s, sigma, draw, exp = self.median_s, self.sigma, rng.normalvariate, math.exp
        return lambda: median_s * exp(draw(0.0, sigma))

    def exceeded_s(self, share: float) -> float:
        return self.median_s * math.exp(-self.sigma * _NORMAL.inv_cdf(share))


@dataclass(frozen=True, slots=True, kw_only=True)
class Weibull:
    """P(X > x) = exp(-(x / scale)^shape); shape < 1 has a heavier tail than exp, > 1 a lighter."""

    shape: float
    scale_s: float

    @property
    def mean_s(self) -> float:
        return self.scale_s * math.gamma(1.0 + 1.0 / self.shape)

    def drawer(self, rng: random.Random) -> Callable[[], float]:
        scale_s, shape, draw = self.scale_s, self.shape, rng.weibullvariate
        return lambda: draw(scale_s, shape)

    def exceeded_s(self, share: float) -> float:
        return float(self.scale_s * (-math.log(share)) ** (1.0 / self.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Empirical:
    """One of the measured values, with equal probability; ``values_s`` are kept sorted."""

    values_s: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values_s", tuple(sorted(self.values_s)))

    @property
    def mean_s(self) -> float:
        return math.fsum(self.values_s) / len(self.values_s)

    def drawer(self, rng: random.Random) -> Callable[[], float]:
        values_s, uniform, num_values = self.values_s, rng.random, len(self.values_s)
        return lambda: values_s[int(uniform() * num_values)]

    def exceeded_s(self, share: float) -> float:
        num_values = len(self.values_s)
        return self.values_s[min(num_values - 1, int((1.0 - share) * num_values))]
