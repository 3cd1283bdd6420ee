"""The user's DataLoader, handed out lease by lease.

    epoch order (the user's sampler, drawn once an epoch) -> lease = range of positions -> batch

The sampler, data set, collate function and loader workers stay the user's. With loader workers,
reserved leases are fetched ahead; a batch that does not come (its lease was taken back, or the
lease is another's) is fetched here. The sampler never blocks: one that waits would deadlock inside
the loader's ``__next__``. This module must not know protocols or what is done with a batch.
"""

import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from ..compute.seeding import kept_random_state, mix, seed_all, seed_host
from ..compute.speed import Speed
from ..errors import ConfigError
from ..events import Lease
from .arrays import ArrayDataset, as_input, collate_batch
from .arrays import Batch as Gathered
from .transfer import Arriving, Transfer, move
from .trees import apply

_FETCH_SALT, _STEP_SALT, _ORDER_SALT = 1, 2, 3
_PREFETCH = 2
"""Batches that a worker loads ahead where the loader does not say: torch's own default."""


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


def redraw(kind: str, num_samples: int, seed: int, epoch: int) -> Sequence[int]:
    """The order of an epoch once more, of a loader of this ``order_kind``.

    Raises:
        ConfigError: only the user's own sampler can draw it.
    """
    if kind == "in order":
        return range(num_samples)
    if kind != "shuffled":
        raise ConfigError(
            "the order of this run's samples was the script's own sampler's, which its trace does "
            "not hold; ask for a position in an epoch's order instead: --position N"
        )
    with kept_random_state():
        seed_all(mix(seed, epoch, _ORDER_SALT))
        return list(RandomSampler(range(num_samples)))


