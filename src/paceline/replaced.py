"""What ``prepare`` finds among a script's objects, and what it replaces on them.

    optimizer.step             pushes, waits for the release and pulls
    optimizer.state_dict       the whole state at one version, in any member
    model.state_dict           compact clones: a view would save the whole shared block
    loss.backward              the loss is noted for the report

The objects stay the user's. This module must not know how a session carries anything.
"""

import threading
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from .errors import ConfigError

State = dict[nn.Parameter, dict[str, Any]]


def sort_out(objects: tuple[Any, ...]) -> tuple[nn.Module, Optimizer, DataLoader[Any]]:
    """The one model, optimizer and loader among what was given to ``prepare``."""
    kinds = {"model": nn.Module, "optimizer": Optimizer, "loader": DataLoader}
    found: list[Any] = []
    for label, kind in kinds.items():
        mine = [one for one in objects if isinstance(one, kind)]
        if len(mine) != 1:
            hint = {
                "loader": "; loaders for evaluation stay as they are: pace.evaluate(fn, loader)",
                "optimizer": "; a second optimizer cannot be carried: use parameter groups",
            }.get(label, "")
            names = ", ".join(type(one).__name__ for one in mine) or "none"
            raise ConfigError(f"prepare() needs one {label}, got {names}{hint}")
        found.append(mine[0])
    known = (nn.Module, Optimizer, DataLoader, LRScheduler, ReduceLROnPlateau)
    for one in objects:
        if not isinstance(one, known):
            raise ConfigError(
                f"prepare() takes a model, an optimizer, a DataLoader and schedulers, "
                f"got {type(one).__name__}"
            )
    return found[0], found[1], found[2]


def replace_step(optimizer: Optimizer, function: Callable[..., Any]) -> None:
    """Put a bound method on one optimizer; LR schedulers look for one."""

    def method(_: object, *arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    method._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = types.MethodType(method, optimizer)  # type: ignore[method-assign]
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


def clone_state(model: nn.Module) -> None:
    """``model.state_dict()`` gives compact clones from now on."""
    register: Any = model.register_state_dict_post_hook
    register(_clone)


def _clone(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    for name, value in state.items():
        if isinstance(value, Tensor):
            state[name] = value.detach().clone()


def share_state(optimizer: Optimizer, read: Callable[[], State]) -> None:
    """``optimizer.state_dict()`` in any member gives the whole state at one version."""
    original = optimizer.state_dict

    def state_dict() -> dict[str, Any]:
        for parameter, kept in read().items():
            optimizer.state[parameter] = kept
        try:
            return original()
        finally:
            optimizer.state.clear()

    def load_state_dict(_: dict[str, Any]) -> None:
        raise ConfigError("load the optimizer's state before prepare(): the run holds it now")

    optimizer.state_dict = state_dict  # type: ignore[method-assign]
    optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign, assignment]


class _Listener(threading.local):
    """Who hears of these backward passes: of a process, or of a member of the inline engine."""

    hear: Callable[[Tensor], None] | None = None
    before: Callable[[], None] | None = None
    after: Callable[[], None] | None = None


_listener = _Listener()
_backward: Callable[..., None] = Tensor.backward


def note_losses(hear: Callable[[Tensor], None]) -> None:
    """Tell ``hear`` of the loss of every ``loss.backward()`` in this member."""
    _listener.hear, _listener.before, _listener.after = hear, None, None
    Tensor.backward = _noted_backward  # type: ignore[method-assign]


def note_backward(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call these around every ``backward()`` in this member whose losses are noted."""
    _listener.before, _listener.after = before, after


def _noted_backward(self: Tensor, *arguments: Any, **options: Any) -> None:
    if _listener.hear is not None and self.numel() == 1:
        _listener.hear(self.detach())
    if _listener.before is not None:
        _listener.before()
    _backward(self, *arguments, **options)
    if _listener.after is not None:
        _listener.after()
