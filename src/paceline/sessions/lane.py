"""How a member and the coordinator talk: messages in order, both ways, and nothing else.

A message is a tuple that begins with its kind; several for one receiver travel together. The
tables below are the whole language. This module must not know what a message leads to.

    member -> coordinator
        describe  (text)                          what prepare() found, as JSON
        arrive    (epoch, batch_ends, digest)     at the loader, waiting for the epoch; of its order
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
        rested    (epoch)                         the script has no more epochs
        failed    (text)
        fault     (text)                          what was ordered to go wrong goes wrong now
        settings  (text)                          the optimizer's settings, for newcomers
    coordinator -> member
        laid      (arena_bytes, is_first, num_steps, is_difference, is_error, first_epoch,
                   distance_limit)                the store's memory has this size
        adopt     (text)                          the optimizer's settings, for a newcomer
        away      ()                              to a newcomer: it drew another order, it ends
        open      (epoch, mode, last_round, phase, seats, position, first_id)
        grant     (serial, version, leases, upcoming)
        add       (job, seat, weight, scale, is_first)
        finish    (job, version, seat, scale, clip)
        skip      (job, version, overflow_version)
        copy      (job, number)                   pin the version that the job before made
        snap      (number, version, is_first)     pin this version, all others wait or stop
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
from typing import Any, Protocol

from ..store.memory import spin

Message = tuple[Any, ...]


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

    ``marshal`` is safe here: the other end is a process of ours on the same machine, and the
    pair has no name that anybody else could open.
    """

    MAX_BYTES = 1 << 18

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._held: list[Message] = []

    def send(self, message: Message) -> None:
        messages, self._held = [*self._held, message], []
        self._end.send(marshal.dumps(messages))

    def hold(self, message: Message) -> None:
        self._held.append(message)

    def send_all(self, messages: list[Message]) -> None:
        """Send several messages as one, in order."""
        self._end.send(marshal.dumps(messages))

    def receive(self, is_blocking: bool = True) -> list[Message]:
        data = self._read(is_blocking)
        if data is None:
            return []
        if not data:
            raise ConnectionResetError("the coordinator is gone")
        messages: list[Message] = marshal.loads(data)
        return messages

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def halt(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _read(self, is_blocking: bool) -> bytes | None:
        """The next datagram; None when there is none. A blocking read spins for a moment first."""
        for _ in spin() if is_blocking else (None,):
            try:
                return self._end.recv(self.MAX_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
        return self._end.recv(self.MAX_BYTES) if is_blocking else None


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends that keep message borders (sequenced packets; datagrams where there are none)."""
    kind = getattr(socket, "SOCK_SEQPACKET", socket.SOCK_DGRAM)
    try:
        ends = socket.socketpair(socket.AF_UNIX, kind)
    except OSError:
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SocketLane.MAX_BYTES)
    return ends
