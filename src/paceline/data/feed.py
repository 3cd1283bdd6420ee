"""The user's loader workers, fed lease by lease, or unchanged if one worker trains alone.

    reserved leases -> feed -> the user's workers, collate, pin_memory -> batches, in that order
    alone                      the user's loader -> batch -> [ copy, one batch ahead ] -> device

They fetch reserved leases ahead. The feed never blocks, which would deadlock inside the loader's
``__next__``: it ends when it is empty, and the same workers begin a new iteration. Alone, the
user's sampler, generator and random state draw what they would draw without Paceline.

    host      load n+1 | ................ | load n+2 |
    copies             | n+1 ->|                     | n+2 ->|
    compute   | step n                    | step n+1

A copy to an accelerator overlaps with computation only if it is from pinned memory and on another
stream. The stream that computes waits for the copy's event, so nothing is read half-copied, and the
allocator is told that this stream uses the memory, so that it is not reused meanwhile. This module
must not know what is done with a batch. Above 300 lines, since what is fed, fetched and copied is
one batch, whose structure all steps must keep.

Source: PyTorch documentation, "CUDA semantics": streams, ``record_stream``, pinned memory buffers.
"""

from collections import UserDict, deque
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ..events import Lease
from ..replica.seeding import seed_all
from ..speed import Speed
from .order import length_of


@dataclass(frozen=True, slots=True)
class Arriving:
    """A batch that may still be in transfer; ``host`` is kept until it has arrived."""

    batch: Any
    host: Any
    event: Any


class Transfer:
    """Copies batches to one accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        module: Any = getattr(torch, device.type, None) if device.type != "cpu" else None
        self._module = module if hasattr(module, "current_stream") else None
        self._stream: Any = module.Stream(device) if self._module is not None else None

    def begin(self, host: Any) -> Arriving:
        """Start the copy; returns at once."""
        if self._module is None:  # one stream, as on mps and a CPU, which keeps the order
            return Arriving(move(host, self._device, is_pinned=False), host, None)
        pinned = apply(_pinned, host)
        with self._module.stream(self._stream):
            batch = move(pinned, self._device, is_pinned=True)
            event = self._stream.record_event()
        return Arriving(batch, pinned, event)

    def finish(self, arriving: Arriving) -> Any:
        """The batch, ready for use on the current stream."""
        if arriving.event is None or self._module is None:
            return arriving.batch
        stream = self._module.current_stream(self._device)
        stream.wait_event(arriving.event)

        def record(tensor: Tensor) -> Tensor:
            tensor.record_stream(stream)
            return tensor

        return apply(record, arriving.batch)


def move(batch: Any, device: torch.device, *, is_pinned: bool) -> Any:
    """``batch`` on ``device``; from pinned memory without waiting for the copy."""
    return apply(lambda tensor: tensor.to(device, non_blocking=is_pinned), batch)


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_pinned() else tensor.pin_memory()


def apply(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply ``change`` to every tensor in nested lists, tuples and dicts of any class."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, PackedSequence):  # torch needs its batch_sizes on the CPU
        names = ("data", "sorted_indices", "unsorted_indices")
        return value._replace(**{name: apply(change, getattr(value, name)) for name in names})
    if isinstance(value, dict | UserDict):
        return _dict_like(value, {key: apply(change, item) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(apply(change, item) for item in value)
    if isinstance(value, list | tuple):
        return _sequence_like(value, [apply(change, item) for item in value])
    return value


def _dict_like(value: Any, items: dict[Any, Any]) -> Any:
    """A mapping of the same class with these items."""
    if type(value) is dict:
        return items
    mapping = copy(value)  # keeps its other attributes: a default, an encoding
    for key, item in items.items():
        mapping[key] = item
    return mapping


def _sequence_like(value: Any, items: list[Any]) -> Any:
    """A list or tuple of the same class; a plain one if the class takes other arguments."""
    try:
        return type(value)(items)
    except TypeError:
        return tuple(items) if isinstance(value, tuple) else items


class Indices(list[int]):
    """The indices of one lease, and the seed for fetching its samples."""

    seed: int


class FedWorkers:
    """The loader's workers and the leases that they fetch.

    Args:
        loader: the user's, whose settings they have.
        num_workers: 0: nothing is fetched ahead.
        prefetch: batches that each worker fetches ahead.
    """

    def __init__(self, loader: DataLoader[Any], num_workers: int, prefetch: int) -> None:
        self._loader = loader
        self._num_workers = num_workers
        self._prefetch = prefetch
        self._feed = _Feed()
        self._fed: deque[Lease] = deque()
        self._workers: DataLoader[Any] | None = None
        self._batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        """The number of workers."""
        return self._num_workers

    def ask(self, requests: list[tuple[Lease, Indices]]) -> None:
        """Fetch these leases next."""
        if not self._fed:
            self._batches = None  # it ended when it ran empty
        for lease, indices in requests:
            self._feed.ready.append(indices)
            self._fed.append(lease)
        if self._batches is None and self._fed:
            if self._workers is None:
                self._workers = self._make_workers()
            self._batches = iter(self._workers)
        self._submit()

    def _submit(self) -> None:
        """Hand the workers as many batches as they prefetch.

        torch submits them when its iterator begins and then one for each batch that it returns: an
        iterator that began with one batch in the feed would keep one batch in flight.

        Source: ``torch/utils/data/dataloader.py``, ``_MultiProcessingDataLoaderIter``.
        """
        batches: Any = self._batches
        limit = self._num_workers * self._prefetch
        while self._feed.ready and len(self._fed) - len(self._feed.ready) < limit:
            batches._try_put_index()

    def take(self, lease: Lease) -> Any:
        """The batch of this lease; None if the workers do not fetch it."""
        if lease not in self._fed or self._batches is None:
            return None
        while self._fed:
            fed = self._fed.popleft()
            try:
                batch = next(self._batches)
            except StopIteration:
                self.forget()
                return None
            if fed == lease:
                return batch
        return None

    def forget(self) -> None:
        """Drop all requests."""
        self._feed.ready.clear()
        self._fed.clear()
        self._batches = None

    def end_epoch(self) -> None:
        """Drop all requests; the workers stay if the user's loader says so."""
        self.forget()
        if not self._loader.persistent_workers:
            self._workers = None

    def close(self) -> None:
        """Drop all requests and the workers."""
        self.forget()
        self._workers = None

    def _make_workers(self) -> DataLoader[Any]:
        """A loader over leases with the user's settings."""
        return remade(
            self._loader,
            self._num_workers,
            dataset=SeededData(self._loader.dataset),
            init=OwnDataset(self._loader.worker_init_fn),
            batch_sampler=self._feed,
            prefetch_factor=self._prefetch,
            persistent_workers=True,  # within an epoch the feed may run empty and go on
        )


