"""Compare a few samples' digests, to check that workers hold the same data.

    first, middle, last sample -> fetched repeatedly under one seed -> digest of the contents

Tensors and arrays count by their bytes, numbers and strings by their value, containers by their
contents, anything else by its type. A sample that differs when it is fetched again has random
numbers of its own, and is not compared. One that is flipped half of the time may come out the same
a few times in one worker, and flipped as often in another: ``are_others`` allows for that. This
module must not know workers, and imports torch only to fetch samples: the launcher compares.
"""

import hashlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_LEAST_BITS = 14
"""Samples are different data if chance would explain it less than once in 16,000 runs."""
_SEED = 0
_LEAST_TIMES, _MOST_TIMES, _PATIENCE_S = 3, 8, 0.05
"""How often a sample is fetched; more than the minimum only within this time."""


class Likeness(NamedTuple):
    """A sample's number, its digest, and how often that came out; 0 times: not comparable."""

    number: int
    digest: str
    times: int


def are_others(mine: Sequence[Likeness], theirs: Sequence[Likeness]) -> int | None:
    """The number of a sample that shows that the data differ; None: there is none.

    A sample with two random outcomes is k times the first here, and k times the second there, with
    a probability of at most 2 / 4^k.
    """
    differing = [
        (ours.number, 2 * min(ours.times, other.times) - 1)
        for ours, other in zip(mine, theirs, strict=False)
        if ours.times and other.times and ours.digest != other.digest
    ]
    return differing[0][0] if sum(bits for _, bits in differing) >= _LEAST_BITS else None


def sample_digests(loader: "DataLoader[Any]") -> list[Likeness]:
    """The digests of the first, the middle and the last sample of the loader's data set.

    If the loader has workers, one of them fetches: a data set may open its files in the first
    process that reads, and that must not be one that is forked later.
    """
    from torch.utils.data import DataLoader, IterableDataset

    from ..replica.seeding import kept_random_state
    from .feed import OwnDataset
    from .order import length_of

    num_samples = length_of(loader.dataset)
    if not num_samples or isinstance(loader.dataset, IterableDataset):
        return []
    indices = sorted({0, num_samples // 2, num_samples - 1})
    probe = _Probe(loader.dataset)
    with kept_random_state():
        if not loader.num_workers:
            return [probe[index] for index in indices]
        return list(
            DataLoader(
                probe,  # type: ignore[arg-type]  # it answers [] as a data set does
                batch_size=None,
                sampler=indices,
                num_workers=1,
                collate_fn=_unchanged,
                worker_init_fn=OwnDataset(loader.worker_init_fn),
                multiprocessing_context=loader.multiprocessing_context,
                timeout=loader.timeout,
            )
        )


class _Probe:
    """A data set of the digests of another data set's samples."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Likeness:
        try:
            return self._fetched(index)
        except Exception:  # a sample that the sampler leaves out may be unreadable
            return Likeness(index, "", 0)

    def _fetched(self, index: int) -> Likeness:
        end_s = time.perf_counter() + _PATIENCE_S
        digest, times = self._digest(index), 1
        while times < _LEAST_TIMES or (times < _MOST_TIMES and time.perf_counter() < end_s):
            if self._digest(index) != digest:
                return Likeness(index, "", 0)
            times += 1
        return Likeness(index, digest, times)

    def _digest(self, index: int) -> str:
        from ..replica.seeding import seed_all
        from .feed import fetch

        seed_all(_SEED)
        return digest_of(fetch(self.dataset, [index]))


def _unchanged(value: Any) -> Any:
    return value


def digest_of(value: Any) -> str:
    """The digest of a sample's contents."""
    digest = hashlib.sha256()
    _add(value, digest)
    return digest.hexdigest()


def _add(value: Any, digest: Any) -> None:
    """Add a value to the digest: its type, then its contents."""
    digest.update(f"{type(value).__qualname__};".encode())
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.layout is torch.strided and not value.is_quantized and not value.is_meta:
            digest.update(f"{value.dtype}{tuple(value.shape)};".encode())
            data = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            digest.update(data.flatten().view(torch.uint8).numpy())
    elif numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        if not value.dtype.hasobject:
            digest.update(f"{value.dtype}{value.shape};".encode() + value.tobytes())
    elif isinstance(value, str | bytes | bytearray | int | float | complex | None):
        digest.update(f"{value!r};".encode())
    elif isinstance(value, Mapping):
        for key in value:
            _add(key, digest)
            _add(value[key], digest)
    elif isinstance(value, Sequence):
        for item in value:
            _add(item, digest)
