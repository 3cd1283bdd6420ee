"""Checks of pushed values, and the rules of a push: sum, assign, a function, an optimizer.

    value of the user -> checked -> total on the CPU -> rule: old value + pushed -> new value

Without checks a wrong shape would be broadcast and a wrong dtype converted silently. A rule reads
the old value and writes the new one beside it, so simple rules take one pass over the data and the
others one more copy. An optimizer's state is in shared memory, too, and is read and written in the
same way. Above 300 lines, since the checks of a push are beside its rules. This module must not
know about locks, versions or where the memory comes from.
"""

import abc
import functools
import hashlib
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ConfigError, unknown
from ..store.layout import StateEntry, lay_out
from ..store.optimizer_copy import EXISTS, own_memory, state_rows

Values: TypeAlias = Tensor | Sequence[Tensor]
"""One tensor, or one of each device."""
UpdateFunction: TypeAlias = Callable[[str, Tensor, Tensor], object]
"""``(key, pushed, stored)``: changes ``stored`` in place."""

_V = TypeVar("_V")


def pairs_of(key: str | Mapping[str, _V], value: _V | None) -> list[tuple[str, _V]]:
    """``(key, value)`` of a call with one key and its value, or with a dict."""
    if isinstance(key, Mapping):
        if value is not None:
            raise ConfigError(
                "a dict of keys already has the values: leave the second argument out"
            )
        return list(key.items())
    if value is None:
        raise ConfigError(f"key {key!r} has no value; for many keys pass a dict {{key: value}}")
    return [(key, value)]


def each_once(keys: Iterable[str]) -> dict[str, None]:
    """The keys of a list; raises ConfigError if one is there twice."""
    unique: dict[str, None] = {}
    for name in keys:
        if name in unique:
            raise ConfigError(f"key {name!r} is given twice; leave one out")
        unique[name] = None
    return unique


def check_tensor(key: str, value: object, what: str = "value") -> None:
    """Raise ConfigError unless ``value`` is a dense tensor with memory."""
    if not isinstance(value, Tensor):
        hint = "; convert it by torch.as_tensor(value)" if hasattr(value, "__array__") else ""
        raise ConfigError(f"{what} of key {key!r} must be a tensor, got {_kind(value)}{hint}")
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        raise ConfigError(
            f"{what} of key {key!r} must be a dense tensor with memory, got {value.layout} on "
            f"{value.device}; for a sparse one push value.to_dense()"
        )


def check_like(key: str, stored: Tensor, value: object, what: str = "value") -> None:
    """Raise ConfigError unless ``value`` is a tensor of the key's shape and dtype."""
    check_tensor(key, value, what)
    assert isinstance(value, Tensor)
    if value.shape != stored.shape:
        raise ConfigError(
            f"{what} of key {key!r} must have shape {tuple(stored.shape)}, got "
            f"{tuple(value.shape)}; nothing is broadcast"
        )
    if value.dtype != stored.dtype:
        raise ConfigError(
            f"{what} of key {key!r} must be {stored.dtype}, got {value.dtype}; "
            f"value.to({stored.dtype}) converts it"
        )


def total_of(key: str, stored: Tensor, value: Values) -> Tensor:
    """The pushed value as one dense tensor on the CPU; the sum of a list."""
    if isinstance(value, Tensor):
        check_like(key, stored, value)
        return _dense(value)
    if not isinstance(value, list | tuple) or not value:
        raise ConfigError(
            f"value of key {key!r} must be a tensor or a list of at least one, got {_kind(value)}"
        )
    for tensor in value:
        check_like(key, stored, tensor, "each value")
    return functools.reduce(torch.add, map(_dense, value))


def _dense(value: Tensor) -> Tensor:
    return value.detach().to("cpu").contiguous()


def _kind(value: object) -> str:
    return (
        "an empty list" if isinstance(value, list | tuple) and not value else type(value).__name__
    )


