"""Collective operations of a run's members on tensors: the contract, and torch's own.

    member 0   all_reduce ...... wait |          each begins an operation, and waits for it when it
    member 1      all_reduce .... wait |         needs the result

    torch        torch.distributed's own, NCCL or gloo
    scheduled    a sum along a schedule of `collectives/` (scheduled.py)
    ranks        torch's own on groups of the torchrun engine (engines/torchrun/group.py)
    mapped       in memory that processes of one machine map (mapped.py)
    symmetric    sums in such memory (engines/torchrun/symmetric_memory.py)

All members begin the same operations in the same order, and wait for them. An operation may go on
only while its members begin others or wait, so none may wait for anything else meanwhile. The
results are the same bits in all members, since nothing corrects a member that drifted away. This
module must not know what the tensors are.
"""

import abc
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]  # no stubs


class Pending(Protocol):
    """An operation in flight."""

    def wait(self) -> object:
        """Return when its tensors hold the result.

        Raises:
            RuntimeError, LinkError: a member is gone.
        """


class MemberGroup(abc.ABC):
    """The members that do collective operations together.

    Attributes:
        rank: of this member, from 0.
        size: number of members.
    """

    rank: int
    size: int

    def zeros(self, num_bytes: int) -> Tensor:
        """Return zeroed bytes of a CPU, ``(num_bytes,)``, which this group sums the fastest.

        All members call it alike.
        """
        return torch.zeros(num_bytes, dtype=torch.uint8)

    @abc.abstractmethod
    def all_reduce(
        self, tensor: Tensor, *, is_maximum: bool = False, at_once: bool = False
    ) -> Pending:
        """Begin to sum all members' tensors, or take their maximum, in place.

        Args:
            tensor: contiguous; shape and dtype are free, but equal in all members.
            at_once: whether all wait for it now, and compute nothing meanwhile.
        """

    @abc.abstractmethod
    def all_gather(self, mine: Tensor, out: Tensor) -> Pending:
        """Begin to gather all members' ``(n,)`` tensors into ``out``, ``(size * n,)``, by rank.

        Args:
            mine: may be this member's part of ``out``.
        """

    @abc.abstractmethod
    def all_to_all(self, mine: Tensor, out: Tensor) -> Pending:
        """Begin to send part j of ``mine`` to member j, which gets it as part ``rank`` of ``out``.

        Args:
            mine, out: ``(size * n,)``, of one dtype.
        """


class PeerGroup(MemberGroup):
    """A group whose members can also send to each other."""

    @abc.abstractmethod
    def begin_send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Begin to send a contiguous tensor, which must not change until it is sent."""

    @abc.abstractmethod
    def begin_receive(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Begin to receive into a tensor; messages of one tag from one peer arrive in order."""


