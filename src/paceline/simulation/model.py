"""The one model of a run in virtual time: the versions it can hold, and the work done on them.

    newest version -> in the store's block     older ones -> kept as long as a member needs them
    local-sgd      -> the version's parameters -> H steps by the member's own optimizer -> their
                      difference; each optimizer keeps its state until the next push, as it would
                      alone, and so do parameters that this update does not exchange (fragments)
    evaluation     -> exact metrics, batch by batch

This module must not know how gradients are pushed, or time.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..data.feed import fetch
from ..data.loader import LeasedLoader
from ..events import Lease, Ticket
from ..replica.replica import Replica
from ..store.fragments import Fragment, Fragments
from ..store.means import difference_into, merge_into
from ..store.parameter_store import SharedStore
from ..trainer import make_loader
from ..wire.messages import Totals
from ..workloads.base import Task

_BATCH = 1000
"""Samples of a batch in evaluations."""


class Versions:
    """The versions that members still have to compute at.

    Args:
        home: the model's memory.
        is_pure: whether computing leaves the model's memory unchanged.

    Attributes:
        most_kept: the most versions besides the newest that were kept at any time.
    """

    def __init__(self, store: SharedStore, home: Tensor, *, is_pure: bool) -> None:
        self._store = store
        self._home = home
        self._is_pure = is_pure
        self._home_version = -1
        self._holders: dict[int, int] = {}
        self._kept: dict[int, Tensor] = {}
        self.most_kept = 0

    @property
    def newest(self) -> Tensor:
        """The parameters and buffers of the newest version, in the store."""
        return self._store.blocks[self._store.current][: self._home.numel()]

    @property
    def num_held(self) -> int:
        """The number of versions that members need; none at the end, as tests see."""
        return len(self._holders)

    def hold(self, version: int) -> None:
        """Note that one more member needs a version, which is the newest."""
        assert version == self._store.version
        self._holders[version] = self._holders.get(version, 0) + 1

    def release(self, version: int) -> None:
        """Note that one member less needs a version."""
        self._holders[version] -= 1
        if not self._holders[version]:
            del self._holders[version]
            self._kept.pop(version, None)

    def pull(self, version: int) -> None:
        """Load a version into the model: the newest, or one that is held."""
        if version == self._home_version and self._is_pure:
            return
        kept = self._kept.get(version)
        if kept is None:
            assert version == self._store.version
            kept = self.newest
        self._home.copy_(kept)
        self._home_version = version

    def keep(self) -> None:
        """Copy the newest version aside if members need it, before it is replaced."""
        version = self._store.version
        if version in self._holders:
            self._kept[version] = self.newest.clone()
            self.most_kept = max(self.most_kept, len(self._kept))


class _Held(NamedTuple):
    """A member's parameters at the moment when it had pushed the fragment ``due`` of them."""

    version: int
    due: Fragment
    parameters: Tensor


class LocalSteps:
    """The steps that each member takes by itself.

    It has many arguments, since it is all of a member except its decisions.

    Args:
        home: the model's memory.
        make_optimizer: makes an optimizer for the model; called once for each member.
        fragments: of the parameters; each update exchanges one of them.
        overlap_steps: the steps after which the result of an update is merged; 0: at once.
        skips: whether steps whose gradients are not finite are left out.
    """

    def __init__(
        self,
        task: Task,
        replica: Replica,
        home: Tensor,
        leased: LeasedLoader,
        store: SharedStore,
        make_optimizer: Callable[[], Optimizer],
        fragments: Fragments,
        overlap_steps: int = 0,
        *,
        skips: bool = False,
    ) -> None:
        self._fragments, self._overlap_steps, self._skips = fragments, overlap_steps, skips
        self._held: dict[int, _Held] = {}
        self._task = task
        self._replica = replica
        self._home = home
        self._leased = leased
        self._store = store
        self._make_optimizer = make_optimizer
        self._optimizers: dict[int, Optimizer] = {}
        self._base = torch.empty_like(home)

    def begin(self) -> None:
        """Let all members start from the newest version, with no parameters of their own."""
        self._held.clear()

    def _bring(self, member: int, version: int) -> Fragment | None:
        """Load the parameters that a member has not exchanged into the model, which is ``version``.

        Returns:
            The fragment that was exchanged and is to be merged later; None if there is none.
        """
        held = self._held.get(member)
        if held is None or held.due is self._fragments.whole:
            return None
        late_fragment = held.due if self._overlap_steps and version > held.version else None
        exchanged = (held.due, *self._fragments.between(held.version + 1, version))
        for fragment in self._fragments.each:
            if fragment not in exchanged or fragment is late_fragment:
                self._home[fragment.start : fragment.stop].copy_(
                    held.parameters[fragment.start : fragment.stop]
                )
        return late_fragment

    def _merge(self, late_fragment: Fragment | None) -> None:
        if late_fragment is not None:
            parameters = self._replica.layout.parameters
            merge_into(late_fragment.runs(parameters), self._base, self._home)

    def take(
        self, ticket: Ticket, leases: Sequence[Lease], seat: int, *, is_last: bool = False
    ) -> float:
        """Take a step for each mini-batch, write the difference to a seat, return the last loss.

        Args:
            is_last: whether the update is the last of its epoch, so that it exchanges all
                fragments.
        """
        member, version = ticket.member, ticket.version
        optimizer = self._optimizers.get(member)
        if optimizer is None:
            optimizer = self._optimizers[member] = self._make_optimizer()
        self._base.copy_(self._home)
        late_fragment = self._bring(member, version)
        due = self._fragments.of(version, is_last=is_last)
        loss = math.nan
        for step, (inputs, targets) in enumerate(self._leased.each(leases), start=1):
            optimizer.zero_grad()
            value = self._task.loss(self._replica.model(inputs), targets)
            loss = float(value.detach())
            value.backward()
            if not self._skips or self._is_finite():
                optimizer.step()
            if step == self._overlap_steps or step == len(leases):
                self._merge(late_fragment)
                late_fragment = None
        slot, layout = self._store.slot(seat), self._replica.layout
        difference_into(due.runs(layout.parameters), self._base, self._home, slot)
        layout.buffers.of(slot).copy_(layout.buffers.of(self._home))
        self._store.present(seat)[:] = due.present
        if len(self._fragments.each) > 1 or self._overlap_steps:
            size = layout.parameters.stop
            self._held[member] = _Held(version, due, self._home[:size].clone())
        return loss

    def _is_finite(self) -> bool:
        gradients = [
            parameter.grad for parameter in self._replica.parameters if parameter.grad is not None
        ]
        return all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


def examine(task: Task, model: nn.Module, data: Any) -> Totals:
    """Return the sums of the task's metrics over all of the data; empty if there is no data.

    Args:
        data: a map-style dataset, or None.
    """
    totals: Totals = {}
    if data is None:
        return totals
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for inputs, targets in _batches(data):
            for name, (value, count) in task.metrics(model(inputs), targets).items():
                previous = totals.get(name, (0.0, 0.0))
                totals[name] = (previous[0] + value, previous[1] + count)
    model.train(was_training)
    return totals


def first_samples(data: Any, count: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of the first ``count`` samples of map-style data, or of all."""
    return next(_batches(data, count))


def _batches(data: Any, size: int = _BATCH) -> Iterator[tuple[Tensor, Tensor]]:
    collate: Callable[[Any], Any] = make_loader(data, size).collate_fn
    for start in range(0, len(data), size):
        inputs, targets = collate(fetch(data, list(range(start, min(start + size, len(data))))))
        yield inputs, targets
