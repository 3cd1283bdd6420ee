"""A model's own code, which workers that have parts of it run no more: whether it still says so.

    prepare      forward() is followed once; what it reads, ``self.tau``, is then a number in parts
    each pass    what it reads is looked at: it is as it was, or it is followed again and compared
    sometimes    and without any sign, for what nobody can look at: a global, a class's attribute

What it sets, ``self.aux_loss = ...``, is set no more, and in its place lies something that says so.
Above 300 lines, since what is read and what is set are of one kind. This module must not know where
a model is cut.
"""

import inspect
import itertools
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, fx, nn

from ..errors import ConfigError
from ..replica.seeding import kept_random_state
from ..splits.tracing import TracedModel, untouched
from ..system.reasons import reason

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_ROWS = (list, set, deque, dict)
_DEEPEST = 2
"""Objects in objects that are looked into: a configuration, and a part of it."""
_GONE = object()
_OF_TORCH = frozenset(vars(nn.Module()))
_INSTEAD = "before prepare(), or use --split data or shard"


class Seen(NamedTuple):
    """One thing that code may read, and what it was.

    Attributes:
        held: in what; ``key``: under which name.
        called: in messages.
        is_plain: whether an equal one is the same.
    """

    held: dict[Any, Any]
    key: Any
    value: Any
    called: str
    is_plain: bool = False

    @property
    def now(self) -> Any:
        return self.held.get(self.key, _GONE)

    @property
    def has_changed(self) -> bool:
        now = self.now
        if now is self.value:
            return False
        return not (self.is_plain and type(now) is type(self.value) and now == self.value)


class FollowedCode:
    """What the code of a model that was followed reads and sets.

    Args:
        sets: see `set_by_forward`.
    """

    def __init__(self, traced: TracedModel, sets: Sequence[tuple[nn.Module, str]]) -> None:
        self.traced, self._model, self._num_passes = traced, traced.module, 0
        self._set = sets
        leaves = {
            id(traced.graph_module.get_submodule(str(node.target)))
            for node in traced.graph_module.graph.nodes
            if node.op == "call_module"
        }
        self._modules = list(_followed_modules(self._model, leaves))
        self._look()

    def retire(self) -> None:
        """From now on nothing is set by it."""
        for module, name in self._set:
            vars(module)[name] = SetByForward(f"{type(module).__name__}.{name}")

    def check(self) -> None:
        """Raise ConfigError where it would compute something else by now."""
        self._num_passes += 1
        for one in self._seen:
            if one.held.get(one.key) is not one.value and one.has_changed:
                self._compare([one for one in self._seen if one.has_changed])
                return
        if self.traced.again is None:
            return
        is_time = not self._num_passes & (self._num_passes - 1)
        if is_time or any(one._version != version for one, version in self._tensors):
            self._compare([])

    def _look(self) -> None:
        """At all that it names, as it is now."""
        sets = {(id(module), name) for module, name in self._set}
        self._seen = list[Seen]()
        for module in self._modules:
            kind, own = type(module).__name__, vars(module)
            for held in (module._modules, module._parameters):
                self._seen += [Seen(held, key, held[key], f"{kind}.{key}") for key in held]
            names = _names(type(module)) - _OF_TORCH
            for key in [one for one in own if one in names and (id(module), one) not in sets]:
                self._seen += _seen(own, key, f"{kind}.{key}", names, _DEEPEST)
        self._tensors = [
            (one.value, one.value._version)
            for one in self._seen
            if isinstance(one.value, Tensor) and not isinstance(one.value, nn.Parameter)
        ]
        """What it may have computed something of while it was followed."""

    def _compare(self, changed: Sequence[Seen]) -> None:
        """Follow it again; raise ConfigError where it computes something else now."""
        again, differs = self.traced.again, ""
        if again is not None and not (differs := self._differs(again)):
            self._look()
            return
        name = type(self._model).__name__
        if changed:
            one = changed[0]
            raise ConfigError(
                f"{one.called} was {_shown(one.value)} when {name} was divided and is "
                f"{_shown(one.now)}, and its parts compute with what it was: set it {_INSTEAD}"
            )
        raise ConfigError(
            f"{name} computes otherwise than when it was divided, and its parts do not ({differs}):"
            f" set what its forward() goes by {_INSTEAD}"
        )

    def _differs(self, again: Callable[[], fx.GraphModule]) -> str:
        try:
            with kept_random_state(), torch.no_grad():
                return difference(self.traced.graph_module, again())
        except Exception as error:  # the user's code may raise anything
            return f"its forward() is followed no more: {reason(error)}"


def difference(one: fx.GraphModule, other: fx.GraphModule) -> str:
    """What differs where one model was followed twice, in words; empty: nothing."""
    if one.code != other.code:
        rows = itertools.zip_longest(one.code.splitlines(), other.code.splitlines(), fillvalue="")
        was, now = next(pair for pair in rows if pair[0] != pair[1])
        return f"{was.strip()!r} is now {now.strip()!r}"
    for node, again in zip(one.graph.nodes, other.graph.nodes, strict=True):
        if node.op not in ("call_module", "get_attr"):
            continue
        was, now = (_attribute(*pair) for pair in ((one, node), (other, again)))
        if was is now:
            continue
        if isinstance(was, nn.Module | nn.Parameter) or not are_equal(was, now):
            return f"{node.target} is another one"
    return ""