class Made:
    """An operation that is already complete."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


_TIMEOUT = datetime.timedelta(minutes=5)
_DIRECT_BYTES = 16 << 10
_SWAP_TAG, _DIRECT_TAG = 0, 1


class Parcel(NamedTuple):
    """One message: contiguous numbers for a peer, or memory to receive from it."""

    peer: int
    tensor: Tensor


class TorchGroup(PeerGroup):
    """Members of a process group of ``torch.distributed``.

    Args:
        group: None: the default group. The caller owns it; it is not destroyed here.

    Raises:
        ValueError: there is no default group.
    """

    patience: datetime.timedelta | None = None
    """Timeout of a message; None: the group's."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group: Any = group or dist.group.WORLD

    def all_reduce(
        self, tensor: Tensor, *, is_maximum: bool = False, at_once: bool = False
    ) -> Pending:
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX if is_maximum else dist.ReduceOp.SUM
        return self._watched(self._of(tensor).allreduce([plain(tensor)], options))

    def all_gather(self, mine: Tensor, out: Tensor) -> Pending:
        mine, out = plain(mine), plain(out)
        if _is_direct(mine):
            return self._each_to_each([mine.view(-1)] * self.size, out)
        return self._watched(self._of(mine)._allgather_base(out, mine))

    def all_to_all(self, mine: Tensor, out: Tensor) -> Pending:
        mine, out = plain(mine), plain(out)
        if _is_direct(mine):
            return self._each_to_each(mine.view(self.size, -1).unbind(), out)
        return self._watched(self._of(mine).alltoall_base(out, mine, [], []))

    def begin_send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        work = self._of(tensor).send([plain(tensor)], peer, tag)
        return self._watched(Messages([work], self.patience))

    def begin_receive(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        work = self._of(tensor).recv([plain(tensor)], peer, tag)
        return self._watched(Messages([work], self.patience))

    def _each_to_each(self, parts: Sequence[Tensor], out: Tensor) -> Pending:
        """Send part j to member j, all at once."""
        rows = out.view(self.size, -1).unbind()
        if rows[self.rank].data_ptr() != parts[self.rank].data_ptr():
            rows[self.rank].copy_(parts[self.rank])
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        sent = [Parcel(peer, parts[peer]) for peer in others]
        received = [Parcel(peer, rows[peer]) for peer in others]
        return self._watched(self._post(sent, received, _DIRECT_TAG))

    def swap(self, sent: Sequence[Parcel], received: Sequence[Parcel]) -> None:
        """Exchange the messages of one round; return when all have arrived.

        Between two members they arrive in the given order.

        Raises:
            RuntimeError, LinkError: a member is gone.
        """
        if sent or received:
            self._post(sent, received, _SWAP_TAG).wait()

    def _post(self, sent: Sequence[Parcel], received: Sequence[Parcel], tag: int) -> "Messages":
        """Start messages; those of one tag arrive in order."""
        first = [*sent, *received][0].tensor
        group, device = self._of(first), first.device
        coalesces = device.type != "cpu"
        if coalesces:  # like torch.distributed.batch_isend_irecv: else NCCL waits for each in turn
            group._start_coalescing(*self._devices(device))
        works = [group.recv([parcel.tensor], parcel.peer, tag) for parcel in received]
        works += [group.send([parcel.tensor], parcel.peer, tag) for parcel in sent]
        if coalesces:
            works = [group._end_coalescing(*self._devices(device))]
        return Messages(works, self.patience)

    def _of(self, tensor: Tensor) -> Any:
        """Return the process group for this tensor."""
        return self._group

    def _devices(self, device: torch.device) -> tuple[torch.device, ...]:
        """Return the arguments that tell a group of several backends which one to use."""
        return (device,)

    def _watched(self, work: Any) -> Pending:
        """Return the operation as the caller waits for it; subclasses may wrap it."""
        pending: Pending = work
        return pending


class Messages:
    """Several messages in flight.

    Args:
        patience: timeout of each; None: the group's.
    """

    def __init__(self, works: Sequence[Any], patience: datetime.timedelta | None) -> None:
        self._works, self._patience = works, patience

    def wait(self) -> None:
        for work in self._works:
            work.wait() if self._patience is None else work.wait(self._patience)


def _is_direct(mine: Tensor) -> bool:
    """Return whether to send point to point: gloo's operations use a link one way at a time.

    For 256 KiB between two members at 100 Mbit/s gloo's all-gather takes 28 ms, its all-to-all 39,
    messages 22. For little data the number of rounds counts, and gloo's operations have fewer.
    """
    return mine.device.type == "cpu" and mine.nbytes >= _DIRECT_BYTES


def plain(tensor: Tensor) -> Tensor:
    """Return a view with a dtype that every process group supports."""
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


_met_at = ""
"""The rendezvous of the default group; empty: `start_group` did not make it."""


def start_group(rendezvous: str, seat: int, num_seats: int, device: torch.device) -> TorchGroup:
    """Return a group of all members of the run, or the script's own default group.

    Args:
        rendezvous: path of a file that no other members have met at.
    """
    global _met_at
    if _met_at not in ("", rendezvous) and dist.is_initialized():
        dist.destroy_process_group()  # one of its members died
        Path(_met_at).unlink(missing_ok=True)
    if not dist.is_initialized():
        _met_at = rendezvous
        store = FileStore(rendezvous, num_seats)  # a URL would end at a # or ? in the path
        store.set_timeout(_TIMEOUT)
        dist.init_process_group(
            "gloo" if device.type == "cpu" else None,
            store=store,
            rank=seat,
            world_size=num_seats,
            timeout=_TIMEOUT,
        )
    return TorchGroup()
