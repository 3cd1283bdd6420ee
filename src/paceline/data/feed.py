"""The user's loader workers, fed lease by lease: they fetch ahead what is reserved.

    reserved leases -> feed -> the user's workers, collate, pin_memory -> batches, in that order

The feed never blocks: one that waits would deadlock inside the loader's ``__next__``. It runs empty
instead, and is begun again with the same workers. This module must not know where a batch goes.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from ..events import Lease
from ..replica.seeding import seed_all


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
        user = self._loader
        return DataLoader(
            SeededData(user.dataset),  # type: ignore[arg-type]
            batch_sampler=self._feed,
            num_workers=self._num_workers,
            collate_fn=user.collate_fn,
            pin_memory=user.pin_memory,
            timeout=user.timeout,
            worker_init_fn=user.worker_init_fn,
            multiprocessing_context=user.multiprocessing_context,
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