def _attribute(root: fx.GraphModule, node: fx.Node) -> Any:
    value: Any = root
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value


def are_equal(one: Any, other: Any) -> bool:
    """Whether two tensors have the same numbers, nan where the other has it; others: one type."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


# -- what it reads -----------------------------------------------------------------------------


def _followed_modules(module: nn.Module, leaves: set[int]) -> Iterator[nn.Module]:
    """Whose own code is followed, and so is not run."""
    if id(module) not in leaves:
        yield module
        for child in module.children():
            yield from _followed_modules(child, leaves)


def _names(kind: type) -> set[str]:
    """All names in the code of its ``forward``, and of its own methods that this names."""
    found, due = set[str](), {"forward"}
    while due:
        name = due.pop()
        for base in kind.__mro__:
            if base not in (nn.Module, object) and (code := _code(vars(base).get(name))):
                new = set(_words(code)) - found
                found |= new
                due |= new
    return found


def _code(value: Any) -> types.CodeType | None:
    """Of a method or a property."""
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    found = getattr(inspect.unwrap(value), "__code__", None) if callable(value) else None
    return found if isinstance(found, types.CodeType) else None


def _words(code: types.CodeType) -> Iterator[str]:
    """Names of attributes, and texts, which may be keys; of what is defined in it, too."""
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, str):
            yield one
        elif isinstance(one, types.CodeType):
            yield from _words(one)


def _seen(
    held: dict[Any, Any], key: Any, called: str, names: set[str], depth: int
) -> Iterator[Seen]:
    """What lies under a name, and what code that has these names may look at in it."""
    value = held[key]
    if _is_plain(value):
        kept = list(value) if isinstance(value, list) else value
        yield Seen(held, key, kept, called, is_plain=True)
        return
    yield Seen(held, key, value, called)
    if not depth or isinstance(value, Tensor | nn.Module | type) or callable(value):
        return
    is_dict = isinstance(value, dict)
    inner = value if is_dict else getattr(value, "__dict__", {})
    for name in [one for one in inner if is_dict or one in names]:
        said = f"{called}[{name!r}]" if is_dict else f"{called}.{name}"
        yield from _seen(inner, name, said, names, depth - 1)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _shown(value: Any) -> str:
    if value is _GONE:
        return "gone"
    return repr(value) if _is_plain(value) else f"another {type(value).__name__}"


# -- what it sets ------------------------------------------------------------------------------


def set_by_forward(model: nn.Module, given: Sequence[Tensor]) -> list[tuple[nn.Module, str]]:
    """Attributes that each call of the model sets anew, with the modules that have them.

    Raises:
        ConfigError: it reads what the call before has set.
    """

    def call() -> None:
        with untouched(model), torch.no_grad():
            model(*(one.clone() for one in given))

    call()  # what is made by the first call, and stays
    before = [
        (module, name, value, _copied(value))
        for module in model.modules()
        if not type(module).__module__.startswith(("torch.nn.", "torch.ao."))
        for name, value in vars(module).items()
        if name not in _OF_TORCH
    ]
    call()
    found = [
        (module, name)
        for module, name, value, copied in before
        if _is_other(value, copied, vars(module).get(name, _GONE))
    ]
    for module, name in found:
        vars(module)[name] = SetByForward(f"{type(module).__name__}.{name}")
    try:
        call() if found else None
    except _Used as error:
        raise ConfigError(
            f"{error.called} is changed by each forward pass, which goes by what it was: a divided "
            f"model computes micro-batches, and not all of it in each worker; use --split data"
        ) from None
    return found


def _copied(value: Any) -> Any:
    """What tells later whether it was changed in place."""
    if isinstance(value, Tensor):
        return value._version
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, _ROWS) else None


def _is_other(value: Any, copied: Any, now: Any) -> bool:
    if now is not value:
        return not (_is_plain(value) and type(now) is type(value) and now == value)
    again = _copied(value)
    if not isinstance(copied, list):
        return bool(again != copied)
    return len(again) != len(copied) or any(a is not b for a, b in zip(again, copied, strict=True))


class _Used(ConfigError):
    """Something was done with what a forward pass would have set."""

    def __init__(self, called: str) -> None:
        self.called = called
        super().__init__(
            f"{called} is set by forward(), which a divided model does not run as a whole: return "
            f"it from forward() beside the output, or use --split data or shard"
        )


class SetByForward:
    """Lies where a forward pass would have set something: whatever is done with it is refused."""

    def __init__(self, called: str) -> None:
        self._called = called

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        raise _Used(next(one._called for one in leaves if isinstance(one, cls)))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _Used(self._called)

    def __repr__(self) -> str:
        return f"<{self._called}, which forward() sets>"


def _refuse(self: SetByForward, *_: Any) -> NoReturn:
    raise _Used(self._called)


for _name in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "neg",
    "matmul", "rmatmul", "iadd", "getitem", "setitem", "len", "iter", "contains", "float", "int",
    "bool", "index", "call", "lt", "le", "gt", "ge", "format", "abs",
):  # fmt: skip
    setattr(SetByForward, f"__{_name}__", _refuse)