class LeasedLoader:
    """The batches of leases, from the user's loader.

    Args:
        loader: a DataLoader over a map-style data set.
        seed: of the run: orders and random state follow from it, the epoch and the lease.
        device: where batches are put.
        speed: how many workers load, and whether a batch is copied ahead of the step.
    """

    def __init__(
        self, loader: DataLoader[Any], seed: int, device: torch.device, speed: Speed | None = None
    ) -> None:
        _refuse(loader)
        speed = speed or Speed()
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
        self._digest: str | None = None
        self._expected: list[Any] | None = None
        self._feed = _Feed()
        self._fed: deque[Lease] = deque()
        self._workers: DataLoader[Any] | None = None
        self._inner: Iterator[Any] | None = None
        is_own = speed.loader_workers < 0
        self._num_workers = loader.num_workers if is_own else speed.loader_workers
        self._prefetch = (loader.prefetch_factor or _PREFETCH) if self._num_workers else 0
        self._pins = loader.pin_memory and torch.accelerator.is_available()
        self._transfer = Transfer(device) if speed.ahead and device.type != "cpu" else None
        self._known: deque[Lease] = deque()
        self._arriving: tuple[Lease, Arriving, float | None] | None = None
        self._sends_bytes = device.type != "cpu" and loader.collate_fn is collate_batch
        is_array = type(loader.dataset) is ArrayDataset
        self._is_plain = is_array and loader.collate_fn is collate_batch

    @property
    def lookahead(self) -> int:
        """Mini-batches that are known ahead: for the loader's workers, and the next copy."""
        return max(self._num_workers * self._prefetch, 1 if self._transfer is not None else 0)

    @property
    def order_kind(self) -> str:
        """Whether `redraw` can draw this loader's orders again: "in order", "shuffled" or "own"."""
        sampler: Any = self.loader.sampler
        if self.has_own_batches or self._generators:
            return "own"
        if type(sampler) is SequentialSampler:
            return "in order"
        is_plain = type(sampler) is RandomSampler and not sampler.replacement
        has_all = is_plain and len(sampler) == len(sampler.data_source)
        return "shuffled" if has_all else "own"

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
        self._epoch, self._digest = epoch, None
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

    def order_digest(self) -> list[Any]:
        """The epoch that was drawn last, and a digest of its order."""
        if self._digest is None:
            try:
                data = array("q", self._order).tobytes()
            except (TypeError, OverflowError):  # indices of a data set of the user's own kind
                data = repr(list(self._order)).encode()
            self._digest = hashlib.sha256(data).hexdigest()
        return [self._epoch, self._digest]

    def expect_order(self, digest: list[Any]) -> None:
        """Refuse another order than this when its epoch is drawn: the run goes on inside it."""
        self._expected = digest

    def check_order(self) -> None:
        """Raise ConfigError where another order was drawn than when the run was cut off."""
        expected = self._expected
        if expected is not None and expected[0] == self._epoch:
            if expected != self.order_digest():
                raise ConfigError(
                    f"the sampler gave another order for epoch {self._epoch + 1} than before the "
                    "run was cut off, so some samples would be used twice: has the data changed, "
                    "or does the sampler keep a state of its own? pace.keep(sampler=sampler)"
                )
            self._expected = None

    def reserve(self, leases: Sequence[Lease]) -> None:
        """These come next: let the loader's workers fetch them, and the next copy begin early."""
        self._known.extend(leases)
        if not self._num_workers:
            return
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
        if lease in self._known:
            while self._known.popleft() != lease:
                pass
        arriving, self._arriving = self._arriving, None
        if arriving is not None and arriving[0] == lease:
            assert self._transfer is not None
            batch, scale = self._transfer.finish(arriving[1]), arriving[2]
        else:
            batch, scale = self._load(lease)
            if self._device.type != "cpu":
                batch = move(batch, self._device, is_pinned=self._pins)
        seed_all(mix(self._seed, lease.epoch, lease.start, _STEP_SALT))
        return batch if scale is None else (as_input(batch[0], scale), batch[1])

    def fetch_ahead(self) -> None:
        """Load the batch that comes next and start its copy; for a moment in which one waits."""
        if self._transfer is None or self._arriving is not None or not self._known:
            return
        lease = self._known[0]
        with kept_random_state():
            batch, scale = self._load(lease)
        self._arriving = lease, self._transfer.begin(batch), scale

    def _load(self, lease: Lease) -> tuple[Any, float | None]:
        """The batch in this process's memory, and what its bytes are still to be multiplied with.

        Samples that are gathered as bytes travel so: a quarter of what floats would be.
        """
        batch = self._fetched_ahead(lease)
        if batch is not None:
            return batch, None
        if self._is_plain:
            samples = self._gathered([lease])
        else:
            indices = self._batch(lease)
            seed_host(indices.seed)
            samples = fetch(self.dataset, indices)
        scale = None
        if self._sends_bytes and isinstance(samples, Gathered) and samples.scale is not None:
            batch, scale = (samples.raw, samples.targets), samples.scale
        else:
            batch = self._collate(samples)
        return (apply(lambda one: one.pin_memory(), batch) if self._pins else batch), scale

    def fetch_together(self, leases: Sequence[Lease]) -> tuple[Tensor, Tensor]:
        """The batches of leases of one size, stacked: (leases, samples, ...) and their targets."""
        if self._is_plain:
            inputs, targets = self._collate(self._gathered(leases))
            shape = (len(leases), leases[0].num_samples)
            return (
                inputs.view(*shape, *inputs.shape[1:]), targets.view(*shape, *targets.shape[1:])
            )  # fmt: skip
        pairs = [self.fetch(lease) for lease in leases]
        return torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])

    def _gathered(self, leases: Sequence[Lease]) -> Gathered:
        """All samples of these leases; nothing in it is random, so nothing is seeded."""
        assert type(self.dataset) is ArrayDataset
        indices = [one for lease in leases for one in self._order[lease.start : lease.stop]]
        return self.dataset.__getitems__(indices)

    def end_epoch(self) -> None:
        """Forget what was fetched ahead; the workers stay if they shall."""
        self._forget()
        self._known.clear()
        self._arriving = None
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
            num_workers=self._num_workers,
            collate_fn=user.collate_fn,
            pin_memory=user.pin_memory,
            timeout=user.timeout,
            worker_init_fn=user.worker_init_fn,
            multiprocessing_context=user.multiprocessing_context,
            prefetch_factor=self._prefetch,
            persistent_workers=True,  # in an epoch: it may run empty and go on
        )


def fetch(dataset: Any, indices: list[int]) -> Any:
    """Samples of a map-style data set, at once where it can."""
    if hasattr(dataset, "__getitems__") and dataset.__getitems__:
        return dataset.__getitems__(list(indices))
    return [dataset[index] for index in indices]


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
