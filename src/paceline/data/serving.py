"""How mini-batches of a stream come from who reads it to all members of the machine.

    member --(pass, number), what is done with--> a thread of its own where it is read
           <------- an open file of it ---------- which waits until that number is read

Requests are answered in order, so a member asks for its next mini-batch before it has to have it.
Who reads may be killed at any moment: whoever asked hears the end of the connection, or of another
reader, and asks that one. An open file, not a name of one: what a dead reader had made is there for
whoever was given it. This module must not know leases, nor who decides who reads.
"""

import contextlib
import errno
import os
import resource
import secrets
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import WorkerError
from .frames import Frame, Memory, Part, decode
from .stream import Answer, Broken, Gone, Over

_BACKLOG = 64
_MARK = b"f"
"""What a file goes with: a socket carries none without a byte."""
_POLL_S = 0.05
"""How often who waits for a mini-batch looks whether it still has to."""
_RETRY_S = 0.05
"""Between two attempts to accept a connection, while no file handle is free."""
_LOST = (EOFError, OSError, AuthenticationError)
"""What either end raises when the other is gone, or is none of the run."""


class Endpoint(NamedTuple):
    """Where mini-batches are given.

    Attributes:
        key: who knows it may ask.
    """

    address: str
    key: bytes

    @classmethod
    def new(cls) -> "Endpoint":
        """One where nothing stays behind: on Linux a name without a file."""
        name = f"paceline-{secrets.token_hex(8)}"
        if sys.platform == "linux":
            return cls(f"\0{name}", secrets.token_bytes(32))
        folder = Path(tempfile.mkdtemp(prefix="paceline-"))
        return cls(str(folder / name[-12:]), secrets.token_bytes(32))

    def remove_file(self) -> None:
        """Remove the socket's file, which a killed process leaves behind."""
        if not self.address.startswith("\0"):
            Path(self.address).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the socket's file and its folder."""
        self.remove_file()
        if not self.address.startswith("\0"):
            with contextlib.suppress(OSError):  # removed already, or not ours
                Path(self.address).parent.rmdir()


