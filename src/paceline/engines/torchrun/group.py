"""The process groups of one rank, made beside any that the script makes.

    words, bytes of a CPU   gloo        bytes of a GPU   NCCL        liveness   gloo, a receive

    rank 0  <--  rank 1  <--  rank 2  <--  rank 0     each waits for a word that the next one sends
                                                      as it leaves in order; a death breaks the wait

Between CPUs of one machine a small sum that all wait for goes along a tree, message by message:
gloo's own all-reduce wakes two more threads in each rank, and its ring sends both ways at once.

A process that ends closes its connections, so a death is noticed within milliseconds, also while
the script computes. A machine that is gone (power, cable) closes none: on idle connections between
machines the kernel checks whether the other end is there.

The groups are not registered with torch: ``init_process_group`` and ``destroy_process_group`` of
the script touch none of them. Above 300 lines with all the ways in which an end is noticed. This
module must not know what the bytes are.
"""

import datetime
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NoReturn

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from ...collectives import parse
from ...errors import LinkError
from ...exchange.group import Made, Messages, Parcel, Pending, TorchGroup, plain
from ...exchange.scheduled import ScheduledCollective
from ...spread.group import PeerGroup
from .place import MeetingPlace
from .world import RankOfWorld

_MEET_S = 30.0
_LONGEST = datetime.timedelta(days=30)
"""Others may wait for a rank that evaluates or saves by itself; a death is noticed at once."""
_REPORT_S = 10.0
"""Time for the end of the run to be reported after a connection has broken."""
_LEAVE_S = 5.0
_SMALL_BYTES = 1 << 20
"""The largest sum along a tree."""
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}
"""Seconds of silence, seconds between probes, number of probes: a machine is gone after a minute. A
network switch restarts faster."""
_TAG: Final = 7001
"""The tag of the messages with which ranks leave; the script's own sends are in other groups."""


class RankGroup(TorchGroup):
    """The collective operations of this rank with all others.

    Args:
        lost: called with the next rank when it has died.
        is_near: whether all are on one machine.

    Raises:
        LinkError: the ranks cannot reach each other.
    """

    patience = _LONGEST

    def __init__(
        self,
        place: MeetingPlace,
        rank: RankOfWorld,
        lost: Callable[[int], None],
        *,
        is_near: bool = False,
    ) -> None:
        self._place, self._rank, self._lost = place, rank, lost
        self.rank, self.size = rank.rank, rank.size
        self._store = place.client("gloo")
        try:
            self._gloo: Any = dist.ProcessGroupGloo(
                self._store, rank.rank, rank.size, datetime.timedelta(seconds=_MEET_S)
            )
        except RuntimeError as error:
            raise LinkError(
                f"worker {rank.rank} ({socket.gethostname()}) was not connected to all others "
                f"within {_MEET_S:.0f} s ({_first_line(error)}): gloo may be bound to an interface "
                "that they cannot reach; export GLOO_SOCKET_IFNAME=eth0 (ip -brief address lists "
                "the names here)"
            ) from None
        self._gloo._set_default_timeout(_LONGEST)
        self._nccl: Any = None
        self._tree = ScheduledCollective(parse("tree", self.size), self) if is_near else None
        self._is_leaving = False
        self._watch = threading.Thread(target=self._watch_next, daemon=True)
        self._watch.start()

    # -- collective operations ------------------------------------------------------------------

    def all_reduce(
        self, tensor: Tensor, *, is_maximum: bool = False, at_once: bool = False
    ) -> Pending:
        is_small = tensor.device.type == "cpu" and tensor.nbytes <= _SMALL_BYTES
        if not (at_once and is_small and self._tree is not None):
            return super().all_reduce(tensor, is_maximum=is_maximum, at_once=at_once)
        self._tree.all_reduce(plain(tensor), is_maximum=is_maximum)
        return Made()

    def begin_to_share(self, tensor: Tensor) -> Pending:
        """Start to broadcast rank 0's bytes, on a CPU, into the tensors of all others."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        return self._watched(self._gloo.broadcast([tensor], options))

    def _of(self, tensor: Tensor) -> Any:
        if tensor.device.type == "cpu":
            return self._gloo
        if self._nccl is None:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _LONGEST
            self._nccl = dist.ProcessGroupNCCL(
                self._place.client("nccl"), self._rank.rank, self._rank.size, options
            )
        return self._nccl

    def _devices(self, device: torch.device) -> tuple[torch.device, ...]:
        return ()  # each group is of one backend

    def _watched(self, work: Any) -> Pending:
        return _Watched(self, work)

    def swap(self, sent: Sequence[Parcel], received: Sequence[Parcel]) -> None:
        try:
            super().swap(sent, received)
        except RuntimeError as error:
            self.break_off(error)

    def break_off(self, error: RuntimeError) -> NoReturn:
        """A rank has died: wait for the report of the rank that noticed it first, then raise."""
        time.sleep(_REPORT_S)
        raise LinkError(
            f"worker {self._rank.rank} has lost the others ({_first_line(error)})"
        ) from None

    # -- liveness -------------------------------------------------------------------------------

    def _watch_next(self) -> None:
        next_rank = (self._rank.rank + 1) % self._rank.size
        word = torch.zeros(1, dtype=torch.uint8)
        try:
            # Without a timeout of its own it would use the one for meeting, which breaks all
            # connections when it expires.
            self._gloo.recv([word], next_rank, _TAG).wait(_LONGEST)
        except RuntimeError:
            if not self._is_leaving:
                self._lost(next_rank)

    def leave(self) -> bool:
        """Leave in order, with all others; return whether the next one did, too."""
        self._is_leaving = True
        previous_rank = (self._rank.rank - 1) % self._rank.size
        try:
            self._gloo.send([torch.ones(1, dtype=torch.uint8)], previous_rank, _TAG).wait()
        except RuntimeError:
            return False
        self._watch.join(_LEAVE_S)
        return not self._watch.is_alive()


class MachineKeepalives:
    """Reports machines that disappear without closing their connections.

        rank 0 --> rank 1 --> rank 2 --> rank 0      connections to the next rank and to the store

    Nothing is sent over these connections and nobody accepts them: the kernels probe and answer,
    also for a stopped process. Keepalives on gloo's own connections would work only while nothing
    is in flight: unacknowledged bytes are sent again for a quarter of an hour. That is how long it
    takes if one of these connections cannot be opened.

    Args:
        lost: called with the next rank when its machine is gone.
        unreachable: called when the store's machine is gone.
    """

    def __init__(
        self,
        place: MeetingPlace,
        rank: RankOfWorld,
        lost: Callable[[int], None],
        unreachable: Callable[[], None],
    ) -> None:
        next_rank = (rank.rank + 1) % rank.size
        store = place.client("keepalives")
        store.set(str(rank.rank), self._listen())
        address, _, port = store.get(str(next_rank)).decode().rpartition(" ")
        ends = [((rank.address, rank.port), unreachable)]
        if address:  # in a thread, since the store may be on that machine: reporting takes long
            report = threading.Thread(target=lost, args=(next_rank,), daemon=True)
            ends.append(((address, int(port)), report.start))
        threading.Thread(target=_watch_machines, args=(ends,), daemon=True).start()

    def _listen(self) -> str:
        """The address to which the previous rank connects; "": it cannot."""
        try:
            address = _own_address()
            kind = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._server = socket.create_server((address, 0), family=kind)
        except OSError:
            return ""
        return f"{address} {self._server.getsockname()[1]}"


def _watch_machines(ends: Sequence[tuple[tuple[str, int], Callable[[], None]]]) -> None:
    """Watch addresses, each with a callback for when it stops answering, until all have ended."""
    with selectors.DefaultSelector() as selector:
        for address, callback in ends:
            with suppress(OSError):
                link = socket.create_connection(address, timeout=_MEET_S)
                keep_alive(link)
                selector.register(link, selectors.EVENT_READ, callback)
        while selector.get_map():
            for key, _ in selector.select():
                selector.unregister(key.fileobj)
                if _is_cut_off(key.fileobj):
                    key.data()


def keep_alive(link: socket.socket) -> None:
    """Have the kernel probe whether the other machine is there; reads wait without a limit."""
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # else the system's default, two hours
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _is_cut_off(link: Any) -> bool:
    """Whether the machine does not answer; a process that ended is noticed by gloo's connection."""
    try:
        link.recv(1)
    except ConnectionError:
        return False
    except OSError:
        return True
    return False


