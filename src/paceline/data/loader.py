"""The user's DataLoader, handed out lease by lease.

    epoch order (the user's sampler, drawn once an epoch) -> lease = range of positions -> batch

The sampler, data set, collate function and loader workers stay the user's. With loader workers,
reserved leases are fetched ahead; a batch that was not fetched ahead (its lease was taken back, or
was another member's) is fetched here. This module must not know protocols or what is done with a
batch.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ..errors import ConfigError
from ..events import Lease
from ..replica.seeding import kept_random_state, mix, seed_all, seed_host, step_seed
from ..speed import Speed
from .arrays import ArrayDataset, as_input, collate_batch
from .arrays import Batch as Gathered
from .feed import Arriving, FedWorkers, Indices, Transfer, apply, fetch, move
from .order import EpochOrder

_BETWEEN_SALT = 5
_CACHE_LINE = 64
_GATHERED_BYTES = 2 << 20
PREFETCH = 2
"""Batches that a loader worker fetches ahead by default, as in torch."""


NOTHING = object()
"""In place of a batch: there is none."""


class LeasedLoader:
    """The batches of leases, from the user's loader.

    Args:
        loader: a DataLoader over a map-style data set.
        seed: of the run; orders and random state follow from it, the epoch and the lease.
        device: where batches go.
        speed: how many workers load, and whether a batch is copied ahead of the step.
    """

    def __init__(
        self, loader: DataLoader[Any], seed: int, device: torch.device, speed: Speed | None = None
    ) -> None:
        _refuse(loader)
        speed = speed or Speed()
        self.loader = loader
        self.dataset = loader.dataset
        self.order = EpochOrder(loader, seed)
        self._seed = seed
        self.samples_each = 1
        """Samples at each position of the order."""
        self.is_stream = False
        """Whether a position is a mini-batch, of an unknown number."""
        self.gives_batches = False
        """Whether the data set of a stream makes the mini-batches itself, of any size."""
        self.seeds_between = False
        """Whether an epoch's end leaves the same random state in every worker."""
        self._device = device
        is_own = speed.loader_workers < 0
        num_workers = loader.num_workers if is_own else speed.loader_workers
        prefetch = (loader.prefetch_factor or PREFETCH) if num_workers else 0
        self._workers = FedWorkers(loader, num_workers, prefetch)
        self._fetches_ahead = num_workers * prefetch
        self._pins = loader.pin_memory and torch.accelerator.is_available()
        self._transfer = Transfer(device) if speed.ahead and device.type != "cpu" else None
        self._takes_bytes = device.type != "cpu"
        self._known: deque[Lease] = deque()
        self._arriving: tuple[Lease, Arriving, float | None] | None = None

    @property
    def _sends_bytes(self) -> bool:
        return self._takes_bytes and self.loader.collate_fn is collate_batch

    @property
    def _is_plain(self) -> bool:
        return type(self.dataset) is ArrayDataset and self.loader.collate_fn is collate_batch

    @property
    def num_loading(self) -> int:
        """Number of its loader workers."""
        return self.loader.num_workers if self.is_stream else len(self._workers)

    @property
    def lookahead(self) -> int:
        """Mini-batches to reserve ahead: for the loader's workers, and the next copy."""
        return max(self._fetches_ahead, 1 if self._transfer is not None else 0)

    def reserve(self, leases: Sequence[Lease]) -> None:
        """Note the next leases: loader workers fetch them, and the next copy can begin early."""
        self._known.extend(leases)
        if self._workers:
            self._workers.ask([(lease, self._indices(lease)) for lease in leases])

    def has(self, lease: Lease) -> bool:
        """Whether the lease has a batch: a stream may end before."""
        return True

    def num_samples_of(self, lease: Lease) -> int:
        """Samples of this lease's batch, which was fetched last."""
        return lease.num_samples

    def fetch(self, lease: Lease) -> Any:
        """The batch of ``lease``, on the device; sets the step's random state."""
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
        self._seed_step(lease)
        return batch if scale is None else (as_input(batch[0], scale), batch[1])

    def _seed_step(self, lease: Lease) -> None:
        seed_all(step_seed(self._seed, lease.epoch, lease.start))

    def fetch_ahead(self) -> None:
        """Load the next batch and start its copy; called while the member waits."""
        if self._transfer is None or self._arriving is not None or not self._known:
            return
        lease = self._known[0]
        with kept_random_state():
            batch, scale = self._load(lease)
        self._arriving = lease, self._transfer.begin(batch), scale

    def _load(self, lease: Lease) -> tuple[Any, float | None]:
        """The batch in this process's memory, and the scale of its bytes, still to be applied.

        Samples that are gathered as bytes are copied as bytes: a quarter of the size of floats.
        """
        batch = self._workers.take(lease)
        if batch is not None:
            return batch, None
        if self._is_plain:
            samples = self._gathered([lease])
        else:
            indices = self._indices(lease)
            seed_host(indices.seed)
            samples = fetch(self.dataset, indices)
        scale = None
        if self._sends_bytes and isinstance(samples, Gathered) and samples.scale is not None:
            batch, scale = (samples.raw, samples.targets), samples.scale
        else:
            batch = self._collate(samples)
        return (apply(lambda tensor: tensor.pin_memory(), batch) if self._pins else batch), scale

    def each(self, leases: Sequence[Lease], *, is_seeded: bool = True) -> Iterator[Any]:
        """Yield the batches of these leases in turn; equal sizes are gathered a few at a time.

        Args:
            is_seeded: set each step's random state; else it may be left as it is.
        """
        is_one_size = len({lease.num_samples for lease in leases}) == 1
        if not self._is_plain or len(leases) == 1 or not is_one_size:
            yield from map(self.fetch, leases)
            return
        at_once = self._num_at_once(leases[0].num_samples)
        for first in range(0, len(leases), at_once):
            some = leases[first : first + at_once]
            for lease, *batch in zip(some, *self.fetch_together(some), strict=True):
                if is_seeded:
                    self._seed_step(lease)
                yield tuple(map(_by_itself, batch))

    def _num_at_once(self, num_samples: int) -> int:
        """Mini-batches to gather at once: as many as fit into a cache."""
        assert type(self.dataset) is ArrayDataset
        num_bytes = num_samples * self.dataset.inputs[0].numel() * torch.float32.itemsize
        return max(1, _GATHERED_BYTES // max(1, num_bytes))

    def fetch_together(self, leases: Sequence[Lease]) -> tuple[Tensor, Tensor]:
        """The batches of leases of one size, stacked to (leases, samples, ...): inputs, targets."""
        if self._is_plain:
            inputs, targets = self._collate(self._gathered(leases))
            shape = (len(leases), leases[0].num_samples)
            return (
                inputs.view(*shape, *inputs.shape[1:]), targets.view(*shape, *targets.shape[1:])
            )  # fmt: skip
        pairs = [self.fetch(lease) for lease in leases]
        return torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])

    def _gathered(self, leases: Sequence[Lease]) -> Gathered:
        """All samples of these leases; nothing here is random, so nothing is seeded."""
        assert type(self.dataset) is ArrayDataset
        indices = [
            index for lease in leases for index in self.order.indices[lease.start : lease.stop]
        ]
        return self.dataset.__getitems__(indices)

    def end_epoch(self) -> None:
        """Drop what was fetched ahead; with ``seeds_between``, seed what the script draws next."""
        self._workers.end_epoch()
        self._known.clear()
        self._arriving = None
        if self.seeds_between:
            seed_all(mix(self._seed, self.order.epoch, _BETWEEN_SALT))

    def close(self) -> None:
        """End the loader workers."""
        self._workers.close()

    def _indices(self, lease: Lease) -> Indices:
        indices = Indices(self.order.indices[lease.start : lease.stop])
        indices.seed = step_seed(self._seed, lease.epoch, lease.start, is_loading=True)
        return indices

    def _collate(self, samples: Any) -> Any:
        collate: Callable[[Any], Any] = self.loader.collate_fn
        return collate(samples)


