"""Turn Apply decisions into jobs: which member executes which update, and in which order.

A pushed gradient is added to the sum by the member that pushed it; the push that completes an
update also finishes it. So the work of an update is done by members that would wait anyway, and
the coordinator never touches a tensor. A job whose member died goes to another one. A push is added
when it arrives, so its staleness scale is fixed then, and compared with the weights when the update
is decided. This module must not know sockets or tensors.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import ConfigError, ProtocolError
from ..events import Apply, Discard, EpochEnd, Fact, Grant, Late, Order, Pushed, Ticket
from ..protocols.staleness import WHOLE, StalenessRule
from ..store.clip import UNCLIPPED, Clip, clip_conflict
from ..store.versions import NO_OVERFLOW
from ..wire.messages import FOUND_INF, Add, Copy, Finish, Job, Skip

Send = Callable[[int, Job], None]
_WEIGHT_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Payload:
    """The data of a push that are not part of the fact.

    Attributes:
        stepped: see ``Told``.
        steps_again: see ``Told``: no checkpoint can be taken at the version that it makes.
    """

    fault: int
    clip: Clip
    stepped: int = 0
    steps_again: bool = False


class Jobs:
    """The jobs of one run.

    Args:
        send: sends a message to a member.
        seats: the seat of each member.
        num_done: returns how many jobs are done.
        samples_per_update: samples of a whole update; sums are weighted with it in advance.
        staleness: scales pushes by their lag.
    """

    def __init__(
        self,
        send: Send,
        seats: Mapping[int, int],
        num_done: Callable[[], int],
        samples_per_update: int,
        staleness: StalenessRule = WHOLE,
    ) -> None:
        self._send = send
        self._seats = seats
        self._live = set(seats)
        self._num_done = num_done
        self._target = float(samples_per_update)
        self._rule = staleness
        self._number = 0
        self._version = 0
        self._summed: dict[Ticket, float] = {}
        self._scales: list[float] = []  # of the summed pushes, in the same order
        self._stepped: list[int] = []  # likewise: which of several optimizers each push steps
        self._faults = 0
        self._overflow_version = NO_OVERFLOW
        self._clip = UNCLIPPED
        self._copy = 0
        self._idle: set[int] = set()
        self._open: deque[tuple[int, Job]] = deque()
        """Jobs that may not be done yet, with the member that does each."""

    def settle(self, orders: Sequence[Order], cause: Fact | None, payload: Payload | None) -> None:
        """Turn the orders that follow from ``cause`` into jobs, before grants are sent."""
        pushed = cause if isinstance(cause, Pushed) else None
        if pushed is not None:
            self._idle.add(pushed.ticket.member)
            if payload is not None and pushed.share and not _is_refused(pushed.ticket, orders):
                self._take(pushed, payload, orders)
        for order in orders:
            if type(order) is Apply:
                self._apply(order, pushed)
        if payload is None or not payload.steps_again:
            self._give_copy(orders, pushed)
        for order in orders:
            if type(order) is Grant:
                self._idle.discard(order.ticket.member)

    def ask_copy(self, number: int) -> None:
        """Pin the version of the next update for this checkpoint; 0: cancel that."""
        self._copy = number

    def _give_copy(self, orders: Sequence[Order], pushed: Pushed | None) -> None:
        """Send the copy job before the grants, while the new version cannot change.

        Not at an epoch's end: there a checkpoint may be taken before the next one begins.
        """
        if self._copy and makes_border(orders):
            member = pushed.ticket.member if pushed is not None else self._substitute()
            self._give(member, Copy(self._next(), self._copy))
            self._copy = 0

    def joined(self, member: int) -> None:
        """Note a new member, which can do jobs."""
        self._live.add(member)

    def is_held_by(self, member: int) -> bool:
        """Whether the next job is this member's."""
        num_done = self._num_done()
        return any(holder == member for holder, job in self._open if job.job == num_done + 1)

    def needs(self, seat: int) -> bool:
        """Whether an open job still reads the push of this seat."""
        num_done = self._num_done()
        return any(
            isinstance(job, Add | Finish) and job.job > num_done and job.seat == seat
            for _, job in self._open
        )

    def idle(self, member: int) -> None:
        """Note that this member waits for orders and can do jobs."""
        self._idle.add(member)

    def left(self, member: int) -> None:
        """Give the open jobs of a dead member to another one, in order."""
        self._idle.discard(member)
        self._live.discard(member)
        self._prune()
        if any(holder == member for holder, _ in self._open):
            substitute = self._substitute()
            for holder, job in self._open:
                if holder == member:
                    self._send(substitute, job)
            self._open = deque(
                (substitute if holder == member else holder, job) for holder, job in self._open
            )

    def forget(self) -> None:
        """Drop pushes that are summed but not applied: the run stops."""
        self._clear()

    def _clear(self) -> None:
        self._summed.clear()
        self._scales.clear()
        self._stepped.clear()

    def jump(self, version: int) -> None:
        """Note that the members made updates among themselves up to ``version``."""
        self._version = version

    def _take(self, pushed: Pushed, payload: Payload, orders: Sequence[Order]) -> None:
        is_alone = any(
            type(order) is Apply and order.tickets == (pushed.ticket,) for order in orders
        )
        is_first = not self._summed
        if is_first:
            self._faults, self._clip = 0, payload.clip
            self._overflow_version = NO_OVERFLOW
        self._faults |= payload.fault
        if payload.fault == FOUND_INF:
            self._overflow_version = max(self._overflow_version, pushed.ticket.version)
        if payload.clip != self._clip:
            tickets = (next(iter(self._summed)), pushed.ticket)
            seats = [self._seats[ticket.member] for ticket in tickets]
            raise clip_conflict(seats[0], self._clip, seats[1], payload.clip)
        self._summed[pushed.ticket] = pushed.share
        self._scales.append(self._rule.scale(self._version - pushed.ticket.version))
        self._stepped.append(payload.stepped)
        if not is_alone and not payload.fault:
            weight = pushed.share / self._target
            seat = self._seats[pushed.ticket.member]
            job = Add(self._next(), seat, weight, self._scales[-1], is_first)
            self._give(pushed.ticket.member, job)

    def _apply(self, order: Apply, pushed: Pushed | None) -> None:
        if set(order.tickets) != set(self._summed):
            raise ProtocolError(
                f"an update of {sorted(order.tickets)} was decided, "
                f"but {sorted(self._summed)} were summed"
            )
        total = sum(self._summed.values())
        self._check_weights(order, total)
        is_alone = pushed is not None and order.tickets == (pushed.ticket,)
        member = pushed.ticket.member if pushed is not None else self._substitute()
        scale = self._scales[0] if is_alone else self._target / total
        factors = self._factors(total)
        self._clear()
        self._version += 1
        if self._faults:
            self._give(member, Skip(self._next(), self._version, self._overflow_version))
        else:
            seat = self._seats[member] if is_alone else -1
            update = self._version, seat, scale, self._clip, factors
            self._give(member, Finish(self._next(), *update))

    def _factors(self, total: float) -> tuple[float, ...]:
        """Per optimizer: turns the mean of all pushes into that of the pushes that step it.

        Raises:
            ConfigError: they do not all step the same optimizers, and their mean is clipped.
        """
        if len(set(self._stepped)) < 2:
            return ()
        if self._clip != UNCLIPPED:
            raise ConfigError(
                "the pushes of one update are steps of different optimizers, but it is clipped as "
                "a whole: step all optimizers in every block, or use full-sync, where each step is "
                "an update of its own"
            )
        all_stepped, factors = 0, []
        for stepped in self._stepped:
            all_stepped |= stepped
        for bit in range(all_stepped.bit_length()):
            pairs = zip(self._summed.values(), self._stepped, strict=True)
            share = sum(share for share, stepped in pairs if stepped >> bit & 1)
            factors.append(total / share if share else 1.0)
        return tuple(factors)

    def _check_weights(self, order: Apply, total: float) -> None:
        """Check that pushes were summed with the weights that were decided."""
        if self._rule is WHOLE:
            return
        weights = dict(zip(order.tickets, order.weights, strict=True))
        for (ticket, share), scale in zip(self._summed.items(), self._scales, strict=True):
            summed = scale * share / total
            if abs(summed - weights[ticket]) > _WEIGHT_TOLERANCE:
                raise ProtocolError(
                    f"{ticket!r} should weigh {weights[ticket]}, but was summed with {summed}"
                )

    def _next(self) -> int:
        """The number of a new job."""
        self._number += 1
        return self._number

    def _give(self, member: int, job: Job) -> None:
        self._open.append((member, job))
        if len(self._open) > 64:
            self._prune()
        self._send(member, job)

    def _prune(self) -> None:
        num_done = self._num_done()
        while self._open and self._open[0][1].job <= num_done:
            self._open.popleft()

    def _substitute(self) -> int:
        """The member for a job without one: a member that waits, or one that soon will."""
        if not self._live:
            raise ProtocolError("a job is left over, but no member is alive to do it")
        return min(self._idle or self._live)


def makes_border(orders: Sequence[Order]) -> bool:
    """Whether these orders make a version inside an epoch, at which a checkpoint is possible."""
    kinds = {type(order) for order in orders}
    return Apply in kinds and EpochEnd not in kinds


def _is_refused(ticket: Ticket, orders: Sequence[Order]) -> bool:
    return any(
        (type(order) is Late or type(order) is Discard) and order.ticket[:2] == ticket[:2]
        for order in orders
    )
