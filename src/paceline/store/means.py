"""The arithmetic of updates: means of gradients and buffers, differences and distances of models.

    mean         sum_i w_i g_i, in member order; of 16 bits in 32, rounded once
    buffers      the same, in wider numbers: equal ones stay as they are; of counters the maximum
    difference   base - home: what local steps have changed, pushed as if it were a gradient
    rule         SGD on the mean difference; with rate 1 and no momentum that averages parameters
    distance     eta_j = min(C / ||w_j - w_tau||^2, eta_max), given as a factor on the gradient:
                 scale = eta_j / eta_max            1 where nothing has moved far

``w_tau`` is what the pusher still holds, ``w_j`` the newest version in the store; jobs are done in
one order, so when a push's turn has come the newest version is the one that it is applied to.
Squares are summed in float64, so the scale does not depend on how tensors are laid out.

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
"""Alpha: of its own fragment, that a worker keeps where it has gone on meanwhile."""


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
    """Of a float or complex buffer the weighted mean, of a counter the maximum."""
    first = parts[0]
    if not has_mean(first.dtype):
        return highest(parts)
    if all(torch.equal(first, one) for one in parts[1:]):
        return first
    return _weighted_sum([first.to(carried(first.dtype)), *parts[1:]], weights).to(first.dtype)


def _in_32_bits(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted mean, not rounded to 16 bits yet."""
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
        before, after, into = (one[start:stop].view(dtype) for one in (base, home, out))
        if out.device == home.device:
            torch.sub(before, after, out=into)
        else:
            into.copy_(before - after)


def merge_into(runs: Iterable[tuple[torch.dtype, int, int]], base: Tensor, home: Tensor) -> None:
    """Of ``home`` this share stays, the rest of it becomes ``base``: see protocols/streaming.py.

    Args:
        runs, base, home: as of ``difference_into``.
    """
    for dtype, start, stop in runs:
        mine, came = home[start:stop].view(dtype), base[start:stop].view(dtype)
        mine.mul_(KEPT_SHARE).add_(came, alpha=1.0 - KEPT_SHARE)


def difference_rule(
    parameters: Iterable[nn.Parameter], *, lr: float, momentum: float, is_nesterov: bool
) -> Optimizer:
    """The optimizer that the store applies to mean differences (protocols/outer.py).

    Args:
        parameters: those that may move: a frozen one, whose difference is 0, may thaw.
    """
    moving = [one for one in parameters if one.is_floating_point() or one.is_complex()]
    return torch.optim.SGD(moving, lr=lr, momentum=momentum, nesterov=is_nesterov)


def allowed_scale(limit: float, squared_distance: float, groups: Groups) -> float:
    """The factor that ``C = limit`` leaves of a gradient; 1.0 without a learning rate.

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
        before = place.flat(held)
        if not (before.is_floating_point() or before.is_complex()):
            continue
        moved = place.flat(newest).to(before.device) - before
        dtype = torch.complex128 if moved.is_complex() else torch.float64
        total += float(torch.linalg.vector_norm(moved, dtype=dtype).real) ** 2
    return total
