"""Sends the coordinator's orders: orders become messages, updates become jobs.

    orders of one fact -> [ jobs (core/jobs.py) ] -> messages, sent together -> cancellations

All messages that follow from one fact are sent together. Cancellations come last, so a cancelled
member finds its next grant already there and does not wait twice. This module must not know what a
protocol decides, processes or tensors.
"""

from collections.abc import Sequence

from ..core.jobs import Jobs, Payload
from ..engines.base import ALL_WORK, Engine, StoreView
from ..events import Cancel, Fact, Grant, Joined, Late, Left, Order
from ..protocols.staleness import StalenessRule
from ..wire.messages import Resume, ToMember
from .roster import Roster


class Dispatch:
    """The messages and jobs of one run.

    Attributes:
        store: the coordinator's view of the store; set by ``begin``.
    """

    store: StoreView

    def __init__(self, engine: Engine, roster: Roster) -> None:
        self._engine = engine
        self._roster = roster
        self._jobs: Jobs | None = None
        self._seats: dict[int, int] = {}
        self._serials: dict[int, int] = {}
        self._outbox: list[tuple[int, ToMember]] = []

    def begin(self, num_bytes: int, samples_per_update: int, staleness: StalenessRule) -> None:
        """Make the store's memory and the jobs for pushes.

        Args:
            samples_per_update: samples that a whole update averages.

        Raises:
            LinkError: there is too little memory.
        """
        self.store = store = self._engine.lay_out(num_bytes)
        self._seats |= {entry.number: entry.seat for entry in self._roster.live}
        self._jobs = Jobs(
            self._post, self._seats, lambda: store.num_jobs, samples_per_update, staleness
        )

    @property
    def _begun(self) -> Jobs:
        assert self._jobs is not None
        return self._jobs

    def tell(self, member: int, message: ToMember) -> None:
        """Send one message, without jobs."""
        if isinstance(message, Resume):  # peers made this grant by themselves
            self._serials[member] = message.serial
        self._engine.send([(member, message)])

    def carry_out(
        self, orders: Sequence[Order], cause: Fact | None, payload: Payload | None
    ) -> None:
        """Send the coordinator's answer to ``cause``, which came with ``payload``."""
        jobs = self._begun
        if isinstance(cause, Left):
            jobs.left(cause.member)
        elif isinstance(cause, Joined):
            self._seats[cause.member] = self._roster[cause.member].seat
            jobs.joined(cause.member)
        jobs.settle(orders, cause, payload)
        cancelled = []
        for order in orders:
            if type(order) is Grant:  # not isinstance: an update may have thousands of orders
                ticket = order.ticket
                self._serials[ticket.member] = ticket.serial
                self._post(ticket.member, order)
            elif type(order) is Cancel:
                member = order.member
                cancelled.append((member, self._serials[member]))
            elif type(order) is Late:
                jobs.idle(order.ticket.member)
        self._send()
        for member, serial in cancelled:
            self._engine.cancel(member, serial)

    def hand_on(self, member: int) -> None:
        """This member is gone: give its jobs for the store to others."""
        self._begun.left(member)
        self._send()

    def call_off(self, members: Sequence[int]) -> None:
        """The run ends: cancel all work of these members."""
        if self._jobs is not None:
            self._jobs.forget()
        for member in members:
            self._engine.cancel(member, ALL_WORK)

    def jump(self, version: int) -> None:
        """Peers have made updates by themselves, up to ``version``."""
        self._begun.jump(version)

    def ask_copy(self, number: int, main: int) -> None:
        """Have a member pin the version of the next update for this checkpoint.

        Args:
            main: as of ``StoreView.ask_copy``.
        """
        self.store.ask_copy(number, main)
        self._begun.ask_copy(number)

    def withdraw_copy(self) -> None:
        """Have no member pin a version."""
        self.store.withdraw_copy()
        self._begun.ask_copy(0)

    def needs(self, seat: int) -> bool:
        """Whether an update still has to use the last push from this seat."""
        return self._begun.needs(seat)

    def holds_next_job(self, member: int) -> bool:
        """Whether all others wait for this member's job."""
        return self._jobs is not None and self._jobs.is_held_by(member)

    def _post(self, member: int, message: ToMember) -> None:
        self._outbox.append((member, message))

    def _send(self) -> None:
        if self._outbox:
            outbox, self._outbox = self._outbox, []
            self._engine.send(outbox)
