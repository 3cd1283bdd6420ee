"""The gradients of one member between backward and push: scaled, clipped, watched, or dropped.

    backward -> [ unscale -> edit -> clip ] -> asked: the work of the push -> pushed
                      called off, given back, zeroed -> drop, take_back

A loop clips either this worker's own gradient or the average:

    where the loop's optimizer steps here       torch's own function, at once
    (one plain worker, local-sgd)
    where an update averages pushes             the numbers travel with the push; the norm comes
                                                back with the update that used it

This module must not know how an exchange clips, nor when a push is due.
"""

import cmath
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ConfigError
from ..exchange.base import Exchange, Work
from ..replica.clips import Clips
from ..replica.edits import Edits
from ..replica.own_gradients import OwnGradients
from ..replica.replica import Replica
from ..replica.set_aside import SetAside
from ..store.joint import parameters_of, parts_of
from .accumulation import Accumulation
from .amp import Amp
from .grad_scaler import Scaling, hold_updates, tell_of_unscaling
from .patches import note_backward


class LocalGradients:
    """The gradients of one model.

    Args:
        optimizer: the joint one, of several.
        precision: of forward passes, see `Amp`.
        is_local: whether the user's optimizer steps on this member's own gradients.
        is_whole: whether a push is an update; each of several optimizers is then clipped at once.

    Attributes:
        device: the device of the gradients.
        loss: of the last backward pass, which the next push reports; None: none was recorded.
        edits: finds changes between backward and push; None: every change is allowed.
        accumulation: collects the steps of one update; None: each step is an update.
        own_of: selects from the parameters to clip those held here; differs where a model is split.
        aside: gradients of several optimizers that are not pushed together; None: all are.
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
        is_whole: bool = False,
    ) -> None:
        self._model = model
        self._optimizers = parts_of(optimizer)
        self._parameters = list(model.parameters())
        self.device = device
        self._clips_here = is_local or (is_whole and len(self._optimizers) > 1)
        self.amp = Amp(optimizer, device, precision)
        self.scaling = Scaling(exchange, model, optimizer, is_local=is_local)
        self.edits: Edits | None = None
        self.aside: SetAside | None = None
        self.loss: Tensor | None = None
        self.accumulation: Accumulation | None = None
        self.own_of: Callable[[list[Tensor]], list[Tensor]] = lambda parameters: parameters
        self._clips = Clips(model, self._optimizers)
        self._average: Callable[[], None] = _nothing

    def backward(self, loss: Tensor) -> None:
        """See ``Pace.backward``."""
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            is_tensor = isinstance(loss, Tensor)
            kind = f"a tensor of shape {tuple(loss.shape)}" if is_tensor else repr(loss)
            raise ConfigError(
                "the loss must be a tensor with one number, as torch's losses return it, got "
                f"{kind:.60}; leave out .item() or float(), and take the mean of several"
            )
        self.loss = self.amp.backward(loss).detach()

    def watch(self, replica: Replica, *, is_refused: bool) -> None:
        """Find changes to gradients before their push, except a scaler's; see `Edits`."""
        if len(self._optimizers) > 1:
            self.aside = SetAside(replica, self._optimizers)
        self._watch(Edits(replica, is_refused=is_refused), replica)

    def watch_here(self, replica: Replica, average: Callable[[], None]) -> None:
        """Watch gradients where the optimizer steps here, on the mean of all members'.

        Args:
            average: makes ``.grad`` the mean, before clipping.
        """
        self._average = average
        self._watch(Edits(OwnGradients(replica), is_refused=True), replica)

    def _watch(self, edits: Edits, replica: Replica) -> None:
        self.edits = edits

        def before_backward() -> None:
            replica.held.check_kinds()
            edits.before_backward()

        note_backward(before_backward, edits.after_backward)
        tell_of_unscaling(edits.check, edits.explained)

    def accumulate(self, accumulation: Accumulation) -> None:
        """Let ``accumulation`` set steps aside; without ``edits`` it finds changes itself."""
        self.accumulation = accumulation
        hold_updates(lambda: accumulation.is_held)
        if self.edits is None:
            note_backward(lambda: None, accumulation.take_over)
            tell_of_unscaling(lambda: None, accumulation.take_over)

    def hold(self, part: int) -> None:
        """Set aside the gradients that this optimizer would step on, without clipping."""
        assert self.accumulation is not None
        self.accumulation.hold(part, self._optimizers[part])
        self.take_back(part if len(self._optimizers) > 1 else None)

    def join(self, part: int) -> float | None:
        """Make ``.grad`` the mean of what was set aside; its weight, None: the default."""
        if self.accumulation is None:
            return None
        optimizer = self._optimizers[part]
        mean = self.accumulation.joined(part, optimizer)
        if mean.has_overflowed:
            self.scaling.let_overflow(optimizer)
        if self.edits is not None:
            self.edits.explained()
        self.accumulation.stepped()
        return mean.weight

    # -- the push -------------------------------------------------------------------------------

    def set_aside(self, part: int) -> None:
        """Set aside the step of this optimizer; the push is made when the block ends."""
        assert self.aside is not None
        self.aside.take(part)
        self._look_on(self.aside.stepped)

    def asked(self, stepped: int = 1) -> Work:
        """The work of the next push: its clips, and the loss that it reports.

        Args:
            stepped: the optimizers that step, a bit each.
        """
        loss = math.nan if self.loss is None else float(self.loss)
        work = Work(clip=self._clips.take(stepped), loss=loss)
        self.loss = None
        if len(self._optimizers) > 1:
            work.stepped = stepped
        return work

    def pushed(self, norm: float) -> None:
        """Fill in the norm of the update that used the push; nan: none has yet."""
        self._clips.fill(norm)
        self._look_on(0)

    def _look_on(self, stepped: int) -> None:
        """Note these steps; gradients that others are to clip must not be added to."""
        if self.edits is not None:
            self.edits.pushed()
            self.edits.is_final = self._clips.waits(stepped)

    def take_back(self, part: int | None = None) -> None:
        """Forget pending clips and checks; of ``part`` only, if it is given."""
        mask = -1 if part is None else 1 << part
        if self.aside is not None and part is not None:
            mask &= ~self.aside.stepped  # those are pushed all the same
        self._clips.drop(mask)
        if self.edits is not None:
            self.edits.dropped()
            self.edits.is_final = self._clips.waits()

    def drop(self) -> None:
        """Forget all gradients: the work does not count."""
        if self.aside is not None:
            self.aside.drop()
        self.loss = None
        self.amp.drop()
        if self.accumulation is not None:
            self.accumulation.drop()
        self.take_back()
        for parameter in self._parameters:
            parameter.grad = None

    # -- values ---------------------------------------------------------------------------------

    def are_there(self) -> bool:
        """Whether anything is accumulated; on accelerators, whether there is memory for it."""
        grads = (parameter.grad for parameter in self._parameters if parameter.grad is not None)
        return any(grad.device.type != "cpu" or bool(grad.any()) for grad in grads)

    def first_not_finite(self, part: int) -> str | None:
        """The first parameter whose gradient holds inf or nan; None: none does.

        Args:
            part: which of several optimizers.
        """
        own = parameters_of(self._optimizers[part])
        sums = [p.grad.sum() for p in own if p.grad is not None]
        if self.device.type != "cpu":  # each number that is read waits for the device
            sums = [torch.stack([value.abs().float() for value in sums]).sum()] if sums else []
        if all(cmath.isfinite(value.item()) for value in sums):
            return None
        own_ids = {*map(id, own)}
        for name, parameter in self._model.named_parameters():  # or a sum was too large
            if id(parameter) not in own_ids or parameter.grad is None:
                continue
            if not bool(torch.isfinite(parameter.grad).all()):
                return name
        return None

    # -- clipping -------------------------------------------------------------------------------

    def _unscale(self) -> None:
        scale = self.amp.unscale()
        self.loss = None if self.loss is None else self.loss / scale

    def clip_norm(self, parameters: Any, max_norm: float, norm_type: float) -> Tensor:
        """See ``Pace.clip_grad_norm_``."""
        if not self._clips_now(parameters := self.own_of(_listed(parameters))):
            return torch.tensor(math.nan, device=self.device)
        if self._clips_here:
            self._average()
            norm = nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
            self._take_over()
            return norm
        if float(norm_type) != 2.0:
            raise ConfigError(
                f"pace.clip_grad_norm_ clips an average by its norm of type 2, not {norm_type:g}: "
                "leave norm_type out, or clip each element: pace.clip_grad_value_"
            )
        norm = self._clips.ask_norm(parameters, max_norm)
        self._give_away()
        return norm

    def clip_value(self, parameters: Any, clip_value: float) -> None:
        """See ``Pace.clip_grad_value_``."""
        if not self._clips_now(parameters := self.own_of(_listed(parameters))):
            return
        if self._clips_here:
            self._average()
            nn.utils.clip_grad_value_(parameters, clip_value)
            self._take_over()
            return
        self._clips.ask_value(parameters, clip_value)
        self._give_away()

    def _clips_now(self, parameters: list[Tensor]) -> bool:
        """Whether an update comes next; joins the gradients that are clipped here."""
        if self._clips_here:
            self._unscale()
        accumulation = self.accumulation
        if accumulation is None:
            return True
        if not self._clips_here:
            return accumulation.is_last
        return accumulation.join_for(parameters, self._optimizers)

    def _take_over(self) -> None:
        """Accept clipping done here: it is not a change by the loop."""
        if self.accumulation is not None:
            self.accumulation.take_over()
        if self._average is not _nothing and self.edits is not None:
            self.edits.explained()

    def _give_away(self) -> None:
        """Note a pending clip: nothing may be added to these gradients."""
        if self.edits is not None:
            self.edits.is_final = True


def _listed(parameters: Any) -> list[Tensor]:
    """One tensor or an iterable, as torch's own functions take them, as a list."""
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _nothing() -> None:
    return None
