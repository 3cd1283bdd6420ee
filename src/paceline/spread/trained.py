"""Train a model in parts whose loss is known: forward and backward passes follow a schedule.

    loss = forward(model, batch)   -> meet -> forward and back through all parts -> own loss
    loss.backward()                   nothing is left to do

Each worker of a copy has its own mini-batch, as in model.py; its targets go to the last part, which
computes the loss of each micro-batch. This module must not know the loop.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
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
_TRIED, _CUTS = 16, (1, 5, 8)
"""Rows on which a loss is tried, and after which of them they are cut in two."""
_SEED = 0


class BatchLoss(NamedTuple):
    """A loss that is a mean over rows.

    Attributes:
        target: type and shape of its targets.
        outputs: which of the model's outputs it depends on, one bit each.
    """

    loss: KnownLoss
    target: TensorShape
    outputs: int


def batch_loss(model: nn.Module, loss: KnownLoss, batch: Callable[[int], Any]) -> BatchLoss:
    """Check that a loss is a mean over rows, so that it can be computed for each micro-batch.

    Args:
        batch: returns a number of samples, from all over the data, as the loader collates them.

    Raises:
        ConfigError: it is not; the message is a reason that begins with "its".
    """
    few, more = batch(_TRIED), batch(_TRIED + 1)
    if not all(_is_pair(pair) for pair in (few, more)):
        raise ConfigError("its batches are not a pair of tensors with a row for each sample")
    inputs, targets = few
    if targets.shape[1:] != more[1].shape[1:]:
        raise ConfigError("its targets have rows of several sizes")
    try:
        with modes_kept(model), untouched(model), torch.no_grad():
            outputs = model.eval()(inputs)
            is_mean = all(
                _is_mean(loss, *rows, first)
                for rows in _tried(loss, outputs, targets)
                for first in _CUTS
            )
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ConfigError(f"its loss does not take single rows ({reason(error)})") from error
    if not is_mean:
        raise ConfigError("its loss of a batch is not the mean over its rows")
    with modes_kept(model), untouched(model):
        used = _outputs_of(model.eval(), loss, inputs, targets)
    return BatchLoss(loss, shape_of(targets, more[1], (_TRIED, _TRIED + 1)), used)


def _tried(loss: KnownLoss, outputs: Any, targets: Tensor) -> Iterator[tuple[Any, Tensor]]:
    """Yield outputs and targets: the model's own, and others where the loss takes them.

    A model whose last layer begins with zeros has equal outputs for all rows, and few rows may be
    of one class.
    """
    yield outputs, targets
    yield outputs, targets.flip(0)
    others = _drawn(outputs)
    for rows in (targets, *_all_classes(outputs, targets)):
        with suppress(RuntimeError, ValueError, TypeError, IndexError):
            if loss(others, rows).isfinite():
                yield others, rows


def _drawn(outputs: Any) -> Any:
    """Return outputs of the same form in [0, 1), which are probabilities or scores alike."""
    rng = torch.Generator().manual_seed(_SEED)

    def drawn(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return torch.rand(tensor.shape, generator=rng, dtype=tensor.dtype)

    return torch.utils._pytree.tree_map_only(Tensor, drawn, outputs)


def _all_classes(outputs: Any, targets: Tensor) -> Iterator[Tensor]:
    """Yield targets of all classes in turn, if they are numbers of classes."""
    scores = next(iter(torch.utils._pytree.tree_leaves(outputs)), None)
    if not targets.is_floating_point() and isinstance(scores, Tensor) and scores.ndim > 1:
        turns = torch.arange(targets.numel()).reshape(targets.shape) % scores.shape[1]
        yield turns.to(targets.dtype)


def _is_mean(loss: KnownLoss, outputs: Any, targets: Tensor, first: int) -> bool:
    """Whether the loss of all rows is the mean of that of the first ones and of the others."""
    cuts = (slice(0, _TRIED), slice(0, first), slice(first, _TRIED))

    def of(rows: slice) -> Tensor:
        some = torch.utils._pytree.tree_map_only(Tensor, lambda y: y[rows].clone(), outputs)
        return loss(some, targets[rows])

    whole, *parts = map(of, cuts)
    share = first / _TRIED
    mean = share * parts[0] + (1 - share) * parts[1]
    return not whole.ndim and torch.allclose(whole, mean, rtol=_CLOSE, atol=_CLOSE)


def _outputs_of(model: nn.Module, loss: KnownLoss, inputs: Tensor, targets: Tensor) -> int:
    """Return which outputs the loss depends on, one bit each."""
    with torch.no_grad():
        leaves, form = torch.utils._pytree.tree_flatten(model(inputs))
    outputs = [leaf.clone() for leaf in leaves]
    floats = [y.requires_grad_() for y in outputs if y.is_floating_point() or y.is_complex()]
    with torch.enable_grad():
        value = loss(torch.utils._pytree.tree_unflatten(outputs, form), targets)
        if not value.requires_grad:
            return 0
        gradients = torch.autograd.grad(value, floats, allow_unused=True)
    used = {id(y) for y, gradient in zip(floats, gradients, strict=True) if gradient is not None}
    return sum(1 << number for number, y in enumerate(outputs) if id(y) in used)


def _is_pair(batch: Any) -> bool:
    is_two = isinstance(batch, list | tuple) and len(batch) == 2
    return is_two and all(isinstance(tensor, Tensor) and tensor.ndim for tensor in batch)


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
        self._scheduled = ScheduledRunner(
            self._modules(), self.groups.copy, self.cut.borders, self.norms
        )
        return self._scheduled

    def train_on(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of this worker's mini-batch; all parts have its gradients by then."""
        self._refuse_outside()
        rows, own_inputs = self._checked((inputs,))
        wanted = self._known.target
        is_alike = targets.dtype is wanted.dtype and targets.ndim == len(wanted.fixed)
        if len(targets) != rows or not is_alike:
            raise ConfigError(
                f"a split model was cut for targets of {wanted.dtype}, one for each of "
                f"{rows} samples, but got {len(targets)} of {targets.dtype}"
            )
        shapes = (*self.cut.borders[0], self._known.target)
        intents = self._meet(self._called(PartTask.TRAIN, rows, (inputs, targets), shapes))
        parts = torch.split(targets, self._sizes(rows))
        own_targets = {number: [part] for number, part in enumerate(parts)}
        loss = self._train(intents, own_inputs, own_targets)
        loss = loss.to(next(shape.dtype for shape in self.cut.borders[-1] if shape.has_gradient))
        return _Done.apply(loss, self._anchor)  # type: ignore[no-untyped-call,no-any-return]  # torch's has no types

    def _serve(self, doing: PartTask, intents: Sequence[Intent]) -> None:
        if doing is PartTask.TRAIN:
            self._train(intents, {}, {})
        else:
            super()._serve(doing, intents)

    def _train(
        self, intents: Sequence[Intent], own_inputs: ChunksOfOwn, own_targets: ChunksOfOwn
    ) -> Tensor:
        """Run all workers' mini-batches forward and backward; return this worker's loss."""
        self._note_shares(intents)
        assert self._shares is not None
        intents = only(PartTask.TRAIN, intents)
        chunks = chunks_of([intent.rows for intent in intents], self.cut.shares, in_turns=False)
        of_own = [chunk.rows / intents[chunk.owner].rows for chunk in chunks]
        weights = [self._shares[chunk.owner] * of_own[at] for at, chunk in enumerate(chunks)]
        known = KnownLosses(self._known.loss, self._known.target, weights, of_own)
        size, each = self.groups.copy.size, len(self._modules())
        # A last batch may have another number of micro-batches than the schedule can take.
        is_odd = each > 1 and len(chunks) % size
        schedule = SCHEDULES["gpipe" if is_odd else self.cut.schedule]
        actions = schedule(size, len(chunks), each)
        self._scheduled.used = self._used_of(self._known.outputs)
        mode = next(intent.mode for intent in intents if intent.doing)
        with in_mode(self._module, mode), self._going_back():
            loss = self._scheduled.train(chunks, own_inputs, own_targets, actions, known)
        return torch.tensor(loss, dtype=torch.float64)


class _Done(torch.autograd.Function):
    """A loss whose backward pass is done already."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, anchor: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if float(gradients[0]) != 1.0:
            raise ConfigError(
                "a loss was changed before backward(), but a model that is split with this "
                "schedule has computed its gradients by then; use --split network:gpipe"
            )
        return None, None
