"""The groups of one rank: torch's own, made beside any that the script makes.

    words, bytes of a CPU   gloo        bytes of a GPU   NCCL        liveness   gloo, a receive

    rank 0  <--  rank 1  <--  rank 2  <--  rank 0     each waits for a message that the next rank
                                                      sends at an orderly end, or for its death

Between CPUs of one machine a small blocking sum goes along a tree, message by message: gloo's own
all-reduce wakes two more threads in each rank, and its ring sends both ways at the same time.

A process that ends closes its connections, so a death is known within milliseconds, also while the
script computes. A machine that is gone (power, cable) closes none: the kernel sends keepalives over
idle connections between machines.

The groups are not registered with torch: a script's own ``init_process_group`` and
``destroy_process_group`` do not touch them. Above 300 lines since all ways to notice an end are
here. This module must not know what the bytes are.
"""

import datetime
import functools
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
from ...exchange.group import Made, Parcel, PeerGroup, Pending, TorchGroup, plain
from ...exchange.mapped import mapped
from ...exchange.scheduled import ScheduledCollective
from .place import MeetingPlace
from .symmetric_memory import SymmetricGroup
from .world import RankOfWorld

_MEET_S = 30.0
_LONGEST = datetime.timedelta(days=30)
"""Others may wait long for a rank that evaluates or saves alone; a death is noticed at once."""
_REPORT_S = 10.0
"""Time for the report of a death to arrive after a connection has broken."""
_LEAVE_S = 5.0
_SMALL_BYTES = 1 << 20
"""The largest sum along a tree."""
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}
"""Seconds of silence, seconds between probes, number of probes: a machine is given up after a
minute. A switch restarts in less."""
_TAG: Final = 7001
"""The tag of the messages at an orderly end; the script's own sends are in other groups."""


