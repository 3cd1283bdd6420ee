"""Computes members' gradients in virtual time, at what the model holds, each into a seat.

    mini-batches -> one after another, or in one call (vmap) -> a seat of the store and a loss each

Gradients that are computed in a row are cheaper: the processor's caches are warm (softmax, 64
samples: 125 us each, 175 us after an update), and their samples are gathered at once. Each has the
operations that it would have alone and, if its model draws random numbers, the same random state,
so the order changes no bit.

    members at version v      leases of one size     one call               one row a member
    [ 3 ] [ 5 ] [ 6 ] ...  -> inputs (M, m, ...)  -> vmap(grad(loss))(v) -> gradient, loss

The one call is ``torch.func.vmap`` over the members' ``torch.func.grad``, traced once for each M
and m into a TorchScript: taking the model apart at each call costs more than small gradients do,
and so would Python between the operations (softmax, 8 x 64 samples: 665 us with it, 440 without).
M is a power of two, so that few traces are made. Sums are made in another order than for one
gradient at a time, so a gradient is the same within ``TOLERANCE`` of its largest entry; the first
of each trace is compared with one that is computed alone. Models that keep statistics of a batch,
or draw random numbers, which live runs seed for each mini-batch, are refused by the module's name.
This module must not know versions, members or time.
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
"""Allowed difference, relative to a gradient's largest entry; for float32 sums over a layer."""
MOST = 16
"""The most gradients in one go: more of them take memory and no less time each."""

Rows = tuple[Tensor, list[Tensor | None]]
"""Losses (M,), and gradients (M, ...) of each parameter; None if the loss does not depend on it."""
_WAITING_BYTES = 4 << 20
"""The most bytes of gradients computed ahead one at a time: large ones are not cheaper in a row."""


