"""Where all ranks meet: the store that torch's own process groups meet at.

    torchrun    keeps it, and names it to its ranks        srun, mpirun    rank 0 opens it

    rank K   a token -> "registrations" -> rank 0   who answers it with the life that all are in
             <----------- the life ------------   until all of them are

What torchrun keeps outlives its ranks: those that it has begun again must not read what was said
before. How often that was, each of its agents counts by itself and otherwise, so rank 0 counts it,
where all meet, and each rank asks it. One text is kept from life to life.

This module must not know what is said there.
"""

import contextlib
import ctypes
import datetime
import os
import socket
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # no stubs

from ...errors import LinkError
from .world import RankOfWorld

_REACH_S = 25.0
"""Within which it must answer; half a minute with what comes before."""
_FOR_EVER = datetime.timedelta(days=365)
_LIVES, _REGISTRATIONS = "paceline/lives", "paceline/registrations"
_KEPT = "paceline/kept"
_LOOK_S = (0.001, 0.02)
"""Between two looks for an answer, at first and at most; a wait of the store's own hears no
signal."""
_ERRORS_ONLY = 2
"""Of torch's C++ log: 1 is with warnings (TORCH_CPP_LOG_LEVEL)."""


class MeetingPlace:
    """The store that all ranks reach.

    Attributes:
        rank: this one, with the life of the job that it is in.

    Raises:
        LinkError: this rank cannot reach it, or rank 0 cannot open it.
    """

    def __init__(self, rank: RankOfWorld) -> None:
        self.rank = rank
        hosts = rank.rank == 0 and not rank.is_hosted
        if not rank.is_hosted:
            _log_errors_only()
        self._root = self._connect(hosts=hosts)
        """It may be the one that all others connect to: it lives as long as this process."""
        self._registrar: threading.Thread | None = None
        if rank.is_hosted:
            self.rank = replace(rank, life=self._life())

    def client(self, name: str = "") -> Store:
        """A connection of its own, for keys of ours alone."""
        store = self._connect(hosts=False)
        store.set_timeout(_FOR_EVER)
        return PrefixStore(f"paceline/{self.rank.life or 0}/{name}", store)

    def keep(self, text: str) -> None:
        """Of rank 0, for those that are begun again; where torchrun keeps the place."""
        try:
            self._root.set(_KEPT, text)
        except RuntimeError as error:
            raise _gone(error) from None

    def kept(self) -> str:
        """What rank 0 of an earlier life has kept; "": nothing."""
        try:
            return self._root.get(_KEPT).decode() if self._root.check([_KEPT]) else ""
        except RuntimeError as error:
            raise _gone(error) from None

    def close_registration(self) -> None:
        """All are in, or nobody is to come: who is begun after this is of another life."""
        if self._registrar is not None:
            with contextlib.suppress(RuntimeError):
                self._root.queue_push(_REGISTRATIONS, f"close {self.rank.life}")
            self._registrar.join(1.0)
            self._registrar = None

    def _life(self) -> int:
        """Which life of the job all ranks are in that were begun with this one; from 1."""
        try:
            if self.rank.rank:
                return self._ask_life()
            life = int(self._root.add(_LIVES, 1))
        except RuntimeError as error:
            raise _gone(error) from None
        asked = self._connect(hosts=False)
        asked.set_timeout(_FOR_EVER)
        self._registrar = threading.Thread(target=_answer, args=(asked, life), daemon=True)
        self._registrar.start()
        return life

    def _ask_life(self) -> int:
        """Rank 0 answers as soon as it is there; who asked before and is gone is answered, too."""
        token, wait_s = f"paceline/{uuid.uuid4().hex}", _LOOK_S[0]
        self._root.queue_push(_REGISTRATIONS, token)
        while not self._root.check([token]):
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LOOK_S[1])
        return int(self._root.get(token))

    def _connect(self, *, hosts: bool) -> TCPStore:
        rank = self.rank
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


def _gone(error: RuntimeError) -> LinkError:
    return LinkError(f"the place where all workers meet is gone: {error}")


def _answer(store: Store, life: int) -> None:
    """Rank 0's word to whoever comes, until registration is closed."""
    with contextlib.suppress(RuntimeError):  # the place is gone, which others tell of
        while (token := store.queue_pop(_REGISTRATIONS).decode()) != f"close {life}":
            store.set(token, str(life))


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
