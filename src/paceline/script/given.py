"""State dicts that the script was given: copies, and whether it has written to one.

    model.state_dict()            copies: others write the weights meanwhile
    state["0.weight"].copy_(...)  in plain PyTorch this writes to the model
    model.load_state_dict(state)  this does here, too: nothing is lost

A write that did not reach the model is refused by name, at the next push or when an epoch begins.
The watcher of a copy shares its counter of changes, not its memory. This module must not know
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
        version: the parameter's own counter when it was copied.
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
        """Copies of the last state dict, and those that were written before."""
        self._kept: list[_Copy] = []
        """Earlier copies that the script keeps."""

    def give(self, module: nn.Module, state: Mapping[str, Any], prefix: str) -> None:
        """Register copies that the script gets.

        Args:
            prefix: of the names in ``state``, before those of the module's parameters.
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
        """Check that no write to the last state dict has missed the model.

        Raises:
            ConfigError: one has; the parameter is named.
        """
        if self._new:
            self._part()
            self._judge(self._new)
            self._new = []

    def check_all(self) -> None:
        """Check the last state dict and every copy that the script keeps."""
        self.check()
        self._judge([copy for copy in self._kept if copy.counter._version])

    def _part(self) -> None:
        """Move copies that were not written to the kept ones, if the script still has them."""
        unwritten = [copy for copy in (*self._kept, *self._new) if not copy.counter._version]
        self._new = [copy for copy in self._new if copy.counter._version]
        self._kept = [copy for copy in unwritten if copy.tensor() is not None]

    def _judge(self, written: list[_Copy]) -> None:
        for copy in written:
            tensor = copy.tensor()
            if copy.parameter._version == copy.version and (
                tensor is None or not torch.equal(tensor, copy.parameter.detach())
            ):
                raise ConfigError(
                    f"state_dict()[{copy.name!r}] was written to, but in a run it is a copy, and "
                    "the model does not change with it: write to the state dict, and then call "
                    "model.load_state_dict(state)"
                )
