"""The engine contract: an engine runs the members, reports events and delivers messages.

    start(specs, program)  start the members
    events(timeout)         what happened since the last call, in one total order
    send(messages)          send these to members, in order; returns at once
    cancel(member, serial)  abandon a member's step, unless it already works on a later one
    lay_out(num_bytes)      allocate the store's memory
    clear()                 reset shared state for another run of the same members
    close()                 end every member and free everything

An event is ``(member, what)``: a message of ``wire/messages.py``, or a happening that the engine
itself reports. An engine whose members can be lost also has `Processes`. This module must not know
protocols or jobs.
"""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from ..errors import ConfigError
from ..store.control import ALARM, JOBS, KEEPS, MAIN, MET, SNAPSHOT, Control
from ..store.memory import Memory
from ..system.vitals import Vitals
from ..wire.messages import FromMember, ToMember

ALL_WORK: Final = 2**63 - 2
"""Serial for `Engine.cancel` that cancels any step."""

RENDEZVOUS = "rendezvous"
"""Prefix of the rendezvous files, beside the logs, of the members of one life of a run."""

THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables that set a library's number of threads."""


class ProcessStarted(NamedTuple):
    """A requested member has started."""

    seat: int
    pid: int


class ProcessLeft(NamedTuple):
    """A member has ended; ``reason`` says how."""

    reason: str


class ProcessStopped(NamedTuple):
    """A member was stopped (SIGSTOP)."""


class ProcessContinued(NamedTuple):
    """A stopped member was continued."""


class MemberStalled(NamedTuple):
    """A member was silent for too long; only from an engine that detects this itself."""


class HelperWoken(NamedTuple):
    """One of the engine's own processes was stopped and has been continued; its member is -1."""

    what: str


Happening: TypeAlias = (
    ProcessStarted | ProcessLeft | ProcessStopped | ProcessContinued | MemberStalled | HelperWoken
)
Event: TypeAlias = tuple[int, FromMember | Happening]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """An engine's capabilities; a protocol that needs more is refused before anything starts."""

    name: str
    cancels: bool
    """Work in flight can be abandoned."""
    loses_members: bool
    """The death of a member is noticed and survived."""
    has_store: bool
    is_spmd: bool
    """Members can exchange gradients as peers, without messages to the coordinator."""
    is_one_machine: bool = True
    """All members are on this machine."""
    why_unmapped: str = "none has tried"
    """Why members that have no store cannot map each other's memory; empty: they can."""


class StoreView:
    """The coordinator's view of the store, and its signals to members that run between peers.

    Args:
        memory: the memory from which checkpoints are written.
        control: the run's control words.
    """

    def __init__(self, memory: Memory, control: Control) -> None:
        self.memory = memory
        self._control = control

    @property
    def version(self) -> int:
        """The newest complete version; between peers the coordinator learns of it later."""
        return self._control.version

    @property
    def num_jobs(self) -> int:
        """The number of jobs done so far."""
        return self._control[JOBS]

    @property
    def keeps(self) -> bool:
        """Whether scripts keep objects of their own in checkpoints."""
        return bool(self._control[KEEPS])

    def ask_copy(self, number: int, main: int) -> None:
        """Have peers pin the version of their next round for this checkpoint.

        Args:
            main: 1 + the seat of the main member, if it writes what the script keeps; else 0.
        """
        self._control[MAIN] = main
        self._control[SNAPSHOT] = number

    def withdraw_copy(self) -> None:
        """Have peers pin nothing; members may still read who is the main one."""
        self._control[SNAPSHOT] = 0

    def alarm(self) -> None:
        """Have peers switch to the store at their next barrier."""
        self._control[ALARM] = 1
        self._control.wake(MET)

    def calm(self) -> int:
        """End the alarm while all members wait; returns the number of barriers passed."""
        self._control[ALARM] = 0
        return max(self._control[index] for index in self._control.arrived)


