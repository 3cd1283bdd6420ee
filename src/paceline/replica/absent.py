"""A parameter whose numbers another worker holds: what looks at them is told so.

It stays the script's own object, of its shape, in its module, without memory. A sum over
``model.parameters()`` that silently left out what lies elsewhere would be another number than plain
PyTorch's; so each look is refused by name. This module must not know who holds what.
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
"""What tells of its shape and kind."""
_FLAGS = {Tensor.requires_grad_, vars(torch._C.TensorBase)["requires_grad"].__set__}
_SET_GRAD = vars(torch._C.TensorBase)["grad"].__set__
"""Whether it is trained, and that it has no gradient: both also of what this worker has of it."""


class AbsentParameter(nn.Parameter):
    """In the place of a parameter that lies elsewhere; made of one by `forget`."""

    called = ""
    place = ""
    held: nn.Parameter | None = None
    """What this worker has of it; None: nothing."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _FLAGS or (func == _SET_GRAD and args[1] is None):
            with torch._C.DisableTorchFunctionSubclass():
                made = func(*args, **(kwargs or {}))
                if args[0].held is not None:
                    func(args[0].held, *args[1:], **(kwargs or {}))
            return made
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        found = next(one for one in leaves if isinstance(one, AbsentParameter))
        return found._refuse(getattr(func, "__name__", str(func)))

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse("copy.deepcopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("pickle")

    def __repr__(self) -> str:  # type: ignore[override]  # torch takes tensor_contents
        return f"AbsentParameter({self.called!r}, {tuple(self.shape)}, {self.place})"

    def _refuse(self, what: str) -> NoReturn:
        what = "grad" if what == "__get__" else what
        raise ConfigError(
            f"parameter {self.called!r} lies {self.place}, since the model is split, and here "
            f"{what} looks at its numbers: model.state_dict() and pace.save() give the whole "
            "model's, pace.clip_grad_norm_(model.parameters(), ...) clips by all gradients; what "
            "changes weights or copies the model comes before prepare()"
        )


def forget(
    parameter: nn.Parameter, name: str, where: str, held: nn.Parameter | None = None
) -> None:
    """Its numbers are needed here no more, and their memory is given back.

    Args:
        where: they lie, in words: ``on worker 1``.
        held: what of it this worker has elsewhere.
    """
    parameter.grad = None
    parameter.data = torch.empty_like(parameter.data)  # it may be a view of more
    parameter.untyped_storage().resize_(0)
    parameter.__class__ = AbsentParameter
    assert isinstance(parameter, AbsentParameter)
    parameter.called, parameter.place, parameter.held = name, where, held