class Together:
    """Computes the gradients of one model for several mini-batches at once.

    Args:
        model: trained in place; its memory is read at each call.

    Raises:
        ConfigError: the model cannot be computed this way; the message names the module.
    """

    def __init__(self, task: Task, model: nn.Module) -> None:
        self._task = task
        self._model = model
        self._named = list(model.named_parameters())
        self._names = [name for name, parameter in self._named if parameter.requires_grad]
        self._is_used: dict[str, bool] = {}
        self._traced: dict[tuple[torch.Size, torch.Size], Callable[..., Any]] = {}
        if not self._names:
            raise self._refusal("it has no trained parameters")
        for name, module in model.named_modules():
            if why := _obstacle(module):
                raise self._refusal(f"module {name!r} ({type(module).__name__}) {why}")

    def rows(self, inputs: Tensor, targets: Tensor) -> Rows:
        """Return a loss and a gradient for each of M mini-batches.

        Args:
            inputs: (M, m, ...).
            targets: (M, m, ...).
        """
        trained = {
            name: parameter.detach() for name, parameter in self._named if parameter.requires_grad
        }
        shapes = inputs.shape, targets.shape
        compute = self._traced.get(shapes)
        is_new = compute is None
        if compute is None:
            compute = self._traced[shapes] = self._trace(trained, inputs, targets)
        with torch.no_grad():
            *gradient_rows, losses = compute(*trained.values(), inputs, targets)
        gradients = dict(zip(self._names, gradient_rows, strict=True))
        if is_new:
            self._compare(gradients, inputs[0], targets[0])
        return losses, [
            gradients[name] if self._is_used.get(name) else None for name, _ in self._named
        ]

    def _trace(
        self, trained: dict[str, Tensor], inputs: Tensor, targets: Tensor
    ) -> Callable[..., Any]:
        """Trace the call from trained parameters, inputs and targets to gradients and losses."""
        from torch.fx.experimental.proxy_tensor import make_fx  # here: it imports sympy

        frozen = {
            name: parameter.detach()
            for name, parameter in self._named
            if not parameter.requires_grad
        }

        def loss(trained: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
            return self._task.loss(
                functional_call(self._model, {**frozen, **trained}, (inputs,)), targets
            )

        together = vmap(grad_and_value(loss), in_dims=(None, 0, 0), randomness="error")
        try:
            traced: Callable[..., Any] = make_fx(together)(trained, inputs, targets)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            first = str(error).strip().partition("\n")[0]
            raise self._refusal(f"{type(error).__name__}: {first}") from None
        return _without_python(traced, self._names, (*trained.values(), inputs, targets))

    def _compare(self, gradients: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> None:
        """Compare the first gradient with one that is computed alone."""
        self._model.zero_grad()
        self._task.loss(self._model(inputs), targets).backward()
        for name, parameter in self._model.named_parameters():
            alone = parameter.grad
            self._is_used[name] = alone is not None
            if alone is None:
                continue
            difference = float((gradients[name][0] - alone).abs().max())
            largest = float(alone.abs().max())
            if difference > TOLERANCE * largest:
                raise self._refusal(
                    f"the gradient of {name!r} is off by {difference:.2g} of {largest:.2g}; "
                    f"at most {TOLERANCE:g} of it is allowed"
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
    """Turn a trace into a script from flat tensors to flat tensors, without Python in between."""

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        trained = dict(zip(names, tensors[:-2], strict=True))
        gradients, losses = traced(trained, *tensors[-2:])
        return (*(gradients[name] for name in names), losses)

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jit.trace is deprecated, but only it needs no compiler
        script: Callable[..., Any] = torch.jit.trace(flat, example, check_trace=False)
    return script


def num_together(num_waiting: int) -> int:
    """Return how many waiting gradients go together: the largest power of two up to ``MOST``."""
    return 1 << (min(num_waiting, MOST).bit_length() - 1)


def _obstacle(module: nn.Module) -> str:
    """Return why members cannot go through this module together; empty if they can."""
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
    """Return the number of seats: one for the current push, and those of gradients computed ahead.

    Args:
        slot_bytes: of one gradient.
        is_batched: whether gradients are computed in one call, which saves time for large ones,
            too.
    """
    num_ahead = num_workers if is_batched else min(num_workers, _WAITING_BYTES // slot_bytes)
    return 1 + num_ahead if num_ahead > 1 else 1


class Gradients:
    """Computes gradients of a task at what its model holds.

    Args:
        store: with ``num_seats`` seats, which the gradients are written to.
        together: computes a row in one call; if None, gradients are computed one after another.
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
        is_torch_loss = getattr(task.loss, "__module__", "") == "torch.nn.functional"
        self._is_seeded = not (is_torch_loss and draws_nothing(replica.model))
        self._places = replica.layout.parameters.places
        self._views: dict[int, list[Tensor]] = {}
        self._free = list(range(store.control.num_seats))

    def length(self, num_waiting: int) -> int:
        """The number of gradients in a row when ``num_waiting`` members wait for one.

        One seat stays free for a push that was not computed ahead.
        """
        count = max(1, min(num_waiting, MOST, len(self._free) - 1))
        return num_together(count) if self._together is not None else count

    def row(self, leases: Sequence[Lease]) -> list[Computed]:
        """Compute a gradient for each of at most ``length`` mini-batches, all of one size."""
        if self._together is not None and len(leases) > 1:
            return self._in_one_call(leases, self._together)
        batches = self._leased.each(leases, is_seeded=self._is_seeded)
        return [self._keep(self._add(batch)) for batch in batches]

    def sum(self, leases: Sequence[Lease]) -> Computed:
        """Compute one gradient over several mini-batches that a member accumulates."""
        loss = math.nan
        for batch in self._leased.each(leases, is_seeded=self._is_seeded):
            loss = self._add(batch)
        return self._keep(loss)

    def take(self) -> int:
        """Take a free seat for what is computed next."""
        return self._free.pop()

    def free(self, seat: int) -> None:
        """Free a seat whose content is in the sum, or will be in no update."""
        self._free.append(seat)

    def _add(self, batch: Any) -> float:
        inputs, targets = batch
        value = self._task.loss(self._replica.model(inputs), targets)
        value.backward()
        return float(value.detach())

    def _keep(self, loss: float) -> Computed:
        """Write the gradient that was just computed to a seat of its own."""
        seat = self.take()
        self._replica.turn_to(self._store.slot(seat), self._views_of(seat))
        self._replica.collect(self._store.present(seat))
        self._replica.drop_gradients()
        return Computed(seat, loss, self._store.is_finite(seat))

    def _in_one_call(self, leases: Sequence[Lease], together: Together) -> list[Computed]:
        losses, gradients = together.rows(*self._leased.fetch_together(leases))
        used = [(i, rows) for i, rows in enumerate(gradients) if rows is not None]
        seats = [self.take() for _ in leases]
        views = [self._views_of(seat) for seat in seats]
        targets = [row[i] for i, _ in used for row in views]
        torch._foreach_copy_(targets, [row for _, rows in used for row in rows])
        present = bytes(rows is not None for rows in gradients)
        for seat, row in zip(seats, views, strict=True):
            self._store.present(seat)[:] = present
            if self._replica.buffers:
                self._replica.turn_to(self._store.slot(seat), row)
                self._replica.send()
        # One pass over all of them: a sum is not finite if an entry is not.
        sums = torch.zeros(len(seats))
        for _, rows in used:
            sums = sums + rows.reshape(len(seats), rows[0].numel()).sum(1)
        return [
            Computed(seat, loss, cmath.isfinite(total) or self._store.is_finite(seat))
            for seat, loss, total in zip(seats, losses.tolist(), sums.tolist(), strict=True)
        ]

    def _views_of(self, seat: int) -> list[Tensor]:
        """Return a view of each parameter's gradient in a seat."""
        views = self._views.get(seat)
        if views is None:
            slot = self._store.slot(seat)
            views = self._views[seat] = [place.view(slot) for place in self._places]
        return views
