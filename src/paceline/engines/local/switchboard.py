"""The channels to all members: messages from them, and messages not yet delivered to them.

    member 0 --\\
    member 1 ----> poll -> (member, message), ...        (member, message), ... -> member 1
    member 2 --/

Sending never waits: messages to a stopped or busy member are kept until it receives them. This
module must not know what a message leads to, nor what a member is.
"""

import contextlib
import errno
import select
import socket
from collections.abc import Callable, Sequence

from ...errors import LinkError
from ...wire.channel import SocketChannel, coordinator_channel
from ...wire.messages import FromMember, ToMember

Received = tuple[int, FromMember]
"""A member and its message."""


class Switchboard:
    """The coordinator's ends of all channels.

    Args:
        extra: another descriptor to poll while waiting for members.
        make_channel: makes a channel from this process's end of a socket pair.
    """

    def __init__(
        self,
        extra: int,
        make_channel: Callable[
            [socket.socket], SocketChannel[ToMember, FromMember]
        ] = coordinator_channel,
    ) -> None:
        self._make_channel = make_channel
        self._channels: dict[int, SocketChannel[ToMember, FromMember]] = {}
        self._ends: dict[int, socket.socket] = {}
        self._members: dict[int, int] = {}
        """Descriptor -> member."""
        self._late: set[int] = set()
        """Members with messages that are not sent yet."""
        self._extra = extra
        self._poll = select.poll()
        self._poll.register(extra, select.POLLIN)

    def look_at(self, extra: int) -> None:
        """Poll this descriptor instead of the previous one from now on."""
        self._poll.unregister(self._extra)
        self._extra = extra
        self._poll.register(extra, select.POLLIN)

    @property
    def members(self) -> list[int]:
        """The members whose channels are open."""
        return list(self._channels)

    def open(self, member: int, end: socket.socket) -> None:
        """Open this member's channel."""
        self._ends[member] = end
        self._channels[member] = self._make_channel(end)
        self._members[end.fileno()] = member
        self._poll.register(end, select.POLLIN)

    def hear(self, timeout_s: float) -> tuple[list[Received], bool]:
        """Return members' messages, [] after ``timeout_s``, and whether ``extra`` is readable."""
        self._send_rest()
        received: list[Received] = []
        is_extra_ready = False
        for descriptor, _ in self._poll.poll(timeout_s * 1000):
            if descriptor == self._extra:
                is_extra_ready = True
                continue
            member = self._members[descriptor]
            try:
                received += [(member, message) for message in self._channels[member].receive(False)]
            except OSError:
                self._poll.unregister(descriptor)
        return received, is_extra_ready

    def hang_up(self, member: int) -> list[Received]:
        """Close the channel of a member that has ended; returns its last messages."""
        received: list[Received] = []
        channel, end = self._channels.pop(member), self._ends.pop(member)
        with contextlib.suppress(OSError):
            while messages := channel.receive(False):
                received += [(member, message) for message in messages]
        self._late.discard(member)
        del self._members[end.fileno()]
        with contextlib.suppress(KeyError):
            self._poll.unregister(end)
        end.close()
        return received

    def send(self, messages: Sequence[tuple[int, ToMember]]) -> None:
        """Send each member's messages in one piece; drop those to members that have ended."""
        outbox: dict[int, list[ToMember]] = {}
        for member, message in messages:
            if member in self._channels:
                outbox.setdefault(member, []).append(message)
        for member, member_messages in outbox.items():
            try:
                self._channels[member].send_all(member_messages)
            except OSError as error:
                self._handle_failure(member, error)
            if self._channels[member].is_late:
                self._late.add(member)

    def close(self) -> None:
        for end in self._ends.values():
            end.close()

    def _send_rest(self) -> None:
        for member in list(self._late):
            try:
                if self._channels[member].send_rest():
                    self._late.discard(member)
            except OSError as error:
                self._handle_failure(member, error)

    def _handle_failure(self, member: int, error: OSError) -> None:
        """Handle a failed send; if the member is gone, the fork server reports it."""
        if error.errno == errno.EMSGSIZE:
            raise LinkError(
                f"this machine's sockets do not accept a message of {SocketChannel.PIECE_BYTES:,} "
                "bytes: raise net.core.wmem_max"
            ) from None
        if error.errno != errno.ENOBUFS:
            self._channels[member].drop()
            self._late.discard(member)
