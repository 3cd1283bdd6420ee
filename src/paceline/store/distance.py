"""How far the parameters have moved since a push pulled them, and the step that this allows.

    eta_j = min(C / ||w_j - w_tau||^2, eta_max)        given as a factor on the gradient:
    scale = eta_j / eta_max                            1 where nothing has moved far

``w_tau`` is what the pusher still holds, ``w_j`` the newest version in the store; jobs are done in
one order, so when a push's turn has come the newest version is the one that it is applied to.
Squares are summed in float64, so the scale does not depend on how tensors are laid out.

Source: Dutta et al., AISTATS 2018, eq. 13 (see protocols/staleness.py). This module must not know
protocols or who executes.
"""

import torch
from torch import Tensor

from .layout import Layout
from .optimizer import Groups


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
