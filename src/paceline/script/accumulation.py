"""An update of K batches, for a loop that steps on each: ``--accumulate K``.

    batch     1         2         3         4 = K      1 ...
    step()    set aside set aside set aside the mean   set aside
    .grad     g1        g2        g3        g4 -> (n1 g1 + n2 g2 + n3 g3 + n4 g4) / (n1 + ... + n4)

What a step sets aside is what it would have stepped on, so ``zero_grad()`` may stand before or
behind it. A batch weighs by its samples: an update is that of one batch with all of them, by one
worker and by many. Between workers a lease is as many samples as K mini-batches have, and is cut
here: an exchange knows nothing of it. Whatever loops so that this would not hold is refused by
name. This module must not know exchanges, leases beyond their positions, or who steps.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import ConfigError
from ..events import Lease
from ..store.joint import parameters_of


class MeanGradient(NamedTuple):
    """What an update's gradient weighs, and whether a scaler found inf in a part of it.

    Attributes:
        num_batches: of which there was one.
    """

    weight: float
    has_overflowed: bool
    num_batches: int


class _Held:
    """The gradients of one optimizer's steps since its last update, as a sum over batches."""

    def __init__(self) -> None:
        self.sums: dict[Tensor, Tensor] = {}
        self.num_batches = 0
        self.unit = self.total = 0.0  # what the first batch weighs, and all in that unit
        self.has_overflowed = False

    def add(self, weight: float) -> float:
        """One more batch; what it weighs against the first."""
        self.num_batches += 1
        self.unit = self.unit or weight
        self.total += (factor := weight / self.unit)
        return factor


