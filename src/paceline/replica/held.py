"""Whether a model still holds the memory that its parameters and buffers were given.

    parameter.data = ...      of equal content: put back; of other content or another type: refused
    module.mean = 0.9 * ...   a buffer made anew: its values go where the old one lies

A script that replaces memory leaves the run without a word, so this is looked at before each push.
This module must not know who else uses the memory, nor whether contents were changed.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..store.layout import Layout, TensorPlace


class HeldMemory:
    """The tensors of one model.

    Args:
        layout: where each lies in a block.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._model = model
        self._layout = layout
        self._parameters = list(model.parameters())
        self._buffers = list(model.buffers())
        number_of = {id(one): number for number, one in enumerate(self._buffers)}
        self._owners = [
            (module, key, number_of[id(buffer)])
            for module in model.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._block: Tensor | None = None

    def lie_in(self, block: Tensor) -> None:
        """The parameters were just made views into ``block``."""
        self._block = block
        self._places = [(one.data_ptr(), one.numel()) for one in self._parameters]

    def versions(self) -> list[int]:
        """How often each parameter was written through a name that torch counts."""
        return [one._version for one in self._parameters]

    # -- parameters -----------------------------------------------------------------------------

    def check_parameters(self) -> None:
        """Take back parameters whose memory the script has replaced by one of equal content.

        Raises:
            ConfigError: it has another content, type, shape or device.
        """
        for number in self._moved():
            ours, found = self._put_back(number)
            if not _are_equal(ours, found):
                raise edited(self._layout.parameters.places[number].name)

    def check_kinds(self) -> None:
        """Before a backward pass, whose gradients would not fit. Raises: as above, but content."""
        for number in self._moved():
            place, found = self._layout.parameters.places[number], self._parameters[number].detach()
            if (found.dtype, tuple(found.shape)) != (place.dtype, place.shape):
                raise replaced("parameter", place, found)

    def take_parameters(self) -> None:
        """As ``check_parameters``, but other contents are taken over."""
        for number in self._moved():
            ours, found = self._put_back(number)
            ours.copy_(found)

    def drop_parameters(self) -> None:
        """As ``check_parameters``, but other contents are forgotten."""
        for number in self._moved():
            self._put_back(number)

    def _moved(self) -> list[int]:
        """Parameters that lie elsewhere, or have another size."""
        if self._block is None:
            return []
        now = [(one.data_ptr(), one.numel()) for one in self._parameters]
        if now == self._places:
            return []
        pairs = zip(now, self._places, strict=True)
        return [number for number, (here, there) in enumerate(pairs) if here != there]

    def _put_back(self, number: int) -> tuple[Tensor, Tensor]:
        """Let a parameter lie in the block again; what is there, and what the script had put."""
        assert self._block is not None
        parameter, place = self._parameters[number], self._layout.parameters.places[number]
        ours, found = place.alone(self._block), parameter.detach()
        if not _are_of_one_kind(ours, found):
            raise replaced("parameter", place, found)
        parameter.data = ours
        return ours, found

    def check_names(self) -> None:
        """Refuse parameters that came after ``prepare``, or are gone."""
        now = {id(one): name for name, one in self._model.named_parameters()}
        known = {id(one): place.name for one, place in self._pairs()}
        for one, name in (*now.items(), *known.items()):
            if one not in known or one not in now:
                raise ConfigError(
                    f"parameter {name!r} was put into the model or taken out of it after "
                    "prepare(): build the whole model before, model.head = ...; "
                    "model, optimizer, loader = pace.prepare(model, optimizer, loader)"
                )

    def _pairs(self) -> "zip[tuple[nn.Parameter, TensorPlace]]":
        return zip(self._parameters, self._layout.parameters.places, strict=True)

    # -- buffers --------------------------------------------------------------------------------

    def take_buffers(self) -> None:
        """Values of buffers that the model has made anew go where the old ones lie.

        Raises:
            ConfigError: one has another type, shape or place since.
        """
        for module, key, number in self._owners:
            mine, found = self._buffers[number], module._buffers.get(key)
            if found is mine:
                continue
            if found is not None and _are_of_one_kind(mine, found):
                mine.copy_(found.detach())
                module._buffers[key] = mine
            elif key not in module._non_persistent_buffers_set:  # those are caches of any size
                raise replaced("buffer", self._layout.buffers.places[number], found)

    def drop_buffers(self) -> None:
        """What a pass has made that does not count is forgotten: the old buffers take its place."""
        for module, key, number in self._owners:
            mine, found = self._buffers[number], module._buffers.get(key)
            if found is not mine and found is not None and _are_of_one_kind(mine, found):
                module._buffers[key] = mine


def edited(name: str) -> ConfigError:
    """The error for weights that changed otherwise than by the optimizer's step."""
    return ConfigError(
        f"parameter {name!r} was changed after prepare() otherwise than by optimizer.step(), and "
        "such a change would be lost or made once by every worker: load weights before prepare(), "
        "and make clamps and projections a part of the step, in a class of your own: "
        "class Clipped(torch.optim.SGD): def step(self, closure=None): super().step(closure); "
        "for group in self.param_groups: for p in group['params']: p.data.clamp_(-c, c)"
    )


def replaced(kind: str, place: TensorPlace, found: Tensor | None) -> ConfigError:
    """The error for a tensor that has another type, shape or device since ``prepare``."""
    now = "nothing"
    if found is not None:
        now = f"{found.dtype} of shape {tuple(found.shape)} on {found.device}"
    return ConfigError(
        f"{kind} {place.name!r} is {place.dtype} of shape {place.shape} in the run, since "
        f"prepare() it was made {now}: convert, move and resize a model before, "
        "model = model.to(...); model, optimizer, loader = pace.prepare(model, optimizer, loader)"
    )


def _are_of_one_kind(one: Tensor, other: Tensor) -> bool:
    """Their strides may differ: values are copied, memory is put back."""
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, as far as numbers go: nan equals itself."""
    same: Any = (one == other) | ((one != one) & (other != other))
    return bool(torch.all(same))