@dataclass(frozen=True, slots=True)
class Change:
    """One push. ``pushed``, ``old`` and ``new`` have one shape."""

    key: str
    pushed: Tensor
    old: Tensor
    new: Tensor
    entries: tuple[StateEntry, ...]
    """The rule's state of the key, and where each entry is in its bytes."""
    old_state: Tensor
    new_state: Tensor


class Rule(abc.ABC):
    """How a push changes the stored value. ``name`` is the same in all processes."""

    name: str

    @abc.abstractmethod
    def write(self, change: Change) -> None:
        """Write ``change.new``; ``change.old`` may be read by others meanwhile."""

    def entries(self, like: Tensor) -> tuple[StateEntry, ...]:
        """The state that is kept for a key like this one; offsets count from 0."""
        return ()

    def check(self, like: Tensor) -> None:  # noqa: B027  most rules take everything
        """Raise ConfigError if keys like this cannot be updated."""


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

    def __init__(self, function: UpdateFunction) -> None:
        self._function = function
        self.name = f"updater {_name_of(function)}"

    def write(self, change: Change) -> None:
        change.new.copy_(change.old)
        self._function(change.key, change.pushed, change.new)


def _name_of(function: Callable[..., object]) -> str:
    """The function's name, and a digest by which lambdas, closures and partials differ.

    It covers their code and the numbers and texts that they hold, but no other objects.
    """
    name = getattr(function, "__qualname__", type(function).__qualname__)
    digest = hashlib.sha256(repr(_content(function)).encode()).hexdigest()[:8]
    return f"{name} [{digest}]"


def _content(value: object, within: tuple[object, ...] = ()) -> object:
    """What is the same in every process that has this value; objects count by their class.

    Args:
        within: the functions that hold it, of which it may be one.
    """
    if any(value is function for function in within):
        return "itself"
    inside = (*within, value)
    match value:
        case None | bool() | int() | float() | complex() | str() | bytes():
            return value
        case tuple():
            return [_content(part, inside) for part in value]
        case frozenset():
            return sorted(repr(_content(part, inside)) for part in value)
        case functools.partial():
            options = sorted((name, _content(one, inside)) for name, one in value.keywords.items())
            return _content(value.func, inside), _content(value.args, inside), options
        case types.MethodType():
            return _content(value.__func__, inside)
        case types.FunctionType():
            cells = tuple(_held(cell) for cell in value.__closure__ or ())
            defaults = value.__defaults__, *(value.__kwdefaults__ or {}).values()
            return [_content(part, inside) for part in (value.__code__, cells, defaults)]
        case types.CodeType():
            return value.co_code, value.co_names, _content(value.co_consts, inside)
        case type() | types.BuiltinFunctionType():
            return f"{value.__module__}.{value.__qualname__}"
        case _:
            return type(value).__qualname__


