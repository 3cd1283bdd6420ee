"""Real gradients in virtual time: one process, one model, one gradient at a time.

    granted   the member holds version v; nothing is copied as long as v is the newest
    push      parameters <- version v; forward, backward; the gradient goes to the store's slot
    orders    jobs of a live run (engines/jobs.py), done at once: add to the sum, finish the update
    update    if somebody still holds the version that it replaces, that one is kept aside

So each gradient is computed at exactly the parameters that its member holds, by the store, the
updater and the random state of a live run: the parameters are those of the inline engine under
the same order of arrivals, bit for bit (tests/equivalences/test_simulated_training.py). Work that
is called off is never computed. Memory: the newest version, the one before, the sum, one slot, and
one more for each older version that somebody holds (``most_versions_kept``). With ``is_batched``
members at one version are computed in one go (engines/batching.py), and a gradient is kept for
each of them until it pushes.

Under local-sgd each member has an optimizer of its own, and its state besides. This module must
not know protocols or time.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..compute.replica import Replica, refuse_what_cannot_be_carried
from ..compute.seeding import seed_all
from ..data.feed import fetch
from ..data.loader import LeasedLoader
from ..errors import ConfigError
from ..events import Fact, Grant, Lease, Order, Pushed, Ticket
from ..protocols.base import SyncProtocol
from ..sessions.base import NOT_FINITE, OK, Totals, not_finite
from ..sessions.lane import Message
from ..store.control import JOBS, Control, control_bytes
from ..store.distance import allowed_scale, squared_distance
from ..store.memory import PrivateMemory
from ..store.shared import SharedStore, arena_bytes
from ..store.update import Updater
from ..trainer import make_loader
from ..workloads.base import Task
from .base import Push
from .batching import Row, Together, num_together
from .jobs import Jobs

SEAT = 0
_EVALUATION_BATCH = 1000


class _OneSeat(dict[int, int]):
    """Every member pushes from the same seat, one after the other."""

    def __missing__(self, member: int) -> int:
        return SEAT


class TrainingCraft:
    """What members do when they train a task.

    Args:
        batch_size: samples an update averages.
        lr: None: the task's.
        nonfinite: "error", or "skip" an update whose gradient is not finite.
        is_batched: gradients of members that hold equal parameters are computed in one go, also of
            work that is called off later; the same within ``batching.TOLERANCE``.
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
        self._task = task
        self.splits = task.data()
        seed_all(seed)
        self.model = task.model()
        self._learning_rate = lr or task.learning_rate
        optimizer = self._make_optimizer()
        refuse_what_cannot_be_carried(self.model, optimizer)
        loader = make_loader(self.splits.train, batch_size, is_shuffled=True)
        self._leased = LeasedLoader(loader, seed, torch.device("cpu"))
        self._num_steps = protocol.num_steps
        self._is_difference = protocol.update_rule == "mean"
        self._own: dict[int, Optimizer] = {}
        self._rule = optimizer
        if self._is_difference:
            trainable = [one for one in self.model.parameters() if one.requires_grad]
            self._rule = torch.optim.SGD(trainable, lr=1.0)
        self._nonfinite_is_error = nonfinite == "error"
        self._lay_out(optimizer)
        self._jobs = Jobs(
            self._do, _OneSeat({0: SEAT}), lambda: self.store.control[JOBS], batch_size,
            protocol.staleness,
        )  # fmt: skip
        self._limit = protocol.staleness.distance_limit
        self.on_scaled: Callable[[Ticket, float], None] = lambda ticket, scale: None
        """Hears what distance left of a push."""
        self._together = self._make_together(protocol) if is_batched else None
        self._waiting: dict[Ticket, Lease] = {}  # to be computed, where they go together
        self._rows: dict[Ticket, Row] = {}  # computed, and not pushed yet
        self._fault = OK
        self._holders: dict[int, int] = {}  # version -> members that hold it
        self._kept: dict[int, Tensor] = {}  # versions that are in no block any longer
        self.most_versions_kept = 0

    def _make_together(self, protocol: SyncProtocol) -> Together:
        if self._is_difference:
            raise ConfigError(
                f"--batched is for protocols that push gradients; under {protocol} each worker "
                "steps on parameters of its own: leave --batched out"
            )
        return Together(self._task, self.model)

    def _make_optimizer(self) -> Optimizer:
        return self._task.optimizer(self.model.parameters(), self._learning_rate)

    def _lay_out(self, optimizer: Optimizer) -> None:
        """The store with one seat, and the model on memory of its own."""
        self.replica = Replica(self.model, optimizer, self._rule)
        layout = self.replica.layout
        arena = PrivateMemory(arena_bytes(layout, 1))
        self.store = SharedStore(
            layout, arena.tensor(), Control(PrivateMemory(control_bytes(1)), 1), has_peers=False
        )
        parameters = self.replica.parameters
        self._updaters = [
            Updater(self._rule, parameters, layout, block) for block in self.store.blocks
        ]
        self.replica.write_to(self.store.blocks[self.store.current])
        self._updaters[self.store.current].write_state(self._rule, parameters)
        self._home = self.replica.live_alone()
        self._base = torch.empty_like(self._home)
        self._home_version = -1
        # Whether a step leaves the parameters that it was made from as they are.
        self._is_pure = not self._is_difference and not self.replica.buffers
        if not self._is_difference:
            self.replica.push_into(self.store.slot(SEAT), None)

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return self._leased.order.count()[0]

    @property
    def update_bytes(self) -> int:
        """Bytes of one push."""
        return self.replica.layout.parameters.num_bytes

    # -- what the run asks ----------------------------------------------------------------------

    def opened(self, epoch: int) -> Sequence[int] | None:
        return self._leased.order.draw(epoch)

    def granted(self, grant: Grant) -> None:
        version = grant.ticket.version
        assert version == self.store.version
        self._holders[version] = self._holders.get(version, 0) + 1
        if self._together is not None and len(grant.leases) == 1:
            self._waiting[grant.ticket] = grant.leases[0]

    def push(self, ticket: Ticket, leases: Sequence[Lease], at_s: float) -> Pushed:
        if ticket not in self._rows or self._limit:
            self._pull(ticket.version)
        if self._is_difference:
            loss = self._step_alone(ticket.member, leases)
        elif self._together is None:
            loss = self._compute(leases)
        else:
            loss = self._compute_together(ticket, leases, self._together)
        self.dropped(ticket)
        self._fault = OK
        if not self.store.is_finite(SEAT):
            if self._nonfinite_is_error:
                name = self.store.not_finite(SEAT)
                raise not_finite(ticket.member, name, ticket.serial, ticket.version, loss)
            self._fault = NOT_FINITE
        num_samples = sum(lease.num_samples for lease in leases)
        return Pushed(ticket, num_samples, loss, self._fault == OK, at_s)

    def carry_out(self, orders: Sequence[Order], fact: Fact) -> None:
        self._pushed = fact.ticket if isinstance(fact, Pushed) else None
        push = Push(self._fault, 0, 0.0) if isinstance(fact, Pushed) else None
        self._jobs.settle(orders, fact, push)

    def dropped(self, ticket: Ticket) -> None:
        version = ticket.version
        self._waiting.pop(ticket, None)
        self._rows.pop(ticket, None)
        self._holders[version] -= 1
        if not self._holders[version]:
            del self._holders[version]
            self._kept.pop(version, None)

    # -- gradients ------------------------------------------------------------------------------

    def _pull(self, version: int) -> None:
        """The model becomes ``version``."""
        if version == self._home_version and self._is_pure:
            return
        kept = self._kept.get(version)
        if kept is None:
            assert version == self.store.version
            kept = self._newest()
        self._home.copy_(kept)
        self._home_version = version

    def _newest(self) -> Tensor:
        return self.store.blocks[self.store.current][: self._home.numel()]

    def _compute(self, leases: Sequence[Lease]) -> float:
        """The gradient of a mini-batch into the slot; returns the loss."""
        loss = math.nan
        for parameter in self.replica.parameters:
            parameter.grad = None
        for lease in leases:
            inputs, targets = self._leased.fetch(lease)
            value = self._task.loss(self.model(inputs), targets)
            loss = float(value.detach())
            value.backward()  # type: ignore[no-untyped-call]
        self.replica.collect(self.store.present(SEAT))
        return loss

    def _compute_together(
        self, ticket: Ticket, leases: Sequence[Lease], together: Together
    ) -> float:
        """The same for all members at this version, unless it has been done for another's push."""
        if ticket not in self._rows:
            size = leases[0].num_samples
            others = [
                one
                for one, lease in self._waiting.items()
                if one.version == ticket.version and lease.num_samples == size and one != ticket
            ]
            chosen = [ticket, *others][: num_together(1 + len(others))]
            if len(chosen) == 1 or len(leases) > 1:
                return self._compute(leases)
            batch = self._leased.fetch_together([self._waiting.pop(one) for one in chosen])
            self._rows.update(zip(chosen, together.rows(*batch), strict=True))
        loss, gradients = self._rows[ticket]
        for parameter, gradient in zip(self.replica.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.replica.collect(self.store.present(SEAT))
        return loss

    def _step_alone(self, member: int, leases: Sequence[Lease]) -> float:
        """local-sgd: steps of one's own, then what they changed into the slot."""
        optimizer = self._own.get(member)
        if optimizer is None:
            optimizer = self._own[member] = self._make_optimizer()
        self._base.copy_(self._home)
        loss = math.nan
        for lease in leases:
            inputs, targets = self._leased.fetch(lease)
            optimizer.zero_grad()
            value = self._task.loss(self.model(inputs), targets)
            loss = float(value.detach())
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        slot, layout = self.store.slot(SEAT), self.replica.layout
        for dtype, start, stop in layout.parameters.runs():
            before, after, out = (
                block[start:stop].view(dtype) for block in (self._base, self._home, slot)
            )
            torch.sub(before, after, out=out)
        layout.buffers.of(slot).copy_(layout.buffers.of(self._home))
        present = self.store.present(SEAT)
        present[:] = b"\1" * len(present)
        return loss

    # -- updates --------------------------------------------------------------------------------

    def _do(self, member: int, message: Message) -> None:
        """A job, done at once."""
        kind, job = message[:2]
        if kind == "add":
            _, _, seat, weight, scale, is_first = message
            self.store.add(job, seat, weight, is_first, scale * self._allowed())
            return
        self._keep_what_is_held()
        if kind == "skip":
            self.store.skip(job)
        else:
            _, _, _, seat, scale, max_norm = message
            groups: Any = self._rule.param_groups
            scale *= self._allowed() if seat >= 0 else 1.0
            self.store.finish(
                job, self._updaters, groups, seat=seat, scale=scale, max_norm=max_norm
            )

    def _allowed(self) -> float:
        """What distance leaves of the push whose job is done now; the model holds its version."""
        if not self._limit:
            return 1.0
        moved = squared_distance(self.replica.layout, self._newest(), self._home)
        scale = allowed_scale(self._limit, moved, self._rule.param_groups)
        assert self._pushed is not None
        self.on_scaled(self._pushed, scale)
        return scale

    def _keep_what_is_held(self) -> None:
        """The newest version is about to be replaced."""
        version = self.store.version
        if version in self._holders:
            self._kept[version] = self._newest().clone()
            self.most_versions_kept = max(self.most_versions_kept, len(self._kept))

    # -- evaluation -----------------------------------------------------------------------------

    def evaluate(self) -> Totals:
        """Exact metrics of the test data at the newest version; empty where there is none."""
        totals: dict[str, tuple[float, float]] = {}
        test: Any = self.splits.test
        if test is None:
            return totals
        self.load_newest()
        collate: Callable[[Any], Any] = make_loader(test, _EVALUATION_BATCH).collate_fn
        was_training = self.model.training
        self.model.eval()
        with torch.no_grad():
            for start in range(0, len(test), _EVALUATION_BATCH):
                indices = list(range(start, min(start + _EVALUATION_BATCH, len(test))))
                inputs, targets = collate(fetch(test, indices))
                for name, (value, count) in self._task.metrics(self.model(inputs), targets).items():
                    before = totals.get(name, (0.0, 0.0))
                    totals[name] = (before[0] + value, before[1] + count)
        self.model.train(was_training)
        return totals

    def first_samples(self, count: int, *, of_test: bool = False) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the first ``count`` training samples, or test samples."""
        data: Any = self.splits.test if of_test else self.splits.train
        count = min(count, len(data))
        collate: Callable[[Any], Any] = make_loader(data, count).collate_fn
        inputs, targets = collate(fetch(data, list(range(count))))
        return inputs, targets

    def load_newest(self) -> None:
        """Let the model hold the newest version."""
        self._pull(self.store.version)
