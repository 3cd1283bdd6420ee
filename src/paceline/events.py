"""The vocabulary of a run: facts that happened and decisions that follow, nothing else.

Facts are in the past tense, decisions in the imperative. An engine turns what happens into
facts, the coordinator answers with orders, which become messages to members:

    facts      Joined    Pushed    Stalled    Left    Exhausted
    decisions  Apply     Discard   Cancel     Release           (what a protocol says)
    orders     Apply     Discard   Cancel     Grant    Late    Retire    EpochEnd
                                                                    (what members are told of)

A protocol says ``Release(member)``; the coordinator makes it a ``Grant``, which names the ticket
and the leases, and takes pushes that weigh nothing out of an ``Apply``, into a ``Retire``. This
module must not know of tensors, processes, clocks or the network.

All are NamedTuples, checked by the coordinator where they enter: a frozen dataclass costs four
times as much to make, and the simulator makes millions.
"""

from typing import NamedTuple, TypeAlias


class Lease(NamedTuple):
    """A mini-batch handed out: positions ``[start, stop)`` of the epoch's sample order."""

    id: int
    epoch: int
    start: int
    stop: int

    @property
    def num_samples(self) -> int:
        return self.stop - self.start


class Ticket(NamedTuple):
    """One piece of work: the ``serial``-th of ``member``, begun at parameters ``version``.

    A ticket, not a version, names work: k-batch-sync releases a member twice at one version.
    """

    member: int
    serial: int
    version: int


# -- facts -----------------------------------------------------------------------------------


class Joined(NamedTuple):
    """A new member is ready for work. Ids are never used twice."""

    member: int
    at_s: float


class Pushed(NamedTuple):
    """A member finished the work of ``ticket``; ``loss`` is the mean over its samples or nan.

    Attributes:
        num_samples: whose gradients are in it.
        weight: its share of an update against those of the others; None: its samples. A push of
            weight 0 has no gradient and is in no update, but to a protocol it is a push.
        kept: ids of those of the ticket's leases that stay with the member, since they ride on a
            later push: a gradient that was accumulated and not stepped yet. Where it keeps all of
            a push that has samples, it steps once more on them and is granted the same again.
        unused: ids of those that the script did nothing with; they are done all the same.
    """

    ticket: Ticket
    num_samples: int
    loss: float
    is_finite: bool
    at_s: float
    weight: float | None = None
    kept: tuple[int, ...] = ()
    unused: tuple[int, ...] = ()

    @property
    def share(self) -> float:
        """What it weighs against the other pushes of its update."""
        return self.num_samples if self.weight is None else self.weight


class Stalled(NamedTuple):
    """No sign of life from ``member`` for too long, but it is still there."""

    member: int
    at_s: float


class Left(NamedTuple):
    """``member`` is gone: ended, killed or replaced."""

    member: int
    at_s: float


class Exhausted(NamedTuple):
    """No lease is free and nobody is at work: apply what is gathered, release who waits."""

    at_s: float


# -- decisions -------------------------------------------------------------------------------


class Apply(NamedTuple):
    """One update of these pushes, averaged with these weights; version + 1.

    They sum to 1, or to less where a staleness rule scales them.
    """

    tickets: tuple[Ticket, ...]
    weights: tuple[float, ...]


class Discard(NamedTuple):
    """This push will not be used; its leases return."""

    ticket: Ticket


class Cancel(NamedTuple):
    """Abandon the work in flight of this member; its leases return."""

    member: int


class Release(NamedTuple):
    """Newest parameters and so many mini-batches to do."""

    member: int
    num_steps: int = 1


# -- orders: what the coordinator adds ---------------------------------------------------------


class Grant(NamedTuple):
    """A Release with its ticket and leases; ``upcoming`` are leases newly reserved for later."""

    ticket: Ticket
    leases: tuple[Lease, ...]
    upcoming: tuple[Lease, ...] = ()


class Late(NamedTuple):
    """This push came after its ticket had ended; its payload may be freed."""

    ticket: Ticket


class Retire(NamedTuple):
    """These pushes weigh nothing: they are done, and there is no update of them."""

    tickets: tuple[Ticket, ...]


class EpochEnd(NamedTuple):
    """Every lease of ``epoch`` is retired or dropped; parameters stand at ``version``.

    ``num_unused`` samples were never handed out: the script left its loop before.
    """

    epoch: int
    version: int
    num_unused: int = 0


Fact: TypeAlias = Joined | Pushed | Stalled | Left | Exhausted
Decision: TypeAlias = Apply | Discard | Cancel | Release
Order: TypeAlias = Apply | Discard | Cancel | Grant | Late | Retire | EpochEnd
