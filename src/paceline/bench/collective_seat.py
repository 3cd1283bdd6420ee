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
from ..collectives.transfers import Operation
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

    def messages(self, num_bytes: int, at_once: int, count: int) -> Answer:
        """Messages to the next rank and from the one before, by all ranks at the same time."""
        there = torch.zeros(num_bytes // 4)
        here = [torch.zeros(num_bytes // 4) for _ in range(at_once)]
        after, before = (self._rank + 1) % self._size, (self._rank - 1) % self._size

        def call() -> None:
            calls = [dist.P2POp(dist.irecv, one, before) for one in here]
            calls += [dist.P2POp(dist.isend, there, after) for _ in here]
            for work in dist.batch_isend_irecv(calls):
                work.wait()

        return self._timed(call, count)

    def memory(self, num_bytes: int, count: int) -> Answer:
        """Adding one buffer to another, and copying it."""
        one, other = torch.zeros(num_bytes // 4), torch.zeros(num_bytes // 4)
        added = self._timed(lambda: one.add_(other), count)
        return {**added, "copy_s": self._timed(lambda: one.copy_(other), count)["seconds"]}

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
