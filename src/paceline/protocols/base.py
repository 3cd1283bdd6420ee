"""The contract of a protocol: facts come in, decisions go out, and its whole state can be saved.

A protocol decides whose pushes make an update and who may go on, and nothing else. It gets a push
only while the ticket is current, and facts of a member only between its Joined and its Left. A
released member counts as working until it pushes or leaves, even while the coordinator has no lease
for it. It must not know of leases, tensors, processes, clocks or the network; time comes in with
the facts.

    update   gathered pushes -> Apply -> version + 1, of num_pushes pushes (K)
    rule     an update is K pushes, not K members: while gathered + working < K, idle members
             are released again at the same version, so no update waits for the dead
    at an    Exhausted: what is gathered is applied, however little, and waiting members are
    epoch's  released (for the next epoch: the coordinator grants nothing before it opens)
    end
"""

import abc
import math
from typing import Any, ClassVar, Literal, NamedTuple

from ..errors import ConfigError
from ..events import (
    Apply,
    Cancel,
    Decision,
    Discard,
    Exhausted,
    Fact,
    Joined,
    Left,
    Pushed,
    Release,
    Stalled,
    Ticket,
)
from ..fields import written
from .arguments import Argument, check_arguments
from .outer import AVERAGING, OuterOptimizer
from .staleness import WHOLE, StalenessRule
from .streaming import AT_ONCE, Streaming


class Rhythm(NamedTuple):
    """How a protocol of K pushes per update behaves while nobody joins, leaves or stalls.

    At first all are released; an update takes the first K pushes, from any members.
    """

    waits: bool
    """Whether a member that pushed is released at the next update, not at once."""
    restarts: bool
    """Whether an update cancels the work in flight and releases its members."""


