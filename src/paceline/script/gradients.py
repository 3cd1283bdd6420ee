"""The gradients of one member between backward and push: scaled, clipped, watched, or dropped.

    backward -> [ unscale -> edit -> clip ] -> asked: what the push brings along -> pushed
                      called off, given back, zeroed -> drop, take_back

Clipping as a loop asks for it is of this worker's own gradient, or of the average:

    where the loop's optimizer steps here       torch's own function, at once
    (one plain worker, local-sgd)
    where an update averages pushes             the numbers travel with the push; the norm comes
                                                back with the update that used it

This module must not know how an exchange clips, nor when a push is due.
"""

import cmath
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ConfigError
from ..exchange.base import Exchange, Work
from ..replica.replica import Replica
from ..store.clip import UNCLIPPED, Clip
from .amp import Amp
from .edits import Edits
from .grad_scaler import Scaling, tell_of_unscaling
from .patches import note_backward


class LocalGradients:
    """What lies in ``.grad`` of one model.

    Args:
        precision: of forward passes, see `Amp`.
        is_local: whether the user's optimizer steps on this member's own gradients.

    Attributes:
        device: where they lie.
        loss: of the last backward pass, which the next push reports; None: nobody recorded one.
        edits: what finds changes on the way; None: every change is right.
    """

    def __init__(
        self,
        exchange: Exchange,
        model: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        precision: str | None,
        *,
        is_local: bool,
    ) -> None:
        self._model = model
        self._parameters = list(model.parameters())
        self.device = device
        self._is_local = is_local
        self.amp = Amp(optimizer, device, precision)
        self.scaling = Scaling(exchange, model, optimizer, is_local=is_local)
        self.edits: Edits | None = None
        self.loss: Tensor | None = None
        self._clip = UNCLIPPED
        self._norm: _LaterNorm | None = None

    def backward(self, loss: Tensor) -> None:
        """See ``Pace.backward``."""
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            is_tensor = isinstance(loss, Tensor)
            found = f"a tensor of shape {tuple(loss.shape)}" if is_tensor else repr(loss)
            raise ConfigError(
                "the loss must be a tensor with one number, as torch's losses return it, got "
                f"{found:.60}; leave out .item() or float(), and take the mean of many"
            )
        self.loss = self.amp.backward(loss).detach()

    def watch(self, replica: Replica, *, is_refused: bool) -> None:
        """Find what changes a gradient on its way, but for a scaler; see `Edits`."""
        edits = self.edits = Edits(replica, is_refused=is_refused)

        def before_backward() -> None:
            replica.held.check_kinds()
            edits.before_backward()

        note_backward(before_backward, edits.after_backward)
        tell_of_unscaling(edits.check, edits.explained)

    # -- the push -------------------------------------------------------------------------------

    def asked(self) -> Work:
        """What the push that is made now asks for, and the loss that it reports."""
        loss = math.nan if self.loss is None else float(self.loss)
        work = Work(clip=self._clip, loss=loss)
        self.loss, self._clip = None, UNCLIPPED
        return work

    def pushed(self, norm: float) -> None:
        """The update that used the push had this norm; nan: none has yet."""
        self._fill(norm)
        if self.edits is not None:
            self.edits.pushed()

    def _fill(self, norm: float) -> None:
        if self._norm is not None:
            self._norm.is_known = True
            self._norm.fill_(norm)
            self._norm = None

    def take_back(self) -> None:
        """There is nothing that could be clipped, or must not change."""
        self._clip = UNCLIPPED
        self._fill(math.nan)
        if self.edits is not None:
            self.edits.dropped()

    def drop(self) -> None:
        """Forget them: the work does not count."""
        self.loss = None
        self.amp.is_waiting = False
        self.take_back()
        for parameter in self._parameters:
            parameter.grad = None

    # -- what they are --------------------------------------------------------------------------

    def are_there(self) -> bool:
        """Whether anything is accumulated; on accelerators, whether there is memory for it."""
        grads = (one.grad for one in self._parameters if one.grad is not None)
        return any(one.device.type != "cpu" or bool(one.any()) for one in grads)

    def first_not_finite(self) -> str | None:
        """The parameter whose gradient holds inf or nan, which sums spread; None: none does."""
        sums = [p.grad.sum() for p in self._model.parameters() if p.grad is not None]
        if self.device.type != "cpu":  # each number that is read waits for the device
            sums = [torch.stack([one.abs().float() for one in sums]).sum()] if sums else []
        if all(cmath.isfinite(one.item()) for one in sums):
            return None
        for name, parameter in self._model.named_parameters():  # or a sum was too large
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
                return name
        return None

    # -- clipping -------------------------------------------------------------------------------

    def _unscale(self) -> None:
        scale = self.amp.unscale()
        self.loss = None if self.loss is None else self.loss / scale

    def clip_norm(self, parameters: Any, max_norm: float, norm_type: float) -> Tensor:
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

    def clip_value(self, parameters: Any, clip_value: float) -> None:
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
        if self.edits is not None:
            self.edits.is_final = True


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
