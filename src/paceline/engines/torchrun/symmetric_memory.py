"""Sums in memory that all ranks of one machine map: each adds up its share of everybody's numbers.

    memory of rank 0   | a0 | b0 |        READY     begun so many sums: their numbers are written
    memory of rank 1   | a1 | b1 |        DONE      added its share of so many, in all memories

    rank 0   writes a0 b0, READY .. all READY: a = a0 + a1 -> both memories, DONE .. all DONE
    rank 1   writes a1 b1, READY .. all READY: b = b0 + b1 -> both memories, DONE .. all DONE

Every number is read once by who adds it and written once to each memory, in chunks that stay in the
cache in between; no socket, no thread. A rank adds what all have begun whenever it begins another
sum or waits for one, and not in between: a sum is complete only once every rank waits for it, or
has begun a later one. One rank computes each number, so all have the same bits.

Each rank makes an anonymous memory of the same size, which the others map (`mapped.map_all`).
Source of the layout: NVSHMEM's symmetric memory, which PyTorch has for GPUs. This module must not
know what is summed, or why.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from ...exchange.group import Made, MemberGroup, Pending, plain
from ...exchange.mapped import map_all
from ...store.memory import LINE_BYTES, SharedMemory, Words
from ...store.sums import CHUNK_BYTES

_READY, _DONE = 0, 8
"""Words, on lines of their own."""
_HEADER_BYTES: Final = 4096
_WAIT_S = 0.1
"""Between looks at whether the others will come."""
_Chunk = tuple[Tensor, list[Tensor]]
"""Numbers of this rank's share: in its own memory, and in all others."""


class SymmetricMemory:
    """Memory in each rank that all have mapped.

    Args:
        memories: by rank: a page with the words, then ``num_bytes`` bytes.
        rank: of this process.
        check: called now and then while this rank waits; raises if no other will come.
    """

    def __init__(
        self,
        memories: Sequence[SharedMemory],
        rank: int,
        num_bytes: int,
        check: Callable[[], None],
    ) -> None:
        self._words = [Words(memory) for memory in memories]
        parts = [memory.tensor()[_HEADER_BYTES:][:num_bytes] for memory in memories]
        self._rank, self.own, self._check = rank, parts.pop(rank), check
        self._others = parts
        self._chunks: dict[tuple[int, int, torch.dtype], list[_Chunk]] = {}
        self._begun = deque[list[_Chunk]]()
        self._num_begun = self._num_added = 0

    def holds(self, tensor: Tensor) -> bool:
        """Return whether this tensor lies in the own memory."""
        first = tensor.data_ptr() - self.own.data_ptr()
        return tensor.device.type == "cpu" and 0 <= first < len(self.own)

    def begin(self, tensor: Tensor) -> Pending:
        """Begin to sum a contiguous tensor of the own memory with those at its place in the others.

        It belongs to the sum until that is waited for.
        """
        place = (tensor.data_ptr() - self.own.data_ptr(), tensor.numel(), tensor.dtype)
        if place not in self._chunks:
            self._chunks[place] = self._own_share(*place)
        self._begun.append(self._chunks[place])
        self._num_begun += 1
        self._words[self._rank].set_and_wake(_READY, self._num_begun)
        while self._begun and all(words[_READY] > self._num_added for words in self._words):
            self._add()
        return _Sum(self, self._num_begun)

    def finish(self, number: int) -> None:
        """Wait until this sum and all before it are whole in the own memory."""
        while self._num_added < number:
            self._wait_for_all(_READY, self._num_added + 1)
            self._add()
        self._wait_for_all(_DONE, number)

    def _own_share(self, first: int, count: int, dtype: torch.dtype) -> list[_Chunk]:
        """Return this rank's share of ``count`` numbers, in chunks."""
        size, num_ranks = dtype.itemsize, len(self._words)
        line, most = max(1, LINE_BYTES // size), CHUNK_BYTES // size
        each = -(-count // (num_ranks * line)) * line
        start, stop = min(count, self._rank * each), min(count, (self._rank + 1) * each)

        def cut(memory: Tensor, begin: int) -> Tensor:
            end = min(stop, begin + most)
            return memory[first + begin * size : first + end * size].view(dtype)

        return [
            (cut(self.own, begin), [cut(other, begin) for other in self._others])
            for begin in range(start, stop, most)
        ]

    def _add(self) -> None:
        """Add up this rank's share of the oldest sum, which all have begun."""
        for own, others in self._begun.popleft():
            for other in others:
                own.add_(other)
            for other in others:
                other.copy_(own)
        self._num_added += 1
        self._words[self._rank].set_and_wake(_DONE, self._num_added)

    def _wait_for_all(self, word: int, number: int) -> None:
        for words in self._words:
            while not words.wait_while(word, lambda value: value < number, _WAIT_S):
                self._check()


class _Sum:
    """A sum that was begun."""

    def __init__(self, memory: SymmetricMemory, number: int) -> None:
        self._memory, self._number = memory, number

    def wait(self) -> None:
        self._memory.finish(self._number)


class SymmetricGroup(MemberGroup):
    """Ranks of one machine: sums of what lies in symmetric memory are made there.

    Args:
        below: does everything else, and these sums, too, if a rank cannot map another's memory.
        note: tells the user that, and why.
        check: called now and then while this rank waits; raises if no other will come.
    """

    def __init__(
        self, below: MemberGroup, note: Callable[[str], None], check: Callable[[], None]
    ) -> None:
        self.rank, self.size = below.rank, below.size
        self._below, self._note, self._check = below, note, check
        self._memory: list[SymmetricMemory] = []

    def zeros(self, num_bytes: int) -> Tensor:
        own = SharedMemory.create(_HEADER_BYTES + -(-num_bytes // LINE_BYTES) * LINE_BYTES)
        memories, refusal = map_all(own, self._below)
        if memories is not None:
            memory = SymmetricMemory(memories, self.rank, num_bytes, self._check)
            self._memory.append(memory)
            return memory.own
        if refusal:
            self._note(f"{refusal}: gradients are sent by torch.distributed, which takes longer")
        return super().zeros(num_bytes)

    def all_reduce(
        self, tensor: Tensor, *, is_maximum: bool = False, at_once: bool = False
    ) -> Pending:
        for memory in () if is_maximum else self._memory:
            if memory.holds(tensor):
                return memory.begin(plain(tensor)) if tensor.numel() else Made()
        return self._below.all_reduce(tensor, is_maximum=is_maximum, at_once=at_once)

    def all_gather(self, mine: Tensor, out: Tensor) -> Pending:
        return self._below.all_gather(mine, out)

    def all_to_all(self, mine: Tensor, out: Tensor) -> Pending:
        return self._below.all_to_all(mine, out)
