"""What ``prepare`` finds among a script's objects, and what it replaces on them.

    optimizer.step             pushes, waits for the release and pulls
    optimizer.state_dict       the whole state at one version, in any member
    model.state_dict           compact clones: what training changes is nobody else's
    loss.backward              the loss is noted for the report
    next() of other loaders    a second one inside the loop is noted

The objects stay the user's. This module must not know how an exchange carries anything.
"""

import copy
import threading
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..errors import ConfigError
from ..store.joint import parameters_of

State = dict[Tensor, dict[str, Any]]


class Sorted(NamedTuple):
    """What was given to ``prepare``, by kind."""

    models: list[nn.Module]
    optimizers: list[Optimizer]
    loader: DataLoader[Any] | None


def sort_out(objects: tuple[Any, ...]) -> Sorted:
    """The models, optimizers and the loader among what was given to ``prepare``; a loop may have
    no loader.

    Raises:
        ConfigError: a kind is missing, there is one too many, or two optimizers have a parameter.
    """
    models = [one for one in objects if isinstance(one, nn.Module)]
    optimizers = [one for one in objects if isinstance(one, Optimizer)]
    loaders = [one for one in objects if isinstance(one, DataLoader)]
    for label, mine in (("model", models), ("optimizer", optimizers)):
        if not mine:
            raise ConfigError(f"prepare() needs a {label}, got none")
        if len({*map(id, mine)}) < len(mine):
            raise ConfigError(f"prepare() was given one {label} twice; give each once")
    if len(loaders) > 1:
        names = ", ".join(type(one).__name__ for one in loaders)
        raise ConfigError(
            f"prepare() needs one loader, got {names}; loaders for evaluation stay as they are: "
            "pace.evaluate(fn, loader)"
        )
    known = (nn.Module, Optimizer, DataLoader, LRScheduler, ReduceLROnPlateau)
    for one in objects:
        if not isinstance(one, known):
            raise ConfigError(
                f"prepare() takes models, optimizers, a DataLoader and schedulers, "
                f"got {type(one).__name__}"
            )
    _refuse_shared(models, optimizers)
    return Sorted(models, optimizers, loaders[0] if loaders else None)


def _refuse_shared(models: list[nn.Module], optimizers: list[Optimizer]) -> None:
    """Raise ConfigError where two optimizers step one parameter."""
    owners: dict[nn.Parameter, int] = {}
    for number, optimizer in enumerate(optimizers):
        for parameter in parameters_of(optimizer):
            if owners.setdefault(parameter, number) == number:
                continue
            names = {one: name for model in models for name, one in model.named_parameters()}
            raise ConfigError(
                f"two optimizers step parameter {names.get(parameter, '?')!r}; give it to one of "
                "them, and what it is to be stepped by twice to one optimizer as a group"
            )


