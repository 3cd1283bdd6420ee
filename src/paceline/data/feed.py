"""The user's loader workers: fed lease by lease, or as they are where one worker trains alone.

    reserved leases -> feed -> the user's workers, collate, pin_memory -> batches, in that order
    alone                      the user's loader -> batch -> [ copy, one batch ahead ] -> device

They fetch ahead what is reserved. The feed never blocks: one that waits would deadlock inside the
loader's ``__next__``. It runs empty instead, and is begun again with the same workers. Alone, the
user's sampler, generator and random state draw what they would draw without Paceline. This module
must not know what is done with a batch.
"""

from collections import deque
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..events import Lease
from ..replica.seeding import seed_all
from ..speed import Speed
from .transfer import Transfer, move


class Indices(list[int]):
    """The indices of one lease, with the seed that its samples are made with."""

    seed: int


class FedWorkers:
    """The loader's workers, and what they were asked for.

    Args:
        loader: the user's, whose settings they have.
        num_workers: 0: nobody fetches ahead.
        prefetch: batches that each fetches ahead.
    """

    def __init__(self, loader: DataLoader[Any], num_workers: int, prefetch: int) -> None:
        self._loader = loader
        self._num_workers = num_workers
        self._prefetch = prefetch
        self._feed = _Feed()
        self._fed: deque[Lease] = deque()
        self._workers: DataLoader[Any] | None = None
        self._batches: Iterator[Any] | None = None

    def __bool__(self) -> bool:
        return self._num_workers > 0

    def ask(self, asked: list[tuple[Lease, Indices]]) -> None:
        """Fetch these next."""
        if not self._fed:
            self._batches = None  # it ended when it ran empty
        for lease, indices in asked:
            self._feed.ready.append(indices)
            self._fed.append(lease)
        if self._batches is None and self._fed:
            if self._workers is None:
                self._workers = self._make_workers()
            self._batches = iter(self._workers)

    def take(self, lease: Lease) -> Any:
        """The batch of this lease, or None where they were not asked for it."""
        if lease not in self._fed or self._batches is None:
            return None
        while self._fed:
            mine = self._fed.popleft()
            try:
                batch = next(self._batches)
            except StopIteration:
                self.forget()
                return None
            if mine == lease:
                return batch
        return None

    def forget(self) -> None:
        """What was asked for is not wanted any longer."""
        self._feed.ready.clear()
        self._fed.clear()
        self._batches = None

    def end_epoch(self) -> None:
        """Forget all; the workers stay if the user's loader says so."""
        self.forget()
        if not self._loader.persistent_workers:
            self._workers = None

    def _make_workers(self) -> DataLoader[Any]:
        """The user's loader with their workers and settings, over leases."""
        return _remade(
            self._loader,
            self._num_workers,
            dataset=SeededData(self._loader.dataset),
            batch_sampler=self._feed,
            prefetch_factor=self._prefetch,
            persistent_workers=True,  # in an epoch: it may run empty and go on
        )


class _Feed:
    """Hands leases to the workers as they become known."""

    def __init__(self) -> None:
        self.ready: deque[Indices] = deque()

    def __iter__(self) -> "_Feed":
        return self

    def __next__(self) -> Indices:
        if not self.ready:
            raise StopIteration
        return self.ready.popleft()


class SeededData:
    """The user's data set in a loader worker: random state set per lease."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, indices: Indices) -> Any:
        seed_all(indices.seed)
        return fetch(self._dataset, indices)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __len__(self) -> int:
        return len(self._dataset)


def fetch(dataset: Any, indices: list[int]) -> Any:
    """Samples of a map-style data set, at once where it can."""
    if hasattr(dataset, "__getitems__") and dataset.__getitems__:
        return dataset.__getitems__(list(indices))
    return [dataset[index] for index in indices]


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
    return _remade(
        loader,
        num_workers,
        dataset=loader.dataset,
        batch_sampler=loader.batch_sampler,
        generator=loader.generator,
    )


def _remade(user: DataLoader[Any], num_workers: int, **others: Any) -> DataLoader[Any]:
    """A loader with these workers and otherwise the user's settings, but for ``others``."""
    return DataLoader(
        num_workers=num_workers,
        collate_fn=user.collate_fn,
        pin_memory=user.pin_memory,
        timeout=user.timeout if num_workers else 0,
        worker_init_fn=user.worker_init_fn,
        multiprocessing_context=user.multiprocessing_context if num_workers else None,
        **others,
    )
