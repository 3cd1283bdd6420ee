"""Closed forms of a protocol's time per update and staleness.

X, the seconds that one worker takes for one mini-batch, is a ``Delay``, independent and identically
distributed for all P workers; communication takes no time. Without a known form the answer is
None, and only a simulation gives the value. This module must not know simulations or measurements.

Source: S. Dutta, G. Joshi, S. Ghosh, P. Dube, P. Nagpurkar, "Slow and Stale Gradients Can Win the
Race: Error-Runtime Trade-offs in Distributed SGD", AISTATS 2018 (PMLR 84:803-812); the order
statistics are textbook results, checked against draws and the paper's figures in the tests.
"""

import math
from collections.abc import Sequence

from .conditions.delays import Delay
from .conditions.distributions import Constant, Empirical, Exponential, Pareto, Term


def harmonic(n: int) -> float:
    """H_n = 1 + 1/2 + ... + 1/n; H_0 = 0."""
    return math.fsum(1.0 / i for i in range(1, n + 1))


def order_statistic_s(delay: Delay, rank: int, num_workers: int) -> float | None:
    """E[X_{K:P}]: mean time at which the ``rank``-th of ``num_workers`` that start together ends.

        Delta + exp(mean)      Delta + mean (H_P - H_{P-K})
        one of x_1 <= x_2 ...  x_1 + sum_i (x_{i+1} - x_i) P(fewer than K of P are <= x_i)
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
    if isinstance(term, Empirical) and len(term.values_s) * rank <= _MOST_SUMMANDS:
        return _empirical_s(term.values_s, rank, num_workers)
    return None


_MOST_SUMMANDS = 1_000_000


def _empirical_s(values_s: Sequence[float], rank: int, num_workers: int) -> float:
    """x_1 + sum_i (x_{i+1} - x_i) P(X_{K:P} > x_i): fewer than K of P are at most x_i."""
    parts = [values_s[0]]
    for i in range(1, len(values_s)):
        if (gap_s := values_s[i] - values_s[i - 1]) > 0.0:
            parts.append(gap_s * _binomial_below(rank, num_workers, i / len(values_s)))
    return math.fsum(parts)


def _binomial_below(rank: int, num_workers: int, share: float) -> float:
    """P(fewer than ``rank`` of ``num_workers`` succeed), each with probability ``share``."""
    yes, no, whole = math.log(share), math.log1p(-share), math.lgamma(num_workers + 1)
    return math.fsum(
        math.exp(
            whole
            - math.lgamma(count + 1)
            - math.lgamma(num_workers - count + 1)
            + count * yes
            + (num_workers - count) * no
        )
        for count in range(rank)
    )


def order_statistic_numeric_s(delay: Delay, rank: int, num_workers: int) -> float:
    """E[X_{K:P}] of any distribution, by one integral over its inverse tail.

        U_{K:P} ~ Beta(K, P-K+1), X = Q(U), u = 1/(1 + e^-t):
        E[X_{K:P}] = integral of Q(u(t)) u^K (1-u)^(P-K+1) / B(K, P-K+1) dt

    In t the weight is one smooth hump whose tails fall exponentially, so equal steps converge
    exponentially; heavy tails only make the right side longer.

    Returns:
        Seconds, exact to about 1e-6 for smooth distributions; a long list, or the sum of several
        random terms, is as good as its steps.
    """
    right = num_workers - rank + 1
    log_beta = math.lgamma(rank) + math.lgamma(right) - math.lgamma(num_workers + 1)
    middle, step = math.log(rank / right), _STEP * math.sqrt(1.0 / rank + 1.0 / right)
    total = 0.0
    for direction in (1, -1):
        i = 0 if direction == 1 else 1
        quiet = 0
        while quiet < _QUIET_STEPS and i < _MOST_STEPS:
            t = middle + direction * i * step
            log_share, log_rest = -_log1p_exp(t), -_log1p_exp(-t)  # of 1 - u and of u
            weight = math.exp(rank * log_rest + right * log_share - log_beta)
            share = math.exp(log_share)
            if not 0.0 < share < 1.0:
                break
            part = delay.exceeded_s(share) * weight
            total += part
            quiet = quiet + 1 if part < _NEGLIGIBLE * total else 0
            i += 1
    return total * step


_STEP, _NEGLIGIBLE = 0.05, 1e-12
_QUIET_STEPS, _MOST_STEPS = 20, 100_000


def _log1p_exp(t: float) -> float:
    """log(1 + e^t) without overflow."""
    return t + math.log1p(math.exp(-t)) if t > 0 else math.log1p(math.exp(t))


def update_s(protocol: str, delay: Delay, num_workers: int, num_pushes: int) -> float | None:
    """Mean seconds between two updates in the long run, E[T].

        full-sync       E[X_{P:P}]
        k-sync          E[X_{K:P}]
        k-batch-sync    K E[X]/P for exp (Erlang), E[X_{1:P}] for K = 1
        k-async         E[X_{K:P}] for exp; K = P: E[X_{P:P}]; K = 1: E[X]/P
        k-batch-async   K E[X]/P (renewal theorem); async: K = 1

    E[X_{K:P}] is a closed form for constant, exponential and Pareto times, shifted or not, and
    one integral for all others.

    Args:
        protocol: its name without the number.
        num_workers: P.
        num_pushes: K, the mini-batches that an update averages.

    Returns:
        Seconds; None where theory has no answer.
    """
    if _is_even(protocol, delay, num_pushes):
        return num_pushes * delay.mean_s / num_workers
    if not _is_ranked(protocol, delay, num_workers, num_pushes):
        return None
    closed_s = order_statistic_s(delay, num_pushes, num_workers)
    if closed_s is not None:
        return closed_s
    return order_statistic_numeric_s(delay, num_pushes, num_workers)


def is_closed_form(protocol: str, delay: Delay, num_workers: int, num_pushes: int) -> bool:
    """Whether `update_s` is a formula, and not an integral."""
    if _is_even(protocol, delay, num_pushes):
        return True
    is_ranked = _is_ranked(protocol, delay, num_workers, num_pushes)
    return is_ranked and order_statistic_s(delay, num_pushes, num_workers) is not None


def _is_even(protocol: str, delay: Delay, num_pushes: int) -> bool:
    """Whether an update takes K E[X]/P: no worker waits, or steps are memoryless."""
    if protocol == "k-batch-sync":
        return _is_exponential(delay)
    return protocol in ("k-batch-async", "async") or (protocol == "k-async" and num_pushes == 1)


def _is_ranked(protocol: str, delay: Delay, num_workers: int, num_pushes: int) -> bool:
    """Whether an update takes E[X_{K:P}]: all begin together, or might as well."""
    if num_pushes > num_workers:
        return False
    if protocol == "k-batch-sync":
        return num_pushes == 1
    if protocol == "k-async":
        return _is_exponential(delay) or num_pushes == num_workers
    return protocol in ("full-sync", "k-sync")


def _is_exponential(delay: Delay) -> bool:
    return len(delay.terms) == 1 and isinstance(delay.terms[0], Exponential)


def evenly_s(means_s: Sequence[float], num_pushes: int) -> float:
    """E[T] of async and k-batch-async when workers differ: K over the sum of their rates.

    Args:
        means_s: E[X] of each worker.

    Source: the elementary renewal theorem for each worker; the sum of renewal processes.
    """
    return num_pushes / math.fsum(1.0 / mean_s for mean_s in means_s)


def staleness_versions(protocol: str, num_workers: int, num_pushes: int) -> float | None:
    """Mean versions that passed between the pull of a gradient's parameters and its update.

    An update ages the work in flight and the pushes already gathered by one version each, and
    K of them are used up by it, so in the long run the mean is the number that age, over K:

        k-async          P - K members are at work at an update     P/K - 1
        k-batch-async    P - 1 members are at work at an update     (P - 1)/K
        synchronous      everything in flight is used or dropped    0

    Source: conservation (Little's law); the distribution of X does not matter.

    Returns:
        Versions; None for other protocols.
    """
    if protocol in ("full-sync", "k-sync", "k-batch-sync"):
        return 0.0
    if protocol == "k-async":
        return num_workers / num_pushes - 1.0
    if protocol in ("k-batch-async", "async"):
        return (num_workers - 1.0) / num_pushes
    return None
