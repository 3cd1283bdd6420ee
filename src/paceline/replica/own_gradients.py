"""Track gradients that stay where torch makes them, to detect changes by the script.

A member whose optimizer steps locally keeps ``.grad`` as in plain PyTorch, since an optimizer may
keep references to the tensors; so does a member that sends a multiple of each gradient, computed in
the only pass over it, and one whose script keeps gradients over the next pass. The interface is
that of `Replica` for gathered gradients. This module must not know who reads the gradients, or why.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from ..errors import ConfigError

if TYPE_CHECKING:
    from .replica import Replica

_LONG = 8
_SMALL = 1 << 16
"""Elements."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class OwnGradients:
    """The gradients of one model, with a hook on each parameter.

    Args:
        replica: of the model; its gathered gradients are not used.

    Attributes:
        arrived: called with the number of each gradient that a backward pass leaves.
        num_edits: how often the script may have changed gradients without torch counting it.
        num_hooked: gradients that backward passes have left, added to the replica's count.
    """

    def __init__(self, replica: "Replica") -> None:
        self.parameters, self.names = replica.parameters, replica.names
        self.layout = replica.layout
        self._left: list[tuple[int, int]] = [(-1, 0)] * len(self.parameters)
        """Per parameter: the gradient's version counter and address."""
        self._pieces_of = dict[tuple[int, int], list[tuple[int, int, int]]]()
        self.arrived: Callable[[int], None] | None = None
        self.num_edits, self.num_hooked = 0, replica.num_hooked
        self._handles = [
            register(parameter, self.hooked, number)
            for number, parameter in enumerate(self.parameters)
            if parameter.is_floating_point() or parameter.is_complex()
        ]

    def release(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()

    def note_edit(self) -> None:
        """Note that the script may have changed gradients."""
        self.num_edits += 1

    def hooked(self, number: int, parameter: Tensor) -> None:
        """Note that a backward pass has left this gradient."""
        if parameter.grad is not None:
            if parameter.grad.is_sparse:
                raise sparse_gradient(self.names[number])
            self.take_over(number, parameter.grad)
        self.num_hooked += 1
        if self.arrived is not None:
            self.arrived(number)

    @property
    def moment(self) -> int:
        """A token that changes with every gradient that is left by a pass or set to None."""
        return hash((self.num_hooked, *(parameter.grad is None for parameter in self.parameters)))

    def is_as_left(self, number: int, gradient: Tensor) -> bool:
        """Whether ``.grad`` is unchanged, by torch's count, since a backward pass left it."""
        return self._left[number] == (gradient._version, gradient.data_ptr())

    def take_over(self, number: int, gradient: Tensor) -> None:
        """Accept this ``.grad``, which was changed or replaced."""
        self._left[number] = gradient._version, gradient.data_ptr()

    def summed(self, start: int, stop: int) -> int:
        """The sum of the gradients' bits in these bytes of the layout, by 8-byte words if possible.

        That takes a fifth of the time of a sum of narrower words; for many small gradients the
        calls take longer than the sums, so they are concatenated first.
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
        for gradients in small.values():
            total += _sum_of(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        return total

    def _pieces(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """The elements in these bytes, as (parameter number, first, last)."""
        if (start, stop) not in self._pieces_of:
            pieces = self._pieces_of[start, stop] = []
            for number, place in enumerate(self.layout.parameters.places):
                size = place.dtype.itemsize
                first = max(0, start - place.offset) // size
                last = min(place.num_bytes, stop - place.offset) // size
                if first < last:
                    pieces.append((number, first, last))
        return self._pieces_of[start, stop]


def sparse_gradient(name: str) -> ConfigError:
    """The error for a parameter's sparse gradient."""
    return ConfigError(
        f"parameter {name!r} has a sparse gradient, which is not supported: build the embedding "
        "with sparse=False"
    )


def _sum_of(flat: Tensor) -> int:
    words = flat.view(_WORDS[flat.dtype.itemsize])
    if flat.numel() * flat.itemsize % _LONG == 0 and flat.data_ptr() % _LONG == 0:
        words = flat.view(torch.int64)
    return int(words.sum(dtype=torch.int64))


def _flat(gradient: Tensor, first: int, last: int) -> Tensor:
    """Elements ``[first, last)``, as real numbers."""
    real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    scale = real.numel() // max(1, gradient.numel())
    return real.detach().reshape(-1)[first * scale : last * scale]


def register(parameter: nn.Parameter, hook: Callable[[int, Tensor], None], number: int) -> Any:
    """Register a method to be called with ``number`` when a gradient has been accumulated.

    Also on a frozen parameter, which may thaw; torch allows hooks only on trained ones. The
    method's object is referenced weakly: the garbage collector does not see torch's hooks.
    """
    method = WeakMethod(hook)

    def call(parameter: Tensor) -> None:
        if (bound := method()) is not None:
            bound(number, parameter)

    was_trained = parameter.requires_grad
    parameter.requires_grad_(True)
    register: Any = parameter.register_post_accumulate_grad_hook
    handle = register(call)
    parameter.requires_grad_(was_trained)
    return handle
