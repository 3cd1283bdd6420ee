"""The engine contract: what makes time pass, carries facts in and orders out.

    events(timeout)            what happened since the last call, in one total order
    carry_out(orders, cause)   do what the coordinator decided; returns at once
    tell(member, message)      everything else that a member waits for
    lay_out(num_bytes)         make the store's memory
    close(reason)              end every member; nothing is left behind

An event is ``(member, what)``: a message of ``wire/messages.py``, or a happening that the engine
itself tells of. Facts are messages, payloads are seats' slots in shared memory here, object
references elsewhere. This module must not know protocols.

How others implement it: a cluster engine's ``events`` are finished remote calls (``wait`` for the
first of them), its payloads object references that ``carry_out`` hands to the member that
executes the update; in a ``torch.distributed`` world every rank runs its own conductor over the
pushes of all ranks in rank order, and ``Apply`` is the collective.
"""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ..core.jobs import Payload
from ..events import Fact, Order
from ..protocols.staleness import StalenessRule
from ..store.memory import Memory
from ..system.vitals import Vitals
from ..wire.messages import FromMember, ToMember

RENDEZVOUS = "rendezvous"
"""The file beside the logs by which members of one life of a run find each other."""


class ProcessBorn(NamedTuple):
    """A member that was asked for is there."""

    seat: int
    pid: int


class ProcessLeft(NamedTuple):
    """A member has ended; ``reason`` says how."""

    reason: str
    exit_code: int


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
    ProcessBorn | ProcessLeft | ProcessStopped | ProcessContinued | MemberStalled | HelperWoken
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


class Engine(abc.ABC):
    """The coordinator's side of an engine."""

    traits: Traits

    @property
    @abc.abstractmethod
    def memory(self) -> Memory:
        """The store's memory, which checkpoints are written from."""

    @abc.abstractmethod
    def events(self, timeout_s: float) -> Sequence[Event]:
        """What happened, in one total order; [] after ``timeout_s``."""

    @abc.abstractmethod
    def carry_out(
        self, orders: Sequence[Order], cause: Fact | None, payload: Payload | None
    ) -> None:
        """Carry out what the coordinator answered to ``cause``, with which ``payload`` came."""

    @abc.abstractmethod
    def tell(self, member: int, message: ToMember) -> None:
        """Send one message to a member."""

    @abc.abstractmethod
    def lay_out(self, num_bytes: int) -> None:
        """Make the store's memory; LinkError where there is too little."""

    @abc.abstractmethod
    def prepare_jobs(self, samples_per_update: int, staleness: StalenessRule) -> None:
        """Be ready for pushes; a whole update averages ``samples_per_update``."""

    @abc.abstractmethod
    def jump(self, version: int) -> None:
        """The members made updates among themselves, up to ``version``."""

    @abc.abstractmethod
    def ask_copy(self, number: int) -> None:
        """Let a member pin the version of the next update for this checkpoint; 0: no longer."""

    @abc.abstractmethod
    def alarm(self) -> None:
        """Make all members leave the express path at their next barrier."""

    @abc.abstractmethod
    def calm(self) -> int:
        """End the alarm, while all members wait; how many barriers they have passed by now."""

    @abc.abstractmethod
    def stop(self, members: Sequence[int]) -> None:
        """Make these members leave their step: the run ends."""

    @abc.abstractmethod
    def start(self, births: Sequence["MemberSpec"], program: bytes) -> dict[int, tuple[int, int]]:
        """Begin these members; member -> (seat, pid).

        Args:
            program: what every member runs, also one that `spawn` begins; pickled, and never in a
                file that has a name: whoever could write there would choose what is run.
        """

    @abc.abstractmethod
    def signs(self, member: int) -> "Signs":
        """Signs of life of this member."""

    @abc.abstractmethod
    def is_free(self, seat: int) -> bool:
        """Whether a new life may push from this seat: nobody needs what the last one pushed."""

    @abc.abstractmethod
    def end(self, member: int) -> None:
        """End a member that was given up; ``ProcessLeft`` follows."""

    @abc.abstractmethod
    def spawn(self, member: int, seat: int, told: dict[str, object]) -> None:
        """Begin a new life on a seat whose last member has left; ``ProcessBorn`` follows.

        Args:
            told: what its script finds through ``connect`` and the first life's did not.
        """

    @abc.abstractmethod
    def vitals(self, member: int) -> Vitals:
        """What this member's process does."""

    @abc.abstractmethod
    def whereabouts(self, member: int, does: str = "is") -> str:
        """Where in its program this member is, in words: "it sleeps at data.py:88 in __getitem__".

        Args:
            does: what it does there.
        """

    def hurry(self, member: int) -> None:
        """Let it copy what it was asked for, though its script is busy by itself; where it can."""
        return

    @abc.abstractmethod
    def begun(self) -> None:
        """The first epoch opens."""

    @abc.abstractmethod
    def close(self) -> None:
        """End every member and free everything; may be called twice."""


class Signs(NamedTuple):
    """Signs of life: what differs from one look to the next was made by a member that gets on.

    Attributes:
        beats: grows with each mini-batch, gradient and push.
        arrived: barriers reached.
        version: the newest whole one; between peers the coordinator hears of it later.
        has_job: whether it holds the job that is next: nobody can go on before it is done.
        is_first: whether it goes through ``pace.once()`` before the others, as long as it takes.
    """

    beats: int
    arrived: int
    version: int
    has_job: bool
    is_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSpec:
    """A new member: where it sits, and what it is told.

    Attributes:
        log: file for all that it prints.
        context: what its script finds through ``connect``.
    """

    member: int
    seat: int
    num_seats: int
    threads: int
    log: str
    context: dict[str, object]
    environment: dict[str, str]
    search_path: tuple[str, ...] = ()
    """Where the launcher's process finds modules: a task may come from beside the user's script."""
