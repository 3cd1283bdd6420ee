"""Sorts a script's objects for ``prepare``, and replaces methods on them.

    optimizer.step             pushes, waits for the release and pulls
    optimizer.state_dict       the whole state at one version, in any member
    model.state_dict           compact clones, which training does not change
    loss.backward              the loss is noted for the report
    next() of other loaders    a second one inside the loop is noted

The objects stay the user's: at the end of a trial the replacements are removed (`Originals`),
and losses and batches are no longer reported (`unlisten`). What is wrapped in torch itself
(``Module.state_dict``, ``Tensor.backward``, ``torch.autograd.backward``, the loader's iterator; the
scaler's methods in grad_scaler.py, hooks in unprepared.py) stays wrapped as long as the process
lives, since others may have wrapped it again: it then does only what torch does.
This module must not know how an exchange carries anything.
"""

import threading
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..errors import ConfigError
from ..replica.held_state import HeldState
from ..store.joint import parameters_of
from .given import GivenStates

_OF_ITEMS = (
    "; for items of which each is a step's: loader = DataLoader(items, batch_size=1, collate_fn="
    'lambda items: items[0]), and batch="per-worker" in prepare()'
)


class Sorted(NamedTuple):
    """What was given to ``prepare``, by kind."""

    models: list[nn.Module]
    optimizers: list[Optimizer]
    loader: DataLoader[Any] | None


def sort_out(objects: tuple[Any, ...]) -> Sorted:
    """The models, the optimizers and the loader, if there is one, among the objects.

    Raises:
        ConfigError: a kind is missing, there is one too many, or two optimizers have a parameter.
    """
    models = [item for item in objects if isinstance(item, nn.Module)]
    optimizers = [item for item in objects if isinstance(item, Optimizer)]
    loaders = [item for item in objects if isinstance(item, DataLoader)]
    if loaders and len(loaders) == len(objects):
        raise ConfigError(
            "prepare() was first given only a loader; start with model, optimizer, loader "
            "= pace.prepare(model, optimizer, loader), then loader_b = pace.prepare(loader_b)"
        )
    for label, group in (("model", models), ("optimizer", optimizers)):
        if not group:
            raise ConfigError(f"prepare() needs a {label}, got none")
        if len({*map(id, group)}) < len(group):
            raise ConfigError(f"prepare() was given one {label} twice; give each once")
    if len(loaders) > 1:
        names = ", ".join(type(loader).__name__ for loader in loaders)
        raise ConfigError(
            f"prepare() needs one loader, got {names}; prepare a second one for use in the loop "
            "afterwards: loader_b = pace.prepare(loader_b); loaders for evaluation stay as "
            "they are: pace.evaluate(fn, loader)"
        )
    known = (nn.Module, Optimizer, DataLoader, LRScheduler, ReduceLROnPlateau)
    for item in objects:
        if not isinstance(item, known):
            remedy = "" if not isinstance(item, list | tuple) else _OF_ITEMS
            raise ConfigError(
                f"prepare() takes models, optimizers, a DataLoader or a range, and schedulers, "
                f"got {type(item).__name__}{remedy}"
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
                f"two optimizers step parameter {names.get(parameter, '?')!r}; give it to only one "
                "of them"
            )


