"""What a member tells of its work: pushed, superseded, given back, or one mini-batch more.

    message -> fact -> run (coordinator, trace) -> orders, with what came beside the gradient

This module must not know epochs, rounds among peers, processes or tensors.
"""

from collections.abc import Sequence

from ..errors import ConfigError
from ..events import Apply, Discard, Grant, Late, Order, Ticket
from ..sessions.base import Told, conflict
from ..sessions.lane import Message
from ..store.clip import Clip
from .base import Push
from .run import Run


class Pushes:
    """The handlers of messages about work, for runs through the store."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._hypers: dict[int, int] = {}
        self._looked: int | None = None
        """A member that left the first epoch and had done nothing in it."""

    def pushed(self, member: int, message: Message) -> None:
        _, serial, version, row, clocks, hyper, clip = message
        run, told = self._run, Told(*row)
        ticket, fault = Ticket(member, serial, version), told.fault
        fact, orders = run.hear_push(ticket, told, clocks, run.now_s())
        if self._looked is not None:
            self._refuse_a_look_of_one()
        if hyper and not any(type(order) in (Discard, Late) for order in orders):
            self._compare_hyper(member, hyper, orders)
        run.carry_out(orders, fact, Push(fault, hyper, Clip(*clip)))

    def _compare_hyper(self, member: int, hyper: int, orders: Sequence[Order]) -> None:
        """All pushes of one update must come with the same settings of the optimizer."""
        hypers = self._hypers
        hypers[member] = hyper
        if not any(type(order) is Apply for order in orders):
            return
        for other, value in hypers.items():
            if value != hyper:
                raise conflict(self._run.roster[other].seat, self._run.roster[member].seat)
        hypers.clear()

    def extend(self, member: int, message: Message) -> None:
        run = self._run
        ticket = run.roster[member].ticket
        lease = None
        if ticket is not None and ticket.serial == message[1]:
            lease = run.coordinator.extend(ticket)
            if lease is not None:
                run.trace.order(Grant(ticket, (lease,)), run.now_s())
        run.engine.tell(member, ("extended", tuple(lease) if lease is not None else None))

    def leave_epoch(self, member: int, message: Message) -> None:
        """The script left its loop: the epoch ends for all."""
        run = self._run
        if not run.is_open:
            return  # its end is on the way to this member
        if message[2] and not run.coordinator.epoch:
            self._looked = member
            self._refuse_a_look_of_one()
        orders = run.coordinator.leave_epoch(member, message[1], run.now_s())
        run.carry_out(orders, None, None)

    def _refuse_a_look_of_one(self) -> None:
        """Raise ConfigError where one only looked at a batch of an epoch that others train in."""
        run, looked = self._run, self._looked
        busy = next((one for one in run.roster.members.values() if one.pushes), None)
        if looked is not None and busy is not None and not run.coordinator.epoch:
            raise ConfigError(
                f"worker {run.roster[looked].seat} took a batch of the prepared loader and left "
                "the loop, which ends the epoch for all workers, while others train in it; to look "
                "at a batch take it from the plain loader: next(iter(loader.plain))"
            )

    def give_back(self, member: int, message: Message) -> None:
        run = self._run
        ticket = Ticket(member, message[1], run.coordinator.version)
        run.carry_out(run.coordinator.give_back(ticket, run.now_s()), None, None)

    def superseded(self, member: int, message: Message) -> None:
        _, serial, wasted_s, left_s = message
        one = self._run.roster[member]
        one.superseded_s += wasted_s
        saved_s = max(0.0, one.usual_s - wasted_s) if one.pushes else 0.0
        self._run.trace.superseded(self._run.now_s(left_s), member, serial, wasted_s, saved_s)
