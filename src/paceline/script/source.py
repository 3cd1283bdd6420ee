"""The source of a loop's mini-batches: a loader, a stream, or numbers without either.

    loader of prepare, or none -> source_of -> order, shape -> lease -> LeasedLoader

Everything known about an epoch before the first one begins is found here. This module must
not know models, optimizers, or how an exchange carries anything.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ..context import Context
from ..data.feed import plain_sizes
from ..data.loader import LeasedLoader, refuse_begun
from ..data.numbers import Numbers, numbered
from ..data.order import EpochOrder
from ..data.own_iteration import refuse_own_iteration
from ..data.streamed import StreamedLoader
from ..errors import ConfigError
from ..exchange.base import Shape
from ..speed import Speed


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSource:
    """The source of a loop's mini-batches.

    Attributes:
        loader: the user's own; for a loop without one, a loader of ``numbers``.
        numbers: those of a loop without a loader; None: it has a loader.
        is_stream: whether its data set has no length and is read in order.
        order: the positions of each epoch.
        num_batches: in an epoch of ``loader``.
        batch_size: samples in one batch of ``loader``, the sum of all workers' shares.
        shape: how an epoch is cut into mini-batches.
        notes: notes on the loader, for the plan.
        make_leased: (loader, seed, device, speed) -> the loader, lease by lease.
    """

    loader: DataLoader[Any]
    numbers: Numbers | None
    is_stream: bool
    order: EpochOrder
    num_batches: int
    batch_size: int
    shape: Shape
    notes: list[str]
    make_leased: Callable[..., LeasedLoader]

    def lease(self, seed: int, device: torch.device, speed: Speed) -> LeasedLoader:
        """Return the loader, whose batches are fetched lease by lease."""
        leased = self.make_leased(self.loader, seed, device, speed)
        leased.order = self.order  # it knows how many positions an epoch has
        return leased


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """What a script specifies about its batches.

    Attributes:
        is_per_worker: the loader's batch size is one worker's share, not what an update averages.
        accumulate: batches that an update averages.
        is_sticky: each worker keeps its part of every batch.
        is_alone: plain PyTorch draws the batches; nothing is shared out.
    """

    is_per_worker: bool
    accumulate: int
    is_sticky: bool
    is_alone: bool


def source_of(
    loader: DataLoader[Any] | None,
    context: Context,
    device: torch.device,
    options: SourceOptions,
    is_kept: Callable[[Any], bool],
) -> BatchSource:
    """Find out what an epoch consists of.

    Args:
        loader: the script's; None: its loop goes over numbers.
        is_kept: whether the script keeps the state of this sampler.

    Raises:
        ConfigError: several workers cannot share these batches.
    """
    numbers = None
    if loader is None:
        numbers = Numbers(context.parts * options.accumulate)
        loader = numbered(numbers, 1 if options.is_alone else None)
    make_leased: Callable[..., LeasedLoader] = LeasedLoader
    stream = None
    if isinstance(loader.dataset, IterableDataset):
        _refuse_steps_together(context)
        stream = Numbers(context.parts * options.accumulate)
        make_leased = partial(
            StreamedLoader, numbers=stream, num_each=options.accumulate,
            is_global=not options.is_per_worker,
        )  # fmt: skip
    order = make_leased(loader, context.seed, device).order
    order.is_kept = is_kept
    notes = [] if options.is_alone else _refuse_what_is_not_shared(loader, order, options)
    num_samples, num_batches = plain_sizes(loader) if options.is_alone else order.count()
    if stream is not None:
        stream.go_far()
    batch_size = loader.batch_size or max(1, -(-num_samples // max(1, num_batches)))
    batch_size *= context.parts if options.is_per_worker else 1
    batch_size = context.parts if numbers is not None else batch_size
    return BatchSource(
        loader=loader, numbers=numbers, is_stream=stream is not None, order=order,
        num_batches=num_batches, batch_size=batch_size,
        shape=_shape(loader, order, context, options, num_samples, batch_size),
        notes=notes, make_leased=make_leased,
    )  # fmt: skip


def _shape(
    loader: DataLoader[Any],
    order: EpochOrder,
    context: Context,
    options: SourceOptions,
    num_samples: int,
    batch_size: int,
) -> Shape:
    """How an epoch is cut; an update of several batches may be cut short."""
    is_stream = isinstance(loader.dataset, IterableDataset)
    is_cut = options.accumulate > 1 and loader.drop_last and not is_stream
    if is_cut:  # less than a batch is dropped
        num_samples -= num_samples % batch_size
    return Shape(
        num_samples=num_samples,
        batch_size=num_samples if is_stream else batch_size * options.accumulate,
        parts=context.parts,
        keep_remainder=not loader.drop_last or order.has_own_batches or is_stream or is_cut,
        is_sticky=options.is_sticky,
    )


def _refuse_steps_together(context: Context) -> None:
    if context.steps_together:
        raise ConfigError(
            "a step that all workers make together (LBFGS, closures, hooks) is not possible over a "
            "stream, whose end is found while it is read; use --protocol local-sgd:1, or a "
            "data set with a length"
        )


def _refuse_what_is_not_shared(
    loader: DataLoader[Any], order: EpochOrder, options: SourceOptions
) -> list[str]:
    """Notes for the plan on sharing. ConfigError: several workers cannot share the loader."""
    if options.accumulate > 1 and order.has_own_batches:
        raise ConfigError(
            f"accumulate {options.accumulate} with a batch sampler of your own: several workers "
            "cut K batches by their samples; accumulate by hand (if (i + 1) % n == 0 or i + 1 == "
            "len(loader): optimizer.step()), or with one worker"
        )
    refuse_begun(loader)
    return refuse_own_iteration(loader)
