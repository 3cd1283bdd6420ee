"""Carries messages between a member and the coordinator: in order, whole, of any size.

This module must not know what a message leads to.
"""

import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from ..store.memory import spin
from .codec import FROM_MEMBER, TO_MEMBER, Codec
from .messages import FromMember, Message, ToMember

Sent = TypeVar("Sent", bound=Message)
Heard = TypeVar("Heard", bound=Message)

_MORE, _LAST = b"+", b"."


class HungUp(ConnectionResetError):
    """The other end is gone; never raised for a script's own lost connections."""


class Channel(Protocol):
    """The member's end of the connection."""

    def send(self, message: FromMember) -> None:
        """Send one message and return at once."""

    def hold(self, message: FromMember) -> None:
        """Keep a message that nobody waits for; it is sent just before the next one."""

    def receive(self, is_blocking: bool = True) -> list[ToMember]:
        """Return the next messages, in order; [] if there are none and ``is_blocking`` is False."""

    def die(self) -> None:
        """End the member here as if it was killed, without cleanup."""

    def halt(self) -> None:
        """Stop the member here until it gets SIGCONT."""


class SocketChannel(Generic[Sent, Heard]):
    """A channel over one end of a socket pair that keeps message boundaries.

    Messages may be of any size: a long frame is sent in pieces, each with a byte that says whether
    it is the last.

    Args:
        sent, heard: the codecs of its two directions.
        waits: whether sending waits for a slow reader. The coordinator does not, since a reader may
            be stopped: the rest stays here until ``send_rest`` can send it.
    """

    PIECE_BYTES = 1 << 17

    def __init__(
        self, end: socket.socket, sent: Codec[Sent], heard: Codec[Heard], *, waits: bool = True
    ) -> None:
        self.end, self._sent, self._heard = end, sent, heard
        self._flags = 0 if waits else socket.MSG_DONTWAIT
        self._held: deque[Sent] = deque()
        self._unsent: deque[bytes] = deque()
        self._lock, self._is_sending = threading.RLock(), False
        self._pieces: list[bytes] = []

    def send(self, message: Sent) -> None:
        with self._lock:
            messages: list[Sent] = []
            with suppress(IndexError):  # one by one: a signal's handler may send in between
                while True:
                    messages.append(self._held.popleft())
            self.send_all([*messages, message])

    def hold(self, message: Sent) -> None:
        self._held.append(message)

    def send_all(self, messages: Sequence[Sent]) -> None:
        """Send several messages as one, in order."""
        data, size = self._sent.encode(messages), self.PIECE_BYTES
        with self._lock:
            for start in range(0, len(data) - size, size):
                self._unsent.append(_MORE + data[start : start + size])
            self._unsent.append(_LAST + data[(len(data) - 1) // size * size :])
            self.send_rest()

    def drop(self) -> None:
        """Drop what is not sent yet."""
        self._unsent.clear()

    @property
    def is_late(self) -> bool:
        """Whether something is not sent yet."""
        return bool(self._unsent)

    def send_rest(self) -> bool:
        """Send what could not be sent before; return whether all is sent now.

        Threads of a script take turns. A signal handler that interrupts a send leaves its pieces
        to that send.
        """
        with self._lock:
            if self._is_sending:
                return False
            self._is_sending = True
            try:
                while self._unsent:
                    self.end.send(self._unsent[0], self._flags)
                    self._unsent.popleft()
            except BlockingIOError:
                return False
            except ConnectionError as error:
                raise HungUp(*error.args) from None
            finally:
                self._is_sending = False
            return True

    def receive(self, is_blocking: bool = True) -> list[Heard]:
        while (piece := self._read(is_blocking)) is not None:
            if not piece:
                raise HungUp("the coordinator is gone")
            self._pieces.append(piece[1:])
            if piece[:1] == _LAST:
                data, self._pieces = b"".join(self._pieces), []
                return self._heard.decode(data)
        return []

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def halt(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _read(self, is_blocking: bool) -> bytes | None:
        """Return the next datagram, or None; a blocking read spins for a moment first."""
        max_bytes = 1 + self.PIECE_BYTES
        try:
            for _ in spin() if is_blocking else (None,):
                try:
                    return self.end.recv(max_bytes, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    continue
            return self.end.recv(max_bytes) if is_blocking else None
        except ConnectionError as error:
            raise HungUp(*error.args) from None


def member_channel(end: socket.socket) -> SocketChannel[FromMember, ToMember]:
    """Return the member's channel over its end of the pair."""
    return SocketChannel(end, FROM_MEMBER, TO_MEMBER)


def coordinator_channel(end: socket.socket) -> SocketChannel[ToMember, FromMember]:
    """Return the coordinator's channel, whose sends never wait."""
    return SocketChannel(end, TO_MEMBER, FROM_MEMBER, waits=False)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two ends that keep message boundaries: sequenced packets, or else datagrams."""
    kind = getattr(socket, "SOCK_SEQPACKET", socket.SOCK_DGRAM)
    try:
        ends = socket.socketpair(socket.AF_UNIX, kind)
    except OSError:
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * SocketChannel.PIECE_BYTES)
    return ends
