"""What a protocol is: facts come in, decisions go out, and all it remembers can be saved.

A protocol answers two questions, whose pushes make an update and who may go on, and nothing else.
It hears of a push only while the ticket is current, and of a member only between its Joined and
its Left. A member it has released counts as working until that member pushes or leaves, also
when the coordinator has no lease for it yet. It must not know of leases, tensors, processes, clocks
or the network; time comes in with the facts.

    update   gathered pushes -> Apply -> version + 1, of num_pushes pushes (K)
    rule     an update is K pushes, not K members: while gathered + working < K, who is idle
             is released again at the same version, so no update waits for the dead
    at an    Exhausted: what is gathered is applied, however little, and who waits is released
    epoch's  (for the next epoch: the coordinator grants nothing before that opens)
    end
"""

import abc
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from paceline.errors import ConfigError
from paceline.events import (
    Apply,
    Cancel,
    Decision,
    Exhausted,
    Fact,
    Joined,
    Left,
    Pushed,
    Release,
    Stalled,
    Ticket,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """The number in ``name:number``: what it means and which values it may have."""

    symbol: str
    meaning: str
    minimum: int
    is_at_most_workers: bool = False
    instead: str = ""  # what to use for more than the workers allow


class SyncProtocol(abc.ABC):
    """Whose pushes make an update, and who waits.

    Invariant: every push it hears of, it names in exactly one Apply or Discard, at the latest when
    it hears Exhausted (tests/contracts/test_protocols.py).
    """

    name: ClassVar[str]
    summary: ClassVar[str]  # one line for --help
    argument: ClassVar[Argument | None] = None
    cancels: ClassVar[bool] = False  # needs an engine that can call work in flight off
    copies_in_tail: ClassVar[bool] = True  # whether the idle may repeat an epoch's last leases
    is_adaptive: ClassVar[bool] = False  # changes num_pushes or num_steps, within the workers
    is_spmd: ClassVar[bool] = False  # may run between peers, without a coordinator on the way
    update_rule: ClassVar[Literal["optimizer", "mean"]] = "optimizer"  # "mean": of parameters

    def __init__(
        self, num_workers: int, value: int | None = None, *, num_pushes: int = 1, num_steps: int = 1
    ) -> None:
        if num_workers < 1:
            raise ConfigError(f"workers must be >= 1, got {num_workers}")
        if self.argument is not None and value is not None:
            _check_argument(self.name, self.argument, value, num_workers)
        self.num_workers = num_workers
        self.num_pushes = num_pushes  # K, an update; of an adaptive one the K of now, at first K_0
        self.num_steps = num_steps  # H, a release; likewise
        self.value = value  # the number in the name, if it has one

    def __str__(self) -> str:
        return self.name if self.value is None else f"{self.name}:{self.value}"

    @abc.abstractmethod
    def react(self, fact: Fact) -> list[Decision]:
        """What follows from this fact, in the order in which it is to be done."""

    @abc.abstractmethod
    def state(self) -> dict[str, Any]:
        """All it remembers, as JSON can carry it; equal states decide alike."""

    @abc.abstractmethod
    def load(self, state: dict[str, Any]) -> None:
        """Remember what `state()` said."""


def _check_argument(name: str, argument: Argument, value: int, num_workers: int) -> None:
    symbol, minimum = argument.symbol, argument.minimum
    if value < minimum:
        raise ConfigError(
            f"{name}:{symbol} needs {symbol} >= {minimum} ({argument.meaning}), "
            f"got {name}:{value}; try {name}:{minimum}"
        )
    if argument.is_at_most_workers and value > num_workers:
        raise ConfigError(
            f"{name}:{symbol} needs {symbol} <= {num_workers}, the number of workers, "
            f"got {name}:{value}; try {name}:{num_workers}, or {argument.instead}:{value}, "
            f"where one worker may push more than once an update"
        )


class Gathering(SyncProtocol):
    """What the protocols share that gather K pushes, whoever they are from, for one update.

    A member is working or idle, and its push stays gathered also when it leaves. A protocol adds
    what follows a push: before the update is full, and when it is.
    """

    def __init__(
        self, num_workers: int, value: int | None = None, *, num_pushes: int = 1, num_steps: int = 1
    ) -> None:
        super().__init__(num_workers, value, num_pushes=num_pushes, num_steps=num_steps)
        self._idle: set[int] = set()
        self._working: set[int] = set()
        self._tickets: list[Ticket] = []  # gathered for the next update, in order of arrival
        self._samples: list[int] = []  # of each
        self._again: dict[int, list[Decision]] = {}  # made once: the answer to nearly every push

    def react(self, fact: Fact) -> list[Decision]:
        if type(fact) is Pushed:  # not isinstance, and no set is touched: millions of these come
            ticket, num_samples, _, _, _ = fact
            tickets = self._tickets
            tickets.append(ticket)
            self._samples.append(num_samples)
            if len(tickets) < self.num_pushes:
                return self._after_push(ticket.member)
            self._rest(ticket.member)
            return [self._apply(), *self._after_update()]
        if isinstance(fact, Joined):
            self._idle.add(fact.member)
            return self._after_joined(fact.member)
        if isinstance(fact, Left):
            self._idle.discard(fact.member)
            self._working.discard(fact.member)
            return self._fill()
        if isinstance(fact, Stalled):
            return self._after_stalled(fact.member)
        assert isinstance(fact, Exhausted)
        return self._after_exhausted(fact)

    @abc.abstractmethod
    def _after_push(self, member: int) -> list[Decision]:
        """What follows a push that does not complete an update; its member still works."""

    @abc.abstractmethod
    def _after_update(self) -> list[Decision]:
        """What follows an update."""

    def _after_joined(self, member: int) -> list[Decision]:
        return self._release([member])

    def _after_stalled(self, member: int) -> list[Decision]:
        return []  # slow is not dead

    def _after_exhausted(self, fact: Exhausted) -> list[Decision]:
        applied: list[Decision] = [self._apply()] if self._tickets else []
        return applied + self._release_idle()

    def _rest(self, member: int) -> None:
        """Who was working is idle."""
        self._working.remove(member)
        self._idle.add(member)

    def _rest_and_fill(self, member: int) -> list[Decision]:
        """Who has pushed waits for the update, unless that would lack pushes."""
        self._rest(member)
        return self._fill()

    def _go_on(self, member: int) -> list[Decision]:
        """Who has pushed is released again at once: it never stops working."""
        decisions = self._again.get(member)
        if decisions is None:
            decisions = self._again[member] = [Release(member, self.num_steps)]
        return decisions

    def _fill(self) -> list[Decision]:
        """Release the idle, in member order, as long as the update would lack pushes without."""
        num_missing = self.num_pushes - len(self._tickets) - len(self._working)
        if num_missing <= 0 or not self._idle:
            return []
        return self._release(sorted(self._idle)[:num_missing])

    def _release(self, members: list[int]) -> list[Decision]:
        self._idle.difference_update(members)
        self._working.update(members)
        return [Release(member, self.num_steps) for member in members]

    def _release_idle(self) -> list[Decision]:
        return self._release(sorted(self._idle))

    def _cancel_rest(self) -> list[Decision]:
        """Call off who is still working, in member order."""
        cancelled = sorted(self._working)
        self._idle.update(cancelled)
        self._working.clear()
        return [Cancel(member) for member in cancelled]

    def _apply(self) -> Apply:
        """One update of all that is gathered, each push weighted by its samples."""
        num_samples, first = sum(self._samples), self._samples[0]
        if self._samples.count(first) == len(self._samples):
            weights = (first / num_samples,) * len(self._samples)
        else:
            weights = tuple(samples / num_samples for samples in self._samples)
        update = Apply(tuple(self._tickets), weights)
        self._tickets.clear()
        self._samples.clear()
        return update

    def state(self) -> dict[str, Any]:
        return {
            "idle": sorted(self._idle),
            "working": sorted(self._working),
            "tickets": [list(ticket) for ticket in self._tickets],
            "samples": list(self._samples),
        }

    def load(self, state: dict[str, Any]) -> None:
        self._idle = set(state["idle"])
        self._working = set(state["working"])
        self._tickets = [Ticket(*ticket) for ticket in state["tickets"]]
        self._samples = list(state["samples"])
