"""Check that a split model's own code, which no longer runs, still computes what its parts do.

    prepare      forward() is traced once; what it reads, ``self.tau``, becomes a constant in parts
    each pass    what it reads is checked: if it has changed, forward() is traced again and compared
    sometimes    the same without a sign of change, for what cannot be seen: globals, attributes of
                 classes

What forward() sets, ``self.aux_loss = ...``, is no longer set; an object in its place raises an
error when it is used. Above 300 lines, since what is read and what is set are found in similar
ways. This module must not know where a model is cut.
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
_CONTAINERS = (list, set, deque, dict)
_DEEPEST = 2
"""How deeply nested objects are looked into: a configuration, and a part of it."""
_GONE = object()
_OF_TORCH = frozenset(vars(nn.Module()))
_INSTEAD = "before prepare(), or use --split data or shard"


class Seen(NamedTuple):
    """A value that code may read, as it was when it was traced.

    Attributes:
        held: the dict that holds it.
        key: its name in the dict.
        value: what it was.
        called: its name in messages.
        is_plain: whether an equal value of the same type counts as unchanged.
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
    """What the code of a traced model reads and sets.

    Args:
        sets: attributes that it sets, see `set_by_forward`.
    """

    def __init__(self, traced: TracedModel, sets: Sequence[tuple[nn.Module, str]]) -> None:
        self.traced, self._model, self._num_passes = traced, traced.module, 0
        self._set = sets
        leaves = {
            id(traced.graph_module.get_submodule(str(node.target)))
            for node in traced.graph_module.graph.nodes
            if node.op == "call_module"
        }
        self._modules = list(_traced_modules(self._model, leaves))
        self._look()

    def retire(self) -> None:
        """Replace attributes that forward() set before, and sets no longer."""
        for module, name in self._set:
            vars(module)[name] = SetByForward(f"{type(module).__name__}.{name}")

    def check(self) -> None:
        """Raise ConfigError where the code would compute something else by now."""
        self._num_passes += 1
        for seen in self._seen:
            if seen.held.get(seen.key) is not seen.value and seen.has_changed:
                self._compare([seen for seen in self._seen if seen.has_changed])
                return
        if self.traced.again is None:
            return
        is_time = not self._num_passes & (self._num_passes - 1)  # passes 1, 2, 4, 8, ...
        if is_time or any(tensor._version != version for tensor, version in self._tensors):
            self._compare([])

    def _look(self) -> None:
        """Note all values that the code may read, as they are now."""
        sets = {(id(module), name) for module, name in self._set}
        self._seen = list[Seen]()
        for module in self._modules:
            kind, attributes = type(module).__name__, vars(module)
            for held in (module._modules, module._parameters):
                self._seen += [Seen(held, key, held[key], f"{kind}.{key}") for key in held]
            names = _names(type(module)) - _OF_TORCH
            for key in [k for k in attributes if k in names and (id(module), k) not in sets]:
                self._seen += _seen(attributes, key, f"{kind}.{key}", names, _DEEPEST)
        self._tensors = [
            (seen.value, seen.value._version)
            for seen in self._seen
            if isinstance(seen.value, Tensor) and not isinstance(seen.value, nn.Parameter)
        ]
        """Tensors, and their versions, that constants of the trace may have been computed from."""

    def _compare(self, changed: Sequence[Seen]) -> None:
        """Trace the code again; raise ConfigError where it computes something else now.

        Args:
            changed: values that have changed.
        """
        again, differs = self.traced.again, ""
        if again is not None and not (differs := self._differs(again)):
            self._look()
            return
        name = type(self._model).__name__
        if changed:
            first = changed[0]
            raise ConfigError(
                f"{first.called} was {_shown(first.value)} when {name} was split and is now "
                f"{_shown(first.now)}, but its parts compute with the old value: set it {_INSTEAD}"
            )
        raise ConfigError(
            f"{name} computes something else than when it was split, but its parts do not "
            f"({differs}): set what its forward() depends on {_INSTEAD}"
        )

    def _differs(self, again: Callable[[], fx.GraphModule]) -> str:
        """Say how a new trace differs from the first, in words; empty: it does not."""
        try:
            with kept_random_state(), torch.no_grad():
                return difference(self.traced.graph_module, again())
        except Exception as error:  # the user's code may raise anything
            return f"its forward() can no longer be traced: {reason(error)}"


def difference(old: fx.GraphModule, new: fx.GraphModule) -> str:
    """Say what differs between two traces of one model, in words; empty: nothing."""
    if old.code != new.code:
        lines = itertools.zip_longest(old.code.splitlines(), new.code.splitlines(), fillvalue="")
        was, now = next(pair for pair in lines if pair[0] != pair[1])
        return f"{was.strip()!r} is now {now.strip()!r}"
    for old_node, new_node in zip(old.graph.nodes, new.graph.nodes, strict=True):
        if old_node.op not in ("call_module", "get_attr"):
            continue
        was, now = _attribute(old, old_node), _attribute(new, new_node)
        if was is now:
            continue
        if isinstance(was, nn.Module | nn.Parameter) or not are_equal(was, now):
            return f"{old_node.target} has changed"
    return ""


