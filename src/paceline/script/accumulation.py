"""An update of K batches, for a loop that steps on each: ``--accumulate K``.

    batch     1         2         3         4 = K      1 ...
    step()    set aside set aside set aside the mean   set aside
    .grad     g1        g2        g3        g4 -> (n1 g1 + n2 g2 + n3 g3 + n4 g4) / (n1 + ... + n4)

A step sets aside the gradient that it would have stepped on, so ``zero_grad()`` may come before or
after it. A batch weighs by its samples: an update equals that of one batch with all of them, for
one worker and for many. With several workers a lease has the samples of K mini-batches and is cut
here, unknown to the exchange. A loop for which this would not hold is refused by name.
This module must not know exchanges, leases beyond their positions, or who steps.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer

from ..errors import ConfigError
from ..events import Lease
from ..store.joint import parameters_of


class MeanGradient(NamedTuple):
    """The weight of an update's gradient, and whether a scaler found inf in a part of it.

    Attributes:
        num_batches: batches that it is the mean of.
    """

    weight: float
    has_overflowed: bool
    num_batches: int


class _Held:
    """The gradients of one optimizer's steps since its last update, as a sum over batches."""

    def __init__(self) -> None:
        self.sums: dict[Tensor, Tensor] = {}
        self.num_batches = 0
        self.unit = self.total = 0.0  # the first batch's weight, and all weights in that unit
        self.has_overflowed = False

    def add(self, weight: float) -> float:
        """Count one more batch; return its weight relative to the first."""
        self.num_batches += 1
        self.unit = self.unit or weight
        self.total += (factor := weight / self.unit)
        return factor