class SyncProtocol(abc.ABC):
    """Whose pushes make an update, and who waits.

    Invariant: it names every push in exactly one Apply or Discard, at the latest at Exhausted
    (tests/contracts/test_protocols.py).
    """

    name: ClassVar[str]
    summary: ClassVar[str]  # one line for --help
    arguments: ClassVar[tuple[Argument, ...]] = ()  # the numbers behind its name
    cancels: ClassVar[bool] = False  # needs an engine that can cancel work in flight
    copies_in_tail: ClassVar[bool] = True  # whether the idle may repeat an epoch's last leases
    is_adaptive: ClassVar[bool] = False  # changes num_pushes or num_steps, within the workers
    watches_loss: ClassVar[bool] = False  # changes them as the loss falls
    has_stale_pushes: ClassVar[bool] = False  # may apply a push to a version that is not its own
    can_stream: ClassVar[bool] = False  # changes may be exchanged in fragments
    is_spmd: ClassVar[bool] = False  # may run between peers, without a coordinator
    update_rule: ClassVar[Literal["optimizer", "mean"]] = "optimizer"  # "mean": of parameters
    rhythm: ClassVar[Rhythm | None] = None  # not inherited: its timing then needs no events
    learned: ClassVar[tuple[str, ...]] = ()  # keys of its state that outlive all members

    def __init_subclass__(cls) -> None:
        cls.rhythm = vars(cls).get("rhythm")  # a subclass may decide otherwise

    def __init__(
        self, num_workers: int, *values: int, num_pushes: int = 1, num_steps: int = 1
    ) -> None:
        if num_workers < 1:
            raise ConfigError(f"workers must be >= 1, got {num_workers}")
        check_arguments(self.name, self.arguments, values, num_workers)
        self.num_workers = num_workers
        self.num_pushes = num_pushes  # K per update; the current K if adaptive, at first K_0
        self.num_steps = num_steps  # H per release; likewise
        self.values = values  # the numbers after its name
        self.staleness: StalenessRule = WHOLE  # of the run; not used by the protocol itself
        self.idle_rule = ""  # a staleness rule that was set and has no effect here
        self.num_as_full_sync = 0  # first updates that equal full-sync's, where SGD steps locally
        self.outer: OuterOptimizer = AVERAGING  # where a push is a difference; likewise
        self.streaming: Streaming = AT_ONCE  # likewise

    def __str__(self) -> str:
        rules = (
            (self.outer, AVERAGING), (self.streaming, AT_ONCE), (self.staleness, WHOLE)
        )  # fmt: skip
        set_rules = [str(rule) for rule, default in rules if rule is not default]
        return "+".join([written(self.name, self.values), *set_rules])

    @property
    def num_short(self) -> int:
        """Coming rounds with one step per release; later ones have ``long_steps``."""
        return 0

    @property
    def long_steps(self) -> int:
        """Local steps per release after the short rounds."""
        return self.num_steps

    def idle_note(self) -> str:
        """Return why the staleness rule that was set has no effect; empty if it has one."""
        if not self.idle_rule:
            return ""
        reason = f"under {self} no gradient is stale"
        if self.num_workers == 1:
            reason = "the gradients of one worker are never stale"
        return f"staleness {self.idle_rule} has no effect: {reason}"

    def answer(self, fact: Fact, version: int) -> list[Decision]:
        """Return the decisions of ``react`` after the staleness rule; called by a run's driver.

        Args:
            version: the newest.
        """
        rule = self.staleness
        if type(fact) is Pushed and not self.is_spmd and (fact[5] == 0.0 or not fact[1]):
            # This work made no gradient: for the protocol, its member is still working.
            self.note_dropped(fact)
            member = fact.ticket.member
            return [Apply((fact.ticket,), (1.0,)), Release(member, self.num_steps)]
        if rule is WHOLE:
            return self.react(fact)
        if type(fact) is Pushed and rule.is_dropped(version - fact.ticket.version):
            # The protocol does not see this push: for it, the member is still working.
            self.note_dropped(fact)
            return [Discard(fact.ticket), Release(fact.ticket.member, self.num_steps)]
        decisions = self.react(fact)
        if not rule.scales:
            return decisions
        return [_scaled(d, rule, version) if type(d) is Apply else d for d in decisions]

    def note_dropped(self, fact: Pushed) -> None:
        """A push was left out, stale or without a gradient, and its member goes on."""
        return

    @abc.abstractmethod
    def react(self, fact: Fact) -> list[Decision]:
        """Return the decisions that follow from this fact, in the order of execution."""

    @abc.abstractmethod
    def state(self) -> dict[str, Any]:
        """Return its state for JSON; protocols with equal states decide alike."""

    @abc.abstractmethod
    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state()` returned."""


def _scaled(update: Apply, rule: StalenessRule, version: int) -> Apply:
    """Return the update with each weight scaled by the rule."""
    pairs = zip(update.tickets, update.weights, strict=True)
    weights = tuple(weight * rule.scale(version - ticket.version) for ticket, weight in pairs)
    return Apply(update.tickets, weights)


class Gathering(SyncProtocol):
    """Base of the protocols that gather K pushes, from any members, for one update.

    A member is working or idle, and its push stays gathered even if it leaves. A protocol adds
    what follows a push: before the update is complete, and when it is. Without ``num_pushes`` the
    number in its name is K.
    """

    def __init__(
        self, num_workers: int, *values: int, num_pushes: int = 0, num_steps: int = 1
    ) -> None:
        pushes = num_pushes or (values[0] if values else 1)
        super().__init__(num_workers, *values, num_pushes=pushes, num_steps=num_steps)
        self._idle: set[int] = set()
        self._working: set[int] = set()
        self._gathered: list[Pushed] = []  # for the next update, in order of arrival
        self._again: dict[int, list[Decision]] = {}  # cached: the answer to nearly every push

    def react(self, fact: Fact) -> list[Decision]:
        if type(fact) is Pushed:  # not isinstance, and no set is touched: millions of these come
            gathered = self._gathered
            gathered.append(fact)
            member = fact[0][0]
            if len(gathered) < self.num_pushes:
                return self._after_push(member)
            self._rest(member)
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
        """Return what follows a push that does not complete an update; its member is working."""

    @abc.abstractmethod
    def _after_update(self) -> list[Decision]:
        """Return what follows an update."""

    def _after_joined(self, member: int) -> list[Decision]:
        return self._release([member])

    def _after_stalled(self, member: int) -> list[Decision]:
        return []  # slow is not dead

    def _after_exhausted(self, fact: Exhausted) -> list[Decision]:
        applied: list[Decision] = [self._apply()] if self._gathered else []
        return applied + self._release_idle()

    def _rest(self, member: int) -> None:
        """Make a working member idle."""
        self._working.remove(member)
        self._idle.add(member)

    def _rest_and_fill(self, member: int) -> list[Decision]:
        """Make a member that pushed wait for the update, unless that would lack pushes."""
        self._rest(member)
        return self._fill()

    def _go_on(self, member: int) -> list[Decision]:
        """Release a member that pushed again at once: it never stops working."""
        decisions = self._again.get(member)
        if decisions is None or decisions[0][1] != self.num_steps:  # type: ignore[misc]  # a Release
            decisions = self._again[member] = [Release(member, self.num_steps)]
        return decisions

    def _fill(self) -> list[Decision]:
        """Release idle members, in order, while the update would lack pushes without them."""
        num_missing = self.num_pushes - len(self._gathered) - len(self._working)
        if num_missing <= 0 or not self._idle:
            return []
        return self._release(sorted(self._idle)[:num_missing])

    def _release(self, members: list[int]) -> list[Decision]:
        self._idle.difference_update(members)
        self._working.update(members)
        return [self._go_on(member)[0] for member in members]

    def _release_idle(self) -> list[Decision]:
        return self._release(sorted(self._idle))

    def _cancel_rest(self) -> list[Decision]:
        """Cancel all working members, in order."""
        cancelled = sorted(self._working)
        self._idle.update(cancelled)
        self._working.clear()
        return [Cancel(member) for member in cancelled]

    def _apply(self) -> Apply:
        """Return one update of all gathered pushes, weighted by samples or by their weights."""
        gathered = self._gathered
        shares = [pushed[1] if pushed[5] is None else pushed[5] for pushed in gathered]
        total, first = sum(shares), shares[0]
        if shares.count(first) == len(shares):  # also if all weights are 0
            weights = (1.0 / len(shares),) * len(shares)
        else:
            weights = tuple(share / total for share in shares)
        update = Apply(tuple([pushed[0] for pushed in gathered]), weights)
        gathered.clear()
        return update

    def state(self) -> dict[str, Any]:
        return {
            "idle": sorted(self._idle),
            "working": sorted(self._working),
            "tickets": [list(pushed.ticket) for pushed in self._gathered],
            "shares": [pushed.share for pushed in self._gathered],
        }

    def load(self, state: dict[str, Any]) -> None:
        self._idle = set(state["idle"])
        self._working = set(state["working"])
        # Only ticket and weight of gathered pushes are used again.
        self._gathered = [
            Pushed(Ticket(*ticket), 1, math.nan, True, 0.0, weight)
            for ticket, weight in zip(state["tickets"], state["shares"], strict=True)
        ]
