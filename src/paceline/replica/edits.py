"""Detect changes of gradients between backward and push, and accept or refuse them.

    backward: hooks note each gradient and its version counter           the reference
    GradScaler.unscale_, `with edits.allowed():`, zeros, None            accepted
    torch's own clip_grad_norm_, p.grad.mul_, p.grad = ...               refused at the push
    p.grad.data.clamp_, p.grad.numpy()[...]                              not counted: a sum finds it

Each worker holds one part of the gradient that is averaged. Changing the part does not have the
effect that the same line has on the whole, unless it is linear, which cannot be detected. Torch
counts most changes of a tensor (``_version``), but not all, so a stretch of the gradients is summed
after backward and again at the push: all of them if they are few, else another stretch each time.
This module must not know who averages, nor what a step is.
"""

import contextlib
from collections.abc import Iterator
from itertools import cycle

from ..errors import ConfigError
from .own_gradients import OwnGradients
from .replica import Replica

_STRETCH_BYTES = 512 * 1024
"""Summed twice a step, which takes 50 us in all (results/edits.md)."""


class Edits:
    """Watches the gradients of one member.

    Args:
        replica: a replica, or `OwnGradients`, with its hooks registered.
        is_refused: whether changes are refused, since an update averages several parts.
    """

    def __init__(self, replica: Replica | OwnGradients, *, is_refused: bool) -> None:
        self._replica = replica
        self._is_refused = is_refused
        self._is_open = False
        self.is_final = False
        """Whether the gradient is to be clipped at the push: nothing may be added to it."""
        self._stretches = cycle(_stretches(replica))
        self._stretch = next(self._stretches)
        self._sum: int | None = None  # of the stretch, at the last look
        self._moment = 0

    # -- what happens to gradients --------------------------------------------------------------

    def before_backward(self) -> None:
        if self.is_final:
            raise ConfigError(
                "loss.backward() was called after pace.clip_grad_norm_ or pace.clip_grad_value_: "
                "they clip the averaged gradient at optimizer.step(), so call them after the last "
                "backward()"
            )
        self.check()

    def after_backward(self) -> None:
        """Take the current gradients as the worker's own."""
        self._look()

    def check(self) -> None:
        """Check for changes since the last look.

        Raises:
            ConfigError: there is one, which may not commute with averaging.
        """
        if self._is_open:
            return
        replica = self._replica
        for number, parameter in enumerate(replica.parameters):
            gradient = parameter.grad
            if gradient is None or replica.is_as_left(number, gradient):
                continue
            if self._is_refused and bool(gradient.any()):
                raise _refusal(replica.names[number])
            replica.take_over(number, gradient)
            self._sum = None
        is_known = self._sum is not None and self._moment == replica.moment
        if is_known and self._summed() != self._sum:
            raise _refusal("")

    def explained(self) -> None:
        """Accept all changes so far."""
        self._take_over()
        self._look()

    def _take_over(self) -> None:
        replica = self._replica
        for number, parameter in enumerate(replica.parameters):
            gradient = parameter.grad
            if gradient is not None and not replica.is_as_left(number, gradient):
                replica.take_over(number, gradient)

    def pushed(self) -> None:
        """Stop checking ``.grad`` until something is added to it."""
        self._take_over()
        self.is_final, self._sum = False, None
        self._stretch = next(self._stretches)

    def dropped(self) -> None:
        """Forget the gradients: the work does not count."""
        self.is_final, self._sum = False, None

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Accept changes made inside, which act on this worker's own part."""
        if self.is_final:
            raise ConfigError(
                "pace.edit_gradients() comes after pace.clip_grad_norm_ or pace.clip_grad_value_, "
                "which clip the averaged gradient last: edit first, then clip"
            )
        self.check()
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
            self._replica.note_edit()
        self.explained()

    # -- detection ------------------------------------------------------------------------------

    def _look(self) -> None:
        self._moment = self._replica.moment
        self._sum = self._summed() if self._is_refused else None

    def _summed(self) -> int:
        """Return the sum of the bits, as 8-byte words: faster than floats, and exact with nan."""
        return self._replica.summed(*self._stretch)


def _refusal(name: str) -> ConfigError:
    which = f"the gradient of {name!r} was" if name else "gradients were"
    return ConfigError(
        f"{which} changed between backward() and optimizer.step(), but here an update averages "
        "several such gradients, each of a part of the batch: to clip the average write "
        "pace.clip_grad_norm_(model.parameters(), max_norm) or "
        "pace.clip_grad_value_(model.parameters(), clip_value); to change each part separately, "
        "put the change into `with pace.edit_gradients():`"
    )


def _stretches(replica: Replica | OwnGradients) -> list[tuple[int, int]]:
    """Return byte ranges that cover all gradients; they begin and end at whole lines."""
    stop = replica.layout.parameters.stop
    return [(start, min(start + _STRETCH_BYTES, stop)) for start in range(0, stop, _STRETCH_BYTES)]