class RankGroup(TorchGroup):
    """The collective operations of this rank with all others.

    Args:
        lost: called with the next rank when it has died.
        is_near: whether all ranks are on one machine.
        note: tells the user something about the run.
        is_over: whether the run has ended, so that no one waits for this rank any more.

    Raises:
        LinkError: the ranks cannot connect to each other.
    """

    patience = _LONGEST

    def __init__(
        self,
        place: MeetingPlace,
        rank: RankOfWorld,
        lost: Callable[[int], None],
        *,
        is_near: bool = False,
        note: Callable[[str], None] = lambda text: None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._place, self._rank, self._lost = place, rank, lost
        self._note, self._is_over, self._is_near = note, is_over, is_near
        self.rank, self.size = rank.rank, rank.size
        self._store = place.client("gloo")
        try:
            self._gloo: Any = dist.ProcessGroupGloo(
                self._store, rank.rank, rank.size, datetime.timedelta(seconds=_MEET_S)
            )
        except RuntimeError as error:
            raise LinkError(
                f"worker {rank.rank} ({socket.gethostname()}) could not connect to all others "
                f"within {_MEET_S:.0f} s ({_first_line(error)}): gloo may use a network interface "
                "that they cannot reach; export GLOO_SOCKET_IFNAME=eth0 (ip -brief address lists "
                "the names here)"
            ) from None
        self._gloo._set_default_timeout(_LONGEST)
        self._nccl: Any = None
        self._tree = ScheduledCollective(parse("tree", self.size), self) if is_near else None
        self._is_leaving = False
        self._watch = threading.Thread(target=self._watch_next, daemon=True)
        self._watch.start()

    # -- collectives ----------------------------------------------------------------------------

    def all_reduce(
        self, tensor: Tensor, *, is_maximum: bool = False, at_once: bool = False
    ) -> Pending:
        is_small = tensor.device.type == "cpu" and tensor.nbytes <= _SMALL_BYTES
        if not (at_once and is_small and self._tree is not None):
            return super().all_reduce(tensor, is_maximum=is_maximum, at_once=at_once)
        self._tree.all_reduce(plain(tensor), is_maximum=is_maximum)
        return Made()

    def in_shared_memory(self) -> SymmetricGroup:
        """Return the same ranks, whose sums are made in memory that all map."""
        return SymmetricGroup(self, self._note, self._check)

    @functools.cached_property
    def near_ranks(self) -> PeerGroup:
        """These ranks, in mapped memory if possible; all first use it at the same time."""
        return self.near(self)

    def near(self, part: PeerGroup) -> PeerGroup:
        """Return this group of ranks as one that maps memory, if all ranks are on one machine."""
        return mapped(part, self._check) if self._is_near else part

    def _check(self) -> None:
        if self._is_over():
            self.break_off(RuntimeError("the run has ended"))

    def begin_to_share(self, tensor: Tensor) -> Pending:
        """Broadcast rank 0's bytes, on a CPU, into the tensors of all others."""
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
        """Raise LinkError for a death, after the time in which the watching rank reports it."""
        time.sleep(_REPORT_S)
        raise LinkError(
            f"worker {self._rank.rank} lost its connection to the others ({_first_line(error)})"
        ) from None

    # -- liveness -------------------------------------------------------------------------------

    def _watch_next(self) -> None:
        following = (self._rank.rank + 1) % self._rank.size
        message = torch.zeros(1, dtype=torch.uint8)
        try:
            # Without its own timeout it would use the group's first one and break all connections.
            self._gloo.recv([message], following, _TAG).wait(_LONGEST)
        except RuntimeError:
            if not self._is_leaving:
                self._lost(following)

    def leave(self) -> bool:
        """Leave in order, together with the others; returns whether the next rank did."""
        self._is_leaving = True
        previous = (self._rank.rank - 1) % self._rank.size
        try:
            self._gloo.send([torch.ones(1, dtype=torch.uint8)], previous, _TAG).wait()
        except RuntimeError:
            return False
        self._watch.join(_LEAVE_S)
        return not self._watch.is_alive()


class MachineKeepalives:
    """Reports machines that disappear without closing their connections.

        rank 0 --> rank 1 --> rank 2 --> rank 0      one to the next rank, one to the meeting place

    No data is sent and no connection accepted: the kernels probe and answer, also for a stopped
    process. Keepalives on gloo's own connections work only while no data is in flight:
    unacknowledged data is resent for a quarter of an hour. Without a connection of its own, that is
    how long noticing takes.

    Args:
        lost: called with the next rank when its machine is gone.
        unreachable: called when the machine of the meeting place is gone.
    """

    def __init__(
        self,
        place: MeetingPlace,
        rank: RankOfWorld,
        lost: Callable[[int], None],
        unreachable: Callable[[], None],
    ) -> None:
        following = (rank.rank + 1) % rank.size
        store = place.client("keepalives")
        store.set(str(rank.rank), self._listen())
        address, _, port = store.get(str(following)).decode().rpartition(" ")
        ends = [((rank.address, rank.port), unreachable)]
        if address:  # in a thread: reporting may take long if the store was on that machine
            report = threading.Thread(target=lost, args=(following,), daemon=True)
            ends.append(((address, int(port)), report.start))
        threading.Thread(target=_watch_machines, args=(ends,), daemon=True).start()

    def _listen(self) -> str:
        """Return the address to which the previous rank connects; "" if none can be opened."""
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
                after_s = _cut_off_after_s(key.fileobj)
                if after_s is not None:
                    time.sleep(after_s)  # nothing tells this thread of a report by gloo
                    key.data()


def keep_alive(link: socket.socket) -> None:
    """Have the kernel probe the other machine; reads wait without a limit."""
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # else the system's default of two hours
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _cut_off_after_s(link: Any) -> float | None:
    """Return when to report that the machine is gone; None: its process ended in order.

    A machine that restarts within the minute of the probes answers them with a reset, as one does
    whose process has died; but a dead process is also reported through gloo, at once.
    """
    try:
        link.recv(1)
    except ConnectionResetError:
        return _REPORT_S
    except ConnectionError:
        return None
    except OSError:
        return 0.0
    return None


def _own_address() -> str:
    """Return the address at which other ranks reach this one, as gloo chooses it."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    families = (socket.AF_INET, socket.AF_INET6)
    addresses = [
        address
        for address in psutil.net_if_addrs().get(interface, ())
        if address.family in families
    ]
    if addresses:
        return str(addresses[0].address)
    infos = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    return str(infos[0][4][0])


class RankPart(TorchGroup):
    """A group of some of the ranks, numbered from 0; a death in it is one in the whole group.

    Args:
        name: unique among the parts.
        ranks: the ranks in it, in the order of their numbers here.
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

    def _of(self, tensor: Tensor) -> Any:
        return self._gloo

    def _watched(self, work: Any) -> Pending:
        return _Watched(self._whole, work)


class _Watched:
    """An operation that raises LinkError when a rank has died."""

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

    "" if no reason is visible from here.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return ""
    name = socket.gethostname()
    try:
        infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return f"its own name {name!r} resolves to no address"
    addresses = {str(info[4][0]) for info in infos}
    is_loopback = all(address.startswith("127.") or address == "::1" for address in addresses)
    return f"its own name {name!r} resolves to {sorted(addresses)[0]}" if is_loopback else ""
