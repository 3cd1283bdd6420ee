"""The paper's bounds on the error of SGD after J updates, and on the time of an update.

F is L-smooth and, except for the last bound, c-strongly convex; gradients of one sample are
unbiased with a variance of at most sigma^2 + M_G ||grad F||^2; an update averages K mini-batches of
m.

    K-sync     E[F(w_J)] - F* <= floor + (1 - eta c)^J (F(w_0) - F* - floor)
               floor = eta L sigma^2 / (2 c K m)
    K-async,   the same with c gamma' for c: gamma' = 1 - gamma + p0/2; p0 bounds the probability
    K-batch-   that a gradient is fresh from below, and gamma the error of a stale one:
    async      E||grad F(w_j) - grad F(w_tau)||^2 <= gamma E||grad F(w_j)||^2

So the cost of staleness is one number, and the cost of waiting is the time of an update, which is
known (paceline.theory) or bounded here. This module must not know simulations or measurements.

Source: S. Dutta, G. Joshi, S. Ghosh, P. Dube, P. Nagpurkar, "Slow and Stale Gradients Can Win the
Race: Error-Runtime Trade-offs in Distributed SGD", AISTATS 2018 (PMLR 84:803-812), theorems 2 to 5.
"""

import math
from dataclasses import dataclass

from paceline import theory
from paceline.conditions.delays import Delay
from paceline.conditions.distributions import Constant, Exponential, Term, Weibull
from paceline.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The constants of a problem that the bounds need.

    Args:
        smoothness: L, > 0.
        convexity: c, 0 < c <= L.
        variance: sigma^2 of one sample's gradient, >= 0.
        growth: M_G, the growth of the variance with the gradient's square, >= 0.
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
    """Return gamma' = 1 - gamma + p0/2: the progress per update that staleness leaves."""
    return 1.0 - gamma + fresh_probability / 2.0


def most_learning_rate(problem: Problem, num_samples: int, num_pushes: int | None = None) -> float:
    """Return the largest eta for which the bounds hold.

        K-sync     1 / (2L (M_G/(Km) + 1))
        K-async    1 / (2L (M_G/(Km) + 1/K))

    Args:
        num_samples: K m, averaged by an update.
        num_pushes: K for the asynchronous protocols, None for the synchronous ones.
    """
    share = 1.0 if num_pushes is None else 1.0 / num_pushes
    return 1.0 / (2.0 * problem.smoothness * (problem.growth / num_samples + share))


def error_floor(problem: Problem, lr: float, num_samples: int, progress: float = 1.0) -> float:
    """Return the limit of the error over the updates: eta L sigma^2 / (2 c gamma' K m).

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
    """Return the bound on E[F(w_J)] - F* after J = ``num_updates``."""
    floor = error_floor(problem, lr, num_samples, progress)
    remaining = (1.0 - lr * problem.convexity * progress) ** num_updates
    return floor + remaining * (problem.first_error - floor)


def gradient_after(
    problem: Problem, lr: float, num_samples: int, num_updates: int, progress: float
) -> float:
    """Return the bound on (1/(J+1)) sum_j E||grad F(w_j)||^2, without convexity, asynchronous.

    2 (F(w_0) - F*) / ((J+1) eta gamma') + L eta sigma^2 / (K m gamma')
    """
    first = 2.0 * problem.first_error / ((num_updates + 1) * lr * progress)
    return first + problem.smoothness * lr * problem.variance / (num_samples * progress)


def k_async_bound_s(delay: Delay, num_workers: int, num_pushes: int) -> float | None:
    """Return E[X_{K:P}], an upper bound on an update of k-async if steps are new-longer-than-used.

    That is P(X > u + t | X > t) <= P(X > u): constant, exponential, their sums, Weibull with
    shape >= 1. Heavy tails break it: Pareto(2, 1), P = 20, K = 15 takes 2.17, not 1.96.

    Returns:
        Seconds; None if the terms do not tell whether they are.

    Source: Dutta et al. 2018, section 3 and lemma 3.
    """
    if not all(_is_new_longer_than_used(term) for term in delay.terms):
        return None
    closed_s = theory.order_statistic_s(delay, num_pushes, num_workers)
    return closed_s or theory.order_statistic_numeric_s(delay, num_pushes, num_workers)


def _is_new_longer_than_used(term: Term) -> bool:
    return isinstance(term, Constant | Exponential) or (
        isinstance(term, Weibull) and term.shape >= 1.0
    )


def speed_up(delay: Delay, num_workers: int) -> float:
    """Return E[T_sync] / E[T_async] = P E[X_{P:P}] / E[X]: the factor of updates that async makes.

    Source: Dutta et al. 2018, corollary to theorem 2; figure 5.
    """
    slowest_s = theory.update_s("full-sync", delay, num_workers, num_workers)
    assert slowest_s is not None
    return num_workers * slowest_s / delay.mean_s


def fresh_share(num_workers: int, num_pushes: int) -> float:
    """Return the share of k-async's gradients at the newest version, for exponential X: K/P.

    Source: memorylessness: which workers are among the next K does not depend on when they began.
    """
    return num_pushes / num_workers
