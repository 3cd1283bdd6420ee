"""Mixed precision as a script writes it: ``pace.autocast()``, ``pace.backward(loss)``, or a scaler.

    with pace.autocast():             forward pass and loss in 16 bits
        loss = loss_fn(model(x), y)
    pace.backward(loss)               outside autocast; fp16: the loss is scaled first
    pace.clip_grad_norm_(...)         of gradients that are unscaled
    optimizer.step()                  unscales, skips an update that overflowed; the scale follows

bf16 has the range of fp32, so nothing is scaled. For fp16 the scaler is torch's own and goes the
way of a user's (`Scaling`): its scale and its overflow go with the push, one scale for all workers,
which is data of a version; under local-sgd, and with one worker, it is the member's own.

    scaler.step(optimizer) -> read: work.inv_scale, work.found_inf
    a step that was left   -> follow: the scale of the version that was pulled instead

This module must not know what a scaler keeps inside (``script/grad_scaler.py``) nor how an exchange
carries a push.

Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018; PyTorch documentation,
"Automatic Mixed Precision examples".
"""

import warnings
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..errors import ConfigError
from ..exchange.base import Exchange, Work
from ..store.versions import LossScale
from ..tuning.candidates import DTYPES, autocast
from .grad_scaler import (
    begin_with,
    follow,
    only_scaler,
    read_scaler,
    scale_after_update,
    scaler_at,
    share_scaler,
    watch_scalers,
)


class Amp:
    """Mixed precision of one member.

    Args:
        precision: ``fp32``, ``bf16`` or ``fp16``, chosen by a setting or a trial; None: by the
            script.

    Attributes:
        is_waiting: whether the gradients are those of a scaled loss that nobody stepped with yet.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device, precision: str | None) -> None:
        self._optimizer = optimizer
        self._device = device
        self._chosen = precision
        self._scaler: GradScaler | None = None
        self._dtype = torch.float32
        self._was_used = False
        self.is_waiting = False
        if precision is not None:
            _check(device, precision)

    def autocast(self, dtype: torch.dtype | None) -> torch.autocast:
        """The context of a forward pass; ``dtype`` where the script insists on one."""
        self._was_used = True
        names = {one: name for name, one in DTYPES.items()}
        precision = self._chosen or "bf16"
        if dtype is not None:
            if dtype not in names:
                raise ConfigError(f"autocast takes float16, bfloat16 or float32, got {dtype}")
            precision = names[dtype]
        self._dtype = DTYPES[precision]
        return autocast(self._device, precision)

    def backward(self, loss: Tensor) -> Tensor:
        """Differentiate, outside autocast; returns the loss that was: the scaled one, if it is."""
        if self._dtype is torch.float16:
            if self._scaler is None:
                self._scaler = GradScaler(self._device.type)
            loss = self._scaler.scale(loss)
            self.is_waiting = True
        with torch.autocast(self._device.type, enabled=False):
            loss.backward()  # type: ignore[no-untyped-call]
        return loss

    @property
    def has_scaled(self) -> bool:
        """Whether ``backward`` scales the losses: an overflow is its business, not the script's."""
        return self._scaler is not None

    def unscale(self) -> float:
        """Unscale the gradients now, before they are clipped; the scale that they had."""
        if not self.is_waiting or self._scaler is None:
            return 1.0
        scale = self._scaler.get_scale()
        self._scaler.unscale_(self._optimizer)
        return scale

    def step(self) -> None:
        """``optimizer.step()`` of gradients that are scaled: by way of the scaler."""
        assert self._scaler is not None
        self.is_waiting = False
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def check(self) -> None:
        """Refuse a setting that the script does not follow.

        Raises:
            ConfigError: it computes without ``pace.autocast()``, or in fp16 without a scaler.
        """
        if self._chosen in (None, "fp32"):
            return
        if not self._was_used:
            raise ConfigError(
                f"precision {self._chosen} was asked for, but the script computes without it: put "
                "the forward pass and the loss into `with pace.autocast():`, then call "
                "pace.backward(loss)"
            )
        has_scaler = getattr(self._optimizer, "found_inf", None) is not None
        if self._dtype is torch.float16 and not has_scaler:
            raise ConfigError(
                "in fp16 small gradients vanish unless the loss is scaled: call "
                "pace.backward(loss) in place of loss.backward()"
            )


def _check(device: torch.device, precision: str) -> None:
    """Whether this device can compute in it.

    Raises:
        ConfigError: it cannot.
    """
    is_right = precision != "bf16" or device.type != "cuda" or torch.cuda.is_bf16_supported()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch turns autocast off and warns
        try:
            with autocast(device, precision):
                is_on = torch.is_autocast_enabled(device.type)
        except (RuntimeError, ValueError):
            is_on = False
    if precision != "fp32" and not (is_right and is_on):
        others = "fp32" if precision == "bf16" else "bf16 or fp32"
        raise ConfigError(f"{device} cannot compute in {precision}; use --precision {others}")


class Scaling:
    """The scaler of one member, found when it first steps.

    Args:
        is_local: the user's optimizer steps here, as under local-sgd.
    """

    def __init__(
        self, session: Exchange, model: nn.Module, optimizer: Optimizer, *, is_local: bool
    ) -> None:
        self._session = session
        self._model = model
        self._optimizer = optimizer
        self._is_local = is_local
        self._scaler: GradScaler | None = None
        watch_scalers()

    def read(self, work: Work) -> None:
        """Put what a GradScaler left on the optimizer into ``work``."""
        found = getattr(self._optimizer, "found_inf", None)
        scale = getattr(self._optimizer, "grad_scale", None)
        if found is not None:
            work.found_inf = bool(found)
            self._share()
        if scale is not None:
            work.inv_scale = 1.0 / float(scale)
            work.loss *= work.inv_scale
        if self._is_local or self._session.shared is None:
            self._unscale(work.inv_scale)

    def remember(self) -> dict[str, Any] | None:
        """The scale that the next step begins with; None: nobody scales."""
        scale = self._session.scale
        if scale is None and (scaler := only_scaler()) is not None:
            scale = scale_after_update(scaler)
        return None if scale is None else asdict(scale)

    def go_on(self, saved: dict[str, Any] | None) -> None:
        """Begin with what ``remember`` gave."""
        if saved is None:
            return
        scale = LossScale(**saved)
        begin_with(scale)
        session = self._session.shared
        if session is not None and session.num_workers > 1 and not self._is_local:
            session.first_scale = scale

    def follow(self) -> None:
        """Take over the scale of the version that is held now."""
        scale = self._session.scale
        if scale is None:
            return
        if self._scaler is None and (scaler := only_scaler()) is not None:
            self._adopt(scaler)
        if self._scaler is not None:
            follow(self._scaler, scale)

    def _unscale(self, inv_scale: float) -> None:
        """For a step here: torch's own optimizers would refuse what the scaler left on them."""
        for name in ("grad_scale", "found_inf"):
            if name in self._optimizer.__dict__:
                setattr(self._optimizer, name, None)
        if inv_scale != 1.0:
            for parameter in self._model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(inv_scale)

    def _share(self) -> None:
        """The scaler that steps now follows the run's scale."""
        session = self._session.shared
        if session is None or session.num_workers == 1 or self._is_local:
            return
        scaler = scaler_at(self._optimizer)
        if scaler is not None and scaler is not self._scaler:
            session.offer_scale(read_scaler(scaler))
            self._adopt(scaler)

    def _adopt(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        share_scaler(scaler, lambda: self._session.scale)
