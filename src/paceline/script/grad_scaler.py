"""The user's GradScaler in a run: it follows the scale of the version that its member holds.

    scaler.step(optimizer)    pushes; the gradients are unscaled with the scale of their own loss
    scaler.update()           the scaler takes over the scale that came with the version

A scaler that has unscaled an optimizer's gradients refuses to do it again before ``step``; a
superseded step never reaches it, so its stage must begin again. This module must not know why a
step was left, nor who brings a scale forward.
"""

import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch.amp import GradScaler
from torch.optim import Optimizer

from ..errors import ConfigError
from ..store.versions import NO_OVERFLOW, LossScale


def _nothing() -> None:
    return None


class _Used(threading.local):
    """The scalers that have scaled a loss in this process (inline: in this member)."""

    def __init__(self) -> None:
        self.scalers: weakref.WeakSet[GradScaler] = weakref.WeakSet()
        self.first: LossScale | None = None
        self.around: tuple[Callable[[], None], Callable[[], None]] = (_nothing, _nothing)


_used = _Used()
_scale: Callable[[GradScaler, Any], Any] = GradScaler.scale
_unscale: Callable[..., Any] = GradScaler._unscale_grads_


def watch_scalers() -> None:
    """Know every scaler from now on by its first ``scaler.scale(loss)``."""
    GradScaler.scale = _watched_scale  # type: ignore[method-assign]
    GradScaler._unscale_grads_ = _watched_unscale  # type: ignore[method-assign]


def tell_of_unscaling(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call these around every change of gradients by a scaler of this member."""
    _used.around = before, after


def _watched_unscale(self: GradScaler, *arguments: Any, **options: Any) -> Any:
    before, after = _used.around
    before()
    found = _unscale(self, *arguments, **options)
    after()
    return found


def begin_with(scale: LossScale) -> None:
    """The scaler that is used next begins with this scale: the run goes on."""
    _used.first = scale


def _watched_scale(self: GradScaler, outputs: Any) -> Any:
    if self.is_enabled():  # one that is not keeps nothing
        _used.scalers.add(self)
    if _used.first is not None and self.is_enabled():
        first, _used.first = _used.first, None
        self.load_state_dict(
            {
                "scale": first.value,
                "growth_factor": first.growth_factor,
                "backoff_factor": first.backoff_factor,
                "growth_interval": first.growth_interval,
                "_growth_tracker": first.growth_tracker,
            }
        )
    return _scale(self, outputs)


def reset_scalers(optimizer: Optimizer) -> None:
    """Put the stage of every live GradScaler for ``optimizer`` back to the beginning."""
    for name in ("grad_scale", "found_inf"):  # a scaler multiplies with what it finds there
        optimizer.__dict__.pop(name, None)
    for scaler in _used.scalers:
        scaler._per_optimizer_states.pop(id(optimizer), None)


def scaler_at(optimizer: Optimizer) -> GradScaler | None:
    """The scaler that is calling ``optimizer.step`` now."""
    for scaler in _used.scalers:
        if id(optimizer) in scaler._per_optimizer_states:
            return scaler
    return None


def only_scaler() -> GradScaler | None:
    """The one scaler of this member that has scaled a loss; it may not have stepped yet."""
    used = [one for one in _used.scalers if one.is_enabled()]
    return used[0] if len(used) == 1 else None


def read_scaler(scaler: GradScaler) -> LossScale:
    """Its scale as it stands."""
    return LossScale(
        value=scaler.get_scale(),
        growth_tracker=scaler._get_growth_tracker(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
    )


def scale_after_update(scaler: GradScaler) -> LossScale:
    """Its scale as it will stand after ``scaler.update()``, where that is still to come."""
    scale = read_scaler(scaler)
    states = scaler._per_optimizer_states.values()
    if not states:
        return scale
    found = (float(one) for state in states for one in state["found_inf_per_device"].values())
    overflow = 1 if any(found) else NO_OVERFLOW
    return scale.after(1, is_update=True, overflow_version=overflow)


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
