"""How peers compute the mean of their gradients and step on it: the contract, and common code.

    enter -> [ come_back -> [ fill | 1 | update | 2 | settle ] ... -> step_aside ] ... -> leave
               an epoch           barriers of rounds.py

One is made for each member when peers begin, and dropped when the run goes on through the store.
peers.py decides which leases are in a round, what members show, and when a round is given up; this
file handles only gradients, parameters and the optimizer's state. Members:

    shares          each steps on its share of the parameters, which the store holds once
    distributed     each steps on all of its own copy; the mean comes from ``torch.distributed``

docs/add-a-collective.md adds one. This module must not know leases or protocols, nor how a message
travels.
"""

import abc
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor

from ..store.clip import Clip
from ..store.optimizer import Updater
from ..wire.messages import NOT_FINITE, OK
from . import Route
from .base import ScriptHooks, Work
from .model_copy import ModelCopy
from .rounds import Barrier, Line, check_settings, common_clip


class Averaging(abc.ABC):
    """One member's part in the updates between peers.

    Made when the first epoch between peers opens, with the model at the newest version.

    Args:
        copy: this member's model, and the store.
        barrier: shows lines to the other members, and gives further barriers where needed.
        hooks: callbacks to the script's side.
        route: where members find each other, and how they sum.

    Attributes:
        block: number of the store's block that holds the peers' versions.
        norm: of the averaged gradient of the last round, where it is clipped; else nan.
    """

    def __init__(self, copy: ModelCopy, barrier: Barrier, hooks: ScriptHooks, route: Route) -> None:
        self._copy, self._barrier, self._hooks = copy, barrier, hooks
        self._store, self._replica, self._seat = copy.store, copy.replica, copy.seat
        self.block = self._store.current
        self.kept_buffers = self._own_buffers.clone()
        """Buffers of the newest version: the model's own change with every forward pass."""
        self._all_present = b"\1" * len(self._replica.parameters)
        self._pushed = Work()
        self._is_skipped = self._is_bad_update = False
        self.norm = math.nan

    @property
    @abc.abstractmethod
    def _live(self) -> Tensor:
        """The block that updates are made in, on this member's device."""

    @property
    def own_updater(self) -> Updater | None:
        """The updater of this member's own block with the newest version; None: the store's."""
        return None

    @property
    def _own_buffers(self) -> Tensor:
        return self._replica.layout.buffers.of(self._copy.home)

    # -- epochs ---------------------------------------------------------------------------------

    def come_back(self) -> None:
        """An epoch between peers begins: move the weights where others or updates reach them."""
        return

    def step_aside(self) -> None:
        """The epoch is over: from now on nobody sees what the script does with the weights."""
        return

    def pull(self, version: int) -> None:
        """Load this version, which is the newest, and drop local changes."""
        self._copy.pull_whole(version)

    def standing(self) -> tuple[Tensor, Tensor]:
        """Return a block that holds the newest version except its buffers, and the buffers."""
        return self._live, self.kept_buffers

    # -- a round --------------------------------------------------------------------------------

    def fill(self, work: Work) -> None:
        """Before the first barrier: put this member's push where ``update`` reads it."""
        self._pushed = work
        self._copy.own.merge()
        if work.num_samples:
            self._fill(work)

    @abc.abstractmethod
    def _fill(self, work: Work) -> None:
        """Put this member's gradient, which exists, where the mean is made of it."""

    def update(self, lines: Sequence[Line]) -> None:
        """Between the barriers: make the mean of all pushes, and step the optimizer on it.

        Raises:
            ConfigError: two members pushed with different settings, or clip differently.
            GivenUp: a member died at a barrier in between.
        """
        self.norm = math.nan
        check_settings(lines)
        if not self._copy.is_difference:
            self._copy.unedited.check()  # all are here: nobody can change weights after the check
        clip, weights = common_clip(lines), [line.weight for line in lines]
        self._is_skipped = any(line.fault for line in lines)
        present = self._present_in_any(weights)
        if self._is_skipped:
            return
        total = sum(weights)
        self._step([weight / total for weight in weights], present, clip)

    @abc.abstractmethod
    def _step(self, weights: Sequence[float], present: Sequence[int], clip: Clip) -> None:
        """Average with these weights, which sum to 1, clip, and step.

        Args:
            weights: per seat; 0: it did not push.
            present: per parameter, 0 where nobody has a gradient.
        """

    def _present_in_any(self, weights: Sequence[float]) -> Sequence[int]:
        """Return, per parameter, whether any member has a gradient for it."""
        masks = [bytes(self._store.present(seat)) for seat, weight in enumerate(weights) if weight]
        if all(mask == self._all_present for mask in masks):
            return self._all_present
        return [max(column) for column in zip(*masks, strict=True)]

    def settle(self) -> int:
        """After the second barrier: undo an update that is not finite.

        Returns:
            What was wrong: NOT_FINITE or OK.

        Raises:
            WorkerError: it is not finite, and such updates are not skipped.
        """
        is_bad = self._is_bad_update = self._undo_if_bad()
        own_buffers = self._own_buffers
        if is_bad or self._is_skipped:
            own_buffers.copy_(self.kept_buffers)
        else:
            self.kept_buffers.copy_(own_buffers)
        return NOT_FINITE if is_bad else OK

    @abc.abstractmethod
    def _undo_if_bad(self) -> bool:
        """Return whether this round's mean was not finite; then all is restored."""

    def begin_again(self) -> None:
        """After a push of differences: the next steps begin at the new version."""
        # A value that is not finite may be anywhere in a member's copy.
        self._copy.begin_again(self._live, is_whole=self._is_skipped or self._is_bad_update)

    # -- gradients of a step that all members make together (lockstep.py) -------------------------

    def show_gradients(self) -> None:
        """Before the first barrier: copy ``.grad`` to where ``mean_gradients`` reads it."""
        replica = self._replica
        replica.gather_own(self._gradient_slot, self._store.present(self._seat))

    @property
    def _gradient_slot(self) -> Tensor:
        """Where this member's gradients go for the others, at the layout's offsets."""
        return self._store.slot(self._seat)

    def mean_gradients(self, weights: Sequence[float]) -> None:
        """After the barrier: every member's ``.grad`` becomes the mean; waits at one more barrier.

        Args:
            weights: per seat, as in ``_step``.
        """
        present = self._present_in_any(weights)
        mean = self._mean_of_gradients(weights) if any(present) else None
        self._barrier.wait()  # all shares are made, and all members read the lines
        if mean is None:
            self._replica.drop_gradients()
        else:
            self._replica.receive(mean, present)

    @abc.abstractmethod
    def _mean_of_gradients(self, weights: Sequence[float]) -> Tensor:
        """Do this member's part of the mean; return the block that holds it after the barrier."""

    # -- the way out ----------------------------------------------------------------------------

    def refuse(self, what: str, *, is_over: bool = False) -> None:
        """Raise ConfigError if ``what`` can be done neither between peers nor through the store.

        Args:
            is_over: whether this member's loop is over, so that it needs no more work.
        """
        return

    def give_up(self, work: Work, *, is_updating: bool) -> None:
        """Undo an unfinished round, and leave ``work`` in this seat's slot.

        Args:
            is_updating: the first barrier was passed, and the second never will be.
        """
        if not (is_updating or self._copy.is_difference):
            self._copy.unedited.check()  # the store takes over the block as it is
        if work.num_samples and not work.found_inf:
            self._refuse_if_mine()

    def _refuse_if_mine(self) -> None:
        """Raise WorkerError if this worker's own gradient is not finite, naming the parameter."""
        if not self._store.is_finite(self._seat):
            self._copy.refuse_not_finite(self._pushed.loss, self._copy.version)

    def restore_the_dead(self) -> None:
        """Undo what members that died in this round changed; all others wait."""
        return

    def hand_over(self) -> None:
        """Copy the peers' newest version to the store's block, where it is not there already."""
        return


def only_first(weights: Sequence[float]) -> list[float]:
    """Return weights by which the mean is the value of the first member that pushed."""
    first = next(seat for seat, weight in enumerate(weights) if weight)
    return [float(seat == first) for seat in range(len(weights))]


MakeAveraging: TypeAlias = Callable[[ModelCopy, Barrier, ScriptHooks, Route], Averaging]
