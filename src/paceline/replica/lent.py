"""Places of gradients that are lent to the script as ``.grad``, and whether it holds one still.

    loss_a.backward()   .grad = the place that goes out     ga = [p.grad for p in ...]
    zero_grad()         .grad = None
    loss_b.backward()   the place is to be written again, and ``ga`` still holds it

In plain PyTorch two passes make two tensors, and a script may keep those of the first: two losses,
the gradients of two steps. Python counts who holds a tensor, torch how many tensors lie in its
memory (``detach()``, ``view(-1)``). What is held is given away: it gets memory of its own. This
module must not know passes or hooks.
"""

import gc
from collections.abc import Callable, Iterable
from sys import getrefcount, maxsize
from typing import Any

import torch
from torch import Tensor, UntypedStorage

_probe = [object()]
_LEAST = getrefcount(_probe[0])
"""Of an object that nobody holds but a list."""
_num_tensors_in: Callable[[int], int] = torch._C._storage_Use_Count


class LentPlaces:
    """The places that are lent now.

    Args:
        views: the tensors that ``.grad`` becomes; nobody else keeps them.
    """

    def __init__(self, views: list[Tensor]) -> None:
        self._views = views
        self._storages: list[UntypedStorage] = []
        self._addresses: list[int] = []
        self._counts: list[int] = []

    def add(self, view: Tensor) -> None:
        """One more, which nobody holds yet."""
        self._storages.append(view.untyped_storage())
        self._addresses.append(self._storages[-1]._cdata)
        self._counts.append(_count(view, self._addresses[-1]))

    def renew(self, number: int, view: Tensor) -> None:
        """Another one in the place of this number, which nobody holds yet."""
        self._views[number] = view
        self._storages[number] = storage = view.untyped_storage()
        self._addresses[number] = storage._cdata
        self._counts[number] = _count(view, storage._cdata)

    def is_held(self, number: int) -> bool:
        """Whether somebody holds the tensor of this number, or its memory; it is no ``.grad``."""
        return number < len(self._addresses) and (
            getrefcount(self._views[number]) > _LEAST
            or _num_tensors_in(self._addresses[number]) > self._counts[number]
        )

    def give(self, numbers: Iterable[int], place: Callable[[int], Tensor]) -> None:
        """Give these away, with what is in them.

        Args:
            place: makes the tensor anew that goes out.
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
    """How many tensors lie in its memory; one without elements has none of its own."""
    return _num_tensors_in(address) if view.numel() else maxsize


def _follow(moved: dict[int, UntypedStorage]) -> None:
    """Let each tensor in one of these memories lie in the other instead.

    Torch knows how many there are, and not which; Python's garbage collector knows all tensors that
    a script can hold. It takes as long as a look at every object, so it is done once: from then on
    nothing is lent any more.
    """
    for one in gc.get_objects():
        if type(one) is not Tensor:
            continue
        try:
            before = one.untyped_storage()
        except RuntimeError:  # it has none, as one that is sparse
            continue
        if (after := moved.get(before._cdata)) is not None:
            where: Any = after, one.storage_offset(), one.size(), one.stride()
            one.data = torch.empty(0, dtype=one.dtype, device=one.device).set_(*where)
            vars(one)["memory_before"] = before  # an array of NumPy's over it must not outlive it
