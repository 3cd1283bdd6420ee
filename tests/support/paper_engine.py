"""A simulated engine: a whole run from a list of small numbers, without processes or sleeps.

    plan -> which member continues, which message arrives, when time passes -> Controller

Everything above the engine is the code of a live run, and so are the jobs (core/jobs.py). What
members share is a ledger: the samples that each version was made of. So at the end every sample can
be counted, and a wait for what nobody will send is seen at once: nobody can go on.

Faults come at places (`paper_member.PLACES`). Messages of one member stay in order, also its last
ones, which are heard before its end. Who could go on and was not let for `PATIENCE_S` goes on next:
slow is anybody on paper, but not for ever.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ledger_places import LedgerPlace, whereabouts
from paceline.checkpoints.folder import number_of
from paceline.checkpoints.resumption import COORDINATOR, RUN
from paceline.checkpoints.writer import Answer, Request, WriteQueue
from paceline.core.batches import Batches
from paceline.core.ledger import Ledger
from paceline.engines.base import (
    Engine,
    Event,
    MemberSpec,
    ProcessContinued,
    Processes,
    ProcessLeft,
    ProcessStarted,
    ProcessStopped,
    Signs,
    StoreView,
)
from paceline.engines.local.engine import LocalEngine
from paceline.events import Lease
from paceline.store.memory import Memory, PrivateMemory
from paceline.system.vitals import ProcessState, Vitals
from paceline.wire.messages import (
    Add,
    Done,
    EndEpoch,
    Failed,
    Finish,
    FromMember,
    Job,
    Skip,
    ToMember,
)
from paper_member import Script
from paper_peers import Board, PeerMember

PATIENCE_S = 0.3
_ACT_S, _TICK_S = 0.01, 0.1
_LONGEST_IDLE_S = 60.0
"""Time without progress that counts as a hang: longer than any stop, or a curfew."""
_MOST_TURNS = 40_000


class Hang(AssertionError):
    """A member waits for a message that will never come."""


class Fault(NamedTuple):
    """The fault of the member on a seat when it reaches a place for the ``nth`` time.

    Attributes:
        kind: "kill", "fail" (its script raises), "exit" (it comes to an end of its own), or "stop"
            (it stands still) for ``for_s``.
        life: of which of the seat's members, from 0.
    """

    kind: str
    seat: int
    place: str
    nth: int = 0
    life: int = 0
    for_s: float = 10.0


@dataclass(slots=True)
class Seated:
    """One member, its pending messages, and its faults."""

    paper: PeerMember
    life: int
    events: deque[Event] = field(default_factory=deque)
    """Not heard yet, in order."""
    is_alive: bool = True
    is_started: bool = True
    has_ended: bool = False
    """By itself."""
    stopped_until_s: float = 0.0
    ready_since_s: float = -1.0
    seen: dict[str, int] = field(default_factory=dict)
    """How often it came to each place."""


class PaperQueue(WriteQueue):
    """Writes nothing, and compares each checkpoint to the samples of its version.

    Args:
        kept: numbers of those that were handed in.
    """

    def __init__(self, memory: Memory, kept: set[int]) -> None:
        super().__init__(memory)
        self.requests: list[Request] = []
        self._kept = kept

    def hand_in(self, request: Request, *, is_last: bool) -> None:
        self.requests.append(request)
        self._kept.add(number_of(Path(request["aside"])))
        self._answers.append({"sealed": request["aside"], "took_s": 0.0})

    def answers(self) -> list[Answer]:
        answers, self._answers = self._answers, []
        return answers

    @property
    def versions(self) -> list[int]:
        """Of the checkpoints, in the order in which they were written."""
        return [request["files"][RUN]["version"] for request in self.requests]

    def used(self, number: int, ledger: Ledger) -> set[tuple[int, int]]:
        """The (epoch, position) pairs this checkpoint lists as used in its epoch."""
        ledger.load(self.requests[number]["files"][COORDINATOR]["ledger"])
        return {
            (lease.epoch, position)
            for lease in ledger.cut_all()
            if whereabouts(ledger, lease).place is LedgerPlace.RETIRED
            for position in range(lease.start, lease.stop)
        }


class PaperStore(StoreView):
    """The ledger shared by the simulated members."""

    def __init__(self, engine: "PaperEngine") -> None:
        self.memory = PrivateMemory()
        self._engine = engine

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def num_jobs(self) -> int:
        return self._engine.num_done

    keeps = True

    def ask_copy(self, number: int, main: int) -> None:
        self._engine.board.asked, self._engine.board.main = number, main

    def withdraw_copy(self) -> None:
        self._engine.board.asked = 0

    def alarm(self) -> None:
        self._engine.board.has_alarm = True

    def calm(self) -> int:
        board = self._engine.board
        board.has_alarm = False
        return max(board.arrived.values(), default=0)


class PaperEngine(Engine, Processes):
    """Members on paper.

    Args:
        num_seats: workers.
        choices: which member continues; after the last one always the longest waiting.
        faults: what happens to members.
        own: by seat: scripts that are not ``script``.
        asked: numbers of turns at which each of these is called, as a user would.
        description: what each member describes.
        batches: of every epoch.

    Attributes:
        now_s: the fake clock.
        made: the leases of each version, from 1 on.
        told: (member, message) in the order of telling.
        kept: numbers of checkpoints whose versions may be read where they are pinned.
        ended_acting: members that were ended although they could go on.
    """

    traits = LocalEngine.traits

    def __init__(
        self,
        num_seats: int,
        description: str,
        script: Script,
        batches: Batches,
        *,
        choices: Sequence[int] = (),
        faults: Sequence[Fault] = (),
        own: Mapping[int, Script] | None = None,
    ) -> None:
        self.now_s = 0.0
        self.processes = self
        self.made: list[list[Lease]] = []
        self.told: list[tuple[int, ToMember]] = []
        self.ended_acting: list[str] = []
        self.ended_epochs: list[int] = []
        self.happened: list[Fault] = []
        self.asked: dict[int, Callable[[], None]] = {}
        self.layout = self.num_done = self.num_turns = 0
        self.pinned: dict[int, int] = {}
        self.kept: set[int] = set()
        self.members: dict[int, Seated] = {}
        self._description, self._script, self._own = description, script, own or {}
        self._choices, self._faults = iter(choices), list(faults)
        self._batches, self.board = batches, Board(num_seats)
        self._cancelled = dict.fromkeys(range(num_seats), 0)
        self._slots: dict[int, list[Lease]] = {}
        self._sum: list[Lease] = []
        self._idle_since_s = 0.0

    # -- shared by members ----------------------------------------------------------------------

    @property
    def version(self) -> int:
        return len(self.made)

    def cancelled(self, seat: int) -> int:
        return self._cancelled[seat]

    def fill(self, seat: int, leases: Sequence[Lease]) -> None:
        self._slots[seat] = list(leases)

    def do(self, job: Job) -> None:
        assert job.job == self.num_done + 1
        if isinstance(job, Add):
            self._sum = [] if job.is_first else self._sum
            self._sum += self._slots[job.seat]
        elif isinstance(job, Finish | Skip):
            assert job.version == self.version + 1, f"{job} after version {self.version}"
            of_seat = isinstance(job, Finish) and job.seat >= 0
            self.made.append(self._slots[job.seat] if of_seat else self._sum)  # type: ignore[union-attr]
            self._sum = []
        self.num_done += 1

    def pin(self, number: int) -> int:
        assert number not in self.kept, f"checkpoint {number} is pinned while it is written"
        self.pinned[number] = self.version
        return self.version

    def stand(self, version: int, leases: Sequence[Lease]) -> None:
        """Peers have made this version of these; each of them says so."""
        shares = self.board.shares
        assert all(share >= version for share in shares.values()), f"version {version} of {shares}"
        if version > self.version:
            self.made.append(list(leases))
        assert self.made[version - 1] == list(leases), f"two versions {version}"

    # -- events ---------------------------------------------------------------------------------

    def events(self, timeout_s: float) -> Sequence[Event]:
        self.num_turns += 1
        if ask := self.asked.pop(self.num_turns, None):
            ask()
        if self.num_turns > _MOST_TURNS:
            raise Hang(f"it does not end within {_MOST_TURNS} turns:\n{self.describe()}")
        self._let_continue()
        heard = [number for number, one in self.members.items() if one.events]
        ready = [number for number, one in self.members.items() if self._is_ready(one)]
        if not heard and not ready:
            return self._wait()
        self._idle_since_s = self.now_s + _TICK_S
        self.now_s += _ACT_S
        number, is_heard = self._choose(heard, ready)
        if number < 0:
            self.now_s += _TICK_S
        elif is_heard:
            return [self._hear(number)]
        else:
            self._go_on(number)
        return []

    def _wait(self) -> Sequence[Event]:
        self.now_s += _TICK_S
        if self.now_s - self._idle_since_s > _LONGEST_IDLE_S:
            raise Hang(f"everybody waits:\n{self.describe()}")
        return []

    def _choose(self, heard: list[int], ready: list[int]) -> tuple[int, bool]:
        """Whose message to deliver (True) or whom to continue (False); -1: time passes."""
        options = [(number, True) for number in heard] + [(number, False) for number in ready]
        late = [one for one in options if self.now_s - self._ready_since_s(one) > PATIENCE_S]
        choice = next(self._choices, None)
        if choice is None or late:
            return min(late or options, key=self._ready_since_s)
        return (-1, False) if choice % 16 == 15 else options[choice % len(options)]

    def _ready_since_s(self, option: tuple[int, bool]) -> float:
        """Since when it is ready; recorded at the first query."""
        one = self.members[option[0]]
        if one.ready_since_s < 0:
            one.ready_since_s = self.now_s
        return one.ready_since_s

    def _hear(self, number: int) -> Event:
        one = self.members[number]
        one.ready_since_s = -1.0
        event = one.events.popleft()
        if isinstance(event[1], ProcessLeft):
            self.board.gone.add(one.paper.seat)
        if isinstance(event[1], ProcessStarted):
            one.is_started = True
        return event

    # -- members --------------------------------------------------------------------------------

    def _is_ready(self, one: Seated) -> bool:
        is_there = one.is_alive and one.is_started and not one.stopped_until_s
        return is_there and one.paper.is_ready

    def _go_on(self, number: int) -> None:
        one = self.members[number]
        one.ready_since_s = -1.0
        place = one.paper.turn.place
        nth = one.seen[place] = one.seen.get(place, -1) + 1
        for fault in self._faults:
            if fault[1:5] == (one.paper.seat, place, nth, one.life):
                self._faults.remove(fault)
                self.happened.append(fault)
                self._strike(number, fault)
                return
        if not one.paper.go_on():
            one.has_ended = True
            self._leave(number, ProcessLeft("exit 0"))

    def _strike(self, number: int, fault: Fault) -> None:
        one = self.members[number]
        if fault.kind == "kill":
            self._leave(number, ProcessLeft("killed by signal 9"))
        elif fault.kind == "fail":
            one.events.append((number, Failed("it fails on paper")))
            self._leave(number, ProcessLeft("exit 1"))
        elif fault.kind == "exit":
            one.events.append((number, Done()))
            self._leave(number, ProcessLeft("exit 0"))
        else:
            one.stopped_until_s = self.now_s + fault.for_s
            one.events.append((number, ProcessStopped()))

    def _let_continue(self) -> None:
        for number, one in self.members.items():
            if one.is_alive and 0.0 < one.stopped_until_s <= self.now_s:
                one.stopped_until_s = 0.0
                one.events.append((number, ProcessContinued()))

    def _leave(self, number: int, end: ProcessLeft) -> None:
        one = self.members[number]
        one.is_alive = False
        one.events.append((number, end))

    def _seat(self, member: int, seat: int, *, is_newcomer: bool) -> Seated:
        life = sum(one.paper.seat == seat for one in self.members.values())
        events: deque[Event] = deque()

        def send(message: FromMember) -> None:
            events.append((member, message))

        paper = PeerMember(
            member,
            seat,
            self,
            send,
            self._description,
            self._own.get(seat, self._script),
            is_newcomer=is_newcomer,
        )
        paper.share_with(self.board, self._batches, self.stand)
        self.members[member] = Seated(paper, life, events)
        return self.members[member]

    def describe(self) -> str:
        """The position of every member, to explain a hang."""
        lines = [f"{self.num_done} jobs done, version {self.version}"]
        for number, one in self.members.items():
            state = "lives" if one.is_alive else "is gone"
            paper = one.paper
            lines.append(
                f"member {number} on seat {paper.seat} {state}, at {paper.turn.place}; "
                f"jobs {paper._jobs}, queue {list(paper._queue)}, inbox {list(paper.inbox)}"
            )
        lines += [f"told {member}: {message}" for member, message in self.told[-12:]]
        return "\n".join(lines)

    # -- the contract ---------------------------------------------------------------------------

    def start(self, specs: Sequence[MemberSpec], program: bytes) -> dict[int, tuple[int, int]]:
        for spec in specs:
            self._seat(spec.member, spec.seat, is_newcomer=False)
        return {spec.member: (spec.seat, 1000 + spec.member) for spec in specs}

    def spawn(self, member: int, seat: int, told: dict[str, object]) -> None:
        self._cancelled[seat] = 0
        self.board.gone.discard(seat)
        one = self._seat(member, seat, is_newcomer=bool(told.get("is_newcomer")))
        one.is_started = False
        one.events.append((member, ProcessStarted(seat, 1000 + member)))

    def end(self, member: int) -> None:
        one = self.members[member]
        if one.is_alive:
            if not one.stopped_until_s:
                self.ended_acting.append(f"member {member} at {one.paper.turn.place}")
            self._leave(member, ProcessLeft("killed by signal 9"))

    def send(self, messages: Sequence[tuple[int, ToMember]]) -> None:
        for member, message in messages:
            self.told.append((member, message))
            if isinstance(message, EndEpoch) and message.epoch not in self.ended_epochs:
                self.ended_epochs.append(message.epoch)
            if self.members[member].is_alive:
                self.members[member].paper.inbox.append(message)

    def cancel(self, member: int, serial: int) -> None:
        self._cancelled[self.members[member].paper.seat] = serial + 1

    def signs(self, member: int) -> Signs:
        paper = self.members[member].paper
        return Signs(paper.beats, self.board.arrived.get(paper.seat, 0))

    def vitals(self, member: int) -> Vitals:
        one = self.members[member]
        if not one.is_alive:
            return Vitals(ProcessState.ENDED)
        return Vitals(
            ProcessState.STOPPED if one.stopped_until_s else ProcessState.AWAKE, self.now_s
        )

    def whereabouts(self, member: int, does: str = "is") -> str:
        return f"it {does} at {self.members[member].paper.turn.place}"

    def hurry(self, member: int) -> None:
        return

    def lay_out(self, num_bytes: int) -> StoreView:
        return PaperStore(self)

    def close(self) -> None:
        for member in self.members.values():
            member.is_alive = False
