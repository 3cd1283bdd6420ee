"""Clipping as a loop asks for it: of this worker's own gradient, or of the average.

    where the loop's optimizer steps here       torch's own function, at once
    (one plain worker, local-sgd)
    where an update averages pushes             the numbers travel with the push; the norm comes
                                                back with the update that used it

This module must not know how a session clips.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..store.clip import UNCLIPPED, Clip


class Clipping:
    """What the loop of one member asks for before its next push.

    Args:
        model: whose gradients are averaged.
        is_local: whether the user's optimizer steps on this member's own gradients.
        unscale: takes the loss scale off them, where ``pace.backward`` put one on.
        give_away: called when the gradient must not change any more.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        is_local: bool,
        unscale: Callable[[], None],
        give_away: Callable[[], None],
    ) -> None:
        self._model = model
        self._is_local = is_local
        self._unscale = unscale
        self._give_away = give_away
        self._clip = UNCLIPPED
        self._norm: _LaterNorm | None = None

    def by_norm(self, parameters: Any, max_norm: float, norm_type: float) -> Tensor:
        """See ``Pace.clip_grad_norm_``."""
        if self._is_local:
            self._unscale()
            return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        if float(norm_type) != 2.0:
            raise ConfigError(
                f"pace.clip_grad_norm_ clips an average by its norm of type 2, not {norm_type:g}: "
                "leave norm_type out, or clip each element: pace.clip_grad_value_"
            )
        if self._clip != UNCLIPPED:
            raise ConfigError(
                "pace.clip_grad_norm_ was called after another clip of the same step: call it "
                "once, after the last backward(), and pace.clip_grad_value_ only after it"
            )
        self._ask("clip_grad_norm_", parameters, Clip(max_norm=_limit("max_norm", max_norm)))
        self._norm = _LaterNorm.unknown(next(self._model.parameters()).dtype)
        return self._norm

    def by_value(self, parameters: Any, clip_value: float) -> None:
        """See ``Pace.clip_grad_value_``."""
        if self._is_local:
            self._unscale()
            nn.utils.clip_grad_value_(parameters, clip_value)
            return
        if self._clip.has_value:
            raise ConfigError(
                "pace.clip_grad_value_ was called twice in one step: call it once, after the last "
                "backward()"
            )
        clip = self._clip._replace(max_value=_limit("clip_value", clip_value))
        self._ask("clip_grad_value_", parameters, clip)

    def _ask(self, name: str, parameters: Any, clip: Clip) -> None:
        """The push that comes next brings it along."""
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        ours, theirs = _with_gradient(self._model.parameters()), _with_gradient(given)
        if ours != theirs:
            raise ConfigError(
                f"pace.{name} was given {len(theirs)} parameters that have gradients, and the "
                f"model has {len(ours)}; an average is clipped as a whole: "
                f"pace.{name}(model.parameters(), ...)"
            )
        self._clip = clip
        self._give_away()

    def take(self) -> Clip:
        """What the push that is made now asks for."""
        clip, self._clip = self._clip, UNCLIPPED
        return clip

    def fill(self, norm: float) -> None:
        """The update that used the push had this norm; nan: none has yet."""
        if self._norm is not None:
            self._norm.is_known = True
            self._norm.fill_(norm)
            self._norm = None

    def drop(self) -> None:
        """The work does not count."""
        self._clip = UNCLIPPED
        self.fill(math.nan)


class _LaterNorm(Tensor):
    """A number that is known after the step: whoever decides by it before would decide by nan."""

    is_known = False

    @classmethod
    def unknown(cls, dtype: torch.dtype) -> "_LaterNorm":
        return torch.tensor(math.nan, dtype=dtype).as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(one, _LaterNorm) and not one.is_known for one in args):
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
