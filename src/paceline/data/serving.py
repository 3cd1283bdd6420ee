"""Send a stream's mini-batches from the process that reads it to all members of the machine.

    member --(pass, number), used numbers--> one thread for this member in the reading process
           <------ open file handles ------- which waits until that number is read

Requests are answered in order, so a member can ask for its next mini-batch before it needs it. The
reader may be killed at any moment: its clients see the connection close, or are told of another
reader, and ask that one. Files are sent as open handles, not names, so a client can still read what
a dead reader has sent. This module must not know leases, nor who chooses the reader.
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
"""Sent with the file handles: a socket needs at least one byte to carry them."""
_POLL_S = 0.05
"""How often a client that waits for a mini-batch checks whether it still needs it."""
_RETRY_S = 0.05
"""Between two attempts to accept a connection, while no file handle is free."""
_LOST = (EOFError, OSError, AuthenticationError)
"""What either end raises when the other is gone, or does not know the key."""


class Endpoint(NamedTuple):
    """The address of a server of mini-batches.

    Attributes:
        key: authenticates clients.
    """

    address: str
    key: bytes

    @classmethod
    def new(cls) -> "Endpoint":
        """A new address; on Linux an abstract one, which leaves no file behind."""
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
    """Serves mini-batches to clients that know the key.

    Args:
        find: (pass, number) -> the answer, once it is known; None: the pass was stopped.
        done_with: (pass, first, others): updates have used the numbers below ``first``, and others.

    Attributes:
        num_asking: clients that are connected.
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
                    for numbers in done:
                        self._done_with(*numbers)
                    _send(connection, epoch, number, self._find(epoch, number))
            finally:
                self._count(-1)

    def _count(self, more: int) -> None:
        with self._lock:
            self.num_asking += more

    def close(self) -> None:
        """Accept no more clients; a last connection wakes the thread that waits in ``accept``."""
        self._is_closed = True
        with contextlib.suppress(*_LOST):
            Client(self._listener.address, "AF_UNIX").close()
        self._listener.close()


def _send(connection: "Connection[Any, Any]", epoch: int, number: int, answer: Any) -> None:
    if not isinstance(answer, Frame):
        connection.send((epoch, number, answer, ()))
        return
    connection.send((epoch, number, answer.num_samples, answer.parts))
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as duplicate:
        socket.send_fds(duplicate, [_MARK], [file.handle for file in answer.files])


@dataclass(frozen=True, slots=True)
class Received:
    """One mini-batch, copied into this member's own memory."""

    num_samples: int
    batch: Any


Found = Received | Over | Gone | Broken | None


class StreamClient:
    """One member's connection to the reader."""

    def __init__(self) -> None:
        self._connection: Connection[Any, Any] | None = None
        self._requests: deque[tuple[int, int]] = deque()
        self._answers: dict[tuple[int, int], Found] = {}
        self._unwanted: set[tuple[int, int]] = set()
        self._done: list[tuple[int, int, tuple[int, ...]]] = []
        self._address = ""
        """The server of the current connection, or of the last one."""

    def is_at(self, address: str) -> bool:
        """Whether it is connected to this address."""
        return self._connection is not None and self._address == address

    def connect(self, address: str, key: bytes) -> bool:
        """Connect to another server; returns whether one answered."""
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
        """Close the connection: the reader is gone, or reads no more."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._requests.clear()
        self._unwanted.clear()

    def done_with(self, epoch: int, first: int, others: tuple[int, ...]) -> None:
        """Note numbers that updates have used; sent with the next request."""
        self._done.append((epoch, first, others))

    def ask(self, epoch: int, number: int) -> None:
        """Request a mini-batch ahead of time."""
        request = (epoch, number)
        self._unwanted.discard(request)
        if self._connection is None or request in self._requests or request in self._answers:
            return
        try:
            self._connection.send((epoch, number, self._done))
        except _LOST:
            self.drop()
            return
        self._done = []
        self._requests.append(request)

    def put_back(self, epoch: int, number: int, answer: "Received | Over | Gone | Broken") -> None:
        """Return an answer, which is taken again later."""
        self._answers[epoch, number] = answer

    def forget(self, epoch: int, number: int) -> None:
        """Drop a request and its answer."""
        if (epoch, number) in self._requests:
            self._unwanted.add((epoch, number))
        self._answers.pop((epoch, number), None)

    def forget_all(self) -> None:
        """Drop all requests and answers."""
        self._answers.clear()
        self._unwanted = set(self._requests)

    def is_here(self, epoch: int, number: int) -> bool:
        """Whether ``take`` would not wait."""
        self._receive(0.0)
        return (epoch, number) in self._answers

    def take(self, epoch: int, number: int) -> Found:
        """The answer for this number; None: it has not come within a short wait."""
        self.ask(epoch, number)
        if (epoch, number) not in self._answers:
            self._receive(_POLL_S)
        return self._answers.pop((epoch, number), None)

    def _receive(self, timeout_s: float) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            while self._requests and connection.poll(timeout_s):
                epoch, number, value, parts = connection.recv()
                self._requests.popleft()
                answer = value
                if isinstance(value, int):
                    answer = Received(value, decode(_receive_frame(connection, value, parts)))
                if (epoch, number) not in self._unwanted:
                    self._answers[epoch, number] = answer
                self._unwanted.discard((epoch, number))
                timeout_s = 0.0
        except _LOST as error:
            self.drop()
            _refuse_without_handles(error)


def _receive_frame(
    connection: "Connection[Any, Any]", num_samples: int, parts: tuple[Part, ...]
) -> Frame:
    num_files = 1 + max(part.file for part in parts)
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as duplicate:
        _, handles, flags, _ = socket.recv_fds(duplicate, len(_MARK), num_files)
    files = tuple(map(Memory, handles))
    if flags & socket.MSG_CTRUNC:  # the kernel could not open them in this process
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if len(files) < num_files:
        raise EOFError("a mini-batch came without its file handles")
    return Frame(num_samples, parts, files)


def _refuse_without_handles(error: Exception) -> None:
    """Raise WorkerError if this process has no file handle left: asking again would not help."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise WorkerError(
            "cannot receive a mini-batch of the stream: this worker has no file handle left "
            f"(limit {limit:,}); raise the limit (ulimit -n), or keep fewer files open"
        ) from error
