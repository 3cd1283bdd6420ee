"""A member of the socket engine: words and bytes that all members have but do not share.

    writes a word, fills its slot, lays the store out  --> engine --> all other members
    jobs of all, with the gradients they need          <-- engine

Each member has the whole store and does every job, in the order of their numbers, so all come to
the same bytes. `Mirror` is channel and carrier of its exchange at once; the exchange is that of a
live run.
"""

import select
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from paceline.context import Context
from paceline.engines.base import MemberSpec
from paceline.exchange.base import Clock
from paceline.exchange.rounds import Barrier
from paceline.exchange.through_store import StoreExchange
from paceline.store.control import (
    ARGUMENTS,
    COUNTS,
    HAS_SCALE,
    INSIDE,
    JOBS,
    LAYOUT,
    MOST_SCHEDULES,
    ONCE,
    RHYTHMS,
    VERSION,
    Control,
    control_bytes,
)
from paceline.store.layout import Layout
from paceline.store.memory import PrivateMemory
from paceline.store.parameter_store import SharedStore
from paceline.wire.channel import SocketChannel
from paceline.wire.codec import Codec
from paceline.wire.messages import Copied, FromMember, Push, ToMember

_BEAT_S, _LOOK_S = 0.1, 0.0005


class Wrote(NamedTuple):
    """Both ways: this word has a new value."""

    index: int
    value: int


class Filled(NamedTuple):
    """This seat's slot, before the push that announces it; from the engine: for the next job."""

    seat: int
    data: bytes


class Stands(NamedTuple):
    """A whole store: of all others as it is laid out, or of one newcomer.

    Attributes:
        member: -1: all.
    """

    member: int
    page: bytes
    arena: bytes


class Pinned(NamedTuple):
    """The bytes of the store's memory that a checkpoint is written from."""

    start: int
    data: bytes


class Ask(NamedTuple):
    """To a member: send this new member the store after this job."""

    member: int
    job: int


class Pass(NamedTuple):
    """To a member: this job changes nothing of its own."""

    job: int


Up: TypeAlias = Wrote | Filled | Stands | Pinned
Down: TypeAlias = Wrote | Filled | Stands | Ask | Pass
UP: Codec[Any] = Codec(FromMember | Up)
DOWN: Codec[Any] = Codec(ToMember | Down)


def exchange_over_sockets(
    channel: SocketChannel[Any, Any], descriptors: list[int], spec: MemberSpec, context: Context
) -> StoreExchange:
    """What ``engines/local/process.py`` asks for."""
    assert not descriptors  # nothing is shared
    mirror = Mirror(channel.end, spec.num_seats, spec.seat)
    return StoreExchange(
        mirror,
        mirror,
        seat=spec.seat,
        member=spec.member,
        is_main=False if context.is_newcomer else None,
    )


class Mirror:
    """The words and bytes of one member, kept equal to those of all others."""

    def __init__(self, end: socket.socket, num_seats: int, seat: int) -> None:
        self._end = end
        self._channel: SocketChannel[Any, Any] = SocketChannel(end, UP, DOWN)
        self._page, self._arena = PrivateMemory(control_bytes(num_seats)), PrivateMemory()
        self.control = MirroredControl(self._page, num_seats, self, seat)
        self._seat = seat
        self._heard: deque[ToMember] = deque()
        self._came: deque[bytes] = deque()
        """What the next jobs of other seats add, in order."""
        self._early: list[Stands] = []
        self._asked: list[Ask] = []
        self._passed: set[int] = set()
        self._looked_s = 0.0
        self._store: MirroredStore | None = None

    # -- the carrier ----------------------------------------------------------------------------

    is_shared = False

    def barrier(self, seat: int, clock: Clock) -> Barrier:
        return Barrier(self.control, seat, clock)

    def open_store(self, layout: Layout, num_bytes: int) -> SharedStore:
        self._arena.grow(num_bytes)
        self._store = MirroredStore(layout, self._arena.tensor(), self.control, self)
        for one in self._early:
            self._take_over(one)
        return self._store

    # -- the channel ----------------------------------------------------------------------------

    def send(self, message: FromMember) -> None:
        store = self._store
        if isinstance(message, Push) and message.told.weight:
            assert store is not None
            self._channel.hold(Filled(self._seat, store.slot_bytes(self._seat)))
        if isinstance(message, Copied) and message.is_pinned:
            assert store is not None
            self._channel.hold(Pinned(*store.pinned_bytes(self._arena.buffer)))
        self._channel.send(message)

    def hold(self, message: FromMember) -> None:
        self._channel.hold(message)

    def die(self) -> None:
        self._channel.die()

    def halt(self) -> None:
        self._channel.halt()

    def receive(self, is_blocking: bool = True) -> list[ToMember]:
        self._pump()
        while is_blocking and not self._heard:
            self.wait(1.0)
        count = len(self._heard) if self._store is not None else min(1, len(self._heard))
        return [self._heard.popleft() for _ in range(count)]  # jobs can wait for the store

    # -- received from the others ---------------------------------------------------------------

    def look(self) -> None:
        """Poll while a step computes."""
        now_s = time.perf_counter()
        if now_s - self._looked_s > _LOOK_S:
            self._looked_s = now_s
            self._pump()

    def wait(self, timeout_s: float) -> None:
        """Wait until a message arrives."""
        if not self._heard:
            select.select([self._end], [], [], timeout_s)
        self._pump()

    def _pump(self) -> None:
        while messages := self._channel.receive(False):
            for message in messages:
                self._hear(message)

    def _hear(self, message: Any) -> None:
        if isinstance(message, Wrote):
            self.control.mirror(message.index, message.value)
        elif isinstance(message, Filled):
            self._came.append(message.data)
        elif isinstance(message, Stands):
            self._early.append(message) if self._store is None else self._take_over(message)
        elif isinstance(message, Ask):
            self._asked.append(message)
            self._answer()
        elif isinstance(message, Pass):
            self._passed.add(message.job)
            self._pass()
        else:
            self._heard.append(message)

    def _take_over(self, message: Stands) -> None:
        control, own = self.control, [self.control.cancelled[self._seat]]
        own.append(control.beats[self._seat])
        kept = [control.plain(index) for index in own]
        self._page.buffer[:] = message.page
        for index, value in zip(own, kept, strict=True):
            control.mirror(index, value)
        self._arena.buffer[:] = message.arena

    # -- sent to the others ---------------------------------------------------------------------

    def tell(self, index: int, value: int) -> None:
        """A word was written here that others look at."""
        if index == LAYOUT:
            self._channel.send(Stands(-1, bytes(self._page.buffer), bytes(self._arena.buffer)))
        self._channel.send(Wrote(index, value))

    def fill(self, seat: int) -> None:
        """A job is about to read this seat's slot."""
        if seat >= 0 and seat != self._seat:
            assert self._store is not None
            self._store.fill(seat, self._came.popleft())

    def done(self) -> None:
        """A job is done here."""
        for index in (VERSION, JOBS):
            self._channel.send(Wrote(index, self.control.plain(index)))
        self._answer()
        self._pass()

    def _answer(self) -> None:
        job = self.control.plain(JOBS)
        for ask in [one for one in self._asked if one.job == job]:
            self._asked.remove(ask)
            page, arena = bytes(self._page.buffer), bytes(self._arena.buffer)
            self._channel.send(Stands(ask.member, page, arena))

    def _pass(self) -> None:
        following = self.control.plain(JOBS) + 1
        if following in self._passed:
            self._passed.remove(following)
            assert self._store is not None
            self._store.finished(following)