class Accumulation:
    """The batches of one update in one member.

    Args:
        num_batches: K, >= 2.
        size: maximum number of samples of a worker's mini-batch.
        is_shared: whether several workers contribute batches to an update, so that their numbers in
            a loop are not those of the loader's batches.

    Attributes:
        is_last: whether the current batch of the loop is the last of its update.
        is_held: whether the last ``optimizer.step()`` was set aside.
    """

    def __init__(
        self,
        num_batches: int,
        optimizers: Sequence[Optimizer],
        size: int,
        *,
        is_shared: bool = False,
    ) -> None:
        self.num_batches = num_batches
        self._size, self._is_shared = size, is_shared
        self._parameters = [parameters_of(optimizer) for optimizer in optimizers]
        self._held = [_Held() for _ in optimizers]
        self._joined: dict[int, MeanGradient] = {}
        self._counts = [0 for _ in optimizers]
        """Batches in the update that each optimizer has made in the current lease."""
        self._weight = 1.0
        self._versions: dict[Tensor, int] = {}
        self._has_gradient = self._has_stepped = False
        self.is_last = True
        self.is_held = False

    # -- batches --------------------------------------------------------------------------------

    def cut(self, lease: Lease) -> list[Lease]:
        """The lease, cut into as many parts as its samples need mini-batches; none is empty."""
        num = min(self.num_batches, max(1, -(-lease.num_samples // self._size)))
        ends = [lease.start + lease.num_samples * part // num for part in range(num + 1)]
        return [Lease(lease.id, lease.epoch, start, stop) for start, stop in pairwise(ends)]

    def begin(self, num_samples: int, *, is_last: bool) -> None:
        """Start on the next batch of the loop."""
        self._weight, self.is_last = float(num_samples), is_last
        self._has_gradient = self._has_stepped = False

    def end(self) -> None:
        """End the current batch: the loop asks for the next one.

        Raises:
            ConfigError: the loop left a gradient without a step, or an update without its last
                step.
        """
        setting = f"accumulate {self.num_batches}"
        if self._has_gradient and not self._has_stepped:
            raise ConfigError(
                f"{setting} makes an update of the steps on {self.num_batches} batches, but one "
                "had a backward() and no optimizer.step(): step on each batch, without dividing "
                "the loss or a condition around step(), or accumulate by hand, without the flag"
            )
        if self.is_last and self.is_pending:
            raise ConfigError(
                f"{setting} makes an update when optimizer.step() is called for the last of its "
                "batches, but it was not called: let each optimizer step on each batch, skip none "
                "with continue, or accumulate by hand, without the flag"
            )
        if self.is_last:
            self._counts = [0 for _ in self._counts]

    @property
    def is_pending(self) -> bool:
        """Whether something is set aside."""
        return bool(self._joined) or any(held.total for held in self._held)

    def drop(self) -> None:
        """Drop what was set aside: the loop was left, or the work is now another worker's."""
        self._held = [_Held() for _ in self._held]
        self._joined.clear()
        self._counts = [0 for _ in self._counts]
        self._has_gradient = self.is_held = False
        self.is_last = True
        self._versions.clear()

    def weigh(self, weight: float) -> None:
        """Set the weight of the current batch."""
        if not weight > 0.0:
            raise ConfigError(
                f"step.weight must be > 0 with accumulate {self.num_batches}, got {weight}"
            )
        if self._has_stepped:
            raise ConfigError("step.weight was set after optimizer.step(); set it before")
        self._weight = weight

    # -- gradients ------------------------------------------------------------------------------

    def differentiated(self) -> None:
        """Record a backward pass: there is a gradient to step on."""
        self._has_gradient = True

    def take_over(self) -> None:
        """Accept all changes to gradients so far: the loop did not make them."""
        self._versions = {
            parameter: parameter.grad._version
            for parameter in self._all()
            if parameter.grad is not None
        }

    def check(self, part: int) -> None:
        """Check the gradients before a step that nothing else checks.

        Raises:
            ConfigError: the loop itself has changed a gradient, once per batch and not once per
                update.
        """
        for parameter in self._parameters[part]:
            grad = parameter.grad
            if grad is not None and grad._version != self._versions.get(parameter, grad._version):
                raise ConfigError(
                    "a gradient was changed between backward() and optimizer.step(), and with "
                    f"accumulate {self.num_batches} that would change each batch's gradient, not "
                    "their mean: to clip the mean write pace.clip_grad_norm_(model.parameters(), "
                    "max_norm) or pace.clip_grad_value_(model.parameters(), clip_value)"
                )

    def hold(self, part: int, optimizer: Optimizer) -> None:
        """Set aside the gradients that this optimizer would step on; the update comes later."""
        held, scale = self._held[part], _scale_of(optimizer)
        held.has_overflowed |= bool(getattr(optimizer, "found_inf", None) or False)
        factor = held.add(self._weight) / scale
        for parameter in self._parameters[part]:
            if parameter.grad is None:
                continue
            if parameter in held.sums:
                held.sums[parameter].add_(parameter.grad.detach(), alpha=factor)
            else:
                grad = parameter.grad.detach().clone()
                held.sums[parameter] = grad if factor == 1.0 else grad.mul_(factor)
        self._has_stepped = self.is_held = True

    def join(self, part: int, optimizer: Optimizer) -> "MeanGradient":
        """Make ``.grad`` the mean over all batches, in its current scale; return its weight."""
        held, scale = self._held[part], _scale_of(optimizer)
        if not held.total:
            return MeanGradient(self._weight, has_overflowed=False, num_batches=1)
        factor = held.add(self._weight)
        with torch.no_grad():
            for parameter in self._parameters[part]:
                earlier = held.sums.get(parameter)
                if earlier is None and parameter.grad is None:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                elif factor != 1.0:
                    parameter.grad.mul_(factor)
                if earlier is not None:
                    parameter.grad.add_(earlier, alpha=scale)
                parameter.grad.div_(held.total)
        self._held[part] = _Held()
        self.take_over()
        weight = held.unit * held.total
        return MeanGradient(weight, held.has_overflowed, held.num_batches)

    def join_for(self, parameters: Iterable[Tensor], optimizers: Sequence[Optimizer]) -> bool:
        """Join gradients that are about to be clipped, which are unscaled by now.

        Returns:
            Whether this is the last batch; else the clip waits for it.
        """
        if self.is_last:
            clipped = {id(parameter) for parameter in parameters}
            for part, own in enumerate(self._parameters):
                if part not in self._joined and any(id(one) in clipped for one in own):
                    self._joined[part] = self.join(part, optimizers[part])
        return self.is_last

    def joined(self, part: int, optimizer: Optimizer) -> "MeanGradient":
        """The mean gradient of an optimizer that steps with the last batch.

        Raises:
            ConfigError: another optimizer has stepped on more batches, or on fewer.
        """
        mean = self._joined.pop(part, None)
        mean = self.join(part, optimizer) if mean is None else mean
        if self._is_shared:
            self._refuse_uneven(part, mean.num_batches)
        return mean

    def _refuse_uneven(self, part: int, num: int) -> None:
        waiting = (held.num_batches + (held.num_batches > 0) for held in self._held)
        counts = [made or coming for made, coming in zip(self._counts, waiting, strict=True)]
        if other := next((count for count in counts if count not in (0, num)), 0):
            raise ConfigError(
                f"accumulate {self.num_batches}: one optimizer stepped on {num} of the batches of "
                f"an update and another one on {other}, and each worker would use other samples "
                "than one process; let each optimizer that steps do so on each batch, or "
                "accumulate by hand, without the flag"
            )
        self._counts[part] = num

    def stepped(self) -> None:
        """Record that the update's own step was made."""
        self._has_stepped, self.is_held = True, False

    def _all(self) -> list[Tensor]:
        return [parameter for own in self._parameters for parameter in own]


def _scale_of(optimizer: Optimizer) -> float:
    """The factor by which a scaler has left the gradients multiplied."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)


def samples_in(batch: Any) -> int:
    """Samples of a batch of any type: the length of its first tensor, or its own length."""
    if (num_samples := next(_lengths(batch), None)) is not None:
        return num_samples
    return len(batch) if isinstance(batch, Sized) and not isinstance(batch, Tensor) else 1


def _lengths(batch: Any) -> Iterator[int]:
    """Samples of each tensor in the batch, but for scalars."""
    if isinstance(batch, Tensor):
        if batch.dim():
            yield len(batch)
    elif isinstance(batch, PackedSequence):  # its data has a row for each time step of each
        yield int(batch.batch_sizes[0])
    elif isinstance(batch, Mapping | list | tuple):
        for item in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _lengths(item)