class Engine(abc.ABC):
    """The coordinator's side of an engine.

    Attributes:
        processes: the members' processes; None if members cannot be lost (threads, for example).
    """

    traits: Traits
    processes: "Processes | None" = None

    @abc.abstractmethod
    def start(self, specs: Sequence["MemberSpec"], program: bytes) -> dict[int, tuple[int, int]]:
        """Start these members; returns member -> (seat, pid).

        Args:
            program: the pickled program of every member, also of one that starts later. It is never
                in a named file, where any process with write access could replace it.
        """

    @abc.abstractmethod
    def events(self, timeout_s: float) -> Sequence[Event]:
        """Return new events, in one total order; [] after ``timeout_s``."""

    @abc.abstractmethod
    def send(self, messages: Sequence[tuple[int, ToMember]]) -> None:
        """Send each message to its member, those of one member in order; returns at once."""

    @abc.abstractmethod
    def cancel(self, member: int, serial: int) -> None:
        """Abandon a member's step if it works on ``serial`` or an earlier one."""

    @abc.abstractmethod
    def lay_out(self, num_bytes: int) -> StoreView:
        """Allocate the store's memory and return the view of it. LinkError: too little memory."""

    def clear(self) -> None:
        """Reset the shared state for another run, while all members wait for a message.

        Control words and memory are as at the start, except for members that are gone. Memory that
        a member still reads stays readable. An engine that cannot do this supports no trials.
        """
        raise ConfigError(
            f"engine {self.traits.name} supports one run and no trials (pace.trial()); use engine "
            "local"
        )

    @abc.abstractmethod
    def close(self) -> None:
        """End every member and free everything; may be called twice."""


class Processes(abc.ABC):
    """Members that can be lost: observed, ended and restarted."""

    @abc.abstractmethod
    def signs(self, member: int) -> "Signs":
        """Return the signs of life of this member."""

    @abc.abstractmethod
    def vitals(self, member: int) -> Vitals:
        """Return the state of this member's process."""

    @abc.abstractmethod
    def whereabouts(self, member: int, does: str = "is") -> str:
        """Return where in its program this member is: "it sleeps at data.py:88 in __getitem__".

        Args:
            does: the verb of that sentence.
        """

    @abc.abstractmethod
    def hurry(self, member: int) -> None:
        """Have it make a requested copy while its script is busy, if it can."""

    @abc.abstractmethod
    def end(self, member: int) -> None:
        """End a member that was given up; ``ProcessLeft`` follows."""

    @abc.abstractmethod
    def spawn(self, member: int, seat: int, changes: dict[str, object]) -> None:
        """Start a new member on a seat whose last member has left; ``ProcessStarted`` follows.

        Args:
            changes: what differs from the context of the seat's first member, see `MemberSpec`.
        """


class Signs(NamedTuple):
    """Signs of life; a change between two checks means that the member makes progress.

    Attributes:
        beats: a counter that grows with each mini-batch, gradient and push.
        arrived: number of barriers reached.
        is_first: whether it runs a ``pace.once()`` block before the others, which may take long.
    """

    beats: int
    arrived: int
    is_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSpec:
    """A new member: its seat and its settings.

    Attributes:
        log: the file for its output.
        exchange: ``module:function`` that makes its exchange, see ``local/process.py``.
        context: the fields of the `Context` that ``connect`` uses in its script.
    """

    member: int
    seat: int
    num_seats: int
    threads: int
    log: str
    context: dict[str, object]
    environment: dict[str, str]
    """Its own variables, and the thread variables that the user has exported."""
    exchange: str = ""
    search_path: tuple[str, ...] = ()
    """The launcher's module path: a task may be beside the user's script."""
    is_path_first: bool = False
    """Whether that path comes first, so that a task's module is the launcher's."""
    preload: tuple[str, ...] = ()
    """Modules that are already imported in it when it starts."""
