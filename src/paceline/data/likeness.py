"""Whether workers hold the same data: a comparison of a few samples' digests.

    first, middle, last sample -> fetched again and again under one seed -> digest of the contents

Tensors and arrays count by their bytes, numbers and texts by their value, containers by what is in
them, anything else by its type. A sample that differs when it is fetched again has random numbers
of its own, and is not compared. One that is flipped in half of all cases may come out alike a few
times in one worker, and flipped as often in another: ``are_others`` weighs that. This module must
not know workers, and imports torch only where samples are fetched: who compares is the launcher.
"""

import hashlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_LEAST_BITS = 14
"""Different samples are other data where chance does that less than once in 16,000 runs."""
_SEED = 0
_LEAST_TIMES, _MOST_TIMES, _PATIENCE_S = 3, 8, 0.05
"""How often a sample is fetched: more than the least only within this time."""


class Likeness(NamedTuple):
    """A sample: its number, a digest of it, and how often it came out so; 0: not to be compared."""

    number: int
    digest: str
    times: int


def are_others(mine: Sequence[Likeness], theirs: Sequence[Likeness]) -> int | None:
    """The number of a sample that shows that data differ; None: none does.

    A sample with two outcomes of its own choice is k times the one here, and k times the other
    there, with a probability of at most 2 / 4^k.
    """
    differing = [
        (one.number, 2 * min(one.times, other.times) - 1)
        for one, other in zip(mine, theirs, strict=False)
        if one.times and other.times and one.digest != other.digest
    ]
    return differing[0][0] if sum(bits for _, bits in differing) >= _LEAST_BITS else None


def sample_digests(loader: "DataLoader[Any]") -> list[Likeness]:
    """Of the first, the middle and the last sample of the loader's data set.

    Where the loader has workers, one of its own fetches: a data set may open its files in the
    first process that asks, and must not do so in one that is forked afterwards.
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
                collate_fn=_as_it_is,
                worker_init_fn=OwnDataset(loader.worker_init_fn),
                multiprocessing_context=loader.multiprocessing_context,
                timeout=loader.timeout,
            )
        )


class _Probe:
    """A data set of the digests of another one's samples."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Likeness:
        try:
            return self._fetched(index)
        except Exception:  # a sample that the sampler leaves out may be one that cannot be read
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


def _as_it_is(value: Any) -> Any:
    return value


def digest_of(value: Any) -> str:
    """Of the contents of a sample."""
    found = hashlib.sha256()
    _add(value, found)
    return found.hexdigest()


def _add(value: Any, found: Any) -> None:
    """Each value by its type and then by what is in it."""
    found.update(f"{type(value).__qualname__};".encode())
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.layout is torch.strided and not value.is_quantized and not value.is_meta:
            found.update(f"{value.dtype}{tuple(value.shape)};".encode())
            data = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            found.update(data.flatten().view(torch.uint8).numpy())
    elif numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        if not value.dtype.hasobject:
            found.update(f"{value.dtype}{value.shape};".encode() + value.tobytes())
    elif isinstance(value, str | bytes | bytearray | int | float | complex | None):
        found.update(f"{value!r};".encode())
    elif isinstance(value, Mapping):
        for key in value:
            _add(key, found)
            _add(value[key], found)
    elif isinstance(value, Sequence):
        for one in value:
            _add(one, found)
