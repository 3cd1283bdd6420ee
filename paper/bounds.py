"""Bounds on the error of SGD after J updates, by protocol.

F is L-smooth and, but for the last bound, c-strongly convex; gradients of one sample are unbiased
with a variance of at most sigma^2 + M_G ||grad F||^2; an update averages K mini-batches of m.

    K-sync     E[F(w_J)] - F* <= floor + (1 - eta c)^J (F(w_0) - F* - floor)
               floor = eta L sigma^2 / (2 c K m)
    K-async,   the same with c gamma' for c: gamma' = 1 - gamma + p0/2; p0 bounds the probability
    K-batch-   that a gradient is fresh from below, and gamma how far a stale one is off:
    async      E||grad F(w_j) - grad F(w_tau)||^2 <= gamma E||grad F(w_j)||^2

So what staleness costs is one number, and what waiting costs is the time of an update (theory.py).
This module must not know simulations or measurements.

Source: S. Dutta, G. Joshi, S. Ghosh, P. Dube, P. Nagpurkar, "Slow and Stale Gradients Can Win the
Race: Error-Runtime Trade-offs in Distributed SGD", AISTATS 2018 (PMLR 84:803-812), theorems 3 to 5.
"""

import math
from dataclasses import dataclass

from paceline.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What the bounds need to know of a problem.

    Args:
        smoothness: L, > 0.
        convexity: c, 0 < c <= L.
        variance: sigma^2 of one sample's gradient, >= 0.
        growth: M_G, what the variance grows by with the gradient's square, >= 0.
        first_error: F(w_0) - F*, >= 0.
    """

    smoothness: float
    convexity: float
    variance: float
    first_error: float
    growth: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.convexity <= self.smoothness < math.inf:
            raise ConfigError(
                f"a problem needs 0 < convexity <= smoothness, got {self.convexity} and "
                f"{self.smoothness}"
            )


def slowdown(gamma: float, fresh_probability: float) -> float:
    """gamma' = 1 - gamma + p0/2: what staleness leaves of each update's progress."""
    return 1.0 - gamma + fresh_probability / 2.0


def most_learning_rate(problem: Problem, num_samples: int, num_pushes: int | None = None) -> float:
    """The largest eta that the bounds hold for.

        K-sync     1 / (2L (M_G/(Km) + 1))
        K-async    1 / (2L (M_G/(Km) + 1/K))

    Args:
        num_samples: K m, averaged by an update.
        num_pushes: K for the asynchronous protocols, None for the synchronous ones.
    """
    own = 1.0 if num_pushes is None else 1.0 / num_pushes
    return 1.0 / (2.0 * problem.smoothness * (problem.growth / num_samples + own))


def error_floor(problem: Problem, lr: float, num_samples: int, progress: float = 1.0) -> float:
    """What no number of updates goes below: eta L sigma^2 / (2 c gamma' K m).

    Args:
        lr: eta.
        num_samples: K m.
        progress: gamma' of `slowdown`; 1 for the synchronous protocols.
    """
    rate = 2.0 * problem.convexity * progress * num_samples
    return lr * problem.smoothness * problem.variance / rate


def error_after(
    problem: Problem, lr: float, num_samples: int, num_updates: int, progress: float = 1.0
) -> float:
    """The bound on E[F(w_J)] - F* after J = ``num_updates``."""
    floor = error_floor(problem, lr, num_samples, progress)
    left = (1.0 - lr * problem.convexity * progress) ** num_updates
    return floor + left * (problem.first_error - floor)


def gradient_after(
    problem: Problem, lr: float, num_samples: int, num_updates: int, progress: float
) -> float:
    """Without convexity: the bound on (1/(J+1)) sum_j E||grad F(w_j)||^2, asynchronous.

    2 (F(w_0) - F*) / ((J+1) eta gamma') + L eta sigma^2 / (K m gamma')
    """
    first = 2.0 * problem.first_error / ((num_updates + 1) * lr * progress)
    return first + problem.smoothness * lr * problem.variance / (num_samples * progress)
