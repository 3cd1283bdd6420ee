"""Rounds between peers, reported afterwards; and the return to the coordinator.

While an epoch runs between peers, the coordinator only follows: it hears every round's pushes in
member order, and its answers are not carried out, because the peers have already done so. The first
peer reports the rounds, and every other one keeps those not reported yet, so none is lost when one
dies; each round is passed on once, in order, whoever reports it. When a peer dies, the run stops or
a member needs the coordinator, all leave at the same barrier:

    PeersLeft (each) -> Mend (one puts back the shares of the dead) -> Resume -> pending pushes

This module must not know processes or tensors.
"""

from collections.abc import Callable, Sequence

from ..core.jobs import Payload
from ..errors import ConfigError
from ..events import EpochEnd
from ..wire.messages import Entry, Mend, Mended, PeersLeft, Resume, Rounds, Row
from .state import RunState


class RoundsBook:
    """The rounds of one epoch.

    Args:
        members: the peers, in member order.
    """

    def __init__(self, members: Sequence[int]) -> None:
        self.members = list(members)
        self._heard = 0
        self._early: dict[int, Row] = {}
        """By number: rounds before which others are still missing. The first peer's are only in its
        own messages, and the others do not keep what it has sent."""
        self._interrupted: dict[int, PeersLeft] = {}

    def take(self, first: int, rows: Sequence[Row]) -> Sequence[Row]:
        """The rows that come next by now; ``first`` is the number of the first one."""
        for number, row in enumerate(rows, first):
            if number >= self._heard:
                self._early.setdefault(number, row)
        new = list[Row]()
        while self._heard in self._early:
            new.append(self._early.pop(self._heard))
            self._heard += 1
        return new

    def interrupted(self, member: int, message: PeersLeft) -> None:
        """A member left, with its own push and those that it saw."""
        self._interrupted[member] = message

    def is_interrupted(self, member: int) -> bool:
        return member in self._interrupted

    def all_interrupted(self, live: Sequence[int]) -> bool:
        return bool(live) and all(member in self._interrupted for member in live)

    def pending(self) -> list[tuple[int, Entry]]:
        """Pushes that are in the slots and in no update yet, in member order."""
        pushes = (
            (member, self._interrupted[member].push)
            for member in self.members
            if member in self._interrupted
        )
        return [(member, push) for member, push in pushes if push is not None] + self._of_the_dead()

    def _of_the_dead(self) -> list[tuple[int, Entry]]:
        """Pushes of members that died after all had arrived, as the survivors saw them."""
        entries: dict[int, Entry] = {}
        for message in self._interrupted.values():
            for number, entry in zip(self.members, message.pushes, strict=False):
                if number not in self._interrupted and entry.num_samples:
                    entries[number] = entry
        return sorted(entries.items())


