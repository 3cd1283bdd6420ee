"""The user's GradScaler in a member: its scale and its overflow go with the push.

    scaler.step(optimizer) -> read: work.inv_scale, work.found_inf
    a step that was left   -> follow: the scale of the version that was pulled instead

Under local-sgd, and with one worker, the scaler is the member's own. This module must not know
what a scaler keeps inside (``script/grad_scaler.py``) nor how a session carries a push.
"""

from dataclasses import asdict
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..exchange.base import Exchange, Work
from ..store.loss_scale import LossScale
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