class MirroredControl(Control):
    """The words of one member, some of which are sent to all others."""

    def __init__(self, page: PrivateMemory, num_seats: int, mirror: Mirror, seat: int) -> None:
        super().__init__(page, num_seats)
        self._mirror = mirror
        self._cancelled, self._beats = self.cancelled[seat], self.beats[seat]
        self._told_s = 0.0
        self._common = {LAYOUT, ONCE, INSIDE, HAS_SCALE}
        for first, count in (
            (RHYTHMS, MOST_SCHEDULES), (COUNTS, 2 * MOST_SCHEDULES), (ARGUMENTS, MOST_SCHEDULES),
            *((offer, 6) for offer in self.offers),
        ):  # fmt: skip
            self._common |= {*range(first, first + count)}

    def plain(self, index: int) -> int:
        return super().__getitem__(index)

    def mirror(self, index: int, value: int) -> None:
        super().__setitem__(index, value)

    def __getitem__(self, index: int) -> int:
        if index == self._cancelled:
            self._mirror.look()
        return super().__getitem__(index)

    def __setitem__(self, index: int, value: int) -> None:
        super().__setitem__(index, value)
        self._tell(index)

    def set_double(self, index: int, value: float) -> None:
        super().set_double(index, value)
        self._tell(index)

    def _tell(self, index: int) -> None:
        if index in self._common:
            self._mirror.tell(index, self.plain(index))
        elif index == self._beats and time.perf_counter() - self._told_s > _BEAT_S:
            self._told_s = time.perf_counter()
            self._mirror.tell(index, self.plain(index))

    def wake(self, index: int) -> None:
        """No other member waits on these."""

    def wait_while(
        self,
        index: int,
        is_early: Callable[[int], bool],
        timeout_s: float,
        *,
        is_soon: bool = True,
    ) -> bool:
        if is_early(self[index]) and timeout_s > 0.0:
            self._mirror.wait(timeout_s)
        return not is_early(self[index])


class MirroredStore(SharedStore):
    """The store as one member has it."""

    def __init__(self, layout: Layout, arena: Any, control: Control, mirror: Mirror) -> None:
        super().__init__(layout, arena, control)
        self._mirror = mirror
        self._arena = arena

    def add(self, job: int, seat: int, *details: Any) -> None:
        self._mirror.fill(seat)
        super().add(job, seat, *details)

    def finish(self, *details: Any, seat: int, **others: Any) -> None:
        self._mirror.fill(seat)
        super().finish(*details, seat=seat, **others)

    def finished(self, job: int) -> None:
        super().finished(job)
        self._mirror.done()

    def slot_bytes(self, seat: int) -> bytes:
        """The pushed bytes: gradients, buffers, and which parameters have one."""
        return self.slot(seat)[: self.layout.slot_bytes].numpy().tobytes() + bytes(
            self.present(seat)
        )

    def fill(self, seat: int, data: bytes) -> None:
        import torch

        size = self.layout.slot_bytes
        found = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.slot(seat)[:size].copy_(found[:size])
        self.present(seat)[:] = data[size:]

    def pinned_bytes(self, buffer: bytearray) -> tuple[int, bytes]:
        """The position of the pinned block in memory, and its content."""
        start = self._pinned.data_ptr() - self._arena.data_ptr()
        return start, bytes(buffer[start : start + self.layout.block_bytes])
