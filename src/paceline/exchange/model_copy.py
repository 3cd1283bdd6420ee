"""One member's copy of the model: what goes to the store, and what comes back.

    .grad, or base - home --fill--> this seat's slot        newest block --pull--> home = the model

``home`` is the memory of the model's parameters and buffers; where members push differences
(local-sgd), ``base`` is the global copy that differences are taken from (own_changes.py). Only the
run may change the weights while it trains (unedited.py). This module must not know jobs or the
loop, nor how a message travels.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..replica.replica import Replica, digest_of
from ..store.means import allowed_scale, difference_into, squared_distance
from ..store.optimizer import Updater
from ..store.parameter_store import SharedStore
from ..wire.messages import FOUND_INF, NOT_FINITE, OK, Laid
from . import SHARED
from .base import ScriptHooks, Work, not_finite, settings_word
from .own_changes import OwnChanges
from .unedited import Unedited


class ModelCopy:
    """The model of one member that takes part in a run through a store.

    Args:
        seat: whose slot it fills.
        rule: the optimizer that the store applies: the user's, or plain averaging.
        hooks: check the script's other objects that must not change.
        check: called now and then while gradients are computed.

    Attributes:
        version: of the parameters that it holds.
        can_skip: whether ``--nonfinite skip`` is possible here; run/describe.py refuses the rest.
        own: its local changes, and the fragment that the next update covers.
        updaters: one for each block of the store.
    """

    home: Tensor
    base: Tensor | None

    def __init__(
        self,
        seat: int,
        replica: Replica,
        rule: Optimizer,
        store: SharedStore,
        layout: Laid,
        hooks: ScriptHooks,
        check: Callable[[], None],
    ) -> None:
        self.seat = seat
        self.replica, self.rule, self.store = replica, rule, store
        self.is_difference, self._raises_not_finite = (
            layout.is_difference,
            layout.nonfinite_is_error,
        )
        self.can_skip = not layout.overlap_steps or layout.collective in ("", SHARED)
        self.unedited = Unedited(replica, store, hooks)
        self._hooks = hooks
        self._check = check
        self.version = 0
        self.updaters: list[Updater] = []
        self.renew_updaters()
        self._hyper: object = ()
        self._hyper_digest = 0
        self.own = OwnChanges(self, layout.num_fragments, layout.overlap_steps)
        self._num_skipped = 0

    def renew_updaters(self) -> None:
        """Replace the updaters by ones without state, in the same list."""
        replica = self.replica
        self.updaters[:] = [
            Updater(self.rule, replica.parameters, replica.layout, block)
            for block in self.store.blocks
        ]

    def live_alone(self) -> None:
        """Move to private memory with the newest version; gradients go to this seat's slot."""
        self.home = self.replica.live_alone()
        self.base = torch.empty_like(self.home) if self.is_difference else None
        self.unedited.watch(self.home)
        self.pull(0)
        if not self.is_difference:
            self.replica.push_into(self.store.slot(self.seat), self._check)

    def move_to(self, block: Tensor) -> None:
        """Move to this memory, which holds its parameters and is from now on their only copy."""
        self.replica.move_to(block)
        self.home = block[: self.replica.layout.slot_bytes]

    def pull(self, version: int) -> None:
        """Pull the newest version, which is ``version`` or a later one.

        Where updates are of fragments, pull those that were exchanged since the last pull.
        """
        if self.base is None:
            self.version = self.store.pull(version, self.home)
        else:
            self.own.merge()
            before, self.version = self.version, self.store.pull(version, self.base)
            self._take(before)
        self.replica.held.drop_buffers()
        self.unedited.mark()

    def pull_whole(self, version: int) -> None:
        """Pull a version, and drop local steps that were not exchanged."""
        self.own.forget()
        self.pull(version)

    def _take(self, before: int) -> None:
        """Copy ``base`` to the model, except changes not exchanged since ``before``."""
        assert self.base is not None
        skipped = self.version - self.store.applied.of(self.version)
        was_skipped, self._num_skipped = skipped != self._num_skipped, skipped
        if was_skipped:  # values that are not finite may be anywhere in it
            self.own.forget()
        self.own.take(before, self.version)
        buffers = self.replica.layout.buffers
        buffers.of(self.home).copy_(buffers.of(self.base))

    def begin_again(self, live: Tensor, *, is_whole: bool) -> None:
        """Between peers: continue from the update that was due.

        Args:
            live: the block that holds it, or will once ``OwnChanges.before_merge`` returned.
            is_whole: whether all local steps are dropped.
        """
        assert self.base is not None
        own = self.own
        part = own.fragments.whole if is_whole else own.due
        self.base[part.start : part.stop].copy_(live[part.start : part.stop])
        own.arrived(part)
        self.unedited.mark()

    # -- pushing ----------------------------------------------------------------------------------

    def fill(self, work: Work, step: int) -> int:
        """Put what is pushed into this seat's slot; return its fault, or OK."""
        store, replica = self.store, self.replica
        slot, present = store.slot(self.seat), store.present(self.seat)
        if self.base is not None:
            self.own.merge()
            replica.held.take_buffers()
            self.difference_into(slot)
            replica.layout.buffers.of(slot).copy_(replica.layout.buffers.of(self.home))
            present[:] = self.own.due.present
            self.own.hand_in()
        else:
            if work.inv_scale != 1.0:
                replica.scale_gradients(work.inv_scale)
            replica.collect(present)
        if work.found_inf:
            return FOUND_INF
        if store.is_finite(self.seat):
            return OK
        self.refuse_not_finite(work.loss, step)
        return NOT_FINITE

    @property
    def is_lockstep(self) -> bool:
        """Whether all members make each step together, so that all push the same parameters."""
        return self._hooks.follow is not None

    def difference_into(self, out: Tensor) -> None:
        """Write to ``out``, on any device, what the work changed in the fragment that is due.

        In lockstep write the parameters instead.
        """
        assert self.base is not None
        if self.is_lockstep:
            size = self.replica.layout.parameters.stop
            out[:size].copy_(self.home[:size])
            return
        runs = self.own.due.runs(self.replica.layout.parameters)
        difference_into(runs, self.base, self.home, out)

    def refuse_not_finite(self, loss: float, step: int) -> None:
        """Raise WorkerError, with the parameter's name, unless such updates are to be skipped."""
        if self._raises_not_finite:
            name = self.store.not_finite(self.seat)
            raise not_finite(self.seat, name, step, self.version, loss, can_skip=self.can_skip)

    @property
    def skips_not_finite(self) -> bool:
        """Whether an update that is not finite changes nothing, and is no error."""
        return not self._raises_not_finite

    def settings(self, marks: object, num_own_steps: int) -> int:
        """Return the word for the optimizer's settings, see ``settings_word``.

        Args:
            marks: state of prepared schedulers that must be the same in all members.
        """
        hyper = (self.replica.hyper(), marks)
        if hyper != self._hyper:
            self._hyper = hyper
            self._hyper_digest = digest_of(hyper)
        return settings_word(self._hyper_digest, num_own_steps)

    def allowed_scale(self, limit: float) -> float:
        """Return the factor that the distance from the newest version leaves of the last push."""
        newest = self.store.blocks[self.store.current]
        moved = squared_distance(self.replica.layout, newest, self.home)
        return allowed_scale(limit, moved, self.rule.param_groups)

    def publish(self) -> None:
        """Make the model's weights those of the newest version for all members."""
        self.store.replace(self.home)

    def optimizer_state(self, own: Updater | None = None) -> dict[Tensor, dict[str, Any]]:
        """Return clones of the optimizer's state at the newest version, by the user's parameters.

        Args:
            own: updater of this member's own block with the newest version; None: the store has it.
        """
        if own is not None:
            rows = own.read_state()
        else:
            rows = self.store.read_whole(lambda block: self.updaters[block].read_state())
        parameters = [p for group in self.rule.param_groups for p in group["params"]]
        return {p: row for p, row in zip(parameters, rows, strict=True) if row}
