"""How peers come to one mean of their gradients, and step on it: the contract, and its first half.

    enter -> [ come_back -> [ fill | 1 | update | 2 | settle ] ... -> step_aside ] ... -> leave
               an epoch           barriers of rounds.py

One of these is made for each member when peers begin, and is dropped when the run goes on through
the store. Which leases are in a round, who shows what, and when a round is given up is decided in
peers.py; here is only what happens to gradients, parameters and the optimizer's state. Members:

    shares          each steps on its share of the parameters, which lie in the store once
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
        barrier: what members show each other, and further barriers where one is needed.
        hooks: what the script's side is asked.
        route: where members find each other, and how they sum.

    Attributes:
        block: number of the store's block that peers' versions are told with.
        norm: of the averaged gradient of the last round, where it is clipped; else nan.
    """

    def __init__(self, copy: ModelCopy, barrier: Barrier, hooks: ScriptHooks, route: Route) -> None:
        self._copy, self._barrier, self._hooks = copy, barrier, hooks
        self._store, self._replica, self._seat = copy.store, copy.replica, copy.seat
        self.block = self._store.current
        self.kept_buffers = self._own_buffers.clone()
        """Of the version that stands: the model's own change with every forward pass."""
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
        """Of a block of this member's own, in which the newest version lies; None: the store's."""
        return None

    @property
    def _own_buffers(self) -> Tensor:
        return self._replica.layout.buffers.of(self._copy.home)

    # -- epochs ---------------------------------------------------------------------------------

    def come_back(self) -> None:
        """An epoch between peers begins: the weights to where others, or updates, reach them."""
        return

    def step_aside(self) -> None:
        """It is over: what a script does with the weights now is seen by nobody."""
        return

    def pull(self, version: int) -> None:
        """The model holds this version, which is the newest, and nothing of its own."""
        self._copy.pull_whole(version)

    def standing(self) -> tuple[Tensor, Tensor]:
        """A block that holds the newest version, but for its buffers, and the buffers."""
        return self._live, self.kept_buffers

    # -- a round --------------------------------------------------------------------------------

    def fill(self, work: Work) -> None:
        """Before the first barrier: this member's push to where ``update`` takes it from."""
        self._pushed = work
        self._copy.own.merge()
        if work.num_samples:
            self._fill(work)

    @abc.abstractmethod
    def _fill(self, work: Work) -> None:
        """Put this member's gradient where the mean is made of it; there is one."""

    def update(self, lines: Sequence[Line]) -> None:
        """Between the barriers: the mean of all pushes, and the optimizer's step on it.

        Raises:
            ConfigError: two pushed with different settings, or clip to different things.
            GivenUp: a member died at a barrier in between.
        """
        self.norm = math.nan
        check_settings(lines)
        if not self._copy.is_difference:
            self._copy.unedited.check()  # all are here: nobody changes weights after it was looked
        clip, weights = common_clip(lines), [line.weight for line in lines]
        self._is_skipped = any(line.fault for line in lines)
        present = self._present_in_any(weights)
        if self._is_skipped:
            return
        total = sum(weights)
        self._step([one / total for one in weights], present, clip)

    @abc.abstractmethod
    def _step(self, weights: Sequence[float], present: Sequence[int], clip: Clip) -> None:
        """Average with these weights, which sum to 1, clip, and step.

        Args:
            weights: of each seat; 0: it has not pushed.
            present: per parameter, 0 where nobody has a gradient.
        """

    def _present_in_any(self, weights: Sequence[float]) -> Sequence[int]:
        """Per parameter: whether any member has a gradient for it."""
        masks = [bytes(self._store.present(seat)) for seat, one in enumerate(weights) if one]
        if all(mask == self._all_present for mask in masks):
            return self._all_present
        return [max(column) for column in zip(*masks, strict=True)]

    def settle(self) -> int:
        """After the second barrier: an update that is not finite is undone; what was wrong.

        Raises:
            WorkerError: it is not finite, and such updates are not skipped.
        """
        is_bad = self._is_bad_update = self._undo_if_bad()
        mine = self._own_buffers
        if is_bad or self._is_skipped:
            mine.copy_(self.kept_buffers)
        else:
            self.kept_buffers.copy_(mine)
        return NOT_FINITE if is_bad else OK

    @abc.abstractmethod
    def _undo_if_bad(self) -> bool:
        """Whether this round's mean was not finite; then all is as it was before."""

    def begin_again(self) -> None:
        """Where members push differences: their next steps begin at the new version."""
        # What is not finite lies in all that a member holds.
        self._copy.begin_again(self._live, is_whole=self._is_skipped or self._is_bad_update)

    # -- gradients of a step that all make together (lockstep.py) ---------------------------------

    def show_gradients(self) -> None:
        """Before the first barrier: what lies in ``.grad`` to where ``mean_gradients`` takes it."""
        replica = self._replica
        replica.gather_own(self._gradient_slot, self._store.present(self._seat))

    @property
    def _gradient_slot(self) -> Tensor:
        """Where this member's gradients go for the others, the layout's offsets."""
        return self._store.slot(self._seat)

    def mean_gradients(self, weights: Sequence[float]) -> None:
        """After it: every member's ``.grad`` becomes the mean of all. There is one barrier more.

        Args:
            weights: of each seat, as of ``_step``.
        """
        present = self._present_in_any(weights)
        mean = self._mean_of_gradients(weights) if any(present) else None
        self._barrier.wait()  # all shares are there, and all have read the lines
        if mean is None:
            self._replica.drop_gradients()
        else:
            self._replica.receive(mean, present)

    @abc.abstractmethod
    def _mean_of_gradients(self, weights: Sequence[float]) -> Tensor:
        """The block that holds the mean after the next barrier; each member does its part."""

    # -- the way out ----------------------------------------------------------------------------

    def refuse(self, what: str, *, is_over: bool = False) -> None:
        """Raise ConfigError where ``what`` cannot be had between peers, nor the store asked.

        Args:
            is_over: whether this member's loop is over, so that it needs no work from elsewhere.
        """
        return

    def give_up(self, work: Work, *, is_updating: bool) -> None:
        """The round will not be finished: the version before it, and ``work`` in this seat's slot.

        Args:
            is_updating: the first barrier was passed, and the second never will be.
        """
        if not (is_updating or self._copy.is_difference):
            self._copy.unedited.check()  # what is on the block goes along
        if work.num_samples and not work.found_inf:
            self._refuse_if_mine()

    def _refuse_if_mine(self) -> None:
        """The worker whose own gradient is not finite says so, with the parameter's name."""
        if not self._store.is_finite(self._seat):
            self._copy.refuse_not_finite(self._pushed.loss, self._copy.version)

    def restore_the_dead(self) -> None:
        """Finish what members that died in this round would have put back; all others wait."""
        return

    def hand_over(self) -> None:
        """The store's block gets the version that peers came to, where it has not got it."""
        return


def only_first(weights: Sequence[float]) -> list[float]:
    """Weights by which a mean is what the first member that has pushed has."""
    first = next(seat for seat, weight in enumerate(weights) if weight)
    return [float(seat == first) for seat in range(len(weights))]


MakeAveraging: TypeAlias = Callable[[ModelCopy, Barrier, ScriptHooks, Route], Averaging]
