"""Sums in memory that all ranks of one machine map: each adds up its share of everybody's numbers.

    memory of rank 0   | a0 | b0 |        READY     begun so many sums: their numbers are written
    memory of rank 1   | a1 | b1 |        DONE      added its share of so many, in all memories

    rank 0   writes a0 b0, READY .. all READY: a = a0 + a1 -> both memories, DONE .. all DONE
    rank 1   writes a1 b1, READY .. all READY: b = b0 + b1 -> both memories, DONE .. all DONE

Every number is read once by who adds it and written once to each memory, in chunks that stay in the
cache in between; no socket, no thread. A rank works off the sums that are ready whenever it begins
another, so that what is left at the end is what the others were late with. One rank computes each
number, so all have the same bits.

Each rank makes an anonymous memory of the same size; the others open it under /proc, where the
kernel lets processes of one user do so. Source of the layout: NVSHMEM's symmetric memory, which
PyTorch has for GPUs. This module must not know what is summed, or why.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from ...exchange.group import Made, MemberGroup, Pending, plain
from ...store.memory import LINE_BYTES, SharedMemory, Words
from ...store.sums import CHUNK_BYTES

_READY, _DONE = 0, 8
"""Words, on lines of their own."""
_HEADER_BYTES: Final = 4096
_WAIT_S = 0.1
_Chunk = tuple[Tensor, list[Tensor]]
"""Numbers of this rank's share: in its own memory, and in all others."""


def memory_domain() -> str:
    """Return what processes have in common that can map each other's memory; "": they cannot."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    except (OSError, AttributeError):
        return ""


class SymmetricMemory:
    """Memory of ``num_bytes`` in each rank, mapped by all.

    Args:
        memories: by rank, each with a header.
        rank: of this process.
    """

    def __init__(self, memories: Sequence[SharedMemory], rank: int, num_bytes: int) -> None:
        self._words = [Words(memory) for memory in memories]
        parts = [memory.tensor()[_HEADER_BYTES:][:num_bytes] for memory in memories]
        self._rank, self.own = rank, parts.pop(rank)
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
                pass  # a rank that dies ends this process, see life.py


class _Sum:
    """A sum that was begun."""

    def __init__(self, memory: SymmetricMemory, number: int) -> None:
        self._memory, self._number = memory, number

    def wait(self) -> None:
        self._memory.finish(self._number)


class SymmetricGroup(MemberGroup):
    """Ranks of one machine: sums of what lies in symmetric memory are made there.

    Args:
        below: does everything else.
        note: tells the user why there is none; then ``below`` makes these sums, too.
    """

    def __init__(self, below: MemberGroup, note: Callable[[str], None]) -> None:
        self.rank, self.size = below.rank, below.size
        self._below, self._memory, self._note = below, list[SymmetricMemory](), note

    def zeros(self, num_bytes: int) -> Tensor:
        own = SharedMemory.create(_HEADER_BYTES + -(-num_bytes // LINE_BYTES) * LINE_BYTES)
        memories, refusal = _open_all(self._below, own)
        if not refusal:
            self._memory.append(SymmetricMemory(memories, self.rank, num_bytes))
        for memory in {*memories, own}:
            memory.close_descriptor()  # what is mapped stays
        if not refusal:
            return self._memory[-1].own
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


def _open_all(group: MemberGroup, own: SharedMemory) -> tuple[list[SharedMemory], str]:
    """Open all ranks' memories, by rank; also return why that failed in one of them, or "".

    All have tried to open all when it returns.
    """
    rows, refusal = torch.empty(4 * group.size, dtype=torch.int64), ""
    group.all_gather(torch.tensor([os.getpid(), own.fd, *_identity(own.fd)]), rows).wait()
    memories = list[SharedMemory]()
    for rank, (pid, number, *identity) in enumerate(rows.view(-1, 4).tolist()):
        try:
            memories.append(own if rank == group.rank else _open(pid, number, identity))
        except OSError as error:
            refusal = f"worker {group.rank} cannot map the memory of worker {rank} ({error})"
            break
    failed = torch.tensor([int(bool(refusal))])
    group.all_reduce(failed).wait()
    return memories, refusal or "another worker cannot map this one's" * bool(failed.item())


def _open(pid: int, number: int, identity: Sequence[int]) -> SharedMemory:
    """Open another process's descriptor; OSError: it may not, or it is another memory."""
    fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    if _identity(fd) != tuple(identity):
        os.close(fd)
        raise OSError(f"process {pid} has another file there")
    return SharedMemory(fd)


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
