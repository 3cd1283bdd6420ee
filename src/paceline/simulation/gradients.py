"""What members compute in virtual time: gradients at what the model holds, each into a seat.

    mini-batches -> one after the other, or in one call (vmap) -> a seat of the store, a loss each

Gradients that are computed in a row are cheaper: what they need of the processor is warm then
(softmax, 64 samples: 125 us each, 175 after an update), and their samples are gathered at once.
Each has the operations and, unless its model draws no random numbers, the random state that it
would have alone, so the order changes no bit.

    members at version v      leases of one size     one call               one row a member
    [ 3 ] [ 5 ] [ 6 ] ...  -> inputs (M, m, ...)  -> vmap(grad(loss))(v) -> gradient, loss

In one call it is ``torch.func.vmap`` over the members of ``torch.func.grad``, traced once for each
M and m into a TorchScript: taking the model apart at each call costs more than small gradients do,
and so would Python between the operations (softmax, 8 x 64 samples: 665 us with it, 440 without).
M is a power of two, so few traces are made. Sums are done in another order than one at a time, so a
gradient is the same within ``TOLERANCE`` of its largest entry; the first of each trace is held
against one that is computed alone. What a model must not do is told by name: keep statistics of a
batch, or draw random numbers, which live runs seed for each mini-batch. This module must not know
versions, members or time.
"""

import cmath
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from ..data.loader import LeasedLoader
from ..errors import ConfigError
from ..events import Lease
from ..replica.replica import Replica
from ..replica.seeding import draws_nothing
from ..store.parameter_store import SharedStore
from ..workloads.base import Task

TOLERANCE = 1e-5
"""Of the largest entry of a gradient; float32, and what the sums of a layer come to."""
MOST = 16
"""Gradients in one go: more take memory and no less time each."""

Rows = tuple[Tensor, list[Tensor | None]]
"""Losses (M,), and (M, ...) for each parameter; None where the loss does not depend on it."""
_WAITING_BYTES = 4 << 20
"""Of gradients that are computed ahead, one at a time: large ones are not cheaper in a row."""


