"""Messages between ranks, through the store at which torch's own process groups meet.

    rank K   send -> teller ------ queue "up" -------> reader -> events      rank 0
             receive <- listener <- queue "down/K" <-- tell                  (the controller)

Each thread has its own connection, since a waiting thread blocks it. No step waits for a message to
be sent: that is the teller's work. A rank that has died is reported by another one (`Lost`), and
`RunOver` ends all ranks. This module must not know what a message leads to.
"""

import contextlib
import os
import queue
import signal
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from torch.distributed import Store  # type: ignore[attr-defined]  # not in its stubs

from ...errors import LinkError
from ...wire.channel import HungUp
from ...wire.codec import Codec, WireError
from ...wire.messages import Failed, FromMember, Rounds, ToMember, Whose
from .place import MeetingPlace

_FLUSH_S = 10.0
_NOTHING = b""
_SEAT = struct.Struct("<i")


class Hello(NamedTuple):
    """Up: this rank has arrived.

    Attributes:
        settings: its settings at the start, as JSON.
        random: digests of its random states, see ``life.unseeded``.
        unreachable_why: why other machines cannot reach it; "" if they can.
        boot: the id of its machine's boot; two machines may have the same name.
        memory: where another process can open some memory of this one, to see whether it may.
        is_restarted: whether its job was started before, as its own machine counts it.
    """

    host: str
    pid: int
    settings: str
    random: tuple[str, ...]
    unreachable_why: str
    boot: str = ""
    memory: tuple[int, ...] = ()
    is_restarted: bool = False


class Lost(NamedTuple):
    """Up: the connection to the rank on this seat broke."""

    seat: int


class EndAsked(NamedTuple):
    """Up: this rank received a signal that asks for the end."""

    number: int


class Bye(NamedTuple):
    """Up: this rank knows that the run is over."""


class Meet(NamedTuple):
    """Down: all ranks have arrived; make the groups.

    Attributes:
        seeds: the random generators that get the run's seed, since the script has not seeded them.
        is_near: whether all ranks are on one machine.
    """

    seeds: tuple[str, ...]
    is_near: bool


class Begin(NamedTuple):
    """Down: become this member; its `MemberSpec` as JSON."""

    spec: str


class CallOff(NamedTuple):
    """Down: abandon the step if it works on this serial or an earlier one."""

    serial: int


class RunOver(NamedTuple):
    """Down: the run is over; exit with this code, after printing a text for this rank only."""

    code: int
    said: str = ""


Up: TypeAlias = Hello | Lost | EndAsked | Bye
Down: TypeAlias = Meet | Begin | CallOff | RunOver
UP: Final[Codec[Any]] = Codec(FromMember | Up)
DOWN: Final[Codec[Any]] = Codec(ToMember | Down)


