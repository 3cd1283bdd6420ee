"""What a trial computes on: one batch of the user's data set, and batches as his loader makes them.

This module must not know what is measured.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from ..data.feed import Transfer, apply, fetch, move
from ..speed import Speed


class Feed:
    """Endless batches of the user's data set, as the loader makes them."""

    def __init__(self, loader: DataLoader[Any], size: int, device: torch.device) -> None:
        num_samples = len(loader.dataset)  # type: ignore[arg-type]
        self._loader, self._size, self._device = loader, min(size, num_samples), device

    def __call__(self, speed: Speed) -> Iterator[Any]:
        user = self._loader
        workers = user.num_workers if speed.loader_workers < 0 else speed.loader_workers
        loader: DataLoader[Any] = DataLoader(
            user.dataset, batch_size=self._size, sampler=RandomSampler(user.dataset),  # type: ignore[arg-type]
            num_workers=workers, collate_fn=user.collate_fn, drop_last=True,
            pin_memory=user.pin_memory and torch.accelerator.is_available(),
            worker_init_fn=user.worker_init_fn,
            multiprocessing_context=user.multiprocessing_context if workers else None,
        )  # fmt: skip
        return self._ahead(loader) if speed.ahead else self._in_turn(loader)

    def _in_turn(self, loader: DataLoader[Any]) -> Iterator[Any]:
        while True:
            for batch in loader:
                yield move(batch, self._device, is_pinned=loader.pin_memory)

    def _ahead(self, loader: DataLoader[Any]) -> Iterator[Any]:
        transfer = Transfer(self._device)
        while True:
            arriving = None
            for batch in loader:
                coming = transfer.begin(batch)
                if arriving is not None:
                    yield transfer.finish(arriving)
                arriving = coming
            if arriving is not None:
                yield transfer.finish(arriving)


def host_batch(loader: DataLoader[Any], size: int) -> Any:
    """The first samples of the data set, collated."""
    dataset: Any = loader.dataset
    num_samples = min(size, len(dataset))
    return loader.collate_fn(fetch(dataset, list(range(num_samples))))


def num_samples_of(batch: Any, size: int) -> int:
    """Samples of a batch: what most of its tensors have as their first dimension."""
    found: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        if tensor.ndim:
            found.append(len(tensor))
        return tensor

    apply(note, batch)
    return max(set(found), key=found.count) if found else size