def _by_itself(batch: Tensor) -> Tensor:
    """The batch as if gathered alone: it may be changed, and sums over it come out the same.

    A sum may depend on whether its memory begins at a cache line.
    """
    return batch.detach() if batch.data_ptr() % _CACHE_LINE == 0 else batch.clone()


def _refuse(loader: DataLoader[Any]) -> None:
    """Raise ConfigError for a loader that cannot be leased."""
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            f"{type(loader.dataset).__name__} is an iterable data set, whose samples have no "
            "numbers: use it in a script's own loop (pace.prepare), or make it map-style "
            "(__len__ and __getitem__)"
        )
    if loader.batch_size is None and loader.batch_sampler is None:
        raise ConfigError(
            "the loader has batch_size=None: set a batch size, the number of samples of an update"
        )
    refuse_shares(loader)
    if getattr(loader, "in_order", True) is False:
        raise ConfigError(
            "the loader has in_order=False, but batches are matched to leases in order; "
            "leave it out"
        )


def refuse_begun(loader: DataLoader[Any]) -> None:
    """Raise ConfigError if the loader would begin in the middle of a pass: only one worker can.

    Source: torchdata, ``StatefulDataLoader.load_state_dict``.
    """
    if getattr(loader, "next_iter_state", None) is not None:
        refuse_state("load_state_dict")


def refuse_state(call: str, *_: Any, **__: Any) -> NoReturn:
    """Replaces this method of the user's loader: raises ConfigError."""
    raise ConfigError(
        f"the loader's {call}() covers only its own reading, but here workers share its "
        "mini-batches: leave it out; checkpoints of the run hold the position, and --resume "
        "goes on there"
    )


def refuse_shares(loader: DataLoader[Any]) -> None:
    """Raise ConfigError if the loader's sampler gives each worker a part of its own."""
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if getattr(sampler, "num_replicas", 1) != 1:
            raise ConfigError(
                f"the loader has the sampler {type(sampler).__name__}, which gives each worker a "
                "part of its own; leave it out: Paceline shares the samples out (DataLoader(data, "
                "batch_size=..., shuffle=True))"
            )
