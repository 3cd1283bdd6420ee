"""One rank of a measurement of collectives, in a process of its own: calls for the clock.

The question comes from collectives.py, which makes as many of these as there are ranks. Buffers are
of zeros, which stay what they are however often they are added. This module must not know what the
times are compared with.
"""

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives import parse
from ..collectives.host import RoundOfKind
from ..collectives.transfers import Action, Operation
from ..exchange.scheduled import ScheduledCollective
from .apart import Answer
from .clock import elapsed_s

NATIVE = "gloo"
HAVE_NATIVE = (Operation.ALL_REDUCE, Operation.BROADCAST, Operation.REDUCE)
_PATIENCE = datetime.timedelta(seconds=60)


class CollectiveSeat:
    """One rank, in a process of its own; `Apart` makes it."""

    def __init__(self, rank: int, num_ranks: int, meeting: str) -> None:
        torch.set_num_threads(1)
        self._rank, self._size = rank, num_ranks
        self._made: dict[str, ScheduledCollective] = {}
        where = f"file://{meeting}"
        dist.init_process_group(
            NATIVE, init_method=where, rank=rank, world_size=num_ranks, timeout=_PATIENCE
        )

    def calls(self, name: str, operation: str, num_bytes: int, count: int) -> Answer:
        """So many calls of a collective, one after the other."""
        what = Operation(operation)
        buffer = torch.zeros(num_bytes // 4 * (self._size if what is Operation.ALL_TO_ALL else 1))
        if name == NATIVE:
            call = self._native(what, buffer)
        else:
            made = self._made.setdefault(name, ScheduledCollective(parse(name, self._size)))
            call = lambda: made.run(buffer, what)  # noqa: E731
        return self._timed(call, count)

    def rounds(self, kind: str, action: str, num_bytes: int, count: int) -> Answer:
        """Rounds of one kind, see `RoundOfKind`, with messages of so many bytes."""
        rounds = ScheduledCollective(RoundOfKind(self._size, kind, Action(action)))
        buffer = torch.zeros(num_bytes // 4 * self._size)
        return self._timed(lambda: rounds.all_reduce(buffer), count)

    def copy(self, num_bytes: int) -> Answer:
        """One buffer copied to another."""
        one, other = torch.zeros(num_bytes // 4), torch.zeros(num_bytes // 4)
        return self._timed(lambda: one.copy_(other), 5)

    def check(self, name: str) -> Answer:
        """Whether its all-reduce adds up."""
        buffer = torch.full((self._size + 1,), float(self._rank + 1))
        ScheduledCollective(parse(name, self._size)).all_reduce(buffer)
        return {"is_right": bool((buffer == self._size * (self._size + 1) / 2).all())}

    def close(self) -> Answer:
        """Leave the group."""
        dist.destroy_process_group()
        return {}

    def _timed(self, call: Callable[[], object], count: int) -> dict[str, Any]:
        call()
        dist.barrier()
        return {"seconds": elapsed_s(call, count) / count}

    def _native(self, operation: Operation, buffer: Tensor) -> Callable[[], object]:
        if operation is Operation.ALL_REDUCE:
            return lambda: dist.all_reduce(buffer)
        if operation is Operation.BROADCAST:
            return lambda: dist.broadcast(buffer, src=0)
        return lambda: dist.reduce(buffer, dst=0)
