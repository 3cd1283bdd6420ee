"""What a member reports of its work: pushed, superseded, given back, or one mini-batch more.

    message -> fact -> run (coordinator, trace) -> orders, with what came beside the gradient

This module must not know epochs, rounds among peers, processes or tensors.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from ..core.jobs import Payload
from ..errors import ConfigError
from ..events import Apply, Discard, Grant, Late, Lease, Order, Retire, Ticket
from ..exchange.base import are_at_odds, conflict
from ..wire.messages import (
    Extend,
    Extended,
    GiveBack,
    LeaveEpoch,
    Push,
    StepLeft,
    StreamOver,
    Told,
)
from .state import RunState


class Pushes:
    """The handlers of messages about work, for runs through the store."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._hypers: dict[int, int] = {}
        self._is_again: dict[int, bool] = {}
        """Of members in step: whether their last push is another step on the same batch."""
        self._stepped: dict[int, int] = {}
        """Of members in step: the optimizer, of several, whose step they pushed."""
        self._looked: int | None = None
        """A member that left the first epoch without doing anything in it."""
        self._looks: dict[int, int] = {}
        """The epoch that a member last left without doing anything, until it trains again."""

    def pushed(self, member: int, message: Push) -> None:
        serial, version, told, clocks, hyper, clip = message
        run, ticket = self._run, Ticket(member, serial, version)
        fact, orders = run.hear_push(ticket, told, clocks, run.now_s())
        if self._looked is not None:
            self._refuse_a_look_of_one()
        if self._looks and told.weight:
            self._refuse_an_earlier_look(member)
        if told.kept or told.unused or not told.weight:
            self._needs_store()
        if not any(type(order) in (Discard, Late) for order in orders):
            self._compare(member, hyper, told, orders)
        run.carry_out(orders, fact, Payload(told.fault, clip, told.stepped, run.is_mid_batch))

    def _needs_store(self) -> None:
        """Note what peers cannot do by themselves; the end of a stream does not count."""
        run = self._run
        run.needs_store |= not run.streams.has_ended

    def _compare(self, member: int, hyper: int, told: Told, orders: Sequence[Order]) -> None:
        """All pushes of one update come with the same settings, and from the same step on a batch.

        Raises:
            ConfigError: they do not.
        """
        if hyper:
            self._hypers[member] = hyper
        protocol = self._run.protocol
        if protocol.is_spmd and protocol.update_rule == "optimizer":
            self._is_again[member] = told.steps_again or told.is_owed
            if told.weight:
                self._stepped[member] = told.stepped
        if not any(type(order) in (Apply, Retire) for order in orders):
            return
        self._run.is_mid_batch = member in self._is_again and told.steps_again
        known = (*self._hypers, *self._is_again, *self._stepped)
        seat = {one: self._run.roster[one].seat for one in known}
        for seen in (self._hypers, self._is_again):
            for other, value in seen.items():
                mine = seen.get(member, value)
                if seen is self._hypers and are_at_odds(value, mine):
                    raise conflict(seat[other], seat[member])
                if seen is self._hypers or value == mine:
                    continue
                raise ConfigError(
                    f"workers {seat[other]} and {seat[member]} call optimizer.step() a different "
                    "number of times on a mini-batch; under full-sync all workers must make the "
                    "same number of steps, since each step is an update of all"
                )
            seen.clear()
        self._compare_optimizers(seat)

    def _compare_optimizers(self, seat: Mapping[int, int]) -> None:
        """Raise ConfigError where members in step have stepped different optimizers."""
        stepped, self._stepped = self._stepped, {}
        for one, other in pairwise(sorted(stepped)):
            if stepped[one] != stepped[other]:
                raise ConfigError(
                    f"workers {seat[one]} and {seat[other]} stepped different optimizers in one "
                    "update; under full-sync each step is an update of all workers, so all must "
                    "step the same ones in the same order: choose by a value that is the same in "
                    "all, such as enumerate(loader), and not by one worker's loss or random number"
                )

    def extend(self, member: int, message: Extend) -> None:
        run = self._run
        self._needs_store()
        ticket = run.roster[member].ticket
        lease = None
        if ticket is not None and ticket.serial == message.serial:
            lease = run.coordinator.extend(ticket)
            if lease is not None:
                self._say_what_is_uneven(ticket, lease)
                run.trace.order(Grant(ticket, (lease,)), run.now_s())
        run.dispatch.tell(member, Extended(lease))

    def _say_what_is_uneven(self, ticket: Ticket, lease: Lease) -> None:
        """Note that accumulated parts of batches of different sizes weigh unlike one process's."""
        run = self._run
        sizes = {one.num_samples for one in run.coordinator.leases_of(ticket)}
        if sizes <= {lease.num_samples}:
            return
        run.notes.say_once(
            f"mini-batches of {min(sizes)} and {max(sizes)} samples are accumulated into one push, "
            "which is weighted by all its samples: with an incomplete last batch the update is not "
            "exactly that of one process; with drop_last=True it is"
        )

    def leave_epoch(self, member: int, message: LeaveEpoch) -> None:
        """The script left its loop: the epoch ends for all."""
        run = self._run
        if message.is_look:
            self._looks[member] = run.coordinator.epoch
        if not run.is_open:
            return  # the message of its end is on its way to this member
        self._needs_store()
        if message.is_look and not run.coordinator.epoch:
            self._looked = member
            self._refuse_a_look_of_one()
        orders = run.coordinator.leave_epoch(member, message.kept, run.now_s())
        run.carry_out(orders, None, None)

    def stream_over(self, member: int, message: StreamOver) -> None:
        """A member has found the end of the stream: no mini-batch after it is handed out."""
        run = self._run
        is_now = run.is_open and message.epoch == run.coordinator.epoch
        if is_now and not run.streams.has_ended:
            run.streams.end = message.end
            if not run.by_peers:  # else when they have left
                run.end_stream()

    def _refuse_a_look_of_one(self) -> None:
        """Raise ConfigError if one only looked at a batch of an epoch that others train in."""
        run, looked = self._run, self._looked
        busy = next((one for one in run.roster.members.values() if one.pushes), None)
        if looked is not None and busy is not None and not run.coordinator.epoch:
            raise self._look_of_one(looked)

    def _refuse_an_earlier_look(self, member: int) -> None:
        """Raise ConfigError if one only looked at a batch of a later epoch, and trains on."""
        run, epoch = self._run, self._looks.get(member)
        if epoch is None or epoch == run.coordinator.epoch:
            return
        del self._looks[member]
        if epoch == run.trained_in:
            raise self._look_of_one(member)

    def _look_of_one(self, member: int) -> ConfigError:
        return ConfigError(
            f"worker {self._run.roster[member].seat} took a batch of the prepared loader and left "
            "the loop, which ends the epoch for all workers, while others train in it; to look "
            "at a batch take it from the plain loader: next(iter(loader.plain))"
        )

    def give_back(self, member: int, message: GiveBack) -> None:
        run = self._run
        self._needs_store()
        ticket = Ticket(member, message.serial, run.coordinator.version)
        run.carry_out(run.coordinator.give_back(ticket, run.now_s()), None, None)

    def superseded(self, member: int, message: StepLeft) -> None:
        serial, wasted_s, left_s = message
        entry = self._run.roster[member]
        entry.superseded_s += wasted_s
        saved_s = max(0.0, entry.usual_s - wasted_s) if entry.pushes else 0.0
        self._run.trace.superseded(self._run.now_s(left_s), member, serial, wasted_s, saved_s)
