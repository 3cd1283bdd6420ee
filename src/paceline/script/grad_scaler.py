"""The user's GradScaler in a run: it follows the scale of the version that its member holds.

    scaler.step(optimizer)    pushes; the gradients are unscaled with the scale of their own loss
                              read: work.inv_scale, work.found_inf
    scaler.update()           the scaler takes over the scale that came with the version
    a superseded step         follow: the scale of the version that was pulled instead

Its scale and its overflow are part of the push: one scale for all workers, which is data of a
version; under local-sgd, and with one worker, it is the member's own.

A scaler that has unscaled an optimizer's gradients refuses to do it again before ``step``; a
superseded step never reaches it, so its stage must be reset. Above 300 lines, since all that a
script may do with its scaler is seen together. This module must not know why a step was left, nor
who brings a scale forward.
"""

import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..errors import ConfigError
from ..exchange.base import Exchange, Work
from ..exchange.through_store import StoreExchange
from ..store.joint import parameters_of, parts_of
from ..store.versions import NO_OVERFLOW, LossScale


def _nothing() -> None:
    return None


def _no_scale() -> None:
    return None


class _Used(threading.local):
    """The scalers that have scaled a loss in this process (inline: in this member)."""

    def __init__(self) -> None:
        self.scalers: weakref.WeakSet[GradScaler] = weakref.WeakSet()
        self.first: Callable[[], LossScale | None] = _no_scale
        """Returns the scale that the first scaler begins with; None: its own."""
        self.around: tuple[Callable[[], None], Callable[[], None]] = (_nothing, _nothing)
        self.is_held: Callable[[], bool] | None = None


_used = _Used()
_scale: Callable[[GradScaler, Any], Any] = GradScaler.scale
_unscale: Callable[..., Any] = GradScaler._unscale_grads_
_update: Callable[..., None] = GradScaler.update