class StoreChannel:
    """The member's end of the channel; see ``wire.channel.Channel``.

    Args:
        heard: called with messages to the rank itself: `Meet`, `Begin`, `CallOff`, `RunOver`.
        lost: called when no message can arrive any more, with the reason; "" if the meeting place
            is gone.
    """

    def __init__(
        self,
        place: MeetingPlace,
        seat: int,
        heard: Callable[[Down], None],
        lost: Callable[[str], None],
    ) -> None:
        self._seat, self._heard, self._lost = seat, heard, lost
        self._held: list[FromMember] = []
        self._outbox: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[list[ToMember] | None] = queue.SimpleQueue()
        self._is_over = False
        teller, self._listener = (
            threading.Thread(target=work, args=(place.client(),), daemon=True)
            for work in (self._tell, self._listen)
        )
        teller.start()
        self._listener.start()

    # -- sending --------------------------------------------------------------------------------

    def send(self, message: FromMember) -> None:
        messages, self._held = [*self._held, message], []
        if self._seat:  # only rank 0 reports rounds, since the controller reads the same clock
            messages = [message for message in messages if not isinstance(message, Rounds)]
        if messages:
            self._outbox.put(_SEAT.pack(self._seat) + UP.encode(messages))

    def hold(self, message: FromMember) -> None:
        self._held.append(message)

    def say(self, message: Up) -> None:
        """Send a message of the rank itself; from any thread, or a signal handler."""
        self._outbox.put(_SEAT.pack(self._seat) + UP.encode([message]))

    def flush(self, within_s: float) -> None:
        """Wait until all messages are in the store, at most this long."""
        done = threading.Event()
        self._outbox.put(done)
        done.wait(within_s)

    def join(self, within_s: float) -> None:
        """Wait for the listening thread to end, after the last message."""
        self._listener.join(within_s)

    def die(self) -> None:
        self.flush(_FLUSH_S)
        os.kill(os.getpid(), signal.SIGKILL)

    def halt(self) -> None:
        self.flush(_FLUSH_S)
        os.kill(os.getpid(), signal.SIGSTOP)

    def _tell(self, store: Store) -> None:
        while True:
            frame = self._outbox.get()
            if isinstance(frame, threading.Event):
                frame.set()
                continue
            try:
                store.queue_push("up", frame)
            except RuntimeError:
                self._fail()
                return

    # -- receiving ------------------------------------------------------------------------------

    def receive(self, is_blocking: bool = True) -> list[ToMember]:
        try:
            messages = self._inbox.get(is_blocking)
        except queue.Empty:
            return []
        if messages is None:
            self._inbox.put(None)  # for the next call
            raise HungUp("the coordinator is gone")
        return messages

    def _listen(self, store: Store) -> None:
        while not self._is_over:
            try:
                received = DOWN.decode(store.queue_pop(f"down/{self._seat}"))
            except RuntimeError:
                self._fail()
                return
            except WireError as error:
                self._fail(str(error))
                return
            messages: list[ToMember] = []
            for message in received:
                if isinstance(message, Meet | Begin | CallOff | RunOver):
                    self._is_over |= isinstance(message, RunOver)
                    self._heard(message)
                else:
                    messages.append(message)
            if messages:
                self._inbox.put(messages)
        self._inbox.put(None)

    def _fail(self, why: str = "") -> None:
        if not self._is_over:
            self._is_over = True
            self._inbox.put(None)
            self._lost(why)


class ControllerPost:
    """Rank 0's end: receives messages of all ranks and sends messages to each."""

    def __init__(self, place: MeetingPlace, size: int) -> None:
        self.size = size
        self._store = place.client()
        self._received: queue.SimpleQueue[tuple[int, list[FromMember | Up]]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, args=(place.client(),), daemon=True)
        self._reader.start()

    def hear(self, timeout_s: float) -> list[tuple[int, FromMember | Up]]:
        """Return the ranks' messages with their seats, in one order; [] after ``timeout_s``."""
        received: list[tuple[int, FromMember | Up]] = []
        with contextlib.suppress(queue.Empty):
            while True:
                seat, messages = self._received.get(timeout=0.0 if received else timeout_s)
                received += [(seat, message) for message in messages]
        return received

    def tell(self, seat: int, messages: Sequence[ToMember | Down]) -> None:
        """Send messages to this rank, in order. LinkError: the meeting place is gone."""
        try:
            self._store.queue_push(f"down/{seat}", DOWN.encode(messages))
        except RuntimeError as error:
            raise LinkError(f"the store at which all workers meet is gone: {error}") from None

    def tell_all(self, message: Down) -> None:
        for seat in range(self.size):
            self.tell(seat, [message])

    def close(self) -> None:
        """Stop listening: a process must not end while a thread is in torch's code."""
        with contextlib.suppress(RuntimeError):
            self._store.queue_push("up", _NOTHING)
        self._reader.join(1.0)

    def _read(self, store: Store) -> None:
        while True:
            try:
                frame = store.queue_pop("up")
            except RuntimeError:
                return
            if frame == _NOTHING:
                return
            (seat,) = _SEAT.unpack_from(frame)
            self._received.put((seat, _decode(seat, frame[_SEAT.size :])))


def _decode(seat: int, frame: bytes) -> list[FromMember | Up]:
    """Decode a rank's messages; if they cannot be decoded (another version), return its failure."""
    try:
        return UP.decode(frame)
    except WireError as error:
        return [Failed(f"worker {seat}: {error}", Whose.USER)]
