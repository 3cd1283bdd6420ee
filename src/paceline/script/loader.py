"""The batches of a script's loop: what ``prepare`` gives back for its loader.

    several workers   exchange.grant() -> leases -> leased.fetch(lease) -> the loop's batch
    one worker        the user's own loader, batch for batch

Inside its own loop, and where no gradients are made, it is the user's own loader, too: an
evaluation over it, ``next(iter(loader))`` or ``list(loader)`` there take nothing from the run. This
module must not know what a step does with a batch, nor how an exchange carries a push.
"""

import weakref
from collections.abc import Generator, Iterator
from typing import Any

import torch

from ..exchange.base import Shape
from ..passes import Passes
from .loop import TrainingLoop, to_device
from .schedules import Schedules


class PreparedLoader:
    """Iterates over the mini-batches that this worker is granted, epoch by epoch.

    ``len`` is the number of updates an epoch. What else the user's loader has, it has.

    Args:
        num_batches: of an epoch of the user's own loader.
    """

    def __init__(
        self,
        loop: TrainingLoop,
        schedules: Schedules,
        shape: Shape,
        num_batches: int,
        passes: Passes,
    ) -> None:
        self._loop = loop
        self._schedules = schedules
        self._shape = shape
        self._num_batches = num_batches
        self.passes = passes
        self.dataset = loop.leased.dataset
        self.batch_size = shape.batch_size
        self.plain = loop.leased.loader
        """The loader that was prepared, for a look at a batch beside the loop."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.plain, name)

    def __len__(self) -> int:
        if self._loop.leased.order.has_own_batches or self._loop.is_alone:
            return self._num_batches
        return self._shape.batches().num_batches

    def __iter__(self) -> Iterator[Any]:
        own: list[weakref.ref[Generator[Any, None, None]]] = []
        iteration = self._batches(own)
        own.append(weakref.ref(iteration))
        return iteration

    def _batches(
        self, own: list[weakref.ref[Generator[Any, None, None]]]
    ) -> Generator[Any, None, None]:
        loop = self._loop
        if not loop.is_iterating:
            loop.iteration = own[0]
        if loop.is_iterating or not torch.is_grad_enabled():
            yield from self._nested()
        elif loop.is_alone:
            yield from self._alone()
        else:
            yield from self._epoch()

    def _nested(self) -> Iterator[Any]:
        """The user's own loader."""
        loop = self._loop
        loop.num_nested += 1
        try:
            for batch in self.plain:
                loop.has_nested = True
                yield to_device(batch, loop.device)
        finally:
            loop.num_nested -= 1

    def _look_again(self) -> Iterator[Any]:
        """Batches to look at, of a pass that lies behind: it draws nothing that others would."""
        state = torch.get_rng_state()
        try:
            yield from self._nested()
        finally:
            torch.set_rng_state(state)

    def _alone(self) -> Iterator[Any]:
        """The user's loader, batch for batch."""
        loop = self._loop
        self.passes.take()
        loop.is_iterating = True
        try:
            for batch in loop.batches_alone():
                if loop.exchange.is_stopped:
                    loop.exchange.is_cut_short = True
                    return
                loop.batch = batch
                yield batch
        finally:
            loop.is_iterating = False
            loop.given_back.clear()

    def _epoch(self) -> Iterator[Any]:
        loop, schedules, passes = self._loop, self._schedules, self.passes
        leased, exchange = loop.leased, loop.exchange.shared
        assert exchange is not None
        loop.finish_leaving()
        epoch = passes.take()
        if passes.is_behind(epoch):
            if passes.was_look(epoch):
                yield from self._look_again()
            return
        schedules.open()
        ends = leased.order.draw(epoch)
        leased.order.check()
        if not exchange.open_epoch(epoch, ends):
            return
        schedules.opened()
        loop.is_iterating = True
        loop.holding.has_worked = False
        try:
            if exchange.grant() is None and passes.was_look(epoch):  # before the run went on
                yield from self._look_again()
            while (lease := loop.next_lease()) is not None:
                loop.has_nested = False
                yield leased.fetch(lease)
            schedules.check()
        except GeneratorExit:
            if not loop.holding.has_worked:
                passes.looked(epoch)
            loop.leave()
            raise
        finally:
            loop.is_iterating = False
            leased.end_epoch()
            if exchange.grant() is None:
                schedules.end()  # so that every worker shows the same rate now
