"""The batches of a script's loop: what ``prepare`` gives back for its loader.

    several workers   session.grant() -> leases -> prepared.take(lease) -> the loop's batch
    one worker        the user's own loader, batch for batch

Inside its own loop, and where no gradients are made, it is the user's own loader, too: an
evaluation over it, ``next(iter(loader))`` or ``list(loader)`` there take nothing from the run. This
module must not know what a step does with a batch, nor how a session carries anything.
"""

import weakref
from collections.abc import Generator, Iterator
from typing import Any

import torch

from ..passes import Passes
from .prepared import Prepared


class PreparedLoader:
    """Iterates over the mini-batches that this worker is granted, epoch by epoch.

    ``len`` is the number of updates an epoch. What else the user's loader has, it has.
    """

    def __init__(self, prepared: Prepared, passes: Passes) -> None:
        self._prepared = prepared
        self.passes = passes
        self.dataset = prepared.leased.dataset
        self.batch_size = prepared.shape.batch_size
        self.plain = prepared.leased.loader
        """The loader that was prepared, for a look at a batch beside the loop."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._prepared.leased.loader, name)

    def __len__(self) -> int:
        prepared = self._prepared
        if prepared.leased.order.has_own_batches or prepared.is_alone:
            return prepared.num_batches
        return prepared.shape.batches().num_batches

    def __iter__(self) -> Iterator[Any]:
        own: list[weakref.ref[Generator[Any, None, None]]] = []
        iteration = self._batches(own)
        own.append(weakref.ref(iteration))
        return iteration

    def _batches(
        self, own: list[weakref.ref[Generator[Any, None, None]]]
    ) -> Generator[Any, None, None]:
        prepared = self._prepared
        if not prepared.is_iterating:
            prepared.iteration = own[0]
        if prepared.is_iterating or not torch.is_grad_enabled():
            yield from self._nested()
        elif prepared.is_alone:
            yield from self._alone()
        else:
            yield from self._epoch()

    def _nested(self) -> Iterator[Any]:
        """The user's own loader."""
        prepared = self._prepared
        prepared.num_nested += 1
        try:
            for batch in prepared.leased.loader:
                prepared.has_nested = True
                yield prepared.to_device(batch)
        finally:
            prepared.num_nested -= 1

    def _look_again(self) -> Iterator[Any]:
        """Batches to look at, of a pass that lies behind: it draws nothing that others would."""
        state = torch.get_rng_state()
        try:
            yield from self._nested()
        finally:
            torch.set_rng_state(state)

    def _alone(self) -> Iterator[Any]:
        """The user's loader; what was given back comes once more at the end."""
        prepared = self._prepared
        self.passes.take()
        prepared.is_iterating = True
        try:
            for batch in _with_those_given_back(prepared.batches_alone(), prepared.given_back):
                if prepared._session.is_stopped:
                    prepared._session.is_cut_short = True
                    return
                yield prepared.take_alone(batch)
        finally:
            prepared.is_iterating = False
            prepared.given_back.clear()

    def _epoch(self) -> Iterator[Any]:
        prepared, leased = self._prepared, self._prepared.leased
        session = prepared._session.shared
        assert session is not None
        prepared.finish_leaving()
        passes = self.passes
        epoch = passes.take()
        if passes.is_behind(epoch):
            if passes.was_look(epoch):
                yield from self._look_again()
            return
        prepared.schedules.open()
        prepared.tell_settings()
        ends = leased.order.draw(epoch)
        leased.order.check()
        if not session.open_epoch(epoch, ends):
            return
        prepared.schedules.opened()
        prepared.is_iterating = True
        prepared.holding.has_worked = False
        try:
            while (lease := prepared.next_lease()) is not None:
                yield prepared.take(lease)
            prepared.schedules.check()
        except GeneratorExit:
            if not prepared.holding.has_worked:
                passes.looked(epoch)
            prepared.leave()
            raise
        finally:
            prepared.is_iterating = False
            leased.end_epoch()
            if session.grant() is None:
                prepared.schedules.end()  # so that every worker shows the same rate now


def _with_those_given_back(batches: Iterator[Any], given_back: list[Any]) -> Iterator[Any]:
    """Each once more after the batch that follows it, or at the end."""
    for batch in batches:
        waiting = given_back[:]
        given_back.clear()
        yield batch
        yield from waiting
    while given_back:
        yield given_back.pop(0)
