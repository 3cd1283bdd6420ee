"""Changes of gradients between backward and push: found, explained or refused.

    backward | hooks: every gradient into its place, its counter kept | -> what is looked at
    GradScaler.unscale_, `with edits.allowed():`, zeros, None            explained
    clip_grad_norm_ of torch's own, p.grad.mul_, p.grad = ...            refused at the push
    p.grad.data.clamp_, p.grad.numpy()[...]                              counted by nobody: a sum

Each worker holds one part of the gradient that is averaged; what is done to the part is not what
the same line does to the whole, unless it is linear, which nobody can see. Torch counts changes of
a tensor (``_version``) but not those behind its back, so a stretch of the gradients is summed after
backward and again at the push: all of them where they are few, else another stretch each time.
This module must not know who averages, nor what a step is.
"""

import contextlib
from collections.abc import Iterator
from itertools import cycle

from ..errors import ConfigError
from ..replica.own_gradients import OwnGradients
from ..replica.replica import Replica

_STRETCH_BYTES = 512 * 1024
"""Summed twice a step, which with all else takes 50 us (results/edits.md)."""


class Edits:
    """Watches the gradients of one member.

    Args:
        replica: its hooks are registered; or those of `OwnGradients`.
        is_refused: whether an update averages several parts; if not, every change is right.
    """

    def __init__(self, replica: Replica | OwnGradients, *, is_refused: bool) -> None:
        self._replica = replica
        self._is_refused = is_refused
        self._is_open = False
        self.is_final = False
        """Whether the gradient was given away to be clipped: nothing may be added to it."""
        self._stretches = cycle(_stretches(replica))
        self._stretch = next(self._stretches)
        self._sum: int | None = None  # of the stretch, when it was looked at last
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
        """What is there now is the worker's own."""
        self._look()

    def check(self) -> None:
        """Find what was changed since.

        Raises:
            ConfigError: something was, and it cannot be known to commute with averaging.
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
        """What was changed since may stand: it is taken over."""
        self._take_over()
        self._look()

    def _take_over(self) -> None:
        replica = self._replica
        for number, parameter in enumerate(replica.parameters):
            gradient = parameter.grad
            if gradient is not None and not replica.is_as_left(number, gradient):
                replica.take_over(number, gradient)

    def pushed(self) -> None:
        """What is left in ``.grad`` is no longer looked after, until something is added to it."""
        self._take_over()
        self.is_final, self._sum = False, None
        self._stretch = next(self._stretches)

    def dropped(self) -> None:
        """The work does not count; its gradients are gone."""
        self.is_final, self._sum = False, None

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """What is changed inside is meant, and acts on this worker's own part."""
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

    # -- how it is seen -------------------------------------------------------------------------

    def _look(self) -> None:
        self._moment = self._replica.moment
        self._sum = self._summed() if self._is_refused else None

    def _summed(self) -> int:
        """Of the bits, eight bytes at a time: faster than floats, and nan is a number like any."""
        return self._replica.summed(*self._stretch)


def _refusal(name: str) -> ConfigError:
    which = f"the gradient of {name!r} was" if name else "gradients were"
    return ConfigError(
        f"{which} changed between backward() and optimizer.step(), and here an update averages "
        "several such gradients, each of a part of the batch: to clip the average write "
        "pace.clip_grad_norm_(model.parameters(), max_norm) or "
        "pace.clip_grad_value_(model.parameters(), clip_value); to change each part by itself, put "
        "the change into `with pace.edit_gradients():`"
    )


def _stretches(replica: Replica | OwnGradients) -> list[tuple[int, int]]:
    """All gradients, in pieces; they begin and end at whole lines."""
    stop = replica.layout.parameters.stop
    return [(start, min(start + _STRETCH_BYTES, stop)) for start in range(0, stop, _STRETCH_BYTES)]