def _held(cell: types.CellType) -> object:
    """What a function's cell holds; None: nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


class Optimize(Rule):
    """One step of a ``torch.optim`` optimizer, with the pushed value as the gradient.

    Args:
        kind: the class, or any function ``(parameters, **options) -> Optimizer``.
    """

    def __init__(self, kind: Callable[..., Optimizer], options: Mapping[str, Any]) -> None:
        self._kind = kind
        self._options = dict(options)
        listed = ", ".join(f"{name}={value!r}" for name, value in sorted(options.items()))
        made_by = kind.__qualname__ if inspect.isclass(kind) else _name_of(kind)
        self.name = f"{made_by}({listed})"
        trial = self._tried()  # to refuse it here, and not at the first push
        self._begins_with_state = bool(trial.state)
        # One for each key: the lock of the key is also the lock of its optimizer.
        self._optimizers: dict[str, Optimizer] = {}

    def check(self, like: Tensor) -> None:
        if not like.dtype.is_floating_point and not like.dtype.is_complex:
            raise ConfigError(
                f"{self.name} updates floating-point tensors, not {like.dtype}; keep other tensors "
                'in a store of their own: KVStore(updater="assign")'
            )
        self._made(nn.Parameter(torch.empty_like(like), requires_grad=False))

    def entries(self, like: Tensor) -> tuple[StateEntry, ...]:
        parameter = nn.Parameter(torch.empty_like(like), requires_grad=False)
        return lay_out([], [], state_rows(self._build(parameter), [parameter])).entries

    def write(self, change: Change) -> None:
        change.new.copy_(change.old)
        change.new_state.copy_(change.old_state)
        parameter = nn.Parameter(change.new, requires_grad=False)
        known, optimizer = _read(change), self._optimizers.get(change.key)
        if optimizer is None or (self._begins_with_state and not known):
            optimizer = self._optimizers[change.key] = self._build(parameter)
        if known or not self._begins_with_state:
            optimizer.state.clear()
        if known:
            optimizer.state[parameter] = known
        optimizer.param_groups[0]["params"] = [parameter]
        parameter.grad = change.pushed
        optimizer.step()
        if (
            parameter.data_ptr() != change.new.data_ptr()
        ):  # p.data = ..., in a class of the user's own
            change.new.copy_(parameter.data)
        _write(change, optimizer.state.get(parameter, {}))
        parameter.grad = None

    def _tried(self) -> Optimizer:
        """An optimizer over a small parameter, a matrix if it takes nothing else.

        Raises:
            ConfigError: it cannot be made, or keeps state outside the store.
        """
        small, matrix = (nn.Parameter(torch.zeros(shape)) for shape in ((1,), (1, 1)))
        try:
            optimizer = self._build(small)
        except ConfigError:
            raise
        except Exception:  # code of the user's: Muon, for example, takes only matrices
            optimizer = self._made(matrix)
        if memory := own_memory(optimizer):
            raise ConfigError(
                f"{self.name} keeps {memory} from push to push, which is not in the store and "
                "would differ between processes: keep it for each parameter from the first step "
                "on, self.state[p]['t']"
            )
        return optimizer

    def _made(self, parameter: nn.Parameter) -> Optimizer:
        try:
            return self._build(parameter)
        except ConfigError:
            raise
        except Exception as error:  # code of the user's
            raise ConfigError(
                f"{self.name} cannot be made for a key of shape {tuple(parameter.shape)} "
                f"({type(error).__name__}: {error}); set other options, or keep such keys in a "
                "store of their own"
            ) from None

    def _build(self, parameter: Tensor) -> Optimizer:
        optimizer = self._kind([parameter], **self._options)
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"set_optimizer takes a class of torch.optim, or a function of parameters that "
                f"returns an optimizer; {self._kind!r} returned {type(optimizer).__name__}"
            )
        return optimizer

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_optimizers": {}}


NAMED: dict[str, type[Rule]] = {"sum": Sum, "assign": Assign}


def make_rule(updater: "str | UpdateFunction") -> Rule:
    """The rule for the user's ``updater`` argument."""
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


def _read(change: Change) -> dict[str, Any]:
    """The optimizer's state of one parameter: views into the memory to be written."""
    state: dict[str, Any] = {}
    for entry in change.entries:
        view = entry.place.view(change.new_state)
        if entry.key == EXISTS:
            if not view.item():
                return {}
        elif entry.is_number:
            number = view.item()
            state[entry.key] = int(number) if float(number).is_integer() else number
        else:
            state[entry.key] = view
    return state


def _write(change: Change, state: Mapping[str, Any]) -> None:
    for entry in change.entries:
        view = entry.place.view(change.new_state)
        if entry.key == EXISTS:
            view.fill_(1 if state else 0)
        elif entry.key not in state:
            continue
        elif entry.is_number:
            view.fill_(float(state[entry.key]))
        elif state[entry.key].data_ptr() != view.data_ptr():
            view.copy_(state[entry.key])
