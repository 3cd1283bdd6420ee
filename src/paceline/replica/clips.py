"""Clips of the averaged gradient that a script has requested, until they go with a push.

    clip(G's) -> request --> step of G's optimizer ----------> its push is clipped
    clip(D's) -> request --> step of D's: the block's end ---> one push of both: one common clip

A norm is of all gradients of one push; a limit of values is per element. This module must not know
who pushes, nor how an update is clipped.
"""

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ConfigError
from ..store.clip import UNCLIPPED, Clip
from ..store.joint import parameters_of


class _Request(NamedTuple):
    """A clip of the gradients of these optimizers, one bit each in ``mask``."""

    mask: int
    clip: Clip
    norm: "LaterNorm | None" = None


class Clips:
    """The clips that one member has requested and not pushed yet.

    Args:
        optimizers: of the model, over different parameters.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = optimizers
        self._requests: list[_Request] = []
        self._norms: list[LaterNorm] = []
        """The norms of the current push."""

    def ask_norm(self, parameters: Any, max_norm: float) -> Tensor:
        """See ``Pace.clip_grad_norm_``."""
        mask = self._mask("clip_grad_norm_", parameters)
        if any(request.mask & mask for request in self._requests):
            raise ConfigError(
                "pace.clip_grad_norm_ was called after another clip of the same step: call it "
                "once, after the last backward(), and pace.clip_grad_value_ only after it"
            )
        norm = LaterNorm.unknown(next(self._model.parameters()).dtype)
        self._requests.append(_Request(mask, Clip(max_norm=_limit("max_norm", max_norm)), norm))
        return norm

    def ask_value(self, parameters: Any, clip_value: float) -> None:
        """See ``Pace.clip_grad_value_``."""
        mask = self._mask("clip_grad_value_", parameters)
        if any(request.mask & mask and request.clip.has_value for request in self._requests):
            raise ConfigError(
                "pace.clip_grad_value_ was called twice in one step: call it once, after the last "
                "backward()"
            )
        self._requests.append(_Request(mask, Clip(max_value=_limit("clip_value", clip_value))))

    def _mask(self, name: str, parameters: Any) -> int:
        """Return the optimizers of these parameters, one bit each.

        Raises:
            ConfigError: they are only some of an optimizer's, or of the model's.
        """
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        of_model, clipped = _with_gradient(self._model.parameters()), _with_gradient(parameters)
        if len(self._optimizers) == 1:
            if of_model == clipped:
                return 1
            raise ConfigError(
                f"pace.{name} was given {len(clipped)} parameters that have gradients, and the "
                f"model has {len(of_model)}; an average is clipped as a whole: "
                f"pace.{name}(model.parameters(), ...)"
            )
        owned = [_with_gradient(parameters_of(optimizer)) for optimizer in self._optimizers]
        clipped_parts = [part for part, own in enumerate(owned) if own and own <= clipped]
        if clipped_parts and clipped <= reduce(or_, (owned[part] for part in clipped_parts)):
            return sum(1 << part for part in clipped_parts)
        raise ConfigError(
            f"pace.{name} was given {len(clipped)} parameters that have gradients, which are not "
            f"those of one or more of the {len(owned)} optimizers; an average is clipped as a "
            f"whole: pace.{name}(one_model.parameters(), ...)"
        )

    def waits(self, stepped: int = 0) -> bool:
        """Whether a clip is requested for other optimizers than these."""
        return any(request.mask & ~stepped for request in self._requests)

    def take(self, stepped: int) -> Clip:
        """Return the clip of a push of these optimizers' gradients, applied once to the whole.

        Raises:
            ConfigError: different clips are requested for them.
        """
        if not self._requests:
            self._norms = []
            return UNCLIPPED
        requests = [request for request in self._requests if request.mask & stepped]
        norms = [request for request in requests if request.clip.has_norm]
        values = [request for request in requests if request.clip.has_value]
        covered = reduce(or_, (request.mask for request in values), 0)
        limits = {request.clip.max_value for request in values}
        is_one_norm = len(norms) <= 1 and all(request.mask == stepped for request in norms)
        if not is_one_norm or (values and (len(limits) > 1 or stepped & ~covered)):
            raise ConfigError(
                f"this push is the step of {stepped.bit_count()} of the "
                f"{len(self._optimizers)} optimizers, and is clipped once, as a whole: if a block "
                "is one update, clip the gradients of all optimizers that step in it by one call; "
                "with --protocol full-sync, where each step is an update, use one call for each"
            )
        self._norms = [request.norm for request in norms if request.norm is not None]
        self._forget(stepped)
        clip = norms[0].clip if norms else UNCLIPPED
        return clip._replace(max_value=limits.pop()) if limits else clip

    def drop(self, mask: int) -> None:
        """Drop the requests for these optimizers, whose gradients are gone."""
        self._norms += [
            request.norm
            for request in self._requests
            if request.mask & mask and request.norm is not None
        ]
        self._forget(mask)
        self.fill(math.nan)

    def _forget(self, mask: int) -> None:
        rest = [request._replace(mask=request.mask & ~mask) for request in self._requests]
        self._requests = [request for request in rest if request.mask]

    def fill(self, norm: float) -> None:
        """Set the norm of the averaged gradient; nan: no update has used the push."""
        for result in self._norms:
            result.is_known = True
            result.fill_(norm)
        self._norms = []


class LaterNorm(Tensor):
    """A norm that is known only after the step; reading it earlier raises an error."""

    is_known = False

    @classmethod
    def unknown(cls, dtype: torch.dtype) -> "LaterNorm":
        return torch.tensor(math.nan, dtype=dtype).as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, LaterNorm) and not leaf.is_known for leaf in leaves):
            raise ConfigError(
                "the norm that pace.clip_grad_norm_ returns is of the averaged gradient, which "
                "exists only after optimizer.step(): read it then (a non-finite update "
                "is refused, or skipped with --nonfinite skip)"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _with_gradient(parameters: Iterable[Tensor]) -> set[int]:
    return {id(parameter) for parameter in parameters if parameter.grad is not None}


def _limit(name: str, value: float) -> float:
    limit = float(value)
    if not limit >= 0.0:
        raise ConfigError(f"{name} must be >= 0, got {value}")
    return limit
