"""The user's GradScaler in a run: it follows the scale of the version that its member holds.

    scaler.step(optimizer)    pushes; the gradients are unscaled with the scale of their own loss
    scaler.update()           the scaler takes over the scale that came with the version

A scaler that has unscaled an optimizer's gradients refuses to do it again before ``step``; a
superseded step never reaches it, so its stage must begin again. This module must not know why a
step was left, nor who brings a scale forward.
"""

import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch.amp import GradScaler
from torch.optim import Optimizer

from ..errors import ConfigError
from ..store.scale import LossScale

_found: "weakref.WeakSet[GradScaler]" = weakref.WeakSet()
_searched: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


def reset_scalers(optimizer: Optimizer) -> None:
    """Put the stage of every live GradScaler for ``optimizer`` back to the beginning."""
    for name in ("grad_scale", "found_inf"):  # a scaler multiplies with what it finds there
        optimizer.__dict__.pop(name, None)
    if optimizer not in _searched:
        _searched.add(optimizer)
        _search()
    for scaler in _found:
        scaler._per_optimizer_states.pop(id(optimizer), None)


def scaler_at(optimizer: Optimizer) -> GradScaler | None:
    """The scaler that is calling ``optimizer.step`` now."""
    for has_searched in (False, True):
        for scaler in _found:
            if id(optimizer) in scaler._per_optimizer_states:
                return scaler
        if not has_searched:
            _search()
    return None


def only_scaler() -> GradScaler | None:
    """The one scaler of this process that has scaled a loss; it may not have stepped yet."""
    used = [one for one in _found if one.is_enabled() and one._scale is not None]
    return used[0] if len(used) == 1 else None


def _search() -> None:
    for one in gc.get_objects():
        if issubclass(type(one), GradScaler):
            _found.add(one)


def read_scaler(scaler: GradScaler) -> LossScale:
    """Its scale as it stands."""
    return LossScale(
        value=scaler.get_scale(),
        growth_tracker=scaler._get_growth_tracker(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
    )


def share_scaler(scaler: GradScaler, read: Callable[[], LossScale | None]) -> None:
    """From now on the scale is the run's: ``update`` takes over what ``read`` gives."""

    def update(_: GradScaler, new_scale: Any = None) -> None:
        if new_scale is not None:
            raise ConfigError(
                f"scaler.update({float(new_scale):g}) would set the scale of one worker; all "
                "workers have one scale: give it to GradScaler(init_scale=...), then call "
                "scaler.update() without a number"
            )
        follow(scaler, read())
        scaler._per_optimizer_states.clear()

    def load_state_dict(_: GradScaler, state: dict[str, Any]) -> None:
        raise ConfigError("load the scaler's state before the first step: the run holds it now")

    scaler.update = types.MethodType(update, scaler)  # type: ignore[method-assign]
    scaler.load_state_dict = types.MethodType(  # type: ignore[method-assign]
        load_state_dict, scaler
    )


def follow(scaler: GradScaler, scale: LossScale | None) -> None:
    """Make ``scale`` the scaler's own."""
    if scale is None:
        return
    assert scaler._scale is not None
    assert scaler._growth_tracker is not None
    rule = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    if rule != scale.rule:
        raise ConfigError(
            "this worker's GradScaler has (growth_factor, backoff_factor, growth_interval) = "
            f"{rule}, the run began with {scale.rule}; all workers have one scale: give the same "
            "numbers to GradScaler(...) in all of them and do not change them"
        )
    scaler._scale.fill_(scale.value)
    scaler._growth_tracker.fill_(scale.growth_tracker)