def _attribute(root: fx.GraphModule, node: fx.Node) -> Any:
    value: Any = root
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value


def are_equal(a: Any, b: Any) -> bool:
    """Whether two tensors are equal, with nan equal to nan; other values: whether types are."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b)
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


# -- what it reads -----------------------------------------------------------------------------


def _traced_modules(module: nn.Module, leaves: set[int]) -> Iterator[nn.Module]:
    """Yield the modules whose own code was traced, and so is not run."""
    if id(module) not in leaves:
        yield module
        for child in module.children():
            yield from _traced_modules(child, leaves)


def _names(kind: type) -> set[str]:
    """Return all names in the code of a class's ``forward``, and of the methods that it names."""
    names, pending = set[str](), {"forward"}
    while pending:
        name = pending.pop()
        for base in kind.__mro__:
            if base not in (nn.Module, object) and (code := _code(vars(base).get(name))):
                new = set(_words(code)) - names
                names |= new
                pending |= new
    return names


def _code(value: Any) -> types.CodeType | None:
    """Return the code of a method or a property."""
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    code = getattr(inspect.unwrap(value), "__code__", None) if callable(value) else None
    return code if isinstance(code, types.CodeType) else None


def _words(code: types.CodeType) -> Iterator[str]:
    """Yield names of attributes, and strings, which may be keys; also of nested functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _words(constant)


def _seen(
    held: dict[Any, Any], key: Any, called: str, names: set[str], depth: int
) -> Iterator[Seen]:
    """Yield a value, and the values inside it that code with these names may read.

    Args:
        depth: how deeply nested objects are looked into.
    """
    value = held[key]
    if _is_plain(value):
        copy = list(value) if isinstance(value, list) else value
        yield Seen(held, key, copy, called, is_plain=True)
        return
    yield Seen(held, key, value, called)
    if not depth or isinstance(value, Tensor | nn.Module | type) or callable(value):
        return
    is_dict = isinstance(value, dict)
    inner = value if is_dict else getattr(value, "__dict__", {})
    for name in [name for name in inner if is_dict or name in names]:
        inner_called = f"{called}[{name!r}]" if is_dict else f"{called}.{name}"
        yield from _seen(inner, name, inner_called, names, depth - 1)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _shown(value: Any) -> str:
    if value is _GONE:
        return "gone"
    return repr(value) if _is_plain(value) else f"another {type(value).__name__}"


# -- what it sets ------------------------------------------------------------------------------


def set_by_forward(model: nn.Module, args: Sequence[Tensor]) -> list[tuple[nn.Module, str]]:
    """Return the attributes that each call of the model sets, with the modules that have them.

    Raises:
        ConfigError: a call reads what the call before it has set.
    """

    def call() -> None:
        with untouched(model), torch.no_grad():
            model(*(x.clone() for x in args))

    call()  # some attributes are set by the first call alone
    before = [
        (module, name, value, _snapshot(value))
        for module in model.modules()
        if not type(module).__module__.startswith(("torch.nn.", "torch.ao."))
        for name, value in vars(module).items()
        if name not in _OF_TORCH
    ]
    call()
    changed = [
        (module, name)
        for module, name, value, snapshot in before
        if _has_changed(value, snapshot, vars(module).get(name, _GONE))
    ]
    for module, name in changed:
        vars(module)[name] = SetByForward(f"{type(module).__name__}.{name}")
    try:
        call() if changed else None
    except _Used as error:
        raise ConfigError(
            f"{error.called} is changed by each forward pass and read by the next: a split model "
            "computes micro-batches, and no worker computes all of it; use --split data"
        ) from None
    return changed


def _snapshot(value: Any) -> Any:
    """Return what tells later whether a value was changed in place."""
    if isinstance(value, Tensor):
        return value._version
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, _CONTAINERS) else None


def _has_changed(value: Any, old: Any, current: Any) -> bool:
    """Whether an attribute is another value now, or its value was changed in place.

    Args:
        old: the snapshot of the value.
        current: the attribute now.
    """
    if current is not value:
        return not (_is_plain(value) and type(current) is type(value) and current == value)
    new = _snapshot(value)
    if not isinstance(old, list):
        return bool(new != old)
    return len(new) != len(old) or any(a is not b for a, b in zip(new, old, strict=True))


class _Used(ConfigError):
    """An attribute was used that a forward pass would have set."""

    def __init__(self, called: str) -> None:
        self.called = called
        super().__init__(
            f"{called} is set by forward(), which a split model does not run as a whole: return "
            "it from forward() with the output, or use --split data or shard"
        )


class SetByForward:
    """Stands for an attribute that a forward pass would have set: every use of it raises."""

    def __init__(self, called: str) -> None:
        self._called = called

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        raise _Used(next(leaf._called for leaf in leaves if isinstance(leaf, cls)))

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
