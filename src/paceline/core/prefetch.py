"""Leases kept for a member whose loader fetches ahead, until they are handed to it or taken back.

A loader that works ahead must know its mini-batches before they are granted. So a member with a
depth d has up to d leases kept for it, told to it with its next grant, and handed to it in the
same order: first in, first out, so what it fetched is what it is given. Leases that come back
from others are handed out before, and what is kept may be taken for another member when nothing
else is free; the loader then skips what it fetched. It must not know who is at work.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ..events import Lease
from .batches import even_share


class Lookahead:
    """Who looks how far ahead, and the leases that are kept for it."""

    __slots__ = ("_depths", "_queues", "_told")

    def __init__(self) -> None:
        self._depths: dict[int, int] = {}  # by member; only those that look ahead
        self._queues: dict[int, list[Lease]] = {}  # by member, oldest first; no empty ones
        self._told: dict[int, int] = {}  # by member, the newest lease id it was told

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def is_used(self) -> bool:
        """Whether any member looks ahead."""
        return bool(self._depths)

    def set_depth(self, member: int, depth: int) -> None:
        """From now on keep up to `depth` leases for `member`."""
        if depth > 0:
            self._depths[member] = depth
        else:
            self._depths.pop(member, None)

    def kept(self, member: int) -> Sequence[Lease]:
        """What is kept for `member`, oldest first."""
        return self._queues.get(member, ())

    def members(self) -> list[int]:
        """For whom something is kept."""
        return list(self._queues)

    def untold(self, member: int) -> list[Lease]:
        """What is kept for `member` and was never told to it."""
        told = self._told.get(member, -1)
        return [lease for lease in self._queues.get(member, ()) if lease.id > told]

    def keep_for_all(self, members: Sequence[int], next_fresh: Callable[[], Lease | None]) -> None:
        """One more lease for each of them, in their order, as far as there are any."""
        for member in members:
            if (lease := next_fresh()) is None:
                return
            self._queues.setdefault(member, []).append(lease)

    def top_up(
        self,
        next_fresh: Callable[[], Lease | None],
        num_left: Callable[[int], int],
        num_at_once: int,
        *,
        num_single: int = 0,
        in_step: bool = False,
    ) -> None:
        """Fill all to their depth in turns, in member order, `num_at_once` leases a turn.

        A turn for which there are too few is dealt evenly, as they are granted then.

        Args:
            num_left: how many fresh leases there are, counted up to a number.
            num_single: of what is kept for a member so many come in turns of one, before the rest.
            in_step: where one is short all take a turn, so that the order does not depend on who
                comes first.
        """
        short = sorted(m for m, d in self._depths.items() if len(self._queues.get(m, ())) < d)
        while short:
            turn = sorted(self._depths) if in_step else short
            at_once = 1 if len(self._queues.get(turn[0], ())) < num_single else num_at_once
            for place, member in enumerate(turn):
                num_members = len(turn) - place
                num_fresh = num_left(num_members * at_once)
                for _ in range(even_share(num_fresh, num_members, at_once)):
                    if (lease := next_fresh()) is not None:
                        self._queues.setdefault(member, []).append(lease)
            if not num_left(1):
                return
            short = [m for m in short if len(self._queues.get(m, ())) < self._depths[m]]

    def news(self, member: int) -> tuple[Lease, ...]:
        """What is kept for `member` and was not told to it yet; from now on it is."""
        queue = self._queues.get(member)
        told = self._told.get(member, -1)
        if not queue or queue[-1].id <= told:
            return ()
        self._told[member] = queue[-1].id
        return tuple(lease for lease in queue if lease.id > told)

    def oldest(self, member: int) -> Lease | None:
        """The lease that `member` is to have next, left where it is."""
        queue = self._queues.get(member)
        return queue[0] if queue else None

    def take(self, member: int) -> Lease:
        """That lease, taken out."""
        return self._pop(member, 0)

    def take_from_any(self) -> Lease | None:
        """The newest lease of the longest row, for somebody else; None if none is kept."""
        if not self._queues:
            return None
        return self._pop(max(sorted(self._queues), key=lambda m: len(self._queues[m])), -1)

    def _pop(self, member: int, index: int) -> Lease:
        queue = self._queues[member]
        lease = queue.pop(index)
        if not queue:
            del self._queues[member]
        return lease

    def drop(self, is_over: Callable[[Lease], bool]) -> list[Lease]:
        """These are kept for nobody any more; returns them."""
        dropped = [one for queue in self._queues.values() for one in queue if is_over(one)]
        for member, queue in list(self._queues.items()):
            queue[:] = [one for one in queue if not is_over(one)]
            if not queue:
                del self._queues[member]
        return dropped

    def forget(self, member: int) -> list[Lease]:
        """`member` looks ahead no longer; returns the leases that were kept for it."""
        self._depths.pop(member, None)
        self._told.pop(member, None)
        return self._queues.pop(member, [])

    def state(self) -> dict[str, Any]:
        """All of it, as JSON can carry it."""
        return {
            "depths": sorted(map(list, self._depths.items())),
            "kept": [[m, [lease.id for lease in self._queues[m]]] for m in sorted(self._queues)],
            "told": sorted(map(list, self._told.items())),
        }

    def load(self, state: dict[str, Any], by_id: Callable[[int], Lease]) -> None:
        """Become what `state()` described; `by_id` gives the leases."""
        self._depths = dict(state["depths"])
        self._queues = {member: list(map(by_id, ids)) for member, ids in state["kept"]}
        self._told = dict(state["told"])
