"""The user's DataLoader, handed out lease by lease.

    epoch order (the user's sampler, drawn once an epoch) -> lease = range of positions -> batch

The sampler, data set, collate function and loader workers stay the user's. With loader workers,
reserved leases are fetched ahead; a batch that does not come (its lease was taken back, or the
lease is another's) is fetched here. The sampler never blocks: one that waits would deadlock inside
the loader's ``__next__``. This module must not know protocols or what is done with a batch.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ..compute.seeding import kept_random_state, mix, seed_all
from ..errors import ConfigError
from ..events import Lease

_FETCH_SALT, _STEP_SALT, _ORDER_SALT = 1, 2, 3


class Batch(list[int]):
    """The indices of one lease, with the seed that its samples are made with."""

    seed: int


class _Seeded:
    """The user's data set in a loader worker: random state set per lease."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, batch: Batch) -> Any:
        seed_all(batch.seed)
        return fetch(self._dataset, batch)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __len__(self) -> int:
        return len(self._dataset)


class _Feed:
    """Hands leases to the loader's workers as they become known; never waits."""

    def __init__(self) -> None:
        self.ready: deque[Batch] = deque()

    def __iter__(self) -> "_Feed":
        return self

    def __next__(self) -> Batch:
        if not self.ready:
            raise StopIteration
        return self.ready.popleft()


class LeasedLoader:
    """The batches of leases, from the user's loader.

    Args:
        loader: a DataLoader over a map-style data set.
        seed: of the run: orders and random state follow from it, the epoch and the lease.
        device: where batches are put.
    """

    def __init__(self, loader: DataLoader[Any], seed: int, device: torch.device) -> None:
        _refuse(loader)
        self.loader = loader
        self.dataset = loader.dataset
        self._seed = seed
        self._device = device
        own = loader.batch_sampler
        self.has_own_batches = loader.batch_size is None or type(own) is not BatchSampler
        self._generators = [
            (one, one.initial_seed())
            for source in (loader, loader.sampler, own)
            if isinstance(one := getattr(source, "generator", None), torch.Generator)
        ]
        self._epoch = 0
        self._order: Sequence[int] = ()
        self._feed = _Feed()
        self._fed: deque[Lease] = deque()
        self._workers: DataLoader[Any] | None = None
        self._inner: Iterator[Any] | None = None

    @property
    def lookahead(self) -> int:
        """Mini-batches that the loader's workers fetch ahead."""
        return self.loader.num_workers * (self.loader.prefetch_factor or 0)

    def count(self) -> tuple[int, int]:
        """Positions and batches an epoch; of the first one, where the user's differ."""
        sampler = self.loader.sampler
        if not self.has_own_batches and isinstance(sampler, Sized):
            return len(sampler), len(self.loader)
        ends = self.draw(0)
        return len(self._order), len(ends) if ends is not None else len(self.loader)

    def draw(self, epoch: int) -> list[int] | None:
        """Draw the order of ``epoch``; the ends of the user's own batches, where there are any.

        A pure function of the seed and the epoch: every member draws the same.
        """
        self._epoch = epoch
        with kept_random_state():
            seed = mix(self._seed, epoch, _ORDER_SALT)
            seed_all(seed)
            for generator, first_seed in self._generators:
                generator.manual_seed(mix(first_seed, seed))
            if hasattr(self.loader.sampler, "set_epoch"):
                self.loader.sampler.set_epoch(epoch)
            if not self.has_own_batches:
                self._order = list(self.loader.sampler)
                return None
            assert self.loader.batch_sampler is not None
            batches = [list(batch) for batch in self.loader.batch_sampler]
        self._order = [index for batch in batches for index in batch]
        ends, end = [], 0
        for batch in batches:
            end += len(batch)
            ends.append(end)
        return ends

    def reserve(self, leases: Sequence[Lease]) -> None:
        """Let the loader's workers fetch these ahead."""
        if not self._fed:
            self._inner = None  # it ended when it ran empty: begin it again, with the same workers
        for lease in leases:
            self._feed.ready.append(self._batch(lease))
            self._fed.append(lease)
        if self._inner is None and self._fed:
            if self._workers is None:
                self._workers = self._make_inner()
            self._inner = iter(self._workers)

    def fetch(self, lease: Lease) -> Any:
        """The batch of ``lease``, on the device; the step's random state is set."""
        batch = self._fetched_ahead(lease)
        if batch is None:
            indices = self._batch(lease)
            seed_all(indices.seed)
            batch = self._collate(fetch(self.dataset, indices))
            if self.loader.pin_memory and torch.accelerator.is_available():
                batch = apply(lambda tensor: tensor.pin_memory(), batch)
        seed_all(mix(self._seed, lease.epoch, lease.start, _STEP_SALT))
        if self._device.type == "cpu":
            return batch
        is_async = self.loader.pin_memory
        return apply(lambda tensor: tensor.to(self._device, non_blocking=is_async), batch)

    def end_epoch(self) -> None:
        """Forget what was fetched ahead; the workers stay if they shall."""
        self._forget()
        if not self.loader.persistent_workers:
            self._workers = None

    def _forget(self) -> None:
        self._feed.ready.clear()
        self._fed.clear()
        self._inner = None

    def _fetched_ahead(self, lease: Lease) -> Any:
        """The batch from the loader's workers, or None if they were not asked for it."""
        if lease not in self._fed or self._inner is None:
            return None
        while self._fed:
            mine = self._fed.popleft()
            try:
                batch = next(self._inner)
            except StopIteration:
                self._forget()
                return None
            if mine == lease:
                return batch
        return None

    def _batch(self, lease: Lease) -> Batch:
        batch = Batch(self._order[lease.start : lease.stop])
        batch.seed = mix(self._seed, lease.epoch, lease.start, _FETCH_SALT)
        return batch

    def _collate(self, samples: Any) -> Any:
        collate: Callable[[Any], Any] = self.loader.collate_fn
        return collate(samples)

    def _make_inner(self) -> DataLoader[Any]:
        """The user's loader with their workers and settings, over leases."""
        user = self.loader
        return DataLoader(
            _Seeded(self.dataset),  # type: ignore[arg-type]
            batch_sampler=self._feed,
            num_workers=user.num_workers,
            collate_fn=user.collate_fn,
            pin_memory=user.pin_memory,
            timeout=user.timeout,
            worker_init_fn=user.worker_init_fn,
            multiprocessing_context=user.multiprocessing_context,
            prefetch_factor=user.prefetch_factor,
            persistent_workers=True,  # in an epoch: it may run empty and go on
        )


def fetch(dataset: Any, indices: list[int]) -> Any:
    """Samples of a map-style data set, at once where it can."""
    if hasattr(dataset, "__getitems__") and dataset.__getitems__:
        return dataset.__getitems__(list(indices))
    return [dataset[index] for index in indices]


def apply(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``change`` every tensor in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return type(value)({key: apply(change, one) for key, one in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(apply(change, one) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(apply(change, one) for one in value)
    return value


def _refuse(loader: DataLoader[Any]) -> None:
    """Say by name what cannot be leased."""
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            f"{type(loader.dataset).__name__} is an iterable data set: its samples have no "
            "numbers, so they cannot be shared out exactly once; make it map-style "
            "(__len__ and __getitem__)"
        )
    if loader.batch_size is None and loader.batch_sampler is None:
        raise ConfigError(
            "the loader has batch_size=None: give it a batch size, the samples of one update"
        )
    if getattr(loader, "in_order", True) is False:
        raise ConfigError("the loader has in_order=False; batches are matched to leases in order")
