"""Gradient memory that is lent to the script as ``.grad``, and whether the script still holds it.

    loss_a.backward()   .grad = a view into the slot        ga = [p.grad for p in ...]
    zero_grad()         .grad = None
    loss_b.backward()   the view is to be written again, but ``ga`` still holds it

In plain PyTorch two passes make two tensors, and a script may keep those of the first: two losses,
the gradients of two steps. Python counts references to a tensor, torch the tensors in its memory
(``detach()``, ``view(-1)``). A view that is still held is given away: it gets memory of its own.
This module must not know passes or hooks.
"""

import gc
from collections.abc import Callable, Iterable
from sys import getrefcount, maxsize
from typing import Any

import torch
from torch import Tensor, UntypedStorage

_probe = [object()]
_LEAST = getrefcount(_probe[0])
"""The reference count of an object that only a list holds."""
_num_tensors_in: Callable[[int], int] = torch._C._storage_Use_Count


class LentPlaces:
    """The views that are lent now.

    Args:
        views: the tensors that become ``.grad``; nothing else refers to them.
    """

    def __init__(self, views: list[Tensor]) -> None:
        self._views = views
        self._storages: list[UntypedStorage] = []
        self._addresses: list[int] = []
        self._counts: list[int] = []

    def add(self, view: Tensor) -> None:
        """Add a view that nothing else holds yet."""
        self._storages.append(view.untyped_storage())
        self._addresses.append(self._storages[-1]._cdata)
        self._counts.append(_count(view, self._addresses[-1]))

    def renew(self, number: int, view: Tensor) -> None:
        """Replace a view by another one that nothing else holds yet."""
        self._views[number] = view
        self._storages[number] = storage = view.untyped_storage()
        self._addresses[number] = storage._cdata
        self._counts[number] = _count(view, storage._cdata)

    def is_held(self, number: int) -> bool:
        """Whether anything holds this view, or its memory, while it is not ``.grad``."""
        return number < len(self._addresses) and (
            getrefcount(self._views[number]) > _LEAST
            or _num_tensors_in(self._addresses[number]) > self._counts[number]
        )

    def give(self, numbers: Iterable[int], place: Callable[[int], Tensor]) -> None:
        """Give these views to the script, with their values.

        Args:
            place: makes a new view for a number.
        """
        moved: dict[int, UntypedStorage] = {}
        for number in numbers:
            view, address = self._views[number], self._addresses[number]
            is_only = _num_tensors_in(address) <= self._counts[number]
            view.data = view.detach().clone()
            if not is_only:
                moved[address] = view.untyped_storage()
            self.renew(number, place(number))
        if moved:
            _follow(moved)


def _count(view: Tensor, address: int) -> int:
    """How many tensors share the view's memory; an empty view has no memory of its own."""
    return _num_tensors_in(address) if view.numel() else maxsize


def _follow(moved: dict[int, UntypedStorage]) -> None:
    """Move each tensor in one of these storages to its replacement.

    Torch knows how many there are, but not which; Python's garbage collector knows all tensors that
    a script can hold. This visits every object, so it is done once: afterwards nothing is lent any
    more.
    """
    for tensor in gc.get_objects():
        if type(tensor) is not Tensor:
            continue
        try:
            old = tensor.untyped_storage()
        except RuntimeError:  # it has none, such as a sparse tensor
            continue
        if (new := moved.get(old._cdata)) is not None:
            where: Any = new, tensor.storage_offset(), tensor.size(), tensor.stride()
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(*where)
            vars(tensor)["memory_before"] = old  # a NumPy array over it must not outlive it
