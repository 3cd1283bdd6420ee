"""Trains with real gradients in virtual time: one process, one model, the store of a live run.

    granted   the member holds version v; nothing is copied as long as v is the newest
    push      parameters <- version v; its gradient, and those of others that wait at v, each into a
              seat of the store (simulation/gradients.py)
    orders    jobs of a live run (core/jobs.py), done at once: add to the sum, finish the update
    update    a version that is replaced is kept aside if members still have to compute at it
              (simulation/model.py)

So each gradient is computed at exactly the parameters that its member holds, by the store, the
updater and the random state of a live run: the parameters are those of the inline engine under the
same order of arrivals, bit for bit (tests/equivalences/test_simulated_training.py).

Gradients of other members are computed ahead if that changes no bit and the protocol does not
cancel; work that is called off nevertheless (an epoch's last copies, members that leave) was then
computed in vain. With ``is_batched``, members at one version are computed in one call
(simulation/gradients.py), whatever the protocol, and there is a seat for each member and one more.

Memory: the newest version, the previous one, the sum, a seat for each gradient that is computed and
not applied (only one for large models), and a copy of each older version at which members still
have to compute (``most_versions_kept``).

Above 300 lines, since all that a member of a run is asked for is here. This module must not know
protocols or time.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch.optim import Optimizer

from ..core.batches import Batches, PeerLeases
from ..core.jobs import Jobs, Payload
from ..data.loader import LeasedLoader
from ..errors import ConfigError
from ..events import Fact, Grant, Lease, Order, Pushed, Ticket
from ..exchange.base import not_finite
from ..protocols.base import SyncProtocol
from ..replica.replica import (
    Replica,
    refuse_observers,
    refuse_shared_memory,
    refuse_what_cannot_be_carried,
    refuse_without_size,
)
from ..replica.seeding import seed_all
from ..store.clip import UNCLIPPED
from ..store.control import JOBS, Control, control_bytes
from ..store.fragments import Fragments
from ..store.means import allowed_scale, difference_rule, squared_distance
from ..store.memory import PrivateMemory
from ..store.optimizer import Updater
from ..store.optimizer_copy import is_elementwise
from ..store.parameter_store import SharedStore, arena_bytes
from ..trainer import make_loader
from ..wire.messages import NOT_FINITE, OK, Add, Finish, Job, Skip, Totals
from ..workloads.base import Task
from .gradients import Computed, Gradients, Together, num_seats
from .model import LocalSteps, Versions, examine


class TrainingWork:
    """The work of members that train a task.

    Args:
        batch_size: the samples that an update averages.
        lr: the learning rate; by default the task's.
        nonfinite: "error", or "skip" to leave out updates whose gradients are not finite.
        is_batched: whether gradients of members with equal parameters are computed in one go, even
            of work that is called off later; they are the same within ``gradients.TOLERANCE``.
    """

    def __init__(
        self,
        task: Task,
        protocol: SyncProtocol,
        *,
        batch_size: int,
        lr: float | None = None,
        seed: int = 0,
        nonfinite: str = "error",
        is_batched: bool = False,
    ) -> None:
        self._task, self._protocol = task, protocol
        self.splits = task.splits()
        seed_all(seed)
        self.model = task.module()
        self._learning_rate = lr or task.learning_rate
        optimizer = self._make_optimizer()
        self._refuse_others(optimizer)
        loader = make_loader(self.splits.train, batch_size, is_shuffled=True)
        self._leased = LeasedLoader(loader, seed, torch.device("cpu"))
        is_difference = protocol.update_rule == "mean"
        self._rule = self._difference_rule(protocol) if is_difference else optimizer
        self._nonfinite_is_error = nonfinite == "error"
        together = self._make_together(protocol) if is_batched else None
        self.replica = Replica(self.model, optimizer, self._rule)
        is_pure = not is_difference and not self.replica.buffers
        # A user's own optimizer may draw random numbers, from the state that the push's step left.
        is_orderless = is_pure and is_elementwise(self._rule)
        self._computes_ahead = is_batched or (is_orderless and not protocol.cancels)
        self._lay_out(protocol.num_workers, is_batched=is_batched)
        self._versions = Versions(self.store, self._home, is_pure=is_pure)
        self._gradients = Gradients(task, self.replica, self._leased, self.store, together)
        self._local = self._local_steps() if is_difference else None
        self.follow(Batches(self.num_samples, batch_size, protocol.num_pushes))
        self._limit = protocol.staleness.distance_limit
        self.on_scaled: Callable[[Ticket, float], None] = lambda ticket, scale: None
        """Called with each push that is scaled by its distance, and the scale."""
        self._start_records(protocol, batch_size)

    def _refuse_others(self, optimizer: Optimizer) -> None:
        """Raise ConfigError for a model that a live run would refuse."""
        refuse_what_cannot_be_carried(self.model, [optimizer])
        refuse_without_size(self.model)
        refuse_shared_memory(self.model)
        if self._protocol.num_workers > 1:
            refuse_observers(self.model)

    def follow(self, batches: Batches) -> None:
        """Use these batches for epochs in which the user defines none."""
        self._batches, self._last_position = batches, batches.end

    def _start_records(self, protocol: SyncProtocol, batch_size: int) -> None:
        """Start with no member waiting, nothing computed and nothing to settle."""
        self._seats = {0: 0}  # member -> seat of its newest push; one is alive from the start
        self._jobs = Jobs(
            self._do, self._seats, lambda: self.store.control[JOBS], batch_size,
            protocol.staleness,
        )  # fmt: skip
        self._waiting: dict[int, dict[Ticket, Lease]] = {}  # by version: may be computed ahead
        self._ahead: dict[Ticket, Computed] = {}  # computed, and not pushed yet
        self._seat: int | None = None  # of the current push
        self._fault = OK

    def _make_together(self, protocol: SyncProtocol) -> Together:
        if protocol.update_rule == "mean":
            raise ConfigError(
                f"--batched is for protocols that push gradients; under {protocol} each worker "
                "steps on parameters of its own: leave --batched out"
            )
        return Together(self._task, self.model)

    def _make_optimizer(self) -> Optimizer:
        return self._task.optimizer(self.model.parameters(), self._learning_rate)

    def _difference_rule(self, protocol: SyncProtocol) -> Optimizer:
        """Return the rule that subtracts the members' mean difference from the parameters."""
        outer = protocol.outer
        return difference_rule(
            self.model.parameters(), lr=outer.lr, momentum=outer.momentum,
            is_nesterov=outer.is_nesterov,
        )  # fmt: skip

    def _local_steps(self) -> LocalSteps:
        return LocalSteps(
            self._task, self.replica, self._home, self._leased, self.store, self._make_optimizer,
            self._fragments, self._protocol.streaming.overlap_steps,
            skips=not self._nonfinite_is_error,
        )  # fmt: skip

    def _lay_out(self, num_workers: int, *, is_batched: bool) -> None:
        """Set up the store, and move the model to memory of its own."""
        layout, seats = self.replica.layout, 1
        if self._computes_ahead:
            seats = num_seats(layout.slot_bytes, num_workers, is_batched=is_batched)
        self._fragments = Fragments(layout.parameters, self._protocol.streaming.num_fragments)
        self.store = SharedStore(
            layout, PrivateMemory(arena_bytes(layout, seats)).tensor(),
            Control(PrivateMemory(control_bytes(seats)), seats), has_peers=False,
        )  # fmt: skip
        parameters = self.replica.parameters
        self._updaters = [
            Updater(self._rule, parameters, layout, block) for block in self.store.blocks
        ]
        self.replica.write_to(self.store.blocks[self.store.current])
        self._updaters[self.store.current].write_state(self._rule.state)
        self._home = self.replica.live_alone()

    @property
    def most_versions_kept(self) -> int:
        """The most old versions kept at a time, because members still had to compute at them."""
        return self._versions.most_kept

    @property
    def num_samples(self) -> int:
        """The samples of an epoch."""
        return self._leased.order.count()[0]

    @property
    def update_bytes(self) -> int:
        """The bytes of one push; with fragments, those of the largest."""
        return self._fragments.largest_bytes

    # -- what the run asks ----------------------------------------------------------------------

    def opened(self, epoch: int) -> Sequence[int] | None:
        ends = self._leased.order.draw(epoch)
        if self._local is not None:
            self._local.begin()
            batches = self._batches if ends is None else self._batches.with_ends(ends)
            num_workers, num_steps = self._protocol.num_workers, self._protocol.num_steps
            leases = PeerLeases(batches, num_workers, num_steps, epoch=epoch)
            self._last_position = leases.last_position
        return ends

    def granted(self, grant: Grant) -> None:
        version = grant.ticket.version
        self._versions.hold(version)
        if self._computes_ahead and len(grant.leases) == 1:
            self._waiting.setdefault(version, {})[grant.ticket] = grant.leases[0]

    def push(self, ticket: Ticket, leases: Sequence[Lease], at_s: float) -> Pushed:
        computed = self._ahead.pop(ticket, None)
        if computed is None:
            computed = self._compute(ticket, leases)
        elif self._limit:
            self._versions.pull(ticket.version)  # its distance from the newest will be measured
        if self._limit:
            self._versions.release(ticket.version)
        seat, loss, is_finite = computed
        self._seat = self._seats[ticket.member] = seat
        if not is_finite and self._nonfinite_is_error:
            name = self.store.not_finite(seat)
            raise not_finite(ticket.member, name, ticket.serial, ticket.version, loss)
        self._fault = OK if is_finite else NOT_FINITE
        num_samples = sum(lease.num_samples for lease in leases)
        return Pushed(ticket, num_samples, loss, is_finite, at_s)

    def carry_out(self, orders: Sequence[Order], fact: Fact) -> None:
        self._pushed = fact.ticket if isinstance(fact, Pushed) else None
        payload = Payload(self._fault, UNCLIPPED) if isinstance(fact, Pushed) else None
        self._jobs.settle(orders, fact, payload)
        self._free_seat()

    def dropped(self, ticket: Ticket) -> None:
        self._stop_waiting(ticket)
        computed = self._ahead.pop(ticket, None)
        if computed is not None:
            self._gradients.free(computed.seat)
        if computed is None or self._limit:
            self._versions.release(ticket.version)

    def _free_seat(self) -> None:
        """Free the seat of the last push, which is not needed any longer."""
        if self._seat is not None:
            self._gradients.free(self._seat)
            self._seat = None

    # -- gradients ------------------------------------------------------------------------------

    def _compute(self, ticket: Ticket, leases: Sequence[Lease]) -> Computed:
        """Compute what a member pushes, and gradients of others that wait at its version."""
        version, row = ticket.version, {ticket: leases[0]}
        self._versions.pull(version)
        if self._local is not None:
            seat = self._gradients.take()
            is_last = any(lease.start >= self._last_position for lease in leases)
            loss = self._local.take(ticket, leases, seat, is_last=is_last)
            computed = [Computed(seat, loss, self.store.is_finite(seat))]
        elif len(leases) > 1:
            computed = [self._gradients.sum(leases)]
        else:
            row |= self._companions(ticket, leases[0])
            computed = self._gradients.row(list(row.values()))
        for computed_ticket in row:
            self._stop_waiting(computed_ticket)
            if not self._limit:
                self._versions.release(version)
        self._ahead.update(zip(row, computed, strict=True))
        return self._ahead.pop(ticket)

    def _companions(self, ticket: Ticket, lease: Lease) -> dict[Ticket, Lease]:
        """Return the tickets and leases that are computed together with this member's."""
        waiting = self._waiting.get(ticket.version, {})
        num_others = self._gradients.length(len(waiting)) - 1
        candidates = (
            (other, other_lease)
            for other, other_lease in waiting.items()
            if other != ticket and other_lease.num_samples == lease.num_samples
        )
        others = list(islice(candidates, num_others))
        return dict(others[: self._gradients.length(1 + len(others)) - 1])

    def _stop_waiting(self, ticket: Ticket) -> None:
        """Remove a ticket that is computed, or will never be."""
        waiting = self._waiting.get(ticket.version)
        if waiting is not None and waiting.pop(ticket, None) is not None and not waiting:
            del self._waiting[ticket.version]

    # -- updates --------------------------------------------------------------------------------

    def _do(self, member: int, job: Job) -> None:
        """Do a job at once."""
        if isinstance(job, Add):
            scale = job.scale * self._allowed_scale()
            self.store.add(job.job, job.seat, job.weight, job.is_first, scale)
            return
        self._versions.keep()
        if isinstance(job, Skip):
            self.store.skip(job.job)
            self._begin_again()
        elif isinstance(job, Finish):
            groups: Any = self._rule.param_groups
            scale = job.scale * (self._allowed_scale() if job.seat >= 0 else 1.0)
            self.store.finish(
                job.job, self._updaters, groups, seat=job.seat, scale=scale, clip=job.clip
            )

    def _begin_again(self) -> None:
        """Drop members' own parameters, which may not be finite; they go on from the version."""
        if self._local is not None:
            self._local.begin()

    def _allowed_scale(self) -> float:
        """Return the scale that distance allows for the current push.

        The model must hold the version at which the push was computed.
        """
        if not self._limit:
            return 1.0
        moved = squared_distance(self.replica.layout, self._versions.newest, self._home)
        scale = allowed_scale(self._limit, moved, self._rule.param_groups)
        assert self._pushed is not None
        self.on_scaled(self._pushed, scale)
        return scale

    # -- evaluation -----------------------------------------------------------------------------

    def evaluate(self) -> Totals:
        """Return exact metrics of the test data at the newest version; empty if there is none."""
        self.load_newest()
        return examine(self._task, self.model, self.splits.test)

    def load_newest(self) -> None:
        """Load the newest version into the model."""
        self._versions.pull(self.store.version)
