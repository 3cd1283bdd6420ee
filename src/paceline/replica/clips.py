"""Clips of the averaged gradient that a script has asked for, until a push brings them along.

    clip(G's) -> ask --> step of G's optimizer ----------> its push is clipped
    clip(D's) -> ask --> step of D's: the block's end ---> one push of both: they must be one clip

A norm is of all gradients of one push; a limit of values is each element's own. This module must
not know who pushes, nor how an update is clipped.
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


class _Ask(NamedTuple):
    """What was asked for the gradients of these optimizers, a bit each."""

    mask: int
    clip: Clip
    norm: "LaterNorm | None" = None


class Clips:
    """What one member has asked for, and no push has brought along.

    Args:
        optimizers: of the model, over different parameters.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = optimizers
        self._asks: list[_Ask] = []
        self._norms: list[LaterNorm] = []
        """Of the push under way."""

    def ask_norm(self, parameters: Any, max_norm: float) -> Tensor:
        """See ``Pace.clip_grad_norm_``."""
        mask = self._mask("clip_grad_norm_", parameters)
        if any(one.mask & mask for one in self._asks):
            raise ConfigError(
                "pace.clip_grad_norm_ was called after another clip of the same step: call it "
                "once, after the last backward(), and pace.clip_grad_value_ only after it"
            )
        norm = LaterNorm.unknown(next(self._model.parameters()).dtype)
        self._asks.append(_Ask(mask, Clip(max_norm=_limit("max_norm", max_norm)), norm))
        return norm

    def ask_value(self, parameters: Any, clip_value: float) -> None:
        """See ``Pace.clip_grad_value_``."""
        mask = self._mask("clip_grad_value_", parameters)
        if any(one.mask & mask and one.clip.has_value for one in self._asks):
            raise ConfigError(
                "pace.clip_grad_value_ was called twice in one step: call it once, after the last "
                "backward()"
            )
        self._asks.append(_Ask(mask, Clip(max_value=_limit("clip_value", clip_value))))

    def _mask(self, name: str, parameters: Any) -> int:
        """Whose gradients these are, a bit for each optimizer.

        Raises:
            ConfigError: of an optimizer, or of the model, they are a part.
        """
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        ours, theirs = _with_gradient(self._model.parameters()), _with_gradient(given)
        if len(self._optimizers) == 1:
            if ours == theirs:
                return 1
            raise ConfigError(
                f"pace.{name} was given {len(theirs)} parameters that have gradients, and the "
                f"model has {len(ours)}; an average is clipped as a whole: "
                f"pace.{name}(model.parameters(), ...)"
            )
        owned = [_with_gradient(parameters_of(one)) for one in self._optimizers]
        whole = [part for part, mine in enumerate(owned) if mine and mine <= theirs]
        if whole and theirs <= reduce(or_, (owned[part] for part in whole)):
            return sum(1 << part for part in whole)
        raise ConfigError(
            f"pace.{name} was given {len(theirs)} parameters that have gradients, which are not "
            f"those of one or more of the {len(owned)} optimizers; an average is clipped as a "
            f"whole: pace.{name}(one_model.parameters(), ...)"
        )

    def waits(self, stepped: int = 0) -> bool:
        """Whether something is to be clipped for optimizers that are none of these."""
        return any(one.mask & ~stepped for one in self._asks)

    def take(self, stepped: int) -> Clip:
        """What a push of these optimizers' gradients is clipped to, once and as a whole.

        Raises:
            ConfigError: they are not all to be clipped alike.
        """
        if not self._asks:
            self._norms = []
            return UNCLIPPED
        mine = [one for one in self._asks if one.mask & stepped]
        norms = [one for one in mine if one.clip.has_norm]
        values = [one for one in mine if one.clip.has_value]
        covered = reduce(or_, (one.mask for one in values), 0)
        limits = {one.clip.max_value for one in values}
        is_one_norm = len(norms) <= 1 and all(one.mask == stepped for one in norms)
        if not is_one_norm or (values and (len(limits) > 1 or stepped & ~covered)):
            raise ConfigError(
                f"what is pushed now is the step of {stepped.bit_count()} of the "
                f"{len(self._optimizers)} optimizers, and is clipped once, as a whole: where a "
                "block is one update, clip the gradients of all that step in it by one call; with "
                "--protocol full-sync, where each step is an update, those of each by a call of "
                "its own"
            )
        self._norms = [one.norm for one in norms if one.norm is not None]
        self._forget(stepped)
        clip = norms[0].clip if norms else UNCLIPPED
        return clip._replace(max_value=limits.pop()) if limits else clip

    def drop(self, mask: int) -> None:
        """The gradients of these optimizers are gone; what they would have been clipped to, too."""
        self._norms += [one.norm for one in self._asks if one.mask & mask and one.norm is not None]
        self._forget(mask)
        self.fill(math.nan)

    def _forget(self, mask: int) -> None:
        rest = [one._replace(mask=one.mask & ~mask) for one in self._asks]
        self._asks = [one for one in rest if one.mask]

    def fill(self, norm: float) -> None:
        """The norm of the averaged gradient is known; nan: none has used the push yet."""
        for one in self._norms:
            one.is_known = True
            one.fill_(norm)
        self._norms = []


class LaterNorm(Tensor):
    """A number that is known after the step: whoever decides by it before would decide by nan."""

    is_known = False

    @classmethod
    def unknown(cls, dtype: torch.dtype) -> "LaterNorm":
        return torch.tensor(math.nan, dtype=dtype).as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(one, LaterNorm) and not one.is_known for one in args):
            raise ConfigError(
                "the norm that pace.clip_grad_norm_ gives is of the averaged gradient, which "
                "is there after optimizer.step(): look at it then (an update that is not finite "
                "is refused, or left out with --nonfinite skip)"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _with_gradient(parameters: Iterable[Tensor]) -> set[int]:
    return {id(one) for one in parameters if one.grad is not None}


def _limit(name: str, value: float) -> float:
    limit = float(value)
    if not limit >= 0.0:
        raise ConfigError(f"{name} must be >= 0, got {value}")
    return limit
