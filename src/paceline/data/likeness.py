"""Whether workers hold the same data: digests of a few samples, to be compared.

    first, middle, last sample -> fetched twice under one seed -> digest of the contents

A sample that differs when it is fetched again has random numbers of its own, and is not compared.
Tensors and arrays count by their bytes, numbers and texts by their value, containers by what is in
them, anything else by its type. This module must not know workers.
"""

import hashlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..compute.seeding import kept_random_state, seed_all
from .feed import fetch
from .listed import length_of

_SEED = 0
Samples = list[tuple[int, str]]
"""Numbers of samples, each with its digest; an empty one: not to be compared."""


def sample_digests(loader: DataLoader[Any]) -> Samples:
    """Of the first, the middle and the last sample of the loader's data set.

    Where the loader has workers, one of its own fetches: a data set may open its files in the
    first process that asks, and must not do so in one that is forked afterwards.
    """
    num_samples = length_of(loader.dataset)
    if not num_samples:
        return []
    indices = sorted({0, num_samples // 2, num_samples - 1})
    probe = _Probe(loader.dataset)
    with kept_random_state():
        if not loader.num_workers:
            return [probe[index] for index in indices]
        return list(
            DataLoader(
                probe,  # type: ignore[arg-type]
                batch_size=None,
                sampler=indices,
                num_workers=1,
                collate_fn=_as_it_is,
                worker_init_fn=loader.worker_init_fn,
                multiprocessing_context=loader.multiprocessing_context,
                timeout=loader.timeout,
            )
        )


class _Probe:
    """A data set of the digests of another one's samples."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[int, str]:
        try:
            one, again = (self._digest(index) for _ in range(2))
        except Exception:  # a sample that the sampler leaves out may be one that cannot be read
            return index, ""
        return index, one if one == again else ""

    def _digest(self, index: int) -> str:
        seed_all(_SEED)
        return digest_of(fetch(self._dataset, [index]))


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
    numpy = sys.modules.get("numpy")
    if isinstance(value, Tensor):
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
