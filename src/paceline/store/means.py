"""The arithmetic of updates: means of gradients and buffers, differences and distances of models.

    mean         sum_i w_i g_i, in member order; 16-bit ones in 32 bits, rounded once
    buffers      the same, in a wider dtype: equal ones stay unchanged; counters: the maximum
    difference   base - home: the change by local steps, pushed as if it were a gradient
    rule         SGD on the mean difference; with rate 1 and no momentum that averages parameters
    distance     eta_j = min(C / ||w_j - w_tau||^2, eta_max), as a factor of the gradient:
                 scale = eta_j / eta_max            1 if the distance is small

``w_tau`` is the version that the pusher holds, ``w_j`` the newest version in the store; jobs are
done in order, so at a push's turn the newest version is the one that it is applied to. Squares are
summed in float64, so the scale does not depend on the layout of tensors.

Source: Dutta et al., AISTATS 2018, eq. 13 (see protocols/staleness.py). This module must not know
protocols, members or who executes.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .layout import Layout
from .optimizer import Groups
from .sums import CHUNK_BYTES, HALVES, carried, has_mean, highest

KEPT_SHARE = 0.5
"""Alpha: the share of its own fragment that a worker keeps if it has gone on meanwhile."""


def average_into(mean: Tensor, parts: Sequence[Tensor], weights: Sequence[float]) -> None:
    """The weighted mean of the parts of one gradient, in member order."""
    if len(parts) == 1:
        mean.copy_(parts[0])
    elif len(parts) == 2:
        torch.lerp(parts[0], parts[1], weights[1], out=mean)
    elif mean.dtype in HALVES:
        for start in range(0, len(mean), CHUNK_BYTES // 2):
            chunk = slice(start, start + CHUNK_BYTES // 2)
            mean[chunk] = _in_32_bits([part[chunk] for part in parts], weights)
    else:
        _weighted_sum(parts, weights, out=mean)


def average_of_buffers(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted mean of a float or complex buffer, the maximum of a counter."""
    first = parts[0]
    if not has_mean(first.dtype):
        return highest(parts)
    if all(torch.equal(first, part) for part in parts[1:]):
        return first
    return _weighted_sum([first.to(carried(first.dtype)), *parts[1:]], weights).to(first.dtype)


def _in_32_bits(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted mean, before it is rounded to 16 bits."""
    return _weighted_sum([parts[0].float(), *parts[1:]], weights)


def _weighted_sum(
    parts: Sequence[Tensor], weights: Sequence[float], out: Tensor | None = None
) -> Tensor:
    total = torch.mul(parts[0], weights[0], out=out)
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        total.add_(part, alpha=weight)
    return total


def difference_into(
    runs: Iterable[tuple[torch.dtype, int, int]], base: Tensor, home: Tensor, out: Tensor
) -> None:
    """Base minus home, also to another device.

    Args:
        runs: of the parameters, ``(dtype, start, stop)`` in bytes.
        base, home, out: blocks or slots (bytes, the layout's offsets).
    """
    for dtype, start, stop in runs:
        before, after, into = (block[start:stop].view(dtype) for block in (base, home, out))
        if out.device == home.device:
            torch.sub(before, after, out=into)
        else:
            into.copy_(before - after)


def merge_into(runs: Iterable[tuple[torch.dtype, int, int]], base: Tensor, home: Tensor) -> None:
    """Blend ``base`` into ``home``, of which ``KEPT_SHARE`` stays: see protocols/streaming.py.

    Args:
        runs, base, home: as of ``difference_into``.
    """
    for dtype, start, stop in runs:
        own, received = home[start:stop].view(dtype), base[start:stop].view(dtype)
        own.mul_(KEPT_SHARE).add_(received, alpha=1.0 - KEPT_SHARE)


def difference_rule(
    parameters: Iterable[nn.Parameter], *, lr: float, momentum: float, is_nesterov: bool
) -> Optimizer:
    """The optimizer that the store applies to mean differences (protocols/outer.py).

    Args:
        parameters: also frozen ones, whose difference is 0: they may thaw.
    """
    trainable = [
        parameter
        for parameter in parameters
        if parameter.is_floating_point() or parameter.is_complex()
    ]
    return torch.optim.SGD(trainable, lr=lr, momentum=momentum, nesterov=is_nesterov)


def allowed_scale(limit: float, squared_distance: float, groups: Groups) -> float:
    """The factor of a gradient for ``C = limit``; 1.0 without a learning rate.

    Args:
        squared_distance: ||w_j - w_tau||^2, over all parameters.
        groups: the optimizer's; eta_max is their largest learning rate.
    """
    eta_max = max((float(group.get("lr", 0.0)) for group in groups), default=0.0)
    step = eta_max * squared_distance
    return min(1.0, limit / step) if step > 0.0 else 1.0


def squared_distance(layout: Layout, newest: Tensor, held: Tensor) -> float:
    """||w_j - w_tau||^2 over the parameters of two blocks (bytes, the layout's offsets)."""
    total = 0.0
    for place in layout.parameters.places:
        old = place.flat(held)
        if not (old.is_floating_point() or old.is_complex()):
            continue
        difference = place.flat(newest).to(old.device) - old
        dtype = torch.complex128 if difference.is_complex() else torch.float64
        total += float(torch.linalg.vector_norm(difference, dtype=dtype).real) ** 2
    return total