class Peers:
    """The epochs of one run that go between peers.

    Args:
        snapshot: called with the number of a checkpoint taken after the round heard last.
    """

    def __init__(self, run: RunState, snapshot: Callable[[int], None]) -> None:
        self._run = run
        self._snapshot = snapshot
        self._rounds: RoundsBook | None = None

    @property
    def by_peers(self) -> bool:
        """Whether the members run among themselves now."""
        return self._rounds is not None

    @property
    def members(self) -> list[int]:
        """Those of them that are alive."""
        assert self._rounds is not None
        roster = self._run.roster
        return [number for number in self._rounds.members if roster[number].is_alive]

    def has_left(self, member: int) -> bool:
        """Whether this member waits for all others to leave the path between peers."""
        return self._rounds is not None and self._rounds.is_interrupted(member)

    def begin(self) -> None:
        """An epoch opens between peers."""
        self._rounds = RoundsBook(self._run.live)
        self._run.by_peers = True

    def heard(self, member: int, message: Rounds) -> None:
        if self._rounds is not None:  # else another member has reported them all
            for row in self._rounds.take(message.first, message.rows):
                self._hear_round(row)

    def _end(self) -> None:
        self._rounds = None
        self._run.by_peers = False

    def _hear_round(self, row: Row) -> None:
        """One round: the pushes of all members in member order."""
        run, rounds = self._run, self._rounds
        assert rounds is not None
        epoch_end = None
        at_s = run.now_s(row.over_s)
        for number, entry in zip(rounds.members, row.entries, strict=True):
            ticket = run.roster[number].ticket
            if entry.num_samples == 0 or ticket is None:
                continue
            _, orders = run.hear_push(ticket, entry.told, entry.clocks, at_s)
            run.note(orders, at_s)
            epoch_end = next((order for order in orders if isinstance(order, EpochEnd)), epoch_end)
        run.dispatch.jump(run.coordinator.version)
        if row.snapshot:
            self._snapshot(row.snapshot)
        if run.has_all_updates:  # also if the end was asked for meanwhile: all wait for it
            run.ending = run.ending or f"{run.settings.updates} updates are done"
            self._end()
            run.send_stop()
        elif epoch_end is not None:
            self._end()
            if run.ending:
                run.send_stop()
            else:
                run.end_epoch(epoch_end)
                self._hear_the_dead()

    # -- the way back ---------------------------------------------------------------------------

    def interrupted(self, member: int, message: PeersLeft) -> None:
        """A peer left the path between peers; when all have, the coordinator takes over."""
        if self._rounds is not None:
            is_end = self._run.streams.has_ended  # of a stream; the next pass has another
            self._run.needs_store |= message.needs_store and not is_end
            self._rounds.interrupted(member, message)
            self.take_over_if_all_interrupted()

    def take_over_if_all_interrupted(self) -> None:
        rounds = self._rounds
        if rounds is None or not rounds.all_interrupted(live := self.members):
            return
        if len(live) < len(rounds.members):
            self._run.dispatch.tell(live[0], Mend())
        else:
            self._take_over()

    def mended(self, member: int, message: Mended) -> None:
        if self._rounds is not None:  # it may have been asked twice
            self._take_over()

    def _take_over(self) -> None:
        """Every member waits and every share is complete: continue through the store."""
        run, rounds = self._run, self._rounds
        assert rounds is not None
        peers = self.members
        self._end()
        has_store = run.engine.traits.has_store
        if has_store:
            run.trace.note(run.now_s(), "peers go on through the store")
            run.go_by("store")
        elif rounds.pending() and not run.ending:
            raise ConfigError(self._left_alone(rounds.pending()[0][0]))
        for number in peers:
            ticket = run.roster[number].ticket
            run.dispatch.tell(number, Resume(ticket.serial if ticket else -1))
        run.owes_stop = bool(run.ending)
        if run.owes_stop and (run.can_stop_now or not has_store):
            run.send_stop()
            return
        if run.steps_together and rounds.pending():
            seat = run.roster[rounds.pending()[0][0]].seat
            raise ConfigError(
                f"worker {seat} stepped on a mini-batch that another worker skipped: steps with a "
                "closure are made by all workers together, so leave the loop early in all of them, "
                "by a value that is the same in all (pace.version, pace.sum(value))"
            )
        run.end_stream()
        for number, entry in rounds.pending():
            ticket = run.roster[number].ticket
            assert ticket is not None
            fact, orders = run.hear_push(ticket, entry.told, entry.clocks, run.now_s())
            run.carry_out(orders, fact, Payload(entry.fault, entry.clip))
        self._hear_the_dead()
        if run.owes_stop:  # a member was late with the local steps that all others have pushed
            run.send_stop()

    def _left_alone(self, member: int) -> str:
        """Returns the message for a member that trains on while others have left their loops."""
        return (
            f"worker {self._run.roster[member].seat} stepped on a mini-batch of a batch at which "
            "another worker left its loop, which only a store can carry: under torchrun leave "
            "the loop in all workers at the same batch, by a value that is the same in all "
            "(pace.version, pace.sum(value) between epochs), or call pace.stop()"
        )

    def _hear_the_dead(self) -> None:
        """Handle deaths from the time between peers, which had no consequences until now."""
        run = self._run
        for entry in run.roster.members.values():
            if entry.is_alive:
                continue
            if entry.number in run.coordinator.live_members:
                run.hear_left(entry.number)
            elif run.ending and run.live:  # the last update was of its push, and waits for it
                run.hand_on(entry.number)
