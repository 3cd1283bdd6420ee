"""Which member reads the stream: one for all, another when that one is gone.

    an epoch opens --ReadStream--> a member --StreamServed--> StreamAt to all
    that member is gone, or silent --ReadStream--> another, from the first number that is needed
    an update --StreamDone--> whoever is granted next, who tells it with what it asks for

If the data set can report its position, states arrive beside the mini-batches, and the next reader
begins with the newest one before the first number that is needed; else it reads everything before
that again. Only the ledger knows what was used. This module must not know processes, sockets,
tensors or data sets.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..events import Grant, Order
from ..passes import stream_place
from ..wire.messages import (
    ReadStream,
    StreamAt,
    StreamDone,
    StreamServed,
    StreamState,
    ToMember,
)

Place = tuple[int, tuple[int, ...]]


class Streams:
    """The streams of one run, one pass after the other.

    Args:
        tell: sends a message to a member.
        live: members that take part, in member order.
        done_with: returns the first number that is still needed, and later ones that are not.

    Attributes:
        is_on: whether the run reads a stream at all.
        reader: the member that reads; None: no member does.
        end: of the open pass, in mini-batches; None: it is not known yet.
    """

    def __init__(
        self,
        tell: Callable[[int, ToMember], None],
        live: Callable[[], Sequence[int]],
        done_with: Callable[[], Place],
    ) -> None:
        self._tell, self._live, self._done_with = tell, live, done_with
        self.is_on = False
        self.reader: int | None = None
        self.end: int | None = None
        self._epoch = -1
        self._is_open = False
        self._at: StreamAt | None = None
        self._states: list[tuple[int, str]] = []
        """Of this pass, lowest number first; all that is still needed comes after the first."""
        self._told: Place = (0, ())

    # -- who reads ------------------------------------------------------------------------------

    def open(self, epoch: int) -> None:
        """A pass begins, or continues where the run was cut off."""
        if not self.is_on:
            return
        if epoch != self._epoch:
            self._states = []
        self.end = None
        self._epoch, self._is_open = epoch, True
        self._choose()

    @property
    def has_ended(self) -> bool:
        """Whether the length of the open pass is known."""
        return self.end is not None

    def close(self) -> None:
        """The pass is over."""
        self._is_open = False

    def left(self, member: int) -> None:
        """A member is gone, or stalled: it does not read any more."""
        if member == self.reader:
            self.reader = None
            self._at = None
            if self._is_open:
                self._choose(but=member)

    def joined(self, member: int) -> None:
        """A member takes part from now on."""
        if not self._is_open:
            return
        if self.reader is None:
            self._choose()
        elif self._at is not None:
            self._tell(member, self._at)

    def served(self, member: int, message: StreamServed) -> None:
        if member == self.reader and message.epoch == self._epoch:
            self._at = StreamAt(member, *message)
            for member in self._live():
                self._tell(member, self._at)

    def _choose(self, but: int = -1) -> None:
        """Choose the member that has read before, or the first."""
        live = [member for member in self._live() if member != but]
        if self.reader not in live:
            self.reader = live[0] if live else None
        if self.reader is None:
            return
        first, done = self._told = self._done_with()
        number, state = self._state_before(first)
        self._tell(self.reader, ReadStream(self._epoch, first, done, number, state))

    # -- what is needed no more -----------------------------------------------------------------

    def pass_on(self, orders: Sequence[Order]) -> None:
        """Report numbers that are no longer needed with the first grant among these orders."""
        member = next((order.ticket.member for order in orders if isinstance(order, Grant)), None)
        if not self._is_open or member is None:
            return
        now = self._done_with()
        if now == self._told:
            return
        first, others = now
        reported = set(self._told[1])
        news = tuple(number for number in others if number not in reported)
        self._told = now
        self._tell(member, StreamDone(self._epoch, first, news))

    # -- states of the data set -----------------------------------------------------------------

    def state(self, member: int, message: StreamState) -> None:
        if member != self.reader or message.epoch != self._epoch:
            return
        self._states = [state for state in self._states if state[0] < message.number]
        self._states.append((message.number, message.text))
        self._state_before(self._done_with()[0])

    def _state_before(self, first: int) -> tuple[int, str]:
        """The newest state before all that is needed; older ones are dropped."""
        before = [state for state in self._states if state[0] <= first]
        if before:
            self._states = self._states[len(before) - 1 :]
        return before[-1] if before else (0, "")

    def remember(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON-compatible data."""
        number, state = self._state_before(self._done_with()[0]) if self.is_on else (0, "")
        return {"epoch": self._epoch, "number": number, "state": state}

    def go_on(self, saved: Mapping[str, Any] | None) -> None:
        """Restore a state of ``remember``. ValueError, TypeError: it is none."""
        epoch, number, state = stream_place(saved)
        if epoch < 0:
            return
        self._epoch = epoch
        self._states = [(number, state)] if state else []
