"""State dicts that the script was given: copies, and whether it has written to one.

    model.state_dict()            copies: others write the weights meanwhile
    state["0.weight"].copy_(...)  in plain PyTorch the model is written
    model.load_state_dict(state)  here, too: nothing is lost

A write that did not come to the model is refused by name, with the next push or as an epoch begins.
What watches a copy shares its counter of changes, and not its memory. This module must not know
pushes or epochs.
"""

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ConfigError


class _Copy(NamedTuple):
    """A copy of a parameter.

    Attributes:
        counter: a tensor without memory that counts the copy's changes.
        version: of the parameter's own counter, when it was copied.
    """

    name: str
    parameter: nn.Parameter
    tensor: weakref.ref[Tensor]
    counter: Tensor
    version: int


class GivenStates:
    """The copies of one member's models."""

    def __init__(self) -> None:
        self._new: list[_Copy] = []
        """Those of the last state dict, and those that were written before."""
        self._kept: list[_Copy] = []
        """Those before, that the script keeps."""

    def give(self, module: nn.Module, state: Mapping[str, Any], prefix: str) -> None:
        """The script gets these copies.

        Args:
            prefix: of its names, before those of the module's parameters.
        """
        self._part()
        for name, parameter in module.named_parameters(remove_duplicate=False):
            copy = state.get(prefix + name)
            if isinstance(copy, Tensor) and copy is not parameter and not copy.is_inference():
                counter = copy.detach()
                counter.data = copy.new_empty(0)
                copied = _Copy(name, parameter, weakref.ref(copy), counter, parameter._version)
                self._new.append(copied)

    def check(self) -> None:
        """Of the last state dict nothing was written that has not come to the model.

        Raises:
            ConfigError: something was; the parameter is named.
        """
        if self._new:
            self._part()
            self._judge(self._new)
            self._new = []

    def check_all(self) -> None:
        """Look for what was written into the last state dict or any copy that the script keeps."""
        self.check()
        self._judge([one for one in self._kept if one.counter._version])

    def _part(self) -> None:
        """Those that were not written count from now on only where they are kept."""
        unwritten = [one for one in (*self._kept, *self._new) if not one.counter._version]
        self._new = [one for one in self._new if one.counter._version]
        self._kept = [one for one in unwritten if one.tensor() is not None]

    def _judge(self, written: list[_Copy]) -> None:
        for one in written:
            copy = one.tensor()
            if one.parameter._version == one.version and (
                copy is None or not torch.equal(copy, one.parameter.detach())
            ):
                raise ConfigError(
                    f"state_dict()[{one.name!r}] was written to, and in a run it is a copy, which "
                    "the model knows nothing of: write what the model is to have into the state "
                    "dict, and then model.load_state_dict(state)"
                )