class Together:
    """The gradients of one model for several mini-batches at once.

    Args:
        model: trained in place; its memory is read at each call.

    Raises:
        ConfigError: the model cannot be computed so; names the module.
    """

    def __init__(self, task: Task, model: nn.Module) -> None:
        self._task = task
        self._model = model
        self._named = list(model.named_parameters())
        self._names = [name for name, one in self._named if one.requires_grad]
        self._is_used: dict[str, bool] = {}
        self._traced: dict[tuple[torch.Size, torch.Size], Callable[..., Any]] = {}
        if not self._names:
            raise self._refusal("nothing of it is trained")
        for name, module in model.named_modules():
            if why := _obstacle(module):
                raise self._refusal(f"module {name!r} ({type(module).__name__}) {why}")

    def rows(self, inputs: Tensor, targets: Tensor) -> Rows:
        """A loss and a gradient for each mini-batch.

        Args:
            inputs: (M, m, ...).
            targets: (M, m, ...).
        """
        trained = {name: one.detach() for name, one in self._named if one.requires_grad}
        key = inputs.shape, targets.shape
        compute = self._traced.get(key)
        is_new = compute is None
        if compute is None:
            compute = self._traced[key] = self._trace(trained, inputs, targets)
        with torch.no_grad():
            *found, losses = compute(*trained.values(), inputs, targets)
        gradients = dict(zip(self._names, found, strict=True))
        if is_new:
            self._compare(gradients, inputs[0], targets[0])
        return losses, [
            gradients[name] if self._is_used.get(name) else None for name, _ in self._named
        ]

    def _trace(
        self, trained: dict[str, Tensor], inputs: Tensor, targets: Tensor
    ) -> Callable[..., Any]:
        """Takes what is trained, inputs and targets; returns a gradient of each, and the losses."""
        from torch.fx.experimental.proxy_tensor import make_fx  # here: it imports sympy

        frozen = {name: one.detach() for name, one in self._named if not one.requires_grad}

        def loss(trained: dict[str, Tensor], one: Tensor, its: Tensor) -> Tensor:
            return self._task.loss(functional_call(self._model, {**frozen, **trained}, (one,)), its)

        together = vmap(grad_and_value(loss), in_dims=(None, 0, 0), randomness="error")
        try:
            traced: Callable[..., Any] = make_fx(together)(trained, inputs, targets)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            first = str(error).strip().partition("\n")[0]
            raise self._refusal(f"{type(error).__name__}: {first}") from None
        return _without_python(traced, self._names, (*trained.values(), inputs, targets))

    def _compare(self, gradients: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> None:
        """Hold the first gradient against one that is computed alone."""
        self._model.zero_grad()
        self._task.loss(self._model(inputs), targets).backward()
        for name, parameter in self._model.named_parameters():
            alone = parameter.grad
            self._is_used[name] = alone is not None
            if alone is None:
                continue
            off = float((gradients[name][0] - alone).abs().max())
            size = float(alone.abs().max())
            if off > TOLERANCE * size:
                raise self._refusal(
                    f"the gradient of {name!r} is off by {off:.2g} of {size:.2g}; wanted is "
                    f"{TOLERANCE:g} of it"
                )
        self._model.zero_grad()

    def _refusal(self, why: str) -> ConfigError:
        return ConfigError(
            f"--batched cannot compute {self._task.name}: {why}; leave --batched out, then "
            "gradients are computed one at a time"
        )


def _without_python(
    traced: Callable[..., Any], names: list[str], example: tuple[Tensor, ...]
) -> Callable[..., Any]:
    """The same operations, from flat tensors to flat tensors, with no Python between them."""

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        trained = dict(zip(names, tensors[:-2], strict=True))
        gradients, losses = traced(trained, *tensors[-2:])
        return (*(gradients[name] for name in names), losses)

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is deprecated: nothing else has no compiler
        script: Callable[..., Any] = torch.jit.trace(flat, example, check_trace=False)
    return script


def num_together(num_waiting: int) -> int:
    """How many of them go together: the largest power of two, at most ``MOST``."""
    return 1 << (min(num_waiting, MOST).bit_length() - 1)


def _obstacle(module: nn.Module) -> str:
    """Why members cannot go through this module together; empty where they can."""
    if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
        return "keeps running statistics, which each member changes in turn"
    if isinstance(module, nn.modules.dropout._DropoutNd | nn.RReLU) and getattr(module, "p", True):
        return "draws random numbers, which are seeded for each mini-batch"
    return ""


class Computed(NamedTuple):
    """A gradient that waits to be pushed."""

    seat: int
    loss: float
    is_finite: bool


def num_seats(slot_bytes: int, num_workers: int, *, is_batched: bool) -> int:
    """Seats where gradients are computed ahead of their push; one is for who pushes now.

    Args:
        is_batched: in one call; that saves time of large ones, too.
    """
    num_ahead = num_workers if is_batched else min(num_workers, _WAITING_BYTES // slot_bytes)
    return 1 + num_ahead if num_ahead > 1 else 1


class Gradients:
    """Gradients of a task at what its model holds.

    Args:
        store: with ``num_seats`` seats; the gradients go there.
        together: computes a row in one call; None: one gradient after the other.
    """

    def __init__(
        self,
        task: Task,
        replica: Replica,
        leased: LeasedLoader,
        store: SharedStore,
        together: Together | None,
    ) -> None:
        self._task = task
        self._replica = replica
        self._leased = leased
        self._store = store
        self._together = together
        is_torchs = getattr(task.loss, "__module__", "") == "torch.nn.functional"
        self._is_seeded = not (is_torchs and draws_nothing(replica.model))
        self._places = replica.layout.parameters.places
        self._views: dict[int, list[Tensor]] = {}
        self._free = list(range(store.control.num_seats))

    def length(self, num_waiting: int) -> int:
        """Of a row for so many: one seat stays free, for a push that was not computed ahead."""
        count = max(1, min(num_waiting, MOST, len(self._free) - 1))
        return num_together(count) if self._together is not None else count

    def row(self, leases: Sequence[Lease]) -> list[Computed]:
        """One gradient for each mini-batch; all are of one size, and at most ``length``."""
        if self._together is not None and len(leases) > 1:
            return self._in_one_call(leases, self._together)
        batches = self._leased.each(leases, is_seeded=self._is_seeded)
        return [self._keep(self._add(batch)) for batch in batches]

    def sum(self, leases: Sequence[Lease]) -> Computed:
        """One gradient, of several mini-batches that a member accumulates."""
        loss = math.nan
        for batch in self._leased.each(leases, is_seeded=self._is_seeded):
            loss = self._add(batch)
        return self._keep(loss)

    def take(self) -> int:
        """A seat for what is computed next."""
        return self._free.pop()

    def free(self, seat: int) -> None:
        """What lies there is in the sum, or will be in no update."""
        self._free.append(seat)

    def _add(self, batch: Any) -> float:
        inputs, targets = batch
        value = self._task.loss(self._replica.model(inputs), targets)
        value.backward()
        return float(value.detach())

    def _keep(self, loss: float) -> Computed:
        """What was computed goes to a seat of its own."""
        seat = self.take()
        self._replica.turn_to(self._store.slot(seat), self._views_of(seat))
        self._replica.collect(self._store.present(seat))
        self._replica.drop_gradients()
        return Computed(seat, loss, self._store.is_finite(seat))

    def _in_one_call(self, leases: Sequence[Lease], together: Together) -> list[Computed]:
        losses, gradients = together.rows(*self._leased.fetch_together(leases))
        used = [(i, one) for i, one in enumerate(gradients) if one is not None]
        seats = [self.take() for _ in leases]
        views = [self._views_of(seat) for seat in seats]
        into = [row[i] for i, _ in used for row in views]
        torch._foreach_copy_(into, [row for _, one in used for row in one])
        present = bytes(one is not None for one in gradients)
        for seat, row in zip(seats, views, strict=True):
            self._store.present(seat)[:] = present
            if self._replica.buffers:
                self._replica.turn_to(self._store.slot(seat), row)
                self._replica.send()
        # One pass over all of them: a sum is not finite where an entry is not.
        sums = torch.zeros(len(seats))
        for _, one in used:
            sums = sums + one.reshape(len(seats), one[0].numel()).sum(1)
        return [
            Computed(seat, loss, cmath.isfinite(total) or self._store.is_finite(seat))
            for seat, loss, total in zip(seats, losses.tolist(), sums.tolist(), strict=True)
        ]

    def _views_of(self, seat: int) -> list[Tensor]:
        """Where each gradient lies in a seat."""
        views = self._views.get(seat)
        if views is None:
            slot = self._store.slot(seat)
            views = self._views[seat] = [place.view(slot) for place in self._places]
        return views
