"""New lives: a worker that died is started again on its seat and joins the running run.

    left -> spawn -> started -> describe -> laid, with the epoch to begin with -> arrive -> Joined

Nothing waits for a newcomer until it has described itself. From then on the end of the epoch that
it begins with waits for it, since its script joins the others in what follows that epoch; it works
as soon as it arrives at its loop. This module must not know processes or tensors.

Before the run has begun no work is handed out yet, so a new life is told what the first one was,
and is waited for at once; the main worker stays on its seat (``Beginners``).
"""

from ..conditions.faults import FaultPlan
from ..engines.base import ProcessStarted
from ..events import Joined
from ..wire.messages import Adopt, SettingsNow, Stop
from .describe import Description
from .peers import Peers
from .roster import RosterEntry
from .state import RunState

MOST_IN_VAIN = 3
"""Lives of a worker in a row that may end before the run begins, or without a push."""


class Beginners:
    """The new lives in a run that has not begun."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._in_vain: dict[int, int] = {}

    def replace(self, entry: RosterEntry) -> int | None:
        """Start a member in place of this one; returns its number, None if none is started."""
        run = self._run
        if not run.settings.respawn or run.has_begun or run.ending:
            return None
        in_vain = self._in_vain[entry.seat] = self._in_vain.get(entry.seat, 0) + 1
        if in_vain >= MOST_IN_VAIN:
            run.notes.say(f"worker {entry.seat} ended {in_vain} times before prepare()")
            return None
        number = max(run.roster.members) + 1
        run.notes.say(f"worker {entry.seat} is gone ({entry.end}); it begins again")
        run.roster.join(number, entry.seat, 0)
        run.processes.spawn(number, entry.seat, {})
        return number


class Newcomers:
    """The new lives in a run that has begun."""

    def __init__(self, run: RunState, peers: Peers) -> None:
        self._run = run
        self._peers = peers
        self._empty_seats: list[int] = []
        self._in_vain: dict[int, int] = {}
        self._settings = ""
        self._has_lookahead = 0
        self._arrived: list[int] = []
        """Members that are at their loop but cannot enter it yet."""

    # -- a life ends, another one begins --------------------------------------------------------

    def replace(self, member: int) -> None:
        """A member has left: its seat is free for a new one."""
        run = self._run
        entry = run.roster[member]
        if not (run.settings.respawn and run.has_begun) or run.ending or entry.is_done:
            return
        in_vain = 0 if entry.pushes else self._in_vain.get(entry.seat, 0) + 1
        self._in_vain[entry.seat] = in_vain
        if in_vain >= MOST_IN_VAIN:
            run.observer.note(
                f"worker {entry.seat} ended {in_vain} times without a push: it is not restarted"
            )
            return
        self._empty_seats.append(entry.seat)

    def tick(self) -> None:
        """Start new lives, but not while survivors still repair what the dead had begun."""
        run = self._run
        if run.ending or not run.has_begun:
            return
        arrived, self._arrived = self._arrived, []
        for member in arrived:
            self._enter_when_it_can(member)
        if self._empty_seats and not self._peers.by_peers:
            seats, self._empty_seats = self._empty_seats, []
            for seat in seats:
                number = max(run.roster.members) + 1
                run.roster.expect(number, seat)
                plan = FaultPlan.parse(run.settings.fault, run.settings.workers)
                left = [str(one) for one in plan.without(run.happened).faults]
                # Its state is the others', not that of a checkpoint, which may be gone by now.
                run.processes.spawn(
                    number, seat, {"is_newcomer": True, "resume": None, "fault": left}
                )

    def started(self, member: int, message: ProcessStarted) -> None:
        self._run.roster[member].pid = message.pid

    def note_settings(self, member: int, message: SettingsNow) -> None:
        """Keep the optimizer's settings as of this epoch."""
        if self._run.roster[member].has_arrived:
            self._settings = message.text

    # -- it joins -------------------------------------------------------------------------------

    def described(self, member: int, own: Description, first: Description) -> None:
        """A newcomer described itself: send it the store and the epoch to begin with."""
        run = self._run
        entry = run.roster[member]
        if run.ending or first.difference(own):
            if not run.ending:
                run.observer.note(
                    f"worker {entry.seat} came back with another model or other data than the run "
                    "began with; it is sent away"
                )
            run.dispatch.tell(member, Stop(run.coordinator.version))
            return
        self._has_lookahead = own.lookahead
        entry.is_starting = False
        entry.first_epoch, place = run.begins_with()
        run.dispatch.tell(member, run.laid(first.arena_bytes, entry.first_epoch, place))

    def arrived(self, member: int, epoch: int) -> bool:
        """A newcomer is at its loop; returns False if it waits for this epoch like the others."""
        run = self._run
        run.roster[member].has_arrived = True
        if epoch > run.coordinator.epoch or not run.has_opened:
            return False
        self._enter_when_it_can(member)
        return True

    def _enter_when_it_can(self, member: int) -> None:
        """Wait while peers run by themselves, or while its seat holds a push of the last life."""
        run = self._run
        entry = run.roster[member]
        if not entry.is_alive or not run.is_open or entry.first_epoch != run.coordinator.epoch:
            return  # that epoch has ended meanwhile, and it was told
        if self._peers.by_peers or run.dispatch.needs(entry.seat):
            self._arrived.append(member)
        else:
            self._enter(member)

    def _enter(self, member: int) -> None:
        """Let it work from the newest version on."""
        run = self._run
        entry = run.roster[member]
        run.observer.note(f"worker {entry.seat} is back, at update {run.coordinator.version}")
        seats = [run.roster[number].seat for number in run.live]
        self._tell_settings(member)
        assert run.opened is not None
        opened = run.opened._replace(
            by_peers=False, phase=0, seats=tuple(seats), began_for_s=run.began_for_s,
            is_published=False,
        )  # fmt: skip
        run.dispatch.tell(member, opened)
        self._join(member)

    def join_all(self) -> None:
        """An epoch is about to open: newcomers that came between epochs join now."""
        known = self._run.coordinator_members
        for one in self._run.roster.live:
            if one.number not in known:
                self._tell_settings(one.number)
                self._join(one.number)

    def _tell_settings(self, member: int) -> None:
        """Send the current settings: the others may have stepped a scheduler since it arrived."""
        if self._settings:
            self._run.dispatch.tell(member, Adopt(self._settings))

    def _join(self, member: int) -> None:
        run = self._run
        entry = run.roster[member]
        run.trace.joined(run.now_s(), member, entry.seat, entry.pid)
        entry.has_joined = True
        fact = Joined(member, run.now_s())
        run.carry_out(run.coordinator.hear(fact), fact, None)
        run.streams.joined(member)
        if self._has_lookahead:
            run.coordinator.set_lookahead(member, self._has_lookahead)
