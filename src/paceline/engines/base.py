"""The engine contract: what makes time pass, carries facts in and messages out.

    start(specs, program)  start the members
    events(timeout)         what happened since the last call, in one total order
    send(messages)          hand these to members, in order; returns at once
    cancel(member, serial)  let a member leave its step, if it works on no later one
    lay_out(num_bytes)      make the store's memory
    clear()                 make room for another run of the same members
    close()                 end every member; nothing is left behind

An event is ``(member, what)``: a message of ``wire/messages.py``, or a happening that the engine
itself reports. An engine whose members can be lost also has `Processes`. This module must not know
protocols or jobs.
"""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from ..errors import ConfigError
from ..store.control import ALARM, JOBS, MET, SNAPSHOT, Control
from ..store.memory import Memory
from ..system.vitals import Vitals
from ..wire.messages import FromMember, ToMember

ALL_WORK: Final = 2**63 - 2
"""For `Engine.cancel`: whatever a member works on."""

RENDEZVOUS = "rendezvous"
"""Prefix of the files beside the logs at which the members of one life of a run meet."""

THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables with the number of threads for libraries."""


class ProcessStarted(NamedTuple):
    """A member that was asked for has started."""

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
    """From an engine that can tell by itself: a member was silent for too long."""


class HelperWoken(NamedTuple):
    """From no member (-1): a process of the engine's own was stopped, and was continued."""

    what: str


Happening: TypeAlias = (
    ProcessStarted | ProcessLeft | ProcessStopped | ProcessContinued | MemberStalled | HelperWoken
)
Event: TypeAlias = tuple[int, FromMember | Happening]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What an engine can do; protocols that need more are refused before anything starts."""

    name: str
    cancels: bool
    """Work in flight can be abandoned."""
    loses_members: bool
    """The death of a member is noticed and survived."""
    has_store: bool
    is_spmd: bool
    """Members can run between peers, without a message to the coordinator."""
    is_one_machine: bool = True
    """All members are on it."""


class StoreView:
    """What the deciding side sees of the store, and shows to members that run between peers.

    Args:
        memory: the memory that checkpoints are written from.
        control: the run's control words.
    """

    def __init__(self, memory: Memory, control: Control) -> None:
        self.memory = memory
        self._control = control

    @property
    def version(self) -> int:
        """The newest complete version; between peers the coordinator hears of it later."""
        return self._control.version

    @property
    def num_jobs(self) -> int:
        """The number of jobs done so far."""
        return self._control[JOBS]

    def ask_copy(self, number: int) -> None:
        """Let peers pin the version of their next round for this checkpoint; 0: no longer."""
        self._control[SNAPSHOT] = number

    def alarm(self) -> None:
        """Let peers go on through the store at their next barrier."""
        self._control[ALARM] = 1
        self._control.wake(MET)

    def calm(self) -> int:
        """End the alarm, while all members wait; returns how many barriers they have passed."""
        self._control[ALARM] = 0
        return max(self._control[index] for index in self._control.arrived)


class Engine(abc.ABC):
    """The deciding side of an engine.

    Attributes:
        processes: of members; None: they cannot be lost, such as threads of this process.
    """

    traits: Traits
    processes: "Processes | None" = None

    @abc.abstractmethod
    def start(self, specs: Sequence["MemberSpec"], program: bytes) -> dict[int, tuple[int, int]]:
        """Start these members; returns member -> (seat, pid).

        Args:
            program: what every member runs, also one that is started later; pickled, and never in
                a named file, where any process that can write could choose what runs.
        """

    @abc.abstractmethod
    def events(self, timeout_s: float) -> Sequence[Event]:
        """What happened, in one total order; [] after ``timeout_s``."""

    @abc.abstractmethod
    def send(self, messages: Sequence[tuple[int, ToMember]]) -> None:
        """Send each message to its member, those of one member in order; returns at once."""

    @abc.abstractmethod
    def cancel(self, member: int, serial: int) -> None:
        """Let a member leave its step if it works on ``serial`` or an earlier one."""

    @abc.abstractmethod
    def lay_out(self, num_bytes: int) -> StoreView:
        """Make the store's memory. LinkError: there is too little."""

    def clear(self) -> None:
        """Reset what members share, for another run; all of them wait for a message.

        Words and memory are as at the start, except for members that are gone. Memory that a member
        still reads stays readable. An engine that cannot do this supports no trials.
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
        """Signs of life of this member."""

    @abc.abstractmethod
    def vitals(self, member: int) -> Vitals:
        """The state of this member's process."""

    @abc.abstractmethod
    def whereabouts(self, member: int, does: str = "is") -> str:
        """Where in its program this member is: "it sleeps at data.py:88 in __getitem__".

        Args:
            does: the verb for what it does there.
        """

    @abc.abstractmethod
    def hurry(self, member: int) -> None:
        """Let it copy what it was asked for while its script is busy, if it can."""

    @abc.abstractmethod
    def end(self, member: int) -> None:
        """End a member that was given up; ``ProcessLeft`` follows."""

    @abc.abstractmethod
    def spawn(self, member: int, seat: int, told: dict[str, object]) -> None:
        """Start a new life on a seat whose last member has left; ``ProcessStarted`` follows.

        Args:
            told: what its script finds through ``connect`` beyond what the first life's did.
        """


class Signs(NamedTuple):
    """Signs of life: a change between two checks means that the member makes progress.

    Attributes:
        beats: grows with each mini-batch, gradient and push.
        arrived: barriers reached.
        is_first: whether it goes through ``pace.once()`` before the others, as long as it takes.
    """

    beats: int
    arrived: int
    is_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSpec:
    """A new member: its seat, and what it is told.

    Attributes:
        log: the file for all that it prints.
        exchange: ``module:function`` that makes the member's side, see ``local/process.py``.
        context: what its script finds through ``connect``.
    """

    member: int
    seat: int
    num_seats: int
    threads: int
    log: str
    context: dict[str, object]
    environment: dict[str, str]
    """Its own variables, and the numbers of threads that the user has exported."""
    exchange: str = ""
    search_path: tuple[str, ...] = ()
    """The launcher's module path: a task may be beside the user's script."""
    is_path_first: bool = False
    """Whether that path comes first, so that a task's module is the same one."""
    preload: tuple[str, ...] = ()
    """Modules that it has imported from the start."""
