"""The values of one key: three blocks, of which one is the newest whole version.

A push reads one block and writes another, slice by slice, and holds the lock of the slice at hand;
it takes the next lock before it leaves the last, so pushes never overtake each other and two can be
under way, one behind the other:

    block 0    | v7 . . . . . . . . . . . |    published: pulls copy it
    block 1    | v8 . . . . . . . . | ^        first push: reads v7, writes v8
    block 2    | v9 . . . | ^                  second push: reads v8, writes v9
       shard      0     1     2     3

A version is published under the lock of the last slice, by one word. A push that dies has changed
nothing that anybody sees: its chain is cut, and pushes that built on it begin again. This module
must not know keys, rules or who pushes.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from ..store.fences import HAS_ORDER
from ..store.memory import LINE_BYTES, WORD_BYTES
from ..store.region import Region
from .index import Record, Slice
from .locks import LOCK_BYTES, Lock, open_lock, prepare_lock
from .shards import CHAIN, GENERATIONS, LAST, PUBLISHED, Shards

NUM_BLOCKS = 3
_TRIES = 4
"""Copies that a pull may lose to pushes before it asks them to wait."""
_LINE_WORDS = LINE_BYTES // WORD_BYTES

Write: TypeAlias = Callable[[int | None, int, int], None]
"""``(number of the slice or None for the whole, block to read, block to write)``"""


@dataclass(frozen=True, slots=True)
class EntryFlow:
    """One push under way: heads are ``4 * version + block``."""

    chain: int
    base: int
    head: int


class Cell:
    """One key, as one process sees it.

    Args:
        record: its entry in the directory; ``prepare_cell`` has made its control words.
    """

    def __init__(self, region: Region, shards: Shards, record: Record, patience_s: float) -> None:
        self.record = record
        self._words = region.words
        self._shards = shards
        self._control = record.control // WORD_BYTES
        stride = block_bytes(record)
        self.flat = [
            region.data[start : start + record.num_bytes].view(record.dtype)
            for start in range(record.values, record.values + NUM_BLOCKS * stride, stride or 1)
        ][:NUM_BLOCKS] or [region.data[:0].view(record.dtype)] * NUM_BLOCKS
        """Per block: all elements in row-major order."""
        self.parts = [
            [flat[part.start : part.stop] for part in record.slices] for flat in self.flat
        ]
        """Per block: its slices."""
        self.blocks = [flat.view(record.shape) for flat in self.flat]
        gates = record.control + LINE_BYTES * (1 + len(record.slices))
        self._gates: list[Lock] = [
            open_lock(region, gates + i * LOCK_BYTES, f"key {record.key!r}", patience_s)
            for i in range(_num_gates(record))
        ]

    @property
    def version(self) -> int:
        return self._words[self._control + PUBLISHED] >> 2

    # -- pull -----------------------------------------------------------------------------------

    def read(self, copy: Callable[[Tensor], object]) -> int:
        """Call ``copy`` with one whole version, more than once if need be; its number."""
        words, generations = self._words, self._control + GENERATIONS
        for _ in range(_TRIES if HAS_ORDER else 0):
            head = words[self._control + PUBLISHED]
            before = words[generations + (head & 3)]
            if before & 1:
                continue  # the next version but one has begun: a newer one is published by now
            copy(self.blocks[head & 3])
            if words[generations + (head & 3)] == before:
                return head >> 2
        # While the first shard is held no push begins, and those under way write other blocks.
        first = self.record.slices[0].shard
        self._shards.enter(first, 0)
        try:
            head = words[self._control + PUBLISHED]
            copy(self.blocks[head & 3])
        finally:
            self._shards.leave(first)
        return head >> 2

    # -- push -----------------------------------------------------------------------------------

    def change(self, write: Write) -> int:
        """Write the next version, slice by slice; its number."""
        if not self._gates:
            return self._flow(write) or self._never()
        gate = self._enter_gate()
        try:
            while not (version := self._flow(write)):
                pass  # a push ahead of this one died: begin again
            return version
        finally:
            gate.release()

    def change_whole(self, write: Write) -> int:
        """Write the next version in one piece, with all slices held."""
        held: list[int] = []
        try:
            for part in self.record.slices:
                self._shards.enter(part.shard, self._control)
                held.append(part.shard)
            flow = self._begin()
            write(None, flow.base & 3, flow.head & 3)
            for number in range(len(self.record.slices)):
                self._note(number, flow)
            self._publish(flow)
        except BaseException:
            self._abandon(held)
            raise
        for shard in reversed(held):
            self._shards.leave(shard)
        return flow.head >> 2

    def _flow(self, write: Write) -> int | None:
        """One way through the slices; None when the chain was cut."""
        shards, held = self._shards, list[int]()
        try:
            flow: EntryFlow | None = None
            for number, part in enumerate(self.record.slices):
                shards.enter(part.shard, self._control)
                held.append(part.shard)
                if flow is None:
                    flow = self._begin()
                else:
                    shards.leave(held.pop(0))
                    if self._words[self._control + CHAIN] != flow.chain:
                        shards.leave(held.pop())
                        return None
                write(number, flow.base & 3, flow.head & 3)
                self._note(number, flow)
            assert flow is not None
            self._publish(flow)
        except BaseException:
            self._abandon(held)
            raise
        shards.leave(held.pop())
        return flow.head >> 2

    def _begin(self) -> EntryFlow:
        """Under the first shard: continue the push just ahead, or the published version.

        The gates let two live pushes be under way, so one at most is ahead, and of three blocks one
        is free. With two ahead one of them is dead: nothing may be built on it, and the block of
        the other is not free, so the chain is cut here and not where the dead one stopped.
        """
        words, control = self._words, self._control
        while True:
            # The chain is read first: if it is cut after this, the flow ends at its next slice; if
            # not, nothing of an older chain is published any more.
            chain = words[control + CHAIN]
            noted, ahead = words[control + _LINE_WORDS], words[control + _LINE_WORDS + 1]
            base = words[control + PUBLISHED]
            if noted != chain or ahead <= base:
                taken = {base & 3}
                break
            if (ahead >> 2) - (base >> 2) == 1:
                taken = {base & 3, ahead & 3}
                base = ahead
                break
            self._shards.cut(self.record.slices[0].shard, control)
        block = next(i for i in range(NUM_BLOCKS) if i not in taken)
        words[control + GENERATIONS + block] |= 1
        return EntryFlow(chain, base, ((base >> 2) + 1) * 4 + block)

    def _note(self, number: int, flow: EntryFlow) -> None:
        """Under the slice's shard: it is written as far as ``flow.head``."""
        at = self._control + (1 + number) * _LINE_WORDS
        self._words[at + 1] = flow.head
        self._words[at] = flow.chain

    def _publish(self, flow: EntryFlow) -> None:
        """Under the last shard, where no chain is cut meanwhile."""
        self._words[self._control + GENERATIONS + (flow.head & 3)] += 1
        self._words[self._control + PUBLISHED] = flow.head

    def _abandon(self, held: list[int]) -> None:
        for shard in reversed(held):
            self._shards.abandon(shard)

    def _enter_gate(self) -> Lock:
        for gate in self._gates:
            if gate.try_acquire():
                return gate
        gate = self._gates[threading.get_ident() // 4096 % len(self._gates)]
        gate.acquire()
        return gate

    def _never(self) -> int:
        raise AssertionError(f"the chain of {self.record.key!r}, which has one slice, was cut")


def plan_slices(
    numel: int, itemsize: int, loads_bytes: list[int], split_bytes: int
) -> tuple[Slice, ...]:
    """Large values go to all shards in even slices on borders of lines, others to the lightest.

    Args:
        loads_bytes: per shard, what it guards so far.
        split_bytes: the least size that is split.
    """
    num_shards = len(loads_bytes)
    if num_shards == 1 or numel * itemsize < split_bytes:
        return (Slice(shard=loads_bytes.index(min(loads_bytes)), start=0, stop=numel),)
    line = max(1, LINE_BYTES // math.gcd(LINE_BYTES, itemsize))
    borders = [numel * i // num_shards // line * line for i in range(num_shards)] + [numel]
    return tuple(Slice(shard=i, start=borders[i], stop=borders[i + 1]) for i in range(num_shards))


def block_bytes(record: Record) -> int:
    return -(-record.num_bytes // LINE_BYTES) * LINE_BYTES


def control_bytes(slices: tuple[Slice, ...]) -> int:
    return LINE_BYTES * (1 + len(slices)) + LOCK_BYTES * (2 if len(slices) > 1 else 0)


def prepare_cell(region: Region, record: Record) -> None:
    """Make the control words and locks of a key before it is listed; version 0 is in block 0."""
    region.words[record.control // WORD_BYTES + LAST] = record.slices[-1].shard
    gates = record.control + LINE_BYTES * (1 + len(record.slices))
    for i in range(_num_gates(record)):
        prepare_lock(region, gates + i * LOCK_BYTES)


def _num_gates(record: Record) -> int:
    """A key of one slice has its shard's lock alone: one push at a time."""
    return 2 if len(record.slices) > 1 else 0