def replace_step(optimizer: Optimizer, function: Callable[..., Any]) -> None:
    """Replace ``step`` on one optimizer by a bound method, as LR schedulers expect."""

    def method(_: object, *arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    method._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # torch asks
    optimizer.step = types.MethodType(method, optimizer)  # type: ignore[method-assign]  # of this optimizer alone, as schedulers do
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # torch asks


_ABSENT = object()
_PUT_BACK: tuple[tuple[type, tuple[str, ...]], ...] = (
    (nn.Module, ("_compiled_call_impl", "forward")),
    (
        Optimizer,
        (
            "step", "zero_grad", "state_dict", "load_state_dict", "add_param_group",
            "_step_supports_amp_scaling",
        ),
    ),
    (object, ("step", "state_dict", "load_state_dict")),
)  # fmt: skip
"""Attributes set on an object when it is prepared or compiled, by kind; schedulers last."""


class Originals:
    """The attributes of models, optimizers and schedulers before ``prepare``."""

    def __init__(self, objects: Sequence[Any]) -> None:
        self._kept = [
            (one, {name: vars(one).get(name, _ABSENT) for name in names})
            for one in objects
            for names in [next(names for kind, names in _PUT_BACK if isinstance(one, kind))]
        ]

    def put_back(self) -> None:
        """Restore them; an optimizer gets the state that the run has kept for it."""
        for one, kept in self._kept:
            if isinstance(held := vars(one).get("state"), HeldState):
                one.state = defaultdict(dict, held.read())
            for name, value in kept.items():
                if value is _ABSENT:
                    vars(one).pop(name, None)
                else:
                    vars(one)[name] = value


class _Depth(threading.local):
    """How many ``state_dict`` calls of modules are inside each other."""

    now = 0


_depth = _Depth()
_prepared: "weakref.WeakKeyDictionary[nn.Module, GivenStates]" = weakref.WeakKeyDictionary()
"""Modules of prepared models. No hook is put on them: a copy or a pickle would take it along."""
_state_dict: Callable[..., dict[str, Any]] = nn.Module.state_dict


def clone_state(model: nn.Module, given: GivenStates) -> None:
    """Let ``state_dict()`` of the model and its parts return compact clones from now on.

    Args:
        given: registers the clones.
    """
    for module in model.modules():
        _prepared[module] = given
    nn.Module.state_dict = _cloned_state_dict  # type: ignore[method-assign, assignment]  # scripts call it while others write


def leave_state(model: nn.Module) -> None:
    """Let ``state_dict()`` return what torch returns."""
    for module in model.modules():
        _prepared.pop(module, None)


def _cloned_state_dict(self: nn.Module, *arguments: Any, **options: Any) -> dict[str, Any]:
    """Clones once, in the call that the script has made."""
    _depth.now += 1
    try:
        state = _state_dict(self, *arguments, **options)
    finally:
        _depth.now -= 1
    if not _depth.now and (given := _prepared.get(self)) is not None:
        clones: dict[str, Any] = {
            name: value.detach().clone()
            for name, value in state.items()
            if isinstance(value, Tensor) and not value.requires_grad
        }
        state.update(clones)
        if not arguments:
            given.give(self, clones, options.get("prefix", ""))
    return state


class _Listener(threading.local):
    """The listeners of a process, or of a member of the inline engine."""

    hear: Callable[[Tensor], None] | None = None
    hear_batch: Callable[[Any], None] | None = None
    before: Callable[[], None] | None = None
    after: Callable[[], None] | None = None
    is_inside = False


_listener = _Listener()
_backward: Callable[..., None] = Tensor.backward
_backward_of: Callable[..., None] = torch.autograd.backward
_next: Callable[[Any], Any] = _BaseDataLoaderIter.__next__


def note_losses(hear: Callable[[Tensor], None]) -> None:
    """Pass the loss of every ``backward()`` in this member to ``hear``, with its graph."""
    _listener.hear, _listener.before, _listener.after = hear, None, None
    Tensor.backward = _noted_backward  # type: ignore[method-assign]  # only noted: it calls what was there
    torch.autograd.backward = _noted_backward_of


def note_backward(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call these around every ``backward()`` in this member whose losses are noted."""
    _listener.before, _listener.after = before, after


def _noted_backward(self: Tensor, *arguments: Any, **options: Any) -> None:
    _note([self], partial(_backward, self, *arguments, **options))


def _noted_backward_of(tensors: Any, grad_tensors: Any = None, *rest: Any, **options: Any) -> None:
    """``torch.autograd.backward(loss)``; with gradients, for parts of a model, it is no pass."""
    if _listener.is_inside:
        _backward_of(tensors, grad_tensors, *rest, **options)  # a call by torch itself
        return
    if not isinstance(tensors, Tensor | tuple | list):
        tensors = tuple(tensors)  # a generator gives them once
    losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    call = partial(_backward_of, tensors, grad_tensors, *rest, **options)
    if grad_tensors is None and all(isinstance(one, Tensor) for one in losses):
        _note(losses, call)
    else:
        call()  # also for torch's GradientEdge, which is no loss


def _note(losses: Sequence[Tensor], call: Callable[[], None]) -> None:
    if _listener.is_inside:
        call()  # a call by torch itself
        return
    if _listener.hear is not None and losses:
        _listener.hear(sum(losses[1:], losses[0]))
    if _listener.before is not None:
        _listener.before()
    _listener.is_inside = True
    try:
        call()
    finally:
        _listener.is_inside = False
    if _listener.after is not None:
        _listener.after()


def note_batches(hear: Callable[[Any], None]) -> None:
    """Pass the data set of every batch that a DataLoader makes in this member to ``hear``."""
    _listener.hear_batch = hear
    _BaseDataLoaderIter.__next__ = _noted_next  # type: ignore[method-assign]  # the same


def unlisten() -> None:
    """Stop reporting losses and batches in this member."""
    _listener.hear = _listener.before = _listener.after = _listener.hear_batch = None


def _noted_next(self: Any) -> Any:
    batch = _next(self)
    if _listener.hear_batch is not None:
        _listener.hear_batch(self._dataset)
    return batch
