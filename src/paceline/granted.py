"""The batches of a script's loop, grant by grant: what ``prepare`` gives back for its loader.

    session.grant() -> leases -> prepared.take(lease) -> the loop's batch -> optimizer.step -> next

This module must not know what a step does with a batch, nor how a session carries anything.
"""

from collections.abc import Callable, Iterator
from typing import Any

from .events import Grant
from .prepared import Prepared


class PreparedLoader:
    """Iterates over the mini-batches that this worker is granted, epoch by epoch.

    ``len`` is the number of updates an epoch.
    """

    def __init__(self, prepared: Prepared, take_epoch: Callable[[], int]) -> None:
        self._prepared = prepared
        self._take_epoch = take_epoch
        self.dataset = prepared.leased.dataset
        self.batch_size = prepared.shape.batch_size

    def __len__(self) -> int:
        prepared = self._prepared
        if prepared.leased.order.has_own_batches:
            return prepared.num_batches
        return prepared.shape.batches().num_batches

    def __iter__(self) -> Iterator[Any]:
        prepared = self._prepared
        session = prepared._session
        epoch = self._take_epoch()
        leased = prepared.leased
        if prepared.tells_settings:
            prepared.tell_settings()
        ends = leased.order.draw(epoch)
        leased.order.check()
        if not session.open_epoch(epoch, ends):
            prepared.advance(session.version)
            return
        prepared.is_iterating = True
        try:
            while (grant := session.grant()) is not None:
                yield from self._granted(grant)
            prepared.advance(session.version)  # so that every worker shows the same rate now
        finally:
            prepared.is_iterating = False
            leased.end_epoch()

    def _granted(self, grant: Grant) -> Iterator[Any]:
        """The batches of one grant, and more of them while the loop accumulates."""
        prepared, session = self._prepared, self._prepared._session
        leases, depth = grant.leases, prepared.leased.lookahead
        while True:
            if depth:
                prepared.leased.reserve(session.upcoming(depth))
            for lease in leases:
                yield prepared.take(lease)
                if session.grant() is not grant:
                    return
            more = session.extend()
            if more is None:
                prepared.push_rest()
                return
            leases = (more,)
