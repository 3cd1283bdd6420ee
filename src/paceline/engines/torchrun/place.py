"""Where all ranks meet: the store that torch's own process groups meet at.

    torchrun    keeps it, and names it to its ranks        srun, mpirun    rank 0 opens it

This module must not know what is said there.
"""

import contextlib
import ctypes
import datetime
import os
import socket
import time
from pathlib import Path

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # no stubs

from ...errors import LinkError
from .world import RankOfWorld

_REACH_S = 25.0
"""Within which it must answer; half a minute with what comes before."""
_FOR_EVER = datetime.timedelta(days=365)
_ERRORS_ONLY = 2
"""Of torch's C++ log: 1 is with warnings (TORCH_CPP_LOG_LEVEL)."""


class MeetingPlace:
    """The store that all ranks reach.

    Raises:
        LinkError: this rank cannot reach it, or rank 0 cannot open it.
    """

    def __init__(self, rank: RankOfWorld) -> None:
        self._rank = rank
        hosts = rank.rank == 0 and not rank.is_hosted
        if not rank.is_hosted:
            _log_errors_only()
        self._root = self._connect(hosts=hosts)
        """It may be the one that all others connect to: it lives as long as this process."""

    def client(self, name: str = "") -> Store:
        """A connection of its own, for keys of ours alone."""
        store = self._connect(hosts=False)
        store.set_timeout(_FOR_EVER)
        rank = self._rank
        return PrefixStore(f"paceline/{rank.restarts}.{rank.anew}/{name}", store)

    def _connect(self, *, hosts: bool) -> TCPStore:
        rank = self._rank
        if not (hosts or _is_reached(rank)):
            raise LinkError(_unreached(rank, hosts=hosts, error=""))
        try:
            return TCPStore(
                rank.address, rank.port, None, hosts,
                timeout=datetime.timedelta(seconds=_REACH_S),
                wait_for_workers=False, multi_tenant=True,
            )  # fmt: skip
        except (RuntimeError, ValueError) as error:
            raise LinkError(_unreached(rank, hosts=hosts, error=str(error))) from None


def _log_errors_only() -> None:
    """Where rank 0 dies with the store, torch warns with its C++ stack, whoever catches the error.

    May go when its TCPStore says such a thing once. What the user has set stays.
    """
    if "TORCH_CPP_LOG_LEVEL" not in os.environ:
        with contextlib.suppress(OSError, ValueError):  # of another system, of another torch
            library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
            ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level").value = _ERRORS_ONLY


def _is_reached(rank: RankOfWorld) -> bool:
    """Whether the meeting place takes connections; torch's own try writes its stack where not."""
    end_s = time.monotonic() + _REACH_S
    while (left_s := end_s - time.monotonic()) > 0:
        try:
            socket.create_connection((rank.address, rank.port), timeout=min(5.0, left_s)).close()
        except OSError:
            time.sleep(0.1)
        else:
            return True
    return False


def _unreached(rank: RankOfWorld, *, hosts: bool, error: str) -> str:
    if hosts:
        first = error.strip().partition("\n")[0]
        return (
            f"worker 0 cannot open {rank.place}, where all workers meet ({first}): another process "
            "may have that port; set MASTER_PORT to a free one"
        )
    try:
        socket.getaddrinfo(rank.address, rank.port)
    except OSError as unknown:
        return (
            f"worker {rank.rank} cannot find {rank.address} of {rank.place}, where all workers "
            f"meet ({unknown.strerror}): set MASTER_ADDR to an address of worker 0's machine"
        )
    return (
        f"worker {rank.rank} cannot reach {rank.place}, where all workers meet, within "
        f"{_REACH_S:.0f} s: worker 0 must run there (MASTER_ADDR, MASTER_PORT), and no firewall "
        "stand between"
    )
