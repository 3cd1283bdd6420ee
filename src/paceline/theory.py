"""What is known of a protocol before anything runs: closed forms of an update's time and staleness.

X, the seconds that one worker takes for one mini-batch, is a ``Delay``, independent and alike for
all P workers; communication takes no time. Where the literature gives no closed form the answer
is None, and a simulation has to tell. This module must not know simulations or measurements.

Source: S. Dutta, G. Joshi, S. Ghosh, P. Dube, P. Nagpurkar, "Slow and Stale Gradients Can Win the
Race: Error-Runtime Trade-offs in Distributed SGD", AISTATS 2018 (PMLR 84:803-812); the order
statistics are textbook results, checked against draws and the paper's figures in the tests.
"""

import math

from .conditions.delays import Delay
from .conditions.distributions import Constant, Exponential, Pareto, Term


def harmonic(n: int) -> float:
    """H_n = 1 + 1/2 + ... + 1/n; H_0 = 0."""
    return math.fsum(1.0 / i for i in range(1, n + 1))


def order_statistic_s(delay: Delay, rank: int, num_workers: int) -> float | None:
    """E[X_{K:P}]: when the ``rank``-th of ``num_workers`` that start together is done.

        Delta + exp(mean)      Delta + mean (H_P - H_{P-K})
        Delta + Pareto(a, x)   Delta + x Gamma(P+1) Gamma(P-K+1-1/a) / (Gamma(P-K+1) Gamma(P+1-1/a))

    Args:
        rank: K, from 1 to ``num_workers``.
        num_workers: P.

    Returns:
        Seconds; None for sums of several random terms.
    """
    shift_s = math.fsum(term.mean_s for term in delay.terms if isinstance(term, Constant))
    rest = [term for term in delay.terms if not isinstance(term, Constant)]
    if not rest:
        return shift_s
    if len(rest) > 1:
        return None
    random_s = _random_part_s(rest[0], rank, num_workers)
    return None if random_s is None else shift_s + random_s


def _random_part_s(term: Term, rank: int, num_workers: int) -> float | None:
    left = num_workers - rank
    if isinstance(term, Exponential):
        return term.mean_s * (harmonic(num_workers) - harmonic(left))
    if isinstance(term, Pareto):
        inverse = 1.0 / term.shape
        log_s = math.lgamma(num_workers + 1) - math.lgamma(num_workers + 1 - inverse)
        log_s += math.lgamma(left + 1 - inverse) - math.lgamma(left + 1)
        return term.scale_s * math.exp(log_s)
    return None


def update_s(protocol: str, delay: Delay, num_workers: int, num_pushes: int) -> float | None:
    """Mean seconds between two updates in the long run, E[T].

        full-sync       E[X_{P:P}]
        k-sync          E[X_{K:P}]
        k-batch-sync    K E[X]/P for exp (Erlang), E[X_{1:P}] for K = 1
        k-async         E[X_{K:P}] for exp; K = P: E[X_{P:P}]; K = 1: E[X]/P
        k-batch-async   K E[X]/P (renewal theorem); async: K = 1

    Args:
        protocol: its name without the number.
        num_workers: P.
        num_pushes: K, the mini-batches that an update averages.

    Returns:
        Seconds; None where there is no closed form.
    """
    is_exponential = len(delay.terms) == 1 and isinstance(delay.terms[0], Exponential)
    evenly_s = num_pushes * delay.mean_s / num_workers
    ranked_s = None
    if num_pushes <= num_workers:
        ranked_s = order_statistic_s(delay, num_pushes, num_workers)
    if protocol in ("full-sync", "k-sync"):
        return ranked_s
    if protocol == "k-batch-sync":
        return evenly_s if is_exponential else ranked_s if num_pushes == 1 else None
    if protocol == "k-async":
        if num_pushes == 1:
            return evenly_s
        return ranked_s if is_exponential or num_pushes == num_workers else None
    return evenly_s if protocol in ("k-batch-async", "async") else None


def staleness_versions(protocol: str, num_workers: int, num_pushes: int) -> float | None:
    """Mean versions that passed between the pull of a gradient's parameters and its update.

    An update ages the work in flight and the pushes already gathered by one version each, and
    K of them are used up by it, so in the long run the mean is the number that age, over K:

        k-async          P - K members are at work at an update     P/K - 1
        k-batch-async    P - 1 members are at work at an update     (P - 1)/K
        synchronous      everything in flight is used or dropped    0

    Source: conservation (Little's law); the distribution of X does not matter.

    Returns:
        Versions; None for a protocol that it does not hold for.
    """
    if protocol in ("full-sync", "k-sync", "k-batch-sync"):
        return 0.0
    if protocol == "k-async":
        return num_workers / num_pushes - 1.0
    if protocol in ("k-batch-async", "async"):
        return (num_workers - 1.0) / num_pushes
    return None
