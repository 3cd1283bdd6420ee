"""Real gradients in virtual time: one process, one model, the store of a live run.

    granted   the member holds version v; nothing is copied as long as v is the newest
    push      parameters <- version v; its gradient, and those of others that hold v, each into a
              seat of the store (engines/gradients.py)
    orders    jobs of a live run (engines/jobs.py), done at once: add to the sum, finish the update
    update    if somebody still has to compute at the version that it replaces, that is kept aside

So each gradient is computed at exactly the parameters that its member holds, by the store, the
updater and the random state of a live run: the parameters are those of the inline engine under
the same order of arrivals, bit for bit (tests/equivalences/test_simulated_training.py). Where a
protocol calls work off, or a model keeps statistics, only who pushes is computed. Memory: the
newest version, the one before, the sum, a seat for each gradient that is computed and not applied
(of large models one), and one more for each older version that somebody still has to compute at
(``most_versions_kept``). With ``is_batched`` members at one version are computed in one call
(engines/batching.py), whatever the protocol. This module must not know protocols or time.
"""

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
from .batching import Together
from .gradients import Computed, Gradients, num_in_a_row, num_seats
from .jobs import Jobs
from .local_steps import LocalSteps

_EVALUATION_BATCH = 1000


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
        self._is_difference = protocol.update_rule == "mean"
        self._rule = optimizer
        if self._is_difference:
            trainable = [one for one in self.model.parameters() if one.requires_grad]
            self._rule = torch.optim.SGD(trainable, lr=1.0)
        self._nonfinite_is_error = nonfinite == "error"
        together = self._make_together(protocol) if is_batched else None
        self._lay_out(optimizer, protocol.num_workers, is_batched=is_batched)
        self._gradients = Gradients(task, self.replica, self._leased, self.store, together)
        self._local: LocalSteps | None = None
        if self._is_difference:
            self._local = LocalSteps(
                task, self.replica, self._home, self._leased, self._make_optimizer
            )
        self._is_batched = is_batched
        self._computes_ahead = is_batched or (self._is_pure and not protocol.cancels)
        self._seats = {0: 0}  # member -> seat of its newest push
        self._jobs = Jobs(
            self._do, self._seats, lambda: self.store.control[JOBS], batch_size,
            protocol.staleness,
        )  # fmt: skip
        self._limit = protocol.staleness.distance_limit
        self.on_scaled: Callable[[Ticket, float], None] = lambda ticket, scale: None
        """Hears what distance left of a push."""
        self._waiting: dict[int, dict[Ticket, Lease]] = {}  # by version: may be computed ahead
        self._rows: dict[Ticket, Computed] = {}  # computed, and not pushed yet
        self._seat, self._fault = 0, OK  # of the push that is settled now
        self._holders: dict[int, int] = {}  # version -> members that have it to compute at
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

    def _lay_out(self, optimizer: Optimizer, num_workers: int, *, is_batched: bool) -> None:
        """The store, and the model on memory of its own."""
        self.replica = Replica(self.model, optimizer, self._rule)
        layout = self.replica.layout
        seats = num_seats(layout.slot_bytes, num_workers, is_batched=is_batched)
        self.store = SharedStore(
            layout, PrivateMemory(arena_bytes(layout, seats)).tensor(),
            Control(PrivateMemory(control_bytes(seats)), seats), has_peers=False,
        )  # fmt: skip
        parameters = self.replica.parameters
        self._updaters = [
            Updater(self._rule, parameters, layout, block) for block in self.store.blocks
        ]
        self.replica.write_to(self.store.blocks[self.store.current])
        self._updaters[self.store.current].write_state(self._rule, parameters)
        self._home = self.replica.live_alone()
        self._home_version = -1
        # Whether a step leaves the parameters that it was made from as they are.
        self._is_pure = not self._is_difference and not self.replica.buffers

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
        if self._computes_ahead and len(grant.leases) == 1:
            self._waiting.setdefault(version, {})[grant.ticket] = grant.leases[0]

    def push(self, ticket: Ticket, leases: Sequence[Lease], at_s: float) -> Pushed:
        row = self._rows.pop(ticket, None)
        if row is None:
            row = self._compute(ticket, leases)
        elif self._limit:
            self._pull(ticket.version)  # how far it is from the newest will be asked
        if self._limit:
            self._release(ticket.version)
        seat, loss, is_finite = row
        self._seat = self._seats[ticket.member] = seat
        if not is_finite and self._nonfinite_is_error:
            name = self.store.not_finite(seat)
            raise not_finite(ticket.member, name, ticket.serial, ticket.version, loss)
        self._fault = OK if is_finite else NOT_FINITE
        num_samples = sum(lease.num_samples for lease in leases)
        return Pushed(ticket, num_samples, loss, is_finite, at_s)

    def carry_out(self, orders: Sequence[Order], fact: Fact) -> None:
        self._pushed = fact.ticket if isinstance(fact, Pushed) else None
        push = Push(self._fault, 0, 0.0) if isinstance(fact, Pushed) else None
        self._jobs.settle(orders, fact, push)
        if push is not None:
            self._gradients.free(self._seat)

    def dropped(self, ticket: Ticket) -> None:
        if (waiting := self._waiting.get(ticket.version)) is not None:
            waiting.pop(ticket, None)
        row = self._rows.pop(ticket, None)
        if row is not None:
            self._gradients.free(row.seat)
        if row is None or self._limit:
            self._release(ticket.version)

    # -- gradients ------------------------------------------------------------------------------

    def _compute(self, ticket: Ticket, leases: Sequence[Lease]) -> Computed:
        """What this member pushes; those that wait at its version are computed besides."""
        version = ticket.version
        self._pull(version)
        if self._local is not None:
            seat = self._gradients.take_seat()
            loss = self._local.take(ticket.member, leases, self.store, seat)
            found = [Computed(seat, loss, self.store.is_finite(seat))]
            chosen = [ticket]
        elif len(leases) > 1:
            chosen, found = [ticket], [self._gradients.sum(leases)]
        else:
            chosen = self._row_of(ticket, leases[0])
            waiting = self._waiting.get(version, {})
            row = [leases[0], *(waiting.pop(one) for one in chosen[1:])]
            found = self._gradients.row(row)
        if not self._limit:
            for _ in chosen:
                self._release(version)
        self._rows.update(zip(chosen[1:], found[1:], strict=True))
        return found[0]

    def _row_of(self, ticket: Ticket, lease: Lease) -> list[Ticket]:
        """Who is computed together with this member: those that hold its version, or some."""
        waiting = self._waiting.get(ticket.version)
        if not waiting:
            return [ticket]
        waiting.pop(ticket, None)
        size = lease.num_samples
        alike = [one for one, its in waiting.items() if its.num_samples == size]
        count = num_in_a_row(1 + len(alike), self._gradients.room, is_batched=self._is_batched)
        return [ticket, *alike[: count - 1]]

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

    def _release(self, version: int) -> None:
        """One member less needs it."""
        self._holders[version] -= 1
        if not self._holders[version]:
            del self._holders[version]
            self._kept.pop(version, None)
            self._waiting.pop(version, None)

    def _newest(self) -> Tensor:
        return self.store.blocks[self.store.current][: self._home.numel()]

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
