"""Gradients where torch makes them: what a backward pass has left, so that changes are seen.

A member whose optimizer steps here keeps ``.grad`` as plain PyTorch has it, since an optimizer may
hold on to the tensors that it has seen; so does one that sends a multiple of each gradient, which
is made in the only pass over it, and one whose script itself keeps them over the next pass. What
`Replica` tells of gradients that are gathered, this tells of those. This module must not know who
looks, nor why.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .replica import Replica

_LONG = 8
_SMALL = 1 << 16
"""Elements."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class OwnGradients:
    """The gradients of one model, with a hook on each parameter.

    Args:
        replica: of the model; what it gathers is not looked at.

    Attributes:
        arrived: is given the number of each gradient that a backward pass leaves.
        num_edits: how often the script may have changed them behind torch's back.
        num_hooked: gradients that backward passes have left; goes on counting from the replica's.
    """

    def __init__(self, replica: "Replica") -> None:
        self.parameters, self.names = replica.parameters, replica.names
        self.layout = replica.layout
        self._left: list[tuple[int, int]] = [(-1, 0)] * len(self.parameters)
        """Per parameter: the gradient's counter of changes, and where it lay."""
        self._known = dict[tuple[int, int], list[tuple[int, int, int]]]()
        self.arrived: Callable[[int], None] | None = None
        self.num_edits, self.num_hooked = 0, replica.num_hooked
        self._handles = [
            register(parameter, self.hooked, number)
            for number, parameter in enumerate(self.parameters)
            if parameter.is_floating_point() or parameter.is_complex()
        ]

    def release(self) -> None:
        """Nothing is seen from now on."""
        for handle in self._handles:
            handle.remove()

    def note_edit(self) -> None:
        """The script was allowed to change them."""
        self.num_edits += 1

    def hooked(self, number: int, parameter: Tensor) -> None:
        """A backward pass has left this gradient."""
        if parameter.grad is not None:
            self.take_over(number, parameter.grad)
        self.num_hooked += 1
        if self.arrived is not None:
            self.arrived(number)

    @property
    def moment(self) -> int:
        """Another one after every gradient that a backward pass leaves, and that is set to None."""
        return hash((self.num_hooked, *(one.grad is None for one in self.parameters)))

    def is_as_left(self, number: int, gradient: Tensor) -> bool:
        """Whether this ``.grad`` is what a backward pass has left, as torch counts it."""
        return self._left[number] == (gradient._version, gradient.data_ptr())

    def take_over(self, number: int, gradient: Tensor) -> None:
        """This ``.grad``, changed or replaced by somebody, is what counts."""
        self._left[number] = gradient._version, gradient.data_ptr()

    def summed(self, start: int, stop: int) -> int:
        """The bits of the gradients in these bytes of the layout; eight bytes at a time if it can.

        A sum of such words takes a fifth of what one of narrower words does; many small gradients
        take longer to call for than to sum, and are copied together first.
        """
        total, small = 0, dict[torch.dtype, list[Tensor]]()
        for number, first, last in self._pieces(start, stop):
            gradient = self.parameters[number].grad
            if gradient is None:
                continue
            if last - first == gradient.numel() < _SMALL and not gradient.is_complex():
                small.setdefault(gradient.dtype, []).append(gradient.detach())
            else:
                total += _sum_of(_flat(gradient, first, last))
        for some in small.values():
            total += _sum_of(torch.cat([one.reshape(-1) for one in some]))
        return total

    def _pieces(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Which elements lie in these bytes: of which parameter, from which on, to which."""
        if (start, stop) not in self._known:
            pieces = self._known[start, stop] = []
            for number, place in enumerate(self.layout.parameters.places):
                size = place.dtype.itemsize
                first = max(0, start - place.offset) // size
                last = min(place.num_bytes, stop - place.offset) // size
                if first < last:
                    pieces.append((number, first, last))
        return self._known[start, stop]


def _sum_of(flat: Tensor) -> int:
    words = flat.view(_WORDS[flat.dtype.itemsize])
    if flat.numel() * flat.itemsize % _LONG == 0 and flat.data_ptr() % _LONG == 0:
        words = flat.view(torch.int64)
    return int(words.sum(dtype=torch.int64))


def _flat(gradient: Tensor, first: int, last: int) -> Tensor:
    """These of its elements, as real numbers."""
    real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    scale = real.numel() // max(1, gradient.numel())
    return real.detach().reshape(-1)[first * scale : last * scale]


def register(parameter: nn.Parameter, hook: Callable[[int, Tensor], None], number: int) -> Any:
    """A method that is called with ``number`` once a gradient is there.

    Also on a parameter that is frozen: it may thaw, and torch takes hooks of others only. The
    method's object is not held: torch keeps hooks where the garbage collector does not look.
    """
    method = WeakMethod(hook)

    def call(parameter: Tensor) -> None:
        if (found := method()) is not None:
            found(number, parameter)

    was_trained = parameter.requires_grad
    parameter.requires_grad_(True)
    register: Any = parameter.register_post_accumulate_grad_hook
    handle = register(call)
    parameter.requires_grad_(was_trained)
    return handle
