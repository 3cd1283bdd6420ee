"""Gradient noise: from which batch size on a larger batch is worth less than its samples.

The gradient of a batch of B samples is G plus noise of variance tr(Sigma) / B, so

    E|G_B|^2 = |G|^2 + S / B,   S = tr(Sigma)         two batch sizes give both unknowns:

    |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)         unbiased
    S     = (|G_b|^2 - |G_B|^2) / (1/b - 1/B)         unbiased
    B_simple = S / |G|^2                              there, half of a gradient's square is noise

A draw takes B = b 2^n samples in pieces of b, whose gradients are averaged one after the other, so
all batch sizes in between are measured with the same work. It must not know how it is shown.

Source: S. McCandlish, J. Kaplan, D. Amodei and the OpenAI Dota team, "An Empirical Model of
Large-Batch Training", 2018 (arXiv:1812.06162), section 2.2 and appendix A.1; the learning rate:
eq. 2.6. Changed: the large batch is the mean of the small ones, not of other samples.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

_RESAMPLES = 500

Gradient = Callable[[int], Tensor]
"""So many fresh samples -> the mean of their gradients, flat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """What was measured at one point of the training.

    Args:
        small: b, samples of the smallest batch; big: B, of the largest.
        squared: batch size -> mean of |G_batch|^2 over the draws.
        signal: |G|^2, unbiased; not above 0 where the noise hides it.
        trace: S = tr(Sigma), unbiased.
        interval: 95 % of B_simple, by bootstrap over the draws; infinite ends are possible.
        draws: how many.
    """

    small: int
    big: int
    squared: dict[int, float]
    signal: float
    trace: float
    interval: tuple[float, float]
    draws: int

    @property
    def scale(self) -> float:
        """B_simple, in samples; infinite where the noise hides the gradient."""
        return scale_of(self.signal, self.trace)

    def share(self, batch_size: float) -> float:
        """Of the square of such a batch's gradient, how much is noise: 1 / (1 + B / B_simple)."""
        if self.scale == float("inf"):
            return 1.0
        return self.scale / (self.scale + batch_size)

    def measured_share(self, batch_size: int) -> float:
        """The same from the gradients of that size alone and |G|^2."""
        return 1.0 - max(0.0, self.signal) / self.squared[batch_size]


def unbiased(small: int, small_squared: float, big: int, big_squared: float) -> tuple[float, float]:
    """|G|^2 and S from mean squares at two batch sizes.

    Example:
        >>> unbiased(1, 3.0 + 8.0 / 1, 4, 3.0 + 8.0 / 4)
        (3.0, 8.0)
    """
    signal = (big * big_squared - small * small_squared) / (big - small)
    trace = (small_squared - big_squared) / (1.0 / small - 1.0 / big)
    return signal, trace


def scale_of(signal: float, trace: float) -> float:
    """S / |G|^2; 0 where no noise was seen, infinite where no gradient was."""
    if trace <= 0:
        return 0.0
    return trace / signal if signal > 0 else float("inf")


def scaled_rate(rate: float, batch_size: int, other: int, scale: float) -> float:
    """The learning rate for ``other`` samples: in proportion below the noise scale, flat above it.

    eps(B) = eps_max / (1 + B_simple / B), through ``rate`` at ``batch_size``.
    """
    if scale == float("inf"):
        return rate * other / batch_size
    return rate * (1.0 + scale / batch_size) / (1.0 + scale / other)


def measure_noise(gradient: Gradient, small: int, doublings: int, draws: int) -> Noise:
    """Draw gradients and tell the noise from the rest.

    Args:
        small: b, >= 1.
        doublings: n, >= 1.
        draws: >= 2.
    """
    sizes = [small * 2**n for n in range(doublings + 1)]
    found = [_draw(gradient, small, doublings) for _ in range(draws)]
    squared = {size: sum(one[i] for one in found) / draws for i, size in enumerate(sizes)}
    signal, trace = unbiased(small, squared[small], sizes[-1], squared[sizes[-1]])
    return Noise(
        small=small,
        big=sizes[-1],
        squared=squared,
        signal=signal,
        trace=trace,
        interval=_interval([(one[0], one[-1]) for one in found], small, sizes[-1]),
        draws=draws,
    )


def _draw(gradient: Gradient, small: int, doublings: int) -> list[float]:
    """|G|^2 of one draw at each batch size; at the smallest the mean over all pieces."""
    count = 2**doublings
    total = gradient(small).clone()
    smalls, squares = [_squared(total)], []
    for number in range(2, count + 1):
        piece = gradient(small)
        smalls.append(_squared(piece))
        total += piece
        if number & (number - 1) == 0:
            squares.append(_squared(total) / number**2)
    return [sum(smalls) / count, *squares]


def _squared(values: Tensor) -> float:
    return float(values.double().square().sum())


def _interval(pairs: Sequence[tuple[float, float]], small: int, big: int) -> tuple[float, float]:
    rng = random.Random(0)
    scales = []
    for _ in range(_RESAMPLES):
        chosen = rng.choices(pairs, k=len(pairs))
        means = [sum(one[i] for one in chosen) / len(chosen) for i in (0, 1)]
        scales.append(scale_of(*unbiased(small, means[0], big, means[1])))
    scales.sort()
    return scales[_RESAMPLES // 40], scales[-1 - _RESAMPLES // 40]