def _own_address() -> str:
    """The address at which other ranks reach this one, as gloo finds it."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    families = (socket.AF_INET, socket.AF_INET6)
    addresses = [
        address
        for address in psutil.net_if_addrs().get(interface, ())
        if address.family in families
    ]
    if addresses:
        return str(addresses[0].address)
    resolved = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    return str(resolved[0][4][0])


class RankPart(TorchGroup, PeerGroup):
    """A part of the ranks, numbered within it; a death in it counts as one in the whole group.

    Args:
        name: unique among the parts.
        ranks: the ranks of the part, in the order of their numbers in it.
    """

    patience = _LONGEST

    def __init__(
        self, whole: RankGroup, place: MeetingPlace, name: str, ranks: Sequence[int]
    ) -> None:
        self._whole = whole
        self.rank, self.size = ranks.index(whole.rank), len(ranks)
        self._store = place.client(f"part {name}")
        self._gloo: Any = dist.ProcessGroupGloo(
            self._store, self.rank, self.size, datetime.timedelta(seconds=_MEET_S)
        )
        self._gloo._set_default_timeout(_LONGEST)

    def begin_send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        return self._watched(Messages([self._gloo.send([plain(tensor)], peer, tag)], self.patience))

    def begin_receive(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        return self._watched(Messages([self._gloo.recv([plain(tensor)], peer, tag)], self.patience))

    def _of(self, tensor: Tensor) -> Any:
        return self._gloo

    def _watched(self, work: Any) -> Pending:
        return _Watched(self._whole, work)


class _Watched:
    """An operation whose error, at a death, names the cause."""

    def __init__(self, group: RankGroup, work: Any) -> None:
        self._group, self._work = group, work

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._group.break_off(error)


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines() or [type(error).__name__]
    return text[0].rpartition("] ")[2][:120] or text[0][:120]


def why_unreachable() -> str:
    """Return why other machines cannot reach this one by gloo, which uses its host name's address.

    "": they can, as far as this machine can tell.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return ""
    name = socket.gethostname()
    try:
        resolved = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return f"its host name {name!r} resolves to no address"
    addresses = sorted({str(entry[4][0]) for entry in resolved})
    is_loopback = all(address.startswith("127.") or address == "::1" for address in addresses)
    return f"its host name {name!r} resolves to {addresses[0]}" if is_loopback else ""
