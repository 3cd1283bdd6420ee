"""What a push does to the value that is stored: sum, assign, a function, an optimizer.

A rule reads the old value and writes the new one beside it, so the rules of one line of arithmetic
take one pass over the data and the others one copy more. What an optimizer remembers lies in
shared memory, too, and is read and written in the same way. This module must not know about locks,
versions or where the memory comes from.
"""

import abc
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ConfigError, unknown
from ..store.layout import StateEntry, lay_out
from ..store.optimizer_copy import EXISTS, StateRow, is_elementwise, state_rows

UpdateFunction: TypeAlias = Callable[[str, Tensor, Tensor], object]
"""``(key, pushed, stored)``: changes ``stored`` in place."""


@dataclass(frozen=True, slots=True)
class RuleState:
    """What a rule remembers about one slice: bytes to read, bytes to write, and what lies where."""

    entries: tuple[StateEntry, ...]
    old: Tensor
    new: Tensor


@dataclass(frozen=True, slots=True)
class Change:
    """One slice of one push, or a whole one. ``pushed``, ``old`` and ``new`` have one shape."""

    key: str
    start: int
    """The first element of the slice."""
    pushed: Tensor
    old: Tensor
    new: Tensor
    state: RuleState | None


class Rule(abc.ABC):
    """How a pushed value becomes part of the stored one. ``name`` is the same in all processes."""

    name: str
    is_whole: bool = False
    """Whether it must see whole tensors: otherwise it is given flat slices."""

    @abc.abstractmethod
    def write(self, change: Change) -> None:
        """Write ``change.new``; ``change.old`` may be read by others meanwhile."""

    def entries(self, like: Tensor) -> tuple[StateEntry, ...]:
        """What is kept for a slice like this one; offsets count from 0."""
        return ()

    def check(self, like: Tensor) -> None:  # noqa: B027  most rules take everything
        """Raise ConfigError where keys like this cannot be updated."""


class Sum(Rule):
    name = "sum"

    def write(self, change: Change) -> None:
        torch.add(change.old, change.pushed, out=change.new)


class Assign(Rule):
    name = "assign"

    def write(self, change: Change) -> None:
        change.new.copy_(change.pushed)


class Function(Rule):
    """The user's own ``updater(key, pushed, stored)``."""

    is_whole = True

    def __init__(self, function: UpdateFunction) -> None:
        self._function = function
        inner = getattr(function, "__qualname__", type(function).__qualname__)
        self.name = f"updater {inner}"

    def write(self, change: Change) -> None:
        change.new.copy_(change.old)
        self._function(change.key, change.pushed, change.new)


class Optimize(Rule):
    """One step of a ``torch.optim`` optimizer, with the pushed value as the gradient.

    Args:
        kind: the class, or any function ``(parameters, **options) -> Optimizer``.
    """

    def __init__(self, kind: Callable[..., Optimizer], options: Mapping[str, Any]) -> None:
        self._kind = kind
        self._options = dict(options)
        self.name = f"{getattr(kind, '__qualname__', kind)}({_listed(options)})"
        self.is_whole = not is_elementwise(self._build(torch.zeros(1)))
        # One for each slice: the lock of the slice is also the lock of its optimizer.
        self._optimizers: dict[tuple[str, int], Optimizer] = {}

    def check(self, like: Tensor) -> None:
        if not like.dtype.is_floating_point and not like.dtype.is_complex:
            raise ConfigError(
                f"{self.name} updates floating-point tensors, not {like.dtype}; keep other tensors "
                'in a store of their own: KVStore(updater="assign")'
            )

    def entries(self, like: Tensor) -> tuple[StateEntry, ...]:
        parameter = nn.Parameter(torch.empty_like(like), requires_grad=False)
        rows: list[StateRow] = state_rows(self._build(parameter), [parameter])
        return lay_out([], [], rows).entries

    def write(self, change: Change) -> None:
        state = change.state
        assert state is not None
        change.new.copy_(change.old)
        state.new.copy_(state.old)
        optimizer = self._optimizers.get((change.key, change.start))
        parameter = nn.Parameter(change.new, requires_grad=False)
        if optimizer is None:
            optimizer = self._build(parameter)
            self._optimizers[change.key, change.start] = optimizer
        optimizer.param_groups[0]["params"] = [parameter]
        optimizer.state.clear()
        if known := _read(state):
            optimizer.state[parameter] = known
        parameter.grad = change.pushed
        optimizer.step()
        _write(state, optimizer.state.get(parameter, {}))
        parameter.grad = None

    def _build(self, parameter: Tensor) -> Optimizer:
        optimizer = self._kind([parameter], **self._options)
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"set_optimizer wants a class of torch.optim, or a function of parameters that "
                f"returns an optimizer; {self._kind!r} returned {type(optimizer).__name__}"
            )
        return optimizer

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_optimizers": {}}


NAMED: dict[str, type[Rule]] = {"sum": Sum, "assign": Assign}


def make_rule(updater: "str | UpdateFunction") -> Rule:
    """The rule for what a user wrote."""
    if isinstance(updater, str):
        if updater not in NAMED:
            raise unknown("updater", updater, NAMED, "or a function (key, pushed, stored)")
        return NAMED[updater]()
    if inspect.isclass(updater) and issubclass(updater, Optimizer):
        name = updater.__name__
        raise ConfigError(
            f"{name} is an optimizer: store.set_optimizer(torch.optim.{name}, lr=...)"
        )
    if not callable(updater):
        raise ConfigError(
            f'updater must be "sum", "assign" or a function (key, pushed, stored), got {updater!r}'
        )
    return Function(updater)


def _read(kept: RuleState) -> dict[str, Any]:
    """The optimizer's state of one parameter: views into the memory to be written."""
    state: dict[str, Any] = {}
    for entry in kept.entries:
        view = entry.place.view(kept.new)
        if entry.key == EXISTS:
            if not view.item():
                return {}
        elif entry.is_number:
            number = view.item()
            state[entry.key] = int(number) if float(number).is_integer() else number
        else:
            state[entry.key] = view
    return state


def _write(kept: RuleState, state: Mapping[str, Any]) -> None:
    for entry in kept.entries:
        view = entry.place.view(kept.new)
        if entry.key == EXISTS:
            view.fill_(1 if state else 0)
        elif entry.key not in state:
            continue
        elif entry.is_number:
            view.fill_(float(state[entry.key]))
        elif state[entry.key].data_ptr() != view.data_ptr():
            view.copy_(state[entry.key])


def _listed(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in sorted(options.items()))
