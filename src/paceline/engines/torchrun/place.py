"""The rendezvous of all ranks: the store of torch's own process groups.

    torchrun    keeps it and passes its address to ranks       srun, mpirun    rank 0 opens it

    rank K   a token -> "registrations" -> rank 0   which answers with the current life of the job
             <----------- the life ------------   until all ranks are in it

Two jobs may be given the same port. A rank of the second reaches the first one's store, where its
number is taken: it must not read there, nor send.

A store kept by torchrun outlives its ranks: restarted ranks must not read earlier messages. Each of
torchrun's agents counts restarts itself, and the counts differ; so rank 0 counts lives in the
store, and each rank asks it. One text is kept from life to life.

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
"""Time for the store to answer; half a minute in all with the start of the process."""
_FOR_EVER = datetime.timedelta(days=365)
_LIVES, _REGISTRATIONS = "paceline/lives", "paceline/registrations"
_KEPT = "paceline/kept"
_FIRST, _TAKEN = "paceline/first", "paceline/taken"
_LOOK_S = (0.001, 0.02)
"""Between two checks for an answer, at first and at most; the store's own wait blocks signals."""
_ERRORS_ONLY = 2
"""The level of torch's C++ log without warnings (TORCH_CPP_LOG_LEVEL)."""


class MeetingPlace:
    """The store that all ranks connect to.

    Attributes:
        rank: this rank, with its life of the job.

    Raises:
        LinkError: this rank cannot reach it, rank 0 cannot open it, or it is another job's.
    """

    def __init__(self, rank: RankOfWorld) -> None:
        self.rank = rank
        hosts = rank.rank == 0 and not rank.is_hosted
        if not rank.is_hosted:
            _log_errors_only()
        self._root = _connect(rank, hosts=hosts)
        """If this rank hosts the store, the server, which ends with this process."""
        self._registrar: threading.Thread | None = None
        if rank.is_hosted:
            self.rank = replace(rank, life=self._life())
        else:
            self._refuse_another_job()

    def client(self, name: str = "") -> Store:
        """Open a separate connection that uses keys of this life only."""
        store = _connect(self.rank, hosts=False)
        store.set_timeout(_FOR_EVER)
        return PrefixStore(f"paceline/{self.rank.life or 0}/{name}", store)

    def keep(self, text: str) -> None:
        """Keep rank 0's text for restarted ranks, if torchrun keeps the store."""
        try:
            self._root.set(_KEPT, text)
        except RuntimeError as error:
            raise _gone(error) from None

    def kept(self) -> str:
        """Return the text that rank 0 of an earlier life kept; "" if there is none."""
        return _kept(self._root)

    def close_registration(self) -> None:
        """Stop answering: all ranks are in, or none is expected; later ones are of another life."""
        if self._registrar is not None:
            with contextlib.suppress(RuntimeError):
                self._root.queue_push(_REGISTRATIONS, f"close {self.rank.life}")
            self._registrar.join(1.0)
            self._registrar = None

    def _refuse_another_job(self) -> None:
        """Raise LinkError if rank 0 there is another job's: of another size or call of its
        launcher, or one that has this rank."""
        rank = self.rank
        try:
            if rank.rank == 0:
                self._root.set(_FIRST, f"{rank.size} {rank.step}")
            why = self._other_job()
            if not why and self._root.add(f"{_TAKEN}/{rank.rank}", 1) > 1:
                why = f"one that has a worker {rank.rank}"
        except RuntimeError as error:
            raise _gone(error) from None
        if why:
            raise LinkError(
                f"worker {rank.rank} found another job at {rank.place}, {why}: set MASTER_PORT to "
                "a free port, the same for all workers of a job"
            )

    def _other_job(self) -> str:
        """Say what is different in the job of the rank 0 there; "": nothing."""
        rank, until_s = self.rank, time.monotonic() + _REACH_S
        while not self._root.check([_FIRST]):
            if time.monotonic() > until_s:
                return "one without Paceline"
            time.sleep(_LOOK_S[1])
        size, _, step = self._root.get(_FIRST).decode().partition(" ")
        if int(size) != rank.size:
            return f"one of {size} workers, and this one has {rank.size}"
        if step and rank.step and step != rank.step:
            return f"one that its launcher calls {step}, and this one {rank.step}"
        return ""

    def _life(self) -> int:
        """Return the life of the job in which this rank was started; the first is 1."""
        try:
            if self.rank.rank:
                return self._ask_life()
            life = int(self._root.add(_LIVES, 1))
        except RuntimeError as error:
            raise _gone(error) from None
        store = _connect(self.rank, hosts=False)
        store.set_timeout(_FOR_EVER)
        self._registrar = threading.Thread(target=_answer, args=(store, life), daemon=True)
        self._registrar.start()
        return life

    def _ask_life(self) -> int:
        """Ask rank 0 for the life; it answers once it has started, also ranks that are gone."""
        token, wait_s = f"paceline/{uuid.uuid4().hex}", _LOOK_S[0]
        self._root.queue_push(_REGISTRATIONS, token)
        while not self._root.check([token]):
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LOOK_S[1])
        return int(self._root.get(token))


def kept_at(rank: RankOfWorld) -> str:
    """Return the text that rank 0 of an earlier life kept in torchrun's store; "": there is none.

    Raises:
        LinkError: the store cannot be reached.
    """
    return _kept(_connect(rank, hosts=False))


def _kept(store: Store) -> str:
    try:
        return store.get(_KEPT).decode() if store.check([_KEPT]) else ""
    except RuntimeError as error:
        raise _gone(error) from None


def _connect(rank: RankOfWorld, *, hosts: bool) -> TCPStore:
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
    return LinkError(f"the store at which all workers meet is gone: {error}")


def _answer(store: Store, life: int) -> None:
    """Answer each rank with the life, until registration is closed."""
    with contextlib.suppress(RuntimeError):  # the store is gone, which others report
        while (token := store.queue_pop(_REGISTRATIONS).decode()) != f"close {life}":
            store.set(token, str(life))


def _log_errors_only() -> None:
    """Silence torch's warning with a C++ stack when rank 0 dies with the store.

    May go when its TCPStore warns only once. The user's own setting stays.
    """
    if "TORCH_CPP_LOG_LEVEL" not in os.environ:
        with contextlib.suppress(OSError, ValueError):  # another system, or another torch
            library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
            ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level").value = _ERRORS_ONLY


def _is_reached(rank: RankOfWorld) -> bool:
    """Return whether the store accepts connections; a failed attempt of torch prints a stack."""
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
        f"{_REACH_S:.0f} s: worker 0 must run there (MASTER_ADDR, MASTER_PORT), with no firewall "
        "in between"
    )
