"""The engine contract: what makes time pass, carries facts in and messages out.

    start(specs, program)  begin the members
    events(timeout)         what happened since the last call, in one total order
    send(messages)          hand these to members, in order; returns at once
    cancel(member, serial)  let a member leave its step, if it works on no later one
    lay_out(num_bytes)      make the store's memory
    clear()                 make room for another run of the same members
    close()                 end every member; nothing is left behind

An event is ``(member, what)``: a message of ``wire/messages.py``, or a happening that the engine
itself tells of. An engine whose members can be lost has `Processes` besides. This module must not
know protocols or jobs.
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
"""To `Engine.cancel`: whatever a member works on."""

RENDEZVOUS = "rendezvous"
"""How the files beside the logs begin by which members of one life of a run find each other."""

THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables of the environment that tell libraries with how many threads to compute."""


class ProcessStarted(NamedTuple):
    """A member that was asked for is there."""

    seat: int
    pid: int


class ProcessLeft(NamedTuple):
    """A member has ended; ``reason`` says how."""

    reason: str


class ProcessStopped(NamedTuple):
    """Somebody has stopped a member (SIGSTOP)."""


class ProcessContinued(NamedTuple):
    """It was let go on."""


class MemberStalled(NamedTuple):
    """Of an engine that can tell by itself: nothing was heard of a member for too long."""


class HelperWoken(NamedTuple):
    """Of no member (-1): a process of the engine's own had been stopped, and was let go on."""

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
        memory: that checkpoints are written from.
        control: the run's words.
    """

    def __init__(self, memory: Memory, control: Control) -> None:
        self.memory = memory
        self._control = control

    @property
    def version(self) -> int:
        """The newest whole one; between peers the coordinator hears of it later."""
        return self._control.version

    @property
    def num_jobs(self) -> int:
        """How many jobs are done by now."""
        return self._control[JOBS]

    def ask_copy(self, number: int) -> None:
        """Let peers pin the version of their next round for this checkpoint; 0: no longer."""
        self._control[SNAPSHOT] = number

    def alarm(self) -> None:
        """Let peers go on through the store at their next barrier."""
        self._control[ALARM] = 1
        self._control.wake(MET)

    def calm(self) -> int:
        """End the alarm, while all members wait; how many barriers they have passed by now."""
        self._control[ALARM] = 0
        return max(self._control[index] for index in self._control.arrived)


class Engine(abc.ABC):
    """The deciding side of an engine.

    Attributes:
        processes: of members; None: they cannot be lost, as threads of this process.
    """

    traits: Traits
    processes: "Processes | None" = None

    @abc.abstractmethod
    def start(self, specs: Sequence["MemberSpec"], program: bytes) -> dict[int, tuple[int, int]]:
        """Begin these members; member -> (seat, pid).

        Args:
            program: what every member runs, also one that is begun later; pickled, and never in a
                file that has a name: whoever could write there would choose what is run.
        """

    @abc.abstractmethod
    def events(self, timeout_s: float) -> Sequence[Event]:
        """What happened, in one total order; [] after ``timeout_s``."""

    @abc.abstractmethod
    def send(self, messages: Sequence[tuple[int, ToMember]]) -> None:
        """Hand each message to its member, those of one member in order; returns at once."""

    @abc.abstractmethod
    def cancel(self, member: int, serial: int) -> None:
        """Let a member leave its step where that works on ``serial`` or on one before."""

    @abc.abstractmethod
    def lay_out(self, num_bytes: int) -> StoreView:
        """Make the store's memory; LinkError where there is too little."""

    def clear(self) -> None:
        """All members wait for a message, and begin another run: forget what they had in common.

        Words and memory are as at the start, but for who is gone. Memory that a member still looks
        into stays readable. An engine that cannot do it carries no trials.
        """
        raise ConfigError(
            f"engine {self.traits.name} carries one run, and no trials (pace.trial()); use engine "
            "local"
        )

    @abc.abstractmethod
    def close(self) -> None:
        """End every member and free everything; may be called twice."""


class Processes(abc.ABC):
    """Members as something that can be lost: looked at, ended and begun again."""

    @abc.abstractmethod
    def signs(self, member: int) -> "Signs":
        """Signs of life of this member."""

    @abc.abstractmethod
    def vitals(self, member: int) -> Vitals:
        """What this member's process does."""

    @abc.abstractmethod
    def whereabouts(self, member: int, does: str = "is") -> str:
        """Where in its program this member is, in words: "it sleeps at data.py:88 in __getitem__".

        Args:
            does: what it does there.
        """

    @abc.abstractmethod
    def hurry(self, member: int) -> None:
        """Let it copy what it was asked for, though its script is busy by itself; where it can."""

    @abc.abstractmethod
    def end(self, member: int) -> None:
        """End a member that was given up; ``ProcessLeft`` follows."""

    @abc.abstractmethod
    def spawn(self, member: int, seat: int, told: dict[str, object]) -> None:
        """Begin a new life on a seat whose last member has left; ``ProcessStarted`` follows.

        Args:
            told: what its script finds through ``connect`` and the first life's did not.
        """


class Signs(NamedTuple):
    """Signs of life: what differs from one look to the next was made by a member that gets on.

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
    """A new member: where it sits, and what it is told.

    Attributes:
        log: file for all that it prints.
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
    """Variables of its own, and how many threads the user has exported; else none is set."""
    exchange: str = ""
    search_path: tuple[str, ...] = ()
    """Where the launcher's process finds modules: a task may come from beside the user's script."""
    is_path_first: bool = False
    """Whether it looks there before anywhere else, so that a task's module is the same one."""
    preload: tuple[str, ...] = ()
    """Modules that it has from the start."""