class Accumulation:
    """The batches of one update in one member.

    Args:
        num_batches: K, >= 2.
        size: samples of a worker's mini-batch at most.
        is_shared: whether an update has batches of several workers, whose numbers in a loop are not
            those of the loader's batches.

    Attributes:
        is_last: whether the batch in the loop's hands is its update's last.
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
        self._parameters = [parameters_of(one) for one in optimizers]
        self._held = [_Held() for _ in optimizers]
        self._joined: dict[int, MeanGradient] = {}
        self._counts = [0 for _ in optimizers]
        """Batches in the update that each has made of these."""
        self._weight = 1.0
        self._versions: dict[Tensor, int] = {}
        self._has_gradient = self._has_stepped = False
        self.is_last = True
        self.is_held = False

    # -- batches --------------------------------------------------------------------------------

    def cut(self, lease: Lease) -> list[Lease]:
        """The lease in as many parts as mini-batches would have its samples; no empty ones."""
        num = min(self.num_batches, max(1, -(-lease.num_samples // self._size)))
        ends = [lease.start + lease.num_samples * part // num for part in range(num + 1)]
        return [Lease(lease.id, lease.epoch, start, stop) for start, stop in pairwise(ends)]

    def begin(self, num_samples: int, *, is_last: bool) -> None:
        """The next batch comes to the loop."""
        self._weight, self.is_last = float(num_samples), is_last
        self._has_gradient = self._has_stepped = False

    def end(self) -> None:
        """The loop asks for what comes after it.

        Raises:
            ConfigError: it left a gradient without a step, or its update without its last one.
        """
        said = f"accumulate {self.num_batches}"
        if self._has_gradient and not self._has_stepped:
            raise ConfigError(
                f"{said} makes an update of the steps on {self.num_batches} batches, and a batch "
                "had a backward() and no optimizer.step(): step on each batch, without a division "
                "of the loss or a condition around step(), or accumulate by hand, without the flag"
            )
        if self.is_last and self.is_pending:
            raise ConfigError(
                f"{said} makes an update when optimizer.step() is called for the last of its "
                "batches, and there it was not: let each optimizer step on each batch, and leave "
                "none out by continue, or accumulate by hand, without the flag"
            )
        if self.is_last:
            self._counts = [0 for _ in self._counts]

    @property
    def is_pending(self) -> bool:
        """Whether something is set aside."""
        return bool(self._joined) or any(one.total for one in self._held)

    def drop(self) -> None:
        """What was set aside does not count: its work was left, or is another's."""
        self._held = [_Held() for _ in self._held]
        self._joined.clear()
        self._counts = [0 for _ in self._counts]
        self._has_gradient = self.is_held = False
        self.is_last = True
        self._versions.clear()

    def weigh(self, weight: float) -> None:
        """What the batch in the loop's hands weighs."""
        if not weight > 0.0:
            raise ConfigError(
                f"step.weight must be > 0 with accumulate {self.num_batches}, got {weight}"
            )
        if self._has_stepped:
            raise ConfigError("step.weight was set after optimizer.step(); set it before")
        self._weight = weight

    # -- gradients ------------------------------------------------------------------------------

    def differentiated(self) -> None:
        """A backward pass is made: there is something to step on."""
        self._has_gradient = True

    def take_over(self) -> None:
        """What changed a gradient since was no part of the loop's own."""
        self._versions = {one: one.grad._version for one in self._all() if one.grad is not None}

    def check(self, part: int) -> None:
        """Before a step where nobody else looks.

        Raises:
            ConfigError: the loop has changed a gradient by itself, once a batch and not once an
                update.
        """
        for one in self._parameters[part]:
            if one.grad is not None and one.grad._version != self._versions.get(
                one, one.grad._version
            ):
                raise ConfigError(
                    "a gradient was changed between backward() and optimizer.step(), and with "
                    f"accumulate {self.num_batches} that would be done to each batch and not to "
                    "their mean: to clip the mean write pace.clip_grad_norm_(model.parameters(), "
                    "max_norm) or pace.clip_grad_value_(model.parameters(), clip_value)"
                )

    def hold(self, part: int, optimizer: Optimizer) -> None:
        """Set aside what this optimizer would step on; the update comes later."""
        held, scale = self._held[part], _scale_of(optimizer)
        held.has_overflowed |= bool(getattr(optimizer, "found_inf", None) or False)
        factor = held.add(self._weight) / scale
        for one in self._parameters[part]:
            if one.grad is None:
                continue
            if one in held.sums:
                held.sums[one].add_(one.grad.detach(), alpha=factor)
            else:
                mine = one.grad.detach().clone()
                held.sums[one] = mine if factor == 1.0 else mine.mul_(factor)
        self._has_stepped = self.is_held = True

    def join(self, part: int, optimizer: Optimizer) -> "MeanGradient":
        """Make ``.grad`` the mean over all batches, once; in the scale that it has now."""
        held, scale = self._held[part], _scale_of(optimizer)
        if not held.total:
            return MeanGradient(self._weight, has_overflowed=False, num_batches=1)
        factor = held.add(self._weight)
        with torch.no_grad():
            for one in self._parameters[part]:
                mine = held.sums.get(one)
                if mine is None and one.grad is None:
                    continue
                if one.grad is None:
                    one.grad = torch.zeros_like(one)
                elif factor != 1.0:
                    one.grad.mul_(factor)
                if mine is not None:
                    one.grad.add_(mine, alpha=scale)
                one.grad.div_(held.total)
        self._held[part] = _Held()
        self.take_over()
        weight = held.unit * held.total
        return MeanGradient(weight, held.has_overflowed, held.num_batches)

    def join_for(self, parameters: Iterable[Tensor], optimizers: Sequence[Optimizer]) -> bool:
        """The same now for what is about to be clipped; False: it is clipped with the last batch.

        What a scaler has scaled is unscaled by now.
        """
        if self.is_last:
            wanted = {id(one) for one in parameters}
            for part, mine in enumerate(self._parameters):
                if part not in self._joined and any(id(one) in wanted for one in mine):
                    self._joined[part] = self.join(part, optimizers[part])
        return self.is_last

    def joined(self, part: int, optimizer: Optimizer) -> "MeanGradient":
        """The optimizer steps with the last batch: what its ``.grad`` is by now.

        Raises:
            ConfigError: another one has stepped on more batches, or on fewer.
        """
        found = self._joined.pop(part, None)
        found = self.join(part, optimizer) if found is None else found
        if self._is_shared:
            self._refuse_uneven(part, found.num_batches)
        return found

    def _refuse_uneven(self, part: int, num: int) -> None:
        others = (one.num_batches + (one.num_batches > 0) for one in self._held)
        counts = [made or coming for made, coming in zip(self._counts, others, strict=True)]
        if odd := next((one for one in counts if one not in (0, num)), 0):
            raise ConfigError(
                f"accumulate {self.num_batches}: one optimizer stepped on {num} of the batches of "
                f"an update and another one on {odd}, and in each worker these are other samples "
                "than in one process; let each optimizer that steps do so on each batch, or "
                "accumulate by hand, without the flag"
            )
        self._counts[part] = num

    def stepped(self) -> None:
        """The update's own step is made."""
        self._has_stepped, self.is_held = True, False

    def _all(self) -> list[Tensor]:
        return [one for mine in self._parameters for one in mine]


def _scale_of(optimizer: Optimizer) -> float:
    """What a scaler has left its gradients multiplied with."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)


def samples_in(batch: Any) -> int:
    """Samples of a batch of any make: the length of its first tensor, or of itself."""
    if (found := next(_tensors(batch), None)) is not None:
        return len(found)
    return len(batch) if isinstance(batch, Sized) and not isinstance(batch, Tensor) else 1


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Those that have a length."""
    if isinstance(batch, Tensor):
        if batch.dim():
            yield batch
    elif isinstance(batch, Mapping | list | tuple):
        for one in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(one)
