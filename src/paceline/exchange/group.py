"""What all members of a run do together with tensors: the contract, and torch's own way.

    member 0   all_reduce ...... wait |          each begins an operation, and waits for it when it
    member 1      all_reduce .... wait |         needs what comes of it

    torch        torch.distributed's own, NCCL or gloo
    scheduled    a sum along a schedule of `collectives/` (scheduled.py)
    ranks        torch's own on groups of the torchrun engine (engines/torchrun/group.py)

All members begin the same operations in one order. What they come to is the same bits in all of
them: nobody could put a member right that has drifted away. This module must not know what the
tensors are.
"""

import abc
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Pending(Protocol):
    """An operation under way."""

    def wait(self) -> object:
        """Return when its tensors are what was promised.

        Raises:
            RuntimeError, LinkError: a member is gone.
        """


class MemberGroup(abc.ABC):
    """The members that sum together.

    Attributes:
        rank: of this one, from 0.
        size: how many there are.
    """

    rank: int
    size: int

    @abc.abstractmethod
    def all_reduce(
        self, tensor: Tensor, *, is_maximum: bool = False, at_once: bool = False
    ) -> Pending:
        """In place: the sum of all members' tensors, or their maximum.

        Args:
            tensor: contiguous, of any shape and type of numbers, the same in all.
            at_once: whether all wait for it now, and compute nothing meanwhile.
        """

    @abc.abstractmethod
    def all_gather(self, mine: Tensor, out: Tensor) -> Pending:
        """``out`` becomes what all have, by rank: ``(size * n,)`` of ``(n,)``.

        Args:
            mine: may lie where it comes to lie in ``out``.
        """

    @abc.abstractmethod
    def all_to_all(self, mine: Tensor, out: Tensor) -> Pending:
        """Part j of ``mine`` goes to member j: its ``out`` has this one's as part ``rank``.

        Args:
            mine, out: ``(size * n,)``, of one type.
        """


class Made:
    """An operation that was made at once."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


_TIMEOUT = datetime.timedelta(minutes=5)
_DIRECT_BYTES = 16 << 10
_SWAP_TAG, _DIRECT_TAG = 0, 1


class Parcel(NamedTuple):
    """One message: contiguous numbers for a peer, or room for what comes from it."""

    peer: int
    tensor: Tensor


class TorchGroup(MemberGroup):
    """Members of a process group of ``torch.distributed``.

    Args:
        group: the default one where none is given. It stays whose it is: nothing is ended here.

    Raises:
        ValueError: there is none.
    """

    patience: datetime.timedelta | None = None
    """So long a message may take; None: as the group was made."""

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

    def _each_to_each(self, parts: Sequence[Tensor], out: Tensor) -> Pending:
        """Part j to member j, all at once."""
        rows = out.view(self.size, -1).unbind()
        if rows[self.rank].data_ptr() != parts[self.rank].data_ptr():
            rows[self.rank].copy_(parts[self.rank])
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        sent = [Parcel(peer, parts[peer]) for peer in others]
        received = [Parcel(peer, rows[peer]) for peer in others]
        return self._watched(self._post(sent, received, _DIRECT_TAG))

    def swap(self, sent: Sequence[Parcel], received: Sequence[Parcel]) -> None:
        """Messages from member to member, those of one round; returns when all have arrived.

        Between two members they arrive in the order in which they are given.

        Raises:
            RuntimeError, LinkError: a member is gone.
        """
        if sent or received:
            self._post(sent, received, _SWAP_TAG).wait()

    def _post(self, sent: Sequence[Parcel], received: Sequence[Parcel], tag: int) -> "Messages":
        """Messages on their way; those of one tag arrive in order."""
        first = [*sent, *received][0].tensor
        group, device = self._of(first), first.device
        are_one = device.type != "cpu"
        if are_one:  # as torch.distributed.batch_isend_irecv: else NCCL waits for one after another
            group._start_coalescing(*self._devices(device))
        works = [group.recv([one.tensor], one.peer, tag) for one in received]
        works += [group.send([one.tensor], one.peer, tag) for one in sent]
        if are_one:
            works = [group._end_coalescing(*self._devices(device))]
        return Messages(works, self.patience)

    def _of(self, tensor: Tensor) -> Any:
        """The process group that carries it."""
        return self._group

    def _devices(self, device: torch.device) -> tuple[torch.device, ...]:
        """How a group of several backends is told which one is meant."""
        return (device,)

    def _watched(self, work: Any) -> Pending:
        """The operation as whoever waits for it sees it."""
        pending: Pending = work
        return pending


class Messages:
    """Several under way.

    Args:
        patience: so long each may take; None: as the group was made.
    """

    def __init__(self, works: Sequence[Any], patience: datetime.timedelta | None) -> None:
        self._works, self._patience = works, patience

    def wait(self) -> None:
        for work in self._works:
            work.wait() if self._patience is None else work.wait(self._patience)


def _is_direct(mine: Tensor) -> bool:
    """Whether members send to each other: gloo's own operations use a link one way at a time.

    Of 256 KiB between two over 100 Mbit/s its all-gather takes 28 ms, its all-to-all 39, messages
    22. Where little is sent rounds count, and its own have fewer.
    """
    return mine.device.type == "cpu" and mine.nbytes >= _DIRECT_BYTES


def plain(tensor: Tensor) -> Tensor:
    """As numbers that every process group knows."""
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


_met_at = ""
"""Where the members of the default group have met; empty: it is not of `start_group`."""


def start_group(rendezvous: str, seat: int, num_seats: int, device: torch.device) -> TorchGroup:
    """All members of the run, by their seats; where the script has a default group already, that.

    Args:
        rendezvous: path of a file that other members have not met at.
    """
    global _met_at
    if _met_at not in ("", rendezvous) and dist.is_initialized():
        dist.destroy_process_group()  # one of them has died
        Path(_met_at).unlink(missing_ok=True)
    if not dist.is_initialized():
        _met_at = rendezvous
        store = dist.FileStore(rendezvous, num_seats)  # a URL would end at a # or ? in the path
        store.set_timeout(_TIMEOUT)
        dist.init_process_group(
            "gloo" if device.type == "cpu" else None,
            store=store,
            rank=seat,
            world_size=num_seats,
            timeout=_TIMEOUT,
        )
    return TorchGroup()
