"""The user's own loader where one worker trains alone: plain PyTorch, batch for batch.

    loader --> [ other loader workers ] --> batch --> [ copy, one batch ahead ] --> device

Its sampler, its generator and the random state draw what they would draw without Paceline. This
module must not know leases, epochs or sessions.
"""

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..speed import Speed
from .transfer import Transfer, move


def plain_sizes(loader: DataLoader[Any]) -> tuple[int, int]:
    """Positions and batches of an epoch, as far as they are known without drawing: at least 1."""
    sampler, batches = loader.sampler, loader.batch_sampler
    num_batches = len(loader) if isinstance(batches, Sized) else 1
    own_size = num_batches * (loader.batch_size or 1)
    has_size = loader.batch_size is not None and isinstance(sampler, Sized)
    return max(1, len(sampler) if has_size else own_size), max(1, num_batches)  # type: ignore[arg-type]


def plain_batches(loader: DataLoader[Any], device: torch.device, speed: Speed) -> Iterator[Any]:
    """The batches of one pass over ``loader``, on ``device``."""
    batches = iter(_with_workers(loader, speed.loader_workers))
    if device.type == "cpu":
        return batches
    if speed.ahead:
        return _ahead(batches, Transfer(device))
    return (move(batch, device, is_pinned=loader.pin_memory) for batch in batches)


def _ahead(batches: Iterator[Any], transfer: Transfer) -> Iterator[Any]:
    """Each batch's copy begins while the step on the one before is under way."""
    arriving = None
    for batch in batches:
        begun = transfer.begin(batch)
        if arriving is not None:
            yield transfer.finish(arriving)
        arriving = begun
    if arriving is not None:
        yield transfer.finish(arriving)


def _with_workers(loader: DataLoader[Any], num_workers: int) -> DataLoader[Any]:
    """The same loader with another number of workers; -1: its own."""
    if num_workers in (-1, loader.num_workers):
        return loader
    return DataLoader(
        loader.dataset,
        batch_sampler=loader.batch_sampler,
        num_workers=num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout if num_workers else 0,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
    )
