"""What is taken off a gradient before it is applied: clipping, and a step that distance allows.

    norm first, then value, as a loop writes them:  g <- g min(1, max_norm / (|g| + 1e-6))
                                                    g <- min(max(g, -max_value), max_value)

A number below 0 stands for "not at all"; 0 and infinity mean what they mean to torch. It travels as
a plain pair, on which every push into an update must agree.

    eta_j = min(C / ||w_j - w_tau||^2, eta_max)        given as a factor on the gradient:
    scale = eta_j / eta_max                            1 where nothing has moved far

``w_tau`` is what the pusher still holds, ``w_j`` the newest version in the store; jobs are done in
one order, so when a push's turn has come the newest version is the one that it is applied to.
Squares are summed in float64, so the scale does not depend on how tensors are laid out.

Source: Dutta et al., AISTATS 2018, eq. 13 (see protocols/staleness.py). This module must not know
who pushes, protocols, or who executes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError
from .layout import Layout
from .optimizer import Groups

_NOT = -1.0


class Clip(NamedTuple):
    """What one push asks for."""

    max_norm: float = _NOT
    max_value: float = _NOT

    @property
    def has_norm(self) -> bool:
        return self.max_norm >= 0.0

    @property
    def has_value(self) -> bool:
        return self.max_value >= 0.0

    def factor(self, norm: float) -> float:
        """What scales a gradient of this norm down, as ``torch.nn.utils.clip_grad_norm_`` does."""
        return min(1.0, self.max_norm / (norm + 1e-6)) if self.has_norm else 1.0

    def __str__(self) -> str:
        texts = [f"norm {self.max_norm:g}"] if self.has_norm else []
        texts += [f"value {self.max_value:g}"] if self.has_value else []
        return " and ".join(texts) or "nothing"


UNCLIPPED = Clip()


def clip_conflict(worker: int, clip: Clip, other: int, its: Clip) -> ConfigError:
    """Two workers pushed into one update, which is clipped once."""
    return ConfigError(
        f"workers {worker} and {other} pushed into one update, and worker {worker} clips it to "
        f"{clip}, worker {other} to {its}; an update is clipped once: call pace.clip_grad_norm_ "
        "and pace.clip_grad_value_ with the same numbers in every worker and at every step"
    )


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
