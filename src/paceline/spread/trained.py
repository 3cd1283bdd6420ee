"""A model in parts whose loss is known: its micro-batches go back as soon as a schedule says so.

    loss = forward(model, batch)   -> meet -> there and back through all parts -> this worker's loss
    loss.backward()                   nothing is left to do

Each of a copy's workers has a mini-batch of its own, as in model.py; its targets go to the last
part, which computes the loss of each micro-batch. This module must not know the loop.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ConfigError
from ..partition.schedules import SCHEDULES
from ..splits.tracing import untouched
from ..system.reasons import reason
from .borders import shape_of
from .chunks import TensorShape, chunks_of
from .cut import ModelCut
from .group import SplitGroups
from .meeting import Intent, PartTask
from .model import ChunksOfOwn, PipelinedModel, only
from .modes import in_mode, modes_kept
from .scheduled import KnownLoss, KnownLosses, ScheduledRunner

_CLOSE = 1e-4


class BatchLoss(NamedTuple):
    """A loss that is a mean over rows, and what its targets are."""

    loss: KnownLoss
    target: TensorShape


def batch_loss(model: nn.Module, loss: KnownLoss, batch: Callable[[int], Any]) -> BatchLoss:
    """The loss of micro-batches, whose weighed sum is that of the mini-batch.

    Args:
        batch: so many samples, as the loader makes a batch of them.

    Raises:
        ConfigError: it is no such loss; why, without a subject.
    """
    few, more = batch(4), batch(5)
    if not all(_is_pair(one) for one in (few, more)):
        raise ConfigError("its batches are no pair of tensors with a row for each sample")
    inputs, targets = few
    if targets.shape[1:] != more[1].shape[1:]:
        raise ConfigError("its targets have rows of several sizes")
    try:
        whole, *parts = _losses(model, loss, inputs, targets)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ConfigError(f"its loss does not take single rows ({reason(error)})") from error
    if whole.ndim or not torch.allclose(
        whole, parts[0] / 4 + parts[1] * 3 / 4, rtol=_CLOSE, atol=_CLOSE
    ):
        raise ConfigError("its loss of a batch is not the mean over its rows")
    return BatchLoss(loss, shape_of(targets, more[1], (4, 5)))


def _losses(model: nn.Module, loss: KnownLoss, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    """Of all four rows, of the first one, of the other three."""
    with modes_kept(model), untouched(model), torch.no_grad():
        model.eval()
        return [
            loss(model(inputs[rows]), targets[rows])
            for rows in (slice(0, 4), slice(0, 1), slice(1, 4))
        ]


def _is_pair(batch: Any) -> bool:
    is_two = isinstance(batch, list | tuple) and len(batch) == 2
    return is_two and all(isinstance(one, Tensor) and one.ndim for one in batch)


class TrainedModel(PipelinedModel):
    """One worker's side of a model in parts whose loss is known.

    Args:
        known: the loss.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        cut: ModelCut,
        groups: SplitGroups,
        num_samples: Callable[[], int],
        known: BatchLoss,
    ) -> None:
        super().__init__(module, optimizers, cut, groups, num_samples)
        self._known = known

    def _make_runner(self) -> ScheduledRunner:
        self._scheduled = ScheduledRunner(self._modules(), self.groups.copy, self.cut.borders)
        return self._scheduled

    def train_on(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of this worker's mini-batch, whose gradients all parts have when it is there."""
        self._refuse_outside()
        rows, own = self._checked((inputs,))
        wanted = self._known.target
        is_alike = targets.dtype is wanted.dtype and targets.ndim == len(wanted.fixed)
        if len(targets) != rows or not is_alike:
            raise ConfigError(
                f"a split model was cut for targets of {wanted.dtype}, one for each of "
                f"{rows} samples, and is given {len(targets)} of {targets.dtype}"
            )
        shapes = (*self.cut.borders[0], self._known.target)
        every = self._meet(self._called(PartTask.TRAIN, rows, (inputs, targets), shapes))
        parts = torch.split(targets, self._sizes(rows))
        chunks = {number: [one] for number, one in enumerate(parts)}
        found = self._train(every, own, chunks)
        found = found.to(next(one.dtype for one in self.cut.borders[-1] if one.has_gradient))
        return _Done.apply(found, self._anchor)  # type: ignore[no-untyped-call,no-any-return]  # torch's has no types

    def _serve(self, doing: PartTask, every: Sequence[Intent]) -> None:
        if doing is PartTask.TRAIN:
            self._train(every, {}, {})
        else:
            super()._serve(doing, every)

    def _train(self, every: Sequence[Intent], own: ChunksOfOwn, targets: ChunksOfOwn) -> Tensor:
        """There and back; all workers of the copy do it."""
        every = only(PartTask.TRAIN, every)
        self._note_shares(every)
        assert self._shares is not None
        chunks = chunks_of([one.rows for one in every], self.cut.shares, in_turns=False)
        of_own = [one.rows / every[one.owner].rows for one in chunks]
        weights = [self._shares[one.owner] * of_own[at] for at, one in enumerate(chunks)]
        known = KnownLosses(*self._known, weights, of_own)
        size, each = self.groups.copy.size, len(self._modules())
        # A last batch may have another number of micro-batches than the schedule can take.
        is_odd = each > 1 and len(chunks) % size
        schedule = SCHEDULES["gpipe" if is_odd else self.cut.schedule]
        actions = schedule(size, len(chunks), each)
        with (
            in_mode(self._module, next(one.mode for one in every if one.doing)),
            torch.enable_grad(),
        ):
            loss = self._scheduled.train(chunks, own, targets, actions, known)
        return torch.tensor(loss, dtype=torch.float64)


class _Done(torch.autograd.Function):
    """A loss whose gradients are there already."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, anchor: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if float(gradients[0]) != 1.0:
            raise ConfigError(
                "a loss was changed before backward(), and where a model is split by a schedule "
                "its gradients are there by then; use --split network:gpipe"
            )
        return None, None
