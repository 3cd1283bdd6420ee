"""Leases reserved for members whose loaders fetch ahead, until they are granted or taken back.

A loader that works ahead must know its mini-batches before they are granted. So a member with depth
d has up to d leases reserved, which it learns with its next grant, and which are granted in the
same order: first in, first out, so it gets what it has fetched. Leases returned by others are
granted first, and a reserved one may go to another member if nothing else is free; the loader then
skips it. This module must not know who is at work.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ..events import Lease
from .batches import even_share


class Lookahead:
    """Each member's depth, and the leases that are reserved for it."""

    __slots__ = ("_depths", "_queues", "_told")

    def __init__(self) -> None:
        self._depths: dict[int, int] = {}  # by member; only those that prefetch
        self._queues: dict[int, list[Lease]] = {}  # by member, oldest first; no empty ones
        self._told: dict[int, int] = {}  # by member, the newest lease id that it knows

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def is_used(self) -> bool:
        """Whether any member prefetches."""
        return bool(self._depths)

    def set_depth(self, member: int, depth: int) -> None:
        """Reserve up to `depth` leases for `member` from now on."""
        if depth > 0:
            self._depths[member] = depth
        else:
            self._depths.pop(member, None)

    def kept(self, member: int) -> Sequence[Lease]:
        """The leases reserved for `member`, oldest first."""
        return self._queues.get(member, ())

    def members(self) -> list[int]:
        """Members that have reserved leases."""
        return list(self._queues)

    def untold(self, member: int) -> list[Lease]:
        """Leases that are reserved for `member` and that it does not know."""
        told = self._told.get(member, -1)
        return [lease for lease in self._queues.get(member, ()) if lease.id > told]

    def keep_for_all(self, members: Sequence[int], next_fresh: Callable[[], Lease | None]) -> None:
        """Reserve one more lease for each member, in order, as long as there are any."""
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
        """Fill all queues to their depth in turns, in member order, `num_at_once` leases a turn.

        A last turn with too few leases is dealt evenly, as grants are.

        Args:
            num_left: how many fresh leases there are, counted up to its argument.
            num_single: the first so many of a queue come in turns of one.
            in_step: all members take a turn if one is short, so that the order does not depend on
                who comes first.
        """
        short = sorted(
            member
            for member, depth in self._depths.items()
            if len(self._queues.get(member, ())) < depth
        )
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
            short = [
                member
                for member in short
                if len(self._queues.get(member, ())) < self._depths[member]
            ]

    def news(self, member: int) -> tuple[Lease, ...]:
        """As ``untold``; the member is told of them now."""
        queue = self._queues.get(member)
        told = self._told.get(member, -1)
        if not queue or queue[-1].id <= told:
            return ()
        self._told[member] = queue[-1].id
        return tuple(lease for lease in queue if lease.id > told)

    def oldest(self, member: int) -> Lease | None:
        """The lease reserved for `member` that comes next; it stays reserved."""
        queue = self._queues.get(member)
        return queue[0] if queue else None

    def take(self, member: int) -> Lease:
        """Take the next lease reserved for `member`."""
        return self._pop(member, 0)

    def take_from_any(self) -> Lease | None:
        """Take the newest lease of the longest queue; None if none is reserved."""
        if not self._queues:
            return None
        longest = max(sorted(self._queues), key=lambda member: len(self._queues[member]))
        return self._pop(longest, -1)

    def _pop(self, member: int, index: int) -> Lease:
        queue = self._queues[member]
        lease = queue.pop(index)
        if not queue:
            del self._queues[member]
        return lease

    def drop(self, is_over: Callable[[Lease], bool]) -> list[Lease]:
        """Drop all leases for which `is_over`; returns them."""
        dropped = [lease for queue in self._queues.values() for lease in queue if is_over(lease)]
        for member, queue in list(self._queues.items()):
            queue[:] = [lease for lease in queue if not is_over(lease)]
            if not queue:
                del self._queues[member]
        return dropped

    def forget(self, member: int) -> list[Lease]:
        """Stop prefetching for `member`; returns the leases that were reserved for it."""
        self._depths.pop(member, None)
        self._told.pop(member, None)
        return self._queues.pop(member, [])

    def state(self) -> dict[str, Any]:
        """The whole state, as JSON."""
        return {
            "depths": sorted(map(list, self._depths.items())),
            "kept": [
                [member, [lease.id for lease in self._queues[member]]]
                for member in sorted(self._queues)
            ],
            "told": sorted(map(list, self._told.items())),
        }

    def load(self, state: dict[str, Any], by_id: Callable[[int], Lease]) -> None:
        """Restore a `state()`; `by_id` gives the leases."""
        self._depths = dict(state["depths"])
        self._queues = {member: list(map(by_id, ids)) for member, ids in state["kept"]}
        self._told = dict(state["told"])