def tell_of_unscaling(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call these around every change of gradients by a scaler of this member."""
    _used.around = before, after


def hold_updates(is_held: Callable[[], bool]) -> None:
    """Defer a scaler's ``update()`` while the last step of this member is set aside."""
    _used.is_held = is_held
    GradScaler.update = _held_update  # type: ignore[method-assign]  # scripts call it, and workers must agree first


def leave_scalers() -> None:
    """Make the scalers of this member plain ones again, and stop watching them."""
    for scaler in _used.scalers:
        for name in ("update", "load_state_dict"):
            vars(scaler).pop(name, None)
    _used.scalers, _used.first = weakref.WeakSet(), _no_scale
    _used.around, _used.is_held = (_nothing, _nothing), None


def _held_update(self: GradScaler, *arguments: Any, **options: Any) -> None:
    if _used.is_held is not None and _used.is_held():
        self._per_optimizer_states.clear()
        return
    _update(self, *arguments, **options)


def _watched_unscale(self: GradScaler, *arguments: Any, **options: Any) -> Any:
    before, after = _used.around
    before()
    found = _unscale(self, *arguments, **options)
    after()
    return found


def _watched_scale(self: GradScaler, outputs: Any) -> Any:
    if self.is_enabled():  # a disabled one has no state
        _used.scalers.add(self)
        first, _used.first = _used.first(), _no_scale
        if first is not None:
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


class Scaling:
    """The scaler of one member, found when it first steps.

    Args:
        is_local: the user's optimizer steps here: one worker in its own process, or local-sgd.
    """

    def __init__(
        self, exchange: Exchange, model: nn.Module, optimizer: Optimizer, *, is_local: bool
    ) -> None:
        self._exchange = exchange
        self._model = model
        self._optimizers = parts_of(optimizer)
        self._is_local = is_local
        self._scaler: GradScaler | None = None
        _used.is_held = None
        GradScaler.scale = _watched_scale  # type: ignore[method-assign]  # only watched: it calls what was there
        GradScaler._unscale_grads_ = _watched_unscale  # type: ignore[method-assign]  # the same

    def read(self, work: Work, optimizer: Optimizer) -> None:
        """Copy what a GradScaler left on the optimizer, which steps now, into ``work``.

        Raises:
            ConfigError: a scaler steps several optimizers, where all workers have one scale.
        """
        found = getattr(optimizer, "found_inf", None)
        scale = getattr(optimizer, "grad_scale", None)
        if found is not None:
            if len(self._optimizers) > 1 and self._sharing is not None:
                raise ConfigError(
                    "a GradScaler steps one of several optimizers, and its scale would grow with "
                    "each of their steps: several workers support that under local-sgd only; use "
                    "bf16, pace.autocast(torch.bfloat16), which needs no scaler"
                )
            work.found_inf = bool(found)
            self._share(optimizer)
        if scale is not None:
            work.inv_scale = 1.0 / float(scale)
            work.loss *= work.inv_scale
        if self._is_local:
            self._unscale(work.inv_scale, optimizer)

    def let_overflow(self, optimizer: Optimizer) -> None:
        """Tell the scaler that a part of the optimizer's gradient has overflowed."""
        for scaler in _used.scalers:
            state = scaler._per_optimizer_states.get(id(optimizer))
            for found in () if state is None else state["found_inf_per_device"].values():
                found.fill_(1.0)
        if isinstance(found := getattr(optimizer, "found_inf", None), Tensor):
            optimizer.found_inf = torch.ones_like(found)  # type: ignore[attr-defined]  # it asks

    def remember(self) -> dict[str, Any] | None:
        """The scale that the next step begins with; None: there is no scaler."""
        scale = self._exchange.scale
        if scale is None and (scaler := _only_scaler()) is not None:
            scale = _scale_after_update(scaler)
        return None if scale is None else asdict(scale)

    def go_on(self, saved: dict[str, Any] | None) -> None:
        """Restore what ``remember`` returned."""
        if saved is None:
            return
        scale = LossScale(**saved)
        _used.first = lambda: scale  # the scaler that is used next begins with it
        if (exchange := self._sharing) is not None:
            exchange.first_scale = scale

    def join(self) -> None:
        """Begin with the scale of the run, which this member joins."""
        if self._sharing is not None:
            _used.first = lambda: self._exchange.scale

    def follow(self) -> None:
        """Take over the scale of the current version."""
        scale = self._exchange.scale
        if scale is None:
            return
        if self._scaler is None and (scaler := _only_scaler()) is not None:
            self._adopt(scaler)
        if self._scaler is not None:
            _follow(self._scaler, scale)

    def reset(self) -> None:
        """Reset the stage of every live scaler, after a step that was left."""
        scalers = list(_used.scalers) if _used.scalers else ()
        for optimizer in self._optimizers:
            for name in ("grad_scale", "found_inf"):  # a scaler multiplies with an old value
                optimizer.__dict__.pop(name, None)
            for scaler in scalers:
                scaler._per_optimizer_states.pop(id(optimizer), None)

    def _unscale(self, inv_scale: float, optimizer: Optimizer) -> None:
        """Unscale for a local step: torch's own optimizers refuse what a scaler left on them."""
        for name in ("grad_scale", "found_inf"):
            if name in optimizer.__dict__:
                setattr(optimizer, name, None)
        if inv_scale != 1.0:
            for parameter in parameters_of(optimizer):
                if parameter.grad is not None:
                    parameter.grad.mul_(inv_scale)

    def _share(self, optimizer: Optimizer) -> None:
        """Let the scaler that steps now follow the run's scale."""
        if (exchange := self._sharing) is None:
            return
        states = ((scaler, scaler._per_optimizer_states) for scaler in _used.scalers)
        stepping = [scaler for scaler, optimizers in states if id(optimizer) in optimizers]
        if stepping and stepping[0] is not self._scaler:
            exchange.offer_scale(_read_scaler(stepping[0]))
            self._adopt(stepping[0])

    @property
    def _sharing(self) -> StoreExchange | None:
        """The exchange, where all workers share one scale; else None."""
        exchange = self._exchange.shared
        is_shared = exchange is not None and exchange.num_workers > 1 and not self._is_local
        return exchange if is_shared else None

    def _adopt(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        _share_scaler(scaler, lambda: self._exchange.scale)


def _only_scaler() -> GradScaler | None:
    """The only scaler of this member that has scaled a loss; it may not have stepped yet."""
    used = [scaler for scaler in _used.scalers if scaler.is_enabled()]
    return used[0] if len(used) == 1 else None


def _read_scaler(scaler: GradScaler) -> LossScale:
    """Its current scale."""
    return LossScale(
        value=scaler.get_scale(),
        growth_tracker=scaler._get_growth_tracker(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
    )


def _scale_after_update(scaler: GradScaler) -> LossScale:
    """Its scale after ``scaler.update()``, if that call is still to come."""
    scale = _read_scaler(scaler)
    states = scaler._per_optimizer_states.values()
    if not states:
        return scale
    flags = (float(flag) for state in states for flag in state["found_inf_per_device"].values())
    overflow = 1 if any(flags) else NO_OVERFLOW
    return scale.after(1, is_update=True, overflow_version=overflow)


def _share_scaler(scaler: GradScaler, read: Callable[[], LossScale | None]) -> None:
    """Let the scaler use the run's scale: ``update`` takes over what ``read`` returns."""

    def update(_: GradScaler, new_scale: Any = None) -> None:
        if new_scale is not None:
            raise ConfigError(
                f"scaler.update({float(new_scale):g}) would set the scale of one worker; all "
                "workers have one scale: give it to GradScaler(init_scale=...), then call "
                "scaler.update() without a number"
            )
        _follow(scaler, read())
        scaler._per_optimizer_states.clear()

    def load_state_dict(_: GradScaler, state: dict[str, Any]) -> None:
        raise ConfigError(
            "load the scaler's state before the first step: from then on the run keeps it"
        )

    scaler.update = types.MethodType(update, scaler)  # type: ignore[method-assign]  # of this scaler alone
    scaler.load_state_dict = types.MethodType(  # type: ignore[method-assign]  # of this scaler alone
        load_state_dict, scaler
    )


def _follow(scaler: GradScaler, scale: LossScale | None) -> None:
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
