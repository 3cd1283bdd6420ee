"""Mixed precision as a script writes it: ``pace.autocast()``, ``pace.backward(loss)``, or a scaler.

    with pace.autocast():             forward pass and loss in 16 bits
        loss = loss_fn(model(x), y)
    pace.backward(loss)               outside autocast; fp16: the loss is scaled first
    pace.clip_grad_norm_(...)         of gradients that are unscaled
    optimizer.step()                  unscales, skips an update that overflowed; the scale follows

bf16 has the range of fp32, so nothing is scaled. For fp16 the scaler is torch's own, treated
like a user's (``script/grad_scaler.py``). This module must not know what a scaler keeps inside,
nor what goes with a push.

Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018; PyTorch documentation,
"Automatic Mixed Precision examples".
"""

import warnings

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..errors import ConfigError
from ..store.joint import parts_of
from ..tuning.candidates import DTYPES, autocast


class Amp:
    """Mixed precision of one member.

    Args:
        precision: ``fp32``, ``bf16`` or ``fp16``, chosen by a setting or a trial; None: by the
            script.

    Attributes:
        is_waiting: whether the gradients are those of a scaled loss and not used by a step yet.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device, precision: str | None) -> None:
        self._optimizer = optimizer
        self._num_optimizers = len(parts_of(optimizer))
        self._device = device
        self._chosen = precision
        self._scaler: GradScaler | None = None
        self._is_half = self._is_differentiated = False
        """Whether a region since the last backward pass was in fp16; and if there was one since."""
        self._was_used = self._is_unscaled = False
        self.is_waiting = False
        if precision is not None:
            _check(device, precision)

    def autocast(self, dtype: torch.dtype | None) -> torch.autocast:
        """The context of a forward pass; ``dtype`` replaces the chosen precision."""
        self._was_used = True
        names = {kind: name for name, kind in DTYPES.items()}
        precision = self._chosen or "bf16"
        if dtype is not None:
            if dtype not in names:
                raise ConfigError(f"autocast takes float16, bfloat16 or float32, got {dtype}")
            precision = names[dtype]
        if torch.is_grad_enabled():
            if self._is_differentiated:
                self._is_half = self._is_differentiated = False
            self._is_half |= DTYPES[precision] is torch.float16  # also with a part in fp32 inside
        return autocast(self._device, precision)

    def backward(self, loss: Tensor) -> Tensor:
        """Differentiate, outside autocast; returns the loss, scaled where it is."""
        self._is_differentiated = True
        if self._is_half:
            if self._num_optimizers > 1:
                raise ConfigError(
                    "pace.backward(loss) scales fp16 losses for one optimizer, but "
                    f"{self._num_optimizers} were prepared: use bf16, pace.autocast(torch.bfloat16)"
                )
            if self._scaler is None:
                self._scaler = GradScaler(self._device.type)
            loss = self._scaler.scale(loss)
            self.is_waiting = True
        if torch.is_autocast_enabled(self._device.type):
            with torch.autocast(self._device.type, enabled=False):
                loss.backward()
        else:
            loss.backward()
        return loss

    @property
    def has_scaled(self) -> bool:
        """Whether ``backward`` scales the losses, and so handles overflows, not the script."""
        return self._scaler is not None

    def unscale(self) -> float:
        """Unscale the gradients now, before they are clipped; returns their scale.

        It is 1 if they are unscaled already, for another clip of the same step.
        """
        if not self.is_waiting or self._scaler is None or self._is_unscaled:
            return 1.0
        scale = self._scaler.get_scale()
        self._scaler.unscale_(self._optimizer)
        self._is_unscaled = True
        return scale

    def step(self) -> None:
        """Step on scaled gradients, through the scaler."""
        assert self._scaler is not None
        self.drop()
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def drop(self) -> None:
        """Note that no gradients wait for a step."""
        self.is_waiting = self._is_unscaled = False

    def check(self, optimizer: Optimizer) -> None:
        """Check that the script uses the chosen precision; ``optimizer`` steps now.

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
        has_scaler = getattr(optimizer, "found_inf", None) is not None
        if self._is_half and not has_scaler:
            raise ConfigError(
                "in fp16 small gradients vanish unless the loss is scaled: call "
                "pace.backward(loss) in place of loss.backward()"
            )


def _check(device: torch.device, precision: str) -> None:
    """Check the device.

    Raises:
        ConfigError: it cannot compute in this precision.
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