class _Feed:
    """A batch sampler of the leases that are known so far."""

    def __init__(self) -> None:
        self.ready: deque[Indices] = deque()

    def __iter__(self) -> "_Feed":
        return self

    def __next__(self) -> Indices:
        if not self.ready:
            raise StopIteration
        return self.ready.popleft()


class OwnDataset:
    """The user's ``worker_init_fn``, with the user's own data set in ``get_worker_info().dataset``.

    The loader worker fetches from a wrapper of ours, which has the user's as its ``dataset``.

    Source: ``torch/utils/data/_utils/worker.py``, ``_worker_loop``.
    """

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self._init = init

    def __call__(self, number: int) -> None:
        info = get_worker_info()
        assert info is not None
        wrapper: Any = info.dataset
        object.__setattr__(info, "dataset", wrapper.dataset)  # torch allows no assignment
        if self._init is not None:
            self._init(number)


class SeededData:
    """The user's data set in a loader worker; random state is set for each lease."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, indices: Indices) -> Any:
        seed_all(indices.seed)
        return fetch(self.dataset, indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)


def fetch(dataset: Any, indices: list[int]) -> Any:
    """Samples of a map-style data set, in one call where it supports that."""
    if hasattr(dataset, "__getitems__") and dataset.__getitems__:
        return dataset.__getitems__(list(indices))
    return [dataset[index] for index in indices]


def plain_sizes(loader: DataLoader[Any]) -> tuple[int, int]:
    """Positions and batches of an epoch, as far as known without drawing; at least 1 each."""
    if isinstance(loader.dataset, IterableDataset):
        return 1, 1
    num_batches = 1 if length_of(loader.batch_sampler) is None else len(loader)
    num_positions = None if loader.batch_size is None else length_of(loader.sampler)
    if num_positions is None:
        num_positions = num_batches * (loader.batch_size or 1)
    return max(1, num_positions), max(1, num_batches)


def plain_batches(loader: DataLoader[Any], device: torch.device, speed: Speed) -> Iterator[Any]:
    """The batches of one pass over ``loader``, on ``device``."""
    batches = iter(_with_workers(loader, speed.loader_workers))
    if device.type == "cpu":
        return batches
    if speed.ahead:
        return _ahead(batches, Transfer(device))
    return (move(batch, device, is_pinned=loader.pin_memory) for batch in batches)


def _ahead(batches: Iterator[Any], transfer: Transfer) -> Iterator[Any]:
    """Start the copy of each batch during the step on the one before."""
    arriving = None
    for batch in batches:
        started = transfer.begin(batch)
        if arriving is not None:
            yield transfer.finish(arriving)
        arriving = started
    if arriving is not None:
        yield transfer.finish(arriving)


def _with_workers(loader: DataLoader[Any], num_workers: int) -> DataLoader[Any]:
    """The loader with another number of workers; -1: its own."""
    if num_workers in (-1, loader.num_workers):
        return loader
    return remade(
        loader,
        num_workers,
        dataset=loader.dataset,
        init=loader.worker_init_fn,
        prefetch_factor=loader.prefetch_factor if num_workers else None,
        batch_sampler=loader.batch_sampler,
        generator=loader.generator,
    )


def remade(
    user: DataLoader[Any], num_workers: int, *, init: Callable[[int], None] | None, **others: Any
) -> DataLoader[Any]:
    """A loader with ``num_workers`` workers, the user's settings, and ``others`` on top."""
    return DataLoader(
        num_workers=num_workers,
        collate_fn=user.collate_fn,
        pin_memory=user.pin_memory,
        timeout=user.timeout if num_workers else 0,
        worker_init_fn=init,
        multiprocessing_context=user.multiprocessing_context if num_workers else None,
        **others,
    )


def of_one_batch(loader: DataLoader[Any], positions: Sequence[Any]) -> DataLoader[Any]:
    """A loader of the batch of these samples; if the user's has workers, one of them fetches.

    A data set may open its files in the first process that reads, and that must not be one that is
    forked later.
    """
    options: dict[str, Any] = {"batch_sampler": [list(positions)]}
    if loader.batch_sampler is None:
        options = {"batch_size": None, "sampler": positions}
    workers = min(1, loader.num_workers)
    return remade(loader, workers, init=loader.worker_init_fn, dataset=loader.dataset, **options)
