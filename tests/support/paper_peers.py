"""A simulated member that may run between peers: rounds by barriers, and how to leave them.

    show | barrier | update own share | barrier | the next version stands       by nobody's message
    somebody dies, or needs the coordinator: Interrupted -> [ Mend -> Mended ] -> Resume

Its verbs are those of exchange/peers.py, by the same names. It must not know who lets it go on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.core.batches import Batches, PeerLeases
from paceline.events import Grant, Lease, Ticket
from paceline.wire import messages
from paceline.wire.messages import Entry, Row
from paper_member import STEP, Doing, PaperMember, Stopped, Turn

_NEVER_CANCELLED = 2**62
_ROWS = 3
"""Number of rounds after which the first member reports them."""


class Line(NamedTuple):
    """The data a member shows its peers."""

    leases: tuple[Lease, ...] = ()
    leaves: bool = False
    snapshot: int = 0

    @property
    def entry(self) -> Entry:
        """The entry reported to the coordinator."""
        size = sum(lease.num_samples for lease in self.leases)
        return Entry(size, 1.0, messages.OK, float(size), *STEP[:3], STEP.input_s)


@dataclass(slots=True)
class Board:
    """Data peers share beside the store, by seat.

    Attributes:
        shares: the version that each share is at.
        gone: seats whose member has ended.
        asked: number of the checkpoint that is wanted.
        main: 1 + the seat of the main member, which writes what scripts keep; else 0.
    """

    num_seats: int
    has_alarm: bool = False
    asked: int = 0
    main: int = 0
    lines: dict[int, Line] = field(default_factory=dict)
    arrived: dict[int, int] = field(default_factory=dict)
    shares: dict[int, int] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)

    def late(self, phase: int) -> int:
        """The first seat that has not reached this barrier; -1: all have."""
        seats = range(self.num_seats)
        return next((seat for seat in seats if self.arrived.get(seat, 0) < phase), -1)


class GivenUp(Exception):
    """A member is gone, so this barrier is abandoned."""


class PeerMember(PaperMember):
    """One life of one worker, which may run between peers.

    Args:
        batches: of every epoch.
        stand: called with a version that peers have made, and the leases in it.
    """

    _by_peers = False

    def share_with(
        self, board: Board, batches: Batches, stand: Callable[[int, Sequence[Lease]], None]
    ) -> None:
        """Set what it needs beside the store."""
        self._board, self._batches, self._stand = board, batches, stand
        self._newest = 0

    # -- rounds ---------------------------------------------------------------------------------

    def _opened(self, opened: messages.OpenEpoch) -> Doing[None]:
        self._by_peers = opened.by_peers
        if not opened.by_peers:
            yield from self._await_grant()
            return
        self._seats = opened.seats
        rounds, left = self._plan_rounds(opened), opened.updates_left
        self._rounds = rounds if left < 0 else rounds[:left]
        self._round, self._version = 0, self._store.version
        self._rows: list[Row] = []
        self._num_told = 0
        self._phase = opened.phase
        board = self._board
        board.arrived[self.seat], board.shares[self.seat] = opened.phase, self._version
        yield from self._advance()

    def _plan_rounds(self, opened: messages.OpenEpoch) -> list[list[list[Lease]]]:
        num_seats = self._board.num_seats
        leases = PeerLeases(
            self._batches, num_seats, self.num_steps, opened.num_short, epoch=opened.epoch,
            position=opened.position, first_id=opened.first_id,
        )  # fmt: skip
        places = [opened.seats.index(seat) for seat in range(num_seats)]
        return [
            [leases.of(number, place) for place in places] for number in range(leases.num_rounds)
        ]

    def _advance(self) -> Doing[None]:
        """The grant of the next round in which this member has a lease."""
        while self._round < len(self._rounds):
            leases = self._rounds[self._round][self.seat]
            if leases:
                self._serial = _NEVER_CANCELLED
                ticket = Ticket(self.member, self._version, self._version)
                self._grant = Grant(ticket, tuple(leases))
                return
            if not (yield from self._exchange(())):
                return
        self._tell_rows()
        yield from self._await_grant()

    def _push(self, leases: Sequence[Lease]) -> Doing[None]:
        if not self._by_peers:
            yield from super()._push(leases)
        elif (yield from self._exchange(leases)):
            yield from self._advance()

    def _exchange(self, leases: Sequence[Lease]) -> Doing[bool]:
        """One round with the peers; False if they left the exchange instead."""
        board, phase = self._board, 1
        self._show(leases)
        try:
            yield from self._barrier()
            lines = dict(board.lines)
            if any(line.leaves for line in lines.values()):
                raise GivenUp
            phase = 2
            board.shares[self.seat] = self._version + 1
            yield from self._barrier()
        except GivenUp:
            yield from self._interrupted(phase, leases)
            return False
        self._conclude(lines)
        return True

    def _show(self, leases: Sequence[Lease]) -> None:
        board = self._board
        if leases:
            self._store.fill(self.seat, leases)
        board.lines[self.seat] = Line(tuple(leases), board.has_alarm, board.asked)

    def _arrive(self) -> None:
        self._phase += 1
        self._board.arrived[self.seat] = self._phase

    def _barrier(self) -> Doing[None]:
        self._arrive()
        board, phase = self._board, self._phase
        yield Turn("barrier", lambda: (late := board.late(phase)) < 0 or late in board.gone)
        if board.late(phase) >= 0:
            raise GivenUp

    def _conclude(self, lines: dict[int, Line]) -> None:
        """The version exists: record its parts."""
        self._round += 1
        self._version += 1
        self._stand(self._version, [one for seat in sorted(lines) for one in lines[seat].leases])
        asked = max(line.snapshot for line in lines.values())
        is_new = asked > self._newest and self._round < len(self._rounds)
        entries = tuple(lines[seat].entry for seat in self._seats)
        self._rows.append(Row(0.0, entries, asked if is_new else 0))
        if self.seat == 0 and (is_new or len(self._rows) - self._num_told >= _ROWS):
            self._tell_rows()
        if is_new:
            self._newest = asked
            is_main = self._board.main == self.seat + 1
            if self.seat == 0:
                pinned = self._store.pin(asked)
                assert pinned == self._version
                self._send(messages.Copied(asked, pinned, True, "", 0.0, is_main))
            elif self.is_difference or is_main:
                self._send(messages.Copied(asked, self._version, False, "", 0.0, is_main))

    def _tell_rows(self) -> None:
        if self._rows[self._num_told :]:
            self._send(messages.Rounds(self._num_told, tuple(self._rows[self._num_told :])))
        self._num_told = len(self._rows)

    # -- leaving --------------------------------------------------------------------------------

    def _extend(self) -> Doing[Lease | None]:
        if self._by_peers:
            yield from self._ask_to_leave()
        return (yield from super()._extend())

    def _give_back(self) -> Doing[None]:
        if self._by_peers:
            yield from self._ask_to_leave()
        yield from super()._give_back()

    def _leave_epoch(self) -> Doing[None]:
        if self._by_peers:
            yield from self._ask_to_leave()
        yield from super()._leave_epoch()

    def _superseded(self) -> Doing[None]:
        if self._by_peers:
            yield from self._ask_to_leave()
            yield from self._await_grant()
        else:
            yield from super()._superseded()

    def _ask_to_leave(self) -> Doing[None]:
        """This member needs the coordinator: all leave at their next barrier."""
        self._board.has_alarm = True
        self._show(())
        self._arrive()
        yield from self._report(None, (), needs_store=True)

    def _interrupted(self, phase: int, leases: Sequence[Lease]) -> Doing[None]:
        yield Turn("leaving")
        entries: tuple[Entry, ...] = ()
        if phase == 2:
            self._restore(self.seat)
            entries = tuple(self._board.lines[seat].entry for seat in self._seats)
        mine = Line(tuple(leases)).entry if leases else None
        yield from self._report(mine, entries, needs_store=False)
        yield from self._await_grant()

    def _report(
        self, mine: Entry | None, entries: tuple[Entry, ...], *, needs_store: bool
    ) -> Doing[None]:
        """Report this member's push and those it saw; wait until all live ones have."""
        self._tell_rows()
        self._send(messages.PeersLeft(mine, entries, needs_store))
        while isinstance(message := (yield from self._next()), messages.Mend):
            yield Turn("mend")
            for seat in self._board.gone:
                self._restore(seat)
            self._send(messages.Mended())
        if not isinstance(message, messages.Resume):
            raise Stopped
        shares = self._board.shares
        assert max(shares.values()) <= self._version, f"shares at {shares}, not {self._version}"
        self._serial, self._by_peers = message.serial, False

    def _restore(self, seat: int) -> None:
        """Restore a share to the current version."""
        if self._board.shares.get(seat) == self._version + 1:
            self._board.shares[seat] = self._version
