"""A parameter whose values are on another worker: reading them raises an error.

It stays the script's own object, with its shape, in its module, but without memory. A sum over
``model.parameters()`` that silently left out remote values would differ from plain PyTorch's, so
every access is refused by name. This module must not know who holds what.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..errors import ConfigError

_ALLOWED = {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.stride,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.__hash__,
    Tensor.__len__,
    *(
        vars(torch._C.TensorBase)[name].__get__
        for name in (
            "shape", "dtype", "device", "requires_grad", "ndim", "layout", "is_leaf", "nbytes",
            "is_sparse", "is_meta", "is_cuda", "itemsize",
        )
    ),
}  # fmt: skip
"""Functions that read only its shape and kind."""
_FLAGS = {Tensor.requires_grad_, vars(torch._C.TensorBase)["requires_grad"].__set__}
_SET_GRAD = vars(torch._C.TensorBase)["grad"].__set__
"""Setters of requires_grad and of an empty .grad; they act on this worker's part, too."""


class AbsentParameter(nn.Parameter):
    """Stands for a parameter that is elsewhere; made from one by `forget`."""

    called = ""
    place = ""
    held: nn.Parameter | None = None
    """This worker's part of it; None: nothing."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _FLAGS or (func == _SET_GRAD and args[1] is None):
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
                if args[0].held is not None:
                    func(args[0].held, *args[1:], **(kwargs or {}))
            return result
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        absent = next(leaf for leaf in leaves if isinstance(leaf, AbsentParameter))
        return absent._refuse(getattr(func, "__name__", str(func)))

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse("copy.deepcopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("pickle")

    def __repr__(self) -> str:  # type: ignore[override]  # torch takes tensor_contents
        return f"AbsentParameter({self.called!r}, {tuple(self.shape)}, {self.place})"

    def _refuse(self, what: str) -> NoReturn:
        what = "grad" if what == "__get__" else what
        raise ConfigError(
            f"parameter {self.called!r} is {self.place}, since the model is split, and here "
            f"{what} reads its values: use model.state_dict() or pace.save() for the whole model, "
            "pace.clip_grad_norm_(model.parameters(), ...) to clip by all gradients; change "
            "weights or copy the model before prepare()"
        )


def forget(
    parameter: nn.Parameter, name: str, where: str, held: nn.Parameter | None = None
) -> None:
    """Free a parameter's memory and make it an `AbsentParameter`.

    Args:
        where: where its values are, in words: ``on worker 1``.
        held: this worker's part of it.
    """
    parameter.grad = None
    parameter.data = torch.empty_like(parameter.data)  # it may be a view of a larger storage
    parameter.untyped_storage().resize_(0)
    parameter.__class__ = AbsentParameter
    assert isinstance(parameter, AbsentParameter)
    parameter.called, parameter.place, parameter.held = name, where, held