def replace_step(optimizer: Optimizer, function: Callable[..., Any]) -> None:
    """Put a bound method on one optimizer; LR schedulers look for one."""

    def method(_: object, *arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    method._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = types.MethodType(method, optimizer)  # type: ignore[method-assign]
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


class _Depth(threading.local):
    """How many ``state_dict`` calls of modules are inside each other."""

    now = 0


_depth = _Depth()
_prepared: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Modules of prepared models. No hook is put on them: a copy or a pickle would take it along."""
_state_dict: Callable[..., dict[str, Any]] = nn.Module.state_dict


def clone_state(model: nn.Module) -> None:
    """``state_dict()`` of the model and of its parts gives compact clones from now on."""
    for module in model.modules():
        _prepared.add(module)
    nn.Module.state_dict = _cloned_state_dict  # type: ignore[method-assign, assignment]


def _cloned_state_dict(self: nn.Module, *arguments: Any, **options: Any) -> dict[str, Any]:
    """Cloned once, where the script has called it."""
    _depth.now += 1
    try:
        state = _state_dict(self, *arguments, **options)
    finally:
        _depth.now -= 1
    if not _depth.now and self in _prepared:
        for name, value in state.items():
            if isinstance(value, Tensor) and not value.requires_grad:
                state[name] = value.detach().clone()
    return state


_HELD = (
    "optimizer.state is kept by the run for all workers: read it by "
    "optimizer.state_dict()['state'], and load it before the first epoch by "
    "optimizer.load_state_dict(...)"
)


class HeldState(defaultdict[Any, Any]):
    """In the place of ``optimizer.state``: whoever looks into it is told where the state is.

    Copies and pickles hold the true state.
    """

    def __init__(self, read: Callable[[], State]) -> None:
        super().__init__(dict)
        self.read = read

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ConfigError(_HELD)

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = _refuse
    get = items = keys = values = pop = popitem = clear = update = setdefault = copy = _refuse
    __copy__ = _refuse

    def __bool__(self) -> bool:
        raise ConfigError(_HELD)

    def __repr__(self) -> str:
        return "the state that the run keeps: optimizer.state_dict()['state']"

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self.read()))

    def __reduce_ex__(self, _: Any) -> Any:
        return self.__reduce__()

    def __deepcopy__(self, memo: dict[int, Any]) -> "defaultdict[Any, Any]":
        return defaultdict(dict, copy.deepcopy(dict(self.read()), memo))


class SharedState:
    """The state of the user's optimizer, where the store keeps it.

    ``optimizer.state_dict()`` in any member gives the whole state at one version.

    Args:
        read: the state of the newest version, of all optimizers' parameters.
        has_begun: whether the first epoch was opened: from then on nothing can be loaded.
    """

    def __init__(
        self, optimizer: Optimizer, read: Callable[[], State], has_begun: Callable[[], bool]
    ) -> None:
        self._optimizer = optimizer
        self._read = read
        self._has_begun = has_begun
        self._state_dict = optimizer.state_dict
        self._load = optimizer.load_state_dict
        self._loaded: State | None = None
        self._num_groups = len(optimizer.param_groups)
        self._held = HeldState(self._newest)
        optimizer.state = self._held
        optimizer.state_dict = self._whole_state  # type: ignore[method-assign]
        optimizer.load_state_dict = self._note_loaded  # type: ignore[method-assign, assignment]
        optimizer.add_param_group = _refuse_group  # type: ignore[method-assign]

    def take_loaded(self) -> State | None:
        """What was loaded since ``prepare``; None: nothing."""
        loaded, self._loaded = self._loaded, None
        return loaded

    def check(self) -> None:
        """Raise ConfigError where the script has put another state or more groups there."""
        if self._optimizer.state is not self._held:
            raise ConfigError(
                "optimizer.state was replaced after prepare(), and the run keeps the true one: to "
                "begin with a new state, build a new optimizer in a run of its own"
            )
        if len(self._optimizer.param_groups) != self._num_groups:
            _refuse_group()

    def _newest(self) -> State:
        if self._loaded is not None:
            return self._loaded
        state = self._read()
        return {one: state[one] for one in parameters_of(self._optimizer) if one in state}

    def _whole_state(self) -> dict[str, Any]:
        self._optimizer.state = defaultdict(dict, self._newest())
        try:
            return self._state_dict()
        finally:
            self._optimizer.state = self._held

    def _note_loaded(self, state: dict[str, Any]) -> None:
        if self._has_begun():
            raise ConfigError(
                "load the optimizer's state before the first epoch: the run holds it now"
            )
        self._optimizer.state = defaultdict(dict)
        try:
            self._load(state)
            self._loaded = dict(self._optimizer.state)
        finally:
            self._optimizer.state = self._held


class SharedStates:
    """The same of each of a script's optimizers; ``read`` gives the state of all of them."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        read: Callable[[], State],
        has_begun: Callable[[], bool],
    ) -> None:
        self._each = [SharedState(one, read, has_begun) for one in optimizers]

    def take_loaded(self) -> State | None:
        """What was loaded since ``prepare``, by parameter; None: nothing."""
        loaded = [one for state in self._each if (one := state.take_loaded()) is not None]
        return {name: value for one in loaded for name, value in one.items()} if loaded else None

    def check(self) -> None:
        """See ``SharedState.check``."""
        for one in self._each:
            one.check()


def _refuse_group(*_: Any, **__: Any) -> None:
    raise ConfigError(
        "optimizer.add_param_group() cannot be carried after prepare(): give the optimizer all "
        "parameters before prepare(), torch.optim.SGD([{'params': head.parameters()}, {'params': "
        "body.parameters()}]), freeze with body.requires_grad_(False), and thaw later with "
        "body.requires_grad_(True)"
    )


class _Listener(threading.local):
    """Who hears of this: a process, or a member of the inline engine."""

    hear: Callable[[Tensor], None] | None = None
    hear_batch: Callable[[Any], None] | None = None
    before: Callable[[], None] | None = None
    after: Callable[[], None] | None = None


_listener = _Listener()
_backward: Callable[..., None] = Tensor.backward
_next: Callable[[Any], Any] = _BaseDataLoaderIter.__next__


def note_losses(hear: Callable[[Tensor], None]) -> None:
    """Tell ``hear`` of the loss of every ``loss.backward()`` in this member, with its graph."""
    _listener.hear, _listener.before, _listener.after = hear, None, None
    Tensor.backward = _noted_backward  # type: ignore[method-assign]


def note_backward(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call these around every ``backward()`` in this member whose losses are noted."""
    _listener.before, _listener.after = before, after


def _noted_backward(self: Tensor, *arguments: Any, **options: Any) -> None:
    if _listener.hear is not None and self.numel() == 1:
        _listener.hear(self)
    if _listener.before is not None:
        _listener.before()
    _backward(self, *arguments, **options)
    if _listener.after is not None:
        _listener.after()


def note_batches(hear: Callable[[Any], None]) -> None:
    """Tell ``hear`` of the data set of every batch that a DataLoader makes in this member."""
    _listener.hear_batch = hear
    _BaseDataLoaderIter.__next__ = _noted_next  # type: ignore[method-assign]


def _noted_next(self: Any) -> Any:
    batch = _next(self)
    if _listener.hear_batch is not None:
        _listener.hear_batch(self._dataset)
    return batch
