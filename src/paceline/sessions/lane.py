"""How a member and the coordinator talk: messages in order, both ways, and nothing else.

A message is a tuple that begins with its kind; several for one receiver travel together. The
tables below are the whole language. This module must not know what a message leads to.

    member -> coordinator
        describe  (text)                          what prepare() found, as JSON
        arrive    (epoch, batch_ends, digest, place)   at the loader, waiting for the epoch; of
                                                  its order; where the script is in pace.epochs
        push      (serial, version, told, clock, hyper, clip)
        extend    (serial)                        one more lease for the ticket at work
        giveback  (serial)
        leave     (kept, is_look)                 the loop was left before the epoch's end
        superseded (serial, wasted_s, left_s)     travels with the next message
        rounds    (first, rows)                   express: whole rounds, in member order,
                                                  each with the checkpoint taken after it, or 0
        interrupted (push, pushes, needs_store)   express: left; its own push, and those it saw
        mended    ()                              the shares of dead members are put back
        count     (num_samples, batch_size, ends, digest)   an evaluation, of these positions
        counted   (start, totals)
        sum       (values)
        log       (values)
        note      (text)                          the run says it, once
        scaled    (serial, version, scale)        distance left so much of its push; held
        done      ()                              the script ended
        copied    (number, version, is_pinned, fault)   the own part of a checkpoint is written
        rested    (epoch, place)                  the script has no more epochs
        failed    (text)
        fault     (text)                          what was ordered to go wrong goes wrong now
        settings  (text)                          the optimizer's settings, for newcomers
    coordinator -> member
        laid      (arena_bytes, num_steps, is_difference, is_error, first_epoch,
                   distance_limit, version, place)   the store's memory has this size
        adopt     (text)                          the optimizer's settings, for a newcomer
        away      ()                              to a newcomer: it drew another order, it ends
        open      (epoch, mode, last_round, phase, seats, position, first_id)
        grant     (serial, version, leases, upcoming)
        add       (job, seat, weight, scale, is_first)
        finish    (job, version, seat, scale, clip)
        skip      (job, version, overflow_version)
        copy      (job, number)                   pin the version that the job before made
        snap      (number, version, is_first)     pin this version, all others wait
        shelf     (folder, within)                checkpoints go there from now on
        ending    ()                              stop comes when the end of the run is copied
        goodbye   ()                              the answer to rested
        extended  (lease)
        end       (epoch, version)                the epoch is over
        mend      ()                              put back the shares of dead members
        resume    (serial)                        go on through the store
        main      ()                              this member prints and saves from now on
        range     (start, stop) | (-1, -1)
        totals    (totals)
        summed    (values)
        stop      ()
"""

import marshal
import os
import signal
import socket
from collections import deque
from typing import Any, Protocol

from ..store.memory import spin

Message = tuple[Any, ...]
_MORE, _LAST = b"+", b"."


class Lane(Protocol):
    """The member's end of the talk."""

    def send(self, message: Message) -> None:
        """Send one message; returns at once."""

    def hold(self, message: Message) -> None:
        """Keep a message that nobody waits for: it goes with the next one, before it."""

    def receive(self, is_blocking: bool = True) -> list[Message]:
        """The next messages, in order; [] when there is none and ``is_blocking`` is False."""

    def die(self) -> None:
        """The member ends here, as if it was killed; nothing is cleaned up."""

    def halt(self) -> None:
        """The member stands still here until somebody lets it go on."""


class SocketLane:
    """A lane over one end of a socket pair that keeps message borders.

    Messages of any size: a long one goes in pieces, each with a byte that says whether it is the
    last. ``marshal`` is safe here: the other end is a process of ours on the same machine, and the
    pair has no name that anybody else could open.

    Args:
        waits: whether sending waits for a reader that is slow. The coordinator does not, for whom a
            reader may be stopped: what is not taken stays here until ``send_rest`` finds it is.
    """

    PIECE_BYTES = 1 << 17

    def __init__(self, end: socket.socket, *, waits: bool = True) -> None:
        self._end = end
        self._flags = 0 if waits else socket.MSG_DONTWAIT
        self._held: list[Message] = []
        self._unsent: deque[bytes] = deque()
        self._pieces: list[bytes] = []

    def send(self, message: Message) -> None:
        messages, self._held = [*self._held, message], []
        self.send_all(messages)

    def hold(self, message: Message) -> None:
        self._held.append(message)

    def send_all(self, messages: list[Message]) -> None:
        """Send several messages as one, in order."""
        data, size = marshal.dumps(messages), self.PIECE_BYTES
        for start in range(0, len(data) - size, size):
            self._unsent.append(_MORE + data[start : start + size])
        self._unsent.append(_LAST + data[(len(data) - 1) // size * size :])
        self.send_rest()

    @property
    def is_late(self) -> bool:
        """Whether something has not been taken yet."""
        return bool(self._unsent)

    def send_rest(self) -> bool:
        """Send what was not taken before; whether all of it is now."""
        try:
            while self._unsent:
                self._end.send(self._unsent[0], self._flags)
                self._unsent.popleft()
        except BlockingIOError:
            return False
        return True

    def receive(self, is_blocking: bool = True) -> list[Message]:
        while (piece := self._read(is_blocking)) is not None:
            if not piece:
                raise ConnectionResetError("the coordinator is gone")
            self._pieces.append(piece[1:])
            if piece[:1] == _LAST:
                data, self._pieces = b"".join(self._pieces), []
                messages: list[Message] = marshal.loads(data)
                return messages
        return []

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def halt(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _read(self, is_blocking: bool) -> bytes | None:
        """The next datagram; None when there is none. A blocking read spins for a moment first."""
        most = 1 + self.PIECE_BYTES
        for _ in spin() if is_blocking else (None,):
            try:
                return self._end.recv(most, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
        return self._end.recv(most) if is_blocking else None


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends that keep message borders (sequenced packets; datagrams where there are none)."""
    kind = getattr(socket, "SOCK_SEQPACKET", socket.SOCK_DGRAM)
    try:
        ends = socket.socketpair(socket.AF_UNIX, kind)
    except OSError:
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * SocketLane.PIECE_BYTES)
    return ends