class StreamServer:
    """Gives what is read to whoever knows the key.

    Args:
        find: (pass, number) -> what there is of it, once it is known; None: another pass came.
        done_with: (pass, first, others): updates have used those below ``first``, and the others.

    Attributes:
        num_asking: members that are connected.
    """

    def __init__(
        self,
        place: Endpoint,
        find: Callable[[int, int], Answer | None],
        done_with: Callable[[int, int, tuple[int, ...]], None],
    ) -> None:
        self._find, self._done_with = find, done_with
        self._key, self.num_asking = place.key, 0
        self._is_closed = False
        self._lock = threading.Lock()
        place.remove_file()
        self._listener = Listener(place.address, "AF_UNIX", backlog=_BACKLOG)
        self._start(self._accept)

    def _start(self, function: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(
            target=function, args=arguments, name="paceline-stream-server", daemon=True
        ).start()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection = self._listener.accept()
            except OSError:  # no file handle is free, or the client has gone away again
                time.sleep(_RETRY_S)  # until a handle is free
                continue
            if self._is_closed:
                connection.close()
            else:
                self._start(self._serve, connection)

    def _serve(self, connection: "Connection[Any, Any]") -> None:
        with contextlib.closing(connection), contextlib.suppress(*_LOST):
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            self._count(1)
            try:
                while True:
                    epoch, number, done = connection.recv()
                    for told in done:
                        self._done_with(*told)
                    _send(connection, epoch, number, self._find(epoch, number))
            finally:
                self._count(-1)

    def _count(self, more: int) -> None:
        with self._lock:
            self.num_asking += more

    def close(self) -> None:
        """Let nobody in any more. Who waits for somebody to come is woken by one who does."""
        self._is_closed = True
        with contextlib.suppress(*_LOST):
            Client(self._listener.address, "AF_UNIX").close()
        self._listener.close()


def _send(connection: "Connection[Any, Any]", epoch: int, number: int, found: Any) -> None:
    if not isinstance(found, Frame):
        connection.send((epoch, number, found, ()))
        return
    connection.send((epoch, number, found.num_samples, found.parts))
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as way:
        socket.send_fds(way, [_MARK], [one.handle for one in found.files])


@dataclass(frozen=True, slots=True)
class Received:
    """One mini-batch, this member's alone."""

    num_samples: int
    batch: Any


Found = Received | Over | Gone | Broken | None


class StreamClient:
    """One member's way to who reads."""

    def __init__(self) -> None:
        self._connection: Connection[Any, Any] | None = None
        self._asked: deque[tuple[int, int]] = deque()
        self._found: dict[tuple[int, int], Found] = {}
        self._unwanted: set[tuple[int, int]] = set()
        self._done: list[tuple[int, int, tuple[int, ...]]] = []
        self._address = ""
        """Where the connection goes, or went."""

    def is_at(self, address: str) -> bool:
        """Whether that is where it asks."""
        return self._connection is not None and self._address == address

    def connect(self, address: str, key: bytes) -> bool:
        """Ask there from now on; whether there is somebody."""
        self.drop()
        self._address = address
        try:
            connection = Client(address, "AF_UNIX")
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
            self._connection = connection
        except _LOST as error:
            _refuse_without_handles(error)
        return self._connection is not None

    def drop(self) -> None:
        """Who was asked is gone, or reads no more."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._asked.clear()
        self._unwanted.clear()

    def done_with(self, epoch: int, first: int, others: tuple[int, ...]) -> None:
        """To be told with what is asked next."""
        self._done.append((epoch, first, others))

    def ask(self, epoch: int, number: int) -> None:
        """It is wanted soon."""
        one = (epoch, number)
        self._unwanted.discard(one)
        if self._connection is None or one in self._asked or one in self._found:
            return
        try:
            self._connection.send((epoch, number, self._done))
        except _LOST:
            self.drop()
            return
        self._done = []
        self._asked.append(one)

    def put_back(self, epoch: int, number: int, found: "Received | Over | Gone | Broken") -> None:
        """It was looked at, and is taken later."""
        self._found[epoch, number] = found

    def forget(self, epoch: int, number: int) -> None:
        """It is not wanted after all."""
        if (epoch, number) in self._asked:
            self._unwanted.add((epoch, number))
        self._found.pop((epoch, number), None)

    def forget_all(self) -> None:
        self._found.clear()
        self._unwanted = set(self._asked)

    def is_here(self, epoch: int, number: int) -> bool:
        """Whether ``take`` would not wait."""
        self._receive(0.0)
        return (epoch, number) in self._found

    def take(self, epoch: int, number: int) -> Found:
        """What there is of it; None: it is not here yet, after waiting for a moment."""
        self.ask(epoch, number)
        if (epoch, number) not in self._found:
            self._receive(_POLL_S)
        return self._found.pop((epoch, number), None)

    def _receive(self, timeout_s: float) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            while self._asked and connection.poll(timeout_s):
                epoch, number, value, parts = connection.recv()
                self._asked.popleft()
                found = value
                if isinstance(value, int):
                    found = Received(value, decode(_receive_frame(connection, value, parts)))
                if (epoch, number) not in self._unwanted:
                    self._found[epoch, number] = found
                self._unwanted.discard((epoch, number))
                timeout_s = 0.0
        except _LOST as error:
            self.drop()
            _refuse_without_handles(error)


def _receive_frame(
    connection: "Connection[Any, Any]", num_samples: int, parts: tuple[Part, ...]
) -> Frame:
    num_files = 1 + max(part.file for part in parts)
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as way:
        _, handles, flags, _ = socket.recv_fds(way, len(_MARK), num_files)
    files = tuple(map(Memory, handles))
    if flags & socket.MSG_CTRUNC:  # the kernel could not open them in this process
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if len(files) < num_files:
        raise EOFError("a mini-batch did not come with its files")
    return Frame(num_samples, parts, files)


def _refuse_without_handles(error: Exception) -> None:
    """Raise WorkerError where this process has no file handle left: to ask again is no use."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise WorkerError(
            "cannot receive a mini-batch of the stream: this worker has no file handle left "
            f"(limit {limit:,}); raise the limit (ulimit -n), or keep fewer files open"
        ) from error
