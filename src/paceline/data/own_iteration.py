"""Detect loader classes whose iteration changes batches: workers do not call it.

    plain PyTorch   iter(loader) -> the class's __iter__ -> DataLoader's -> data set, collate_fn
    workers         lease -> data set, collate_fn

A class that fetches ahead, or moves batches to a device, is accepted: a batch is sent through it to
check that it comes out unchanged. This module must not know leases or workers.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ..errors import ConfigError
from ..replica.seeding import kept_random_state
from .feed import of_one_batch
from .likeness import digest_of

_FEW = 8
"""Samples of the test batch, if the loader has no batch size."""
_LOOKED = "_paceline_has_looked"


def refuse_own_iteration(loader: DataLoader[Any]) -> list[str]:
    """Notes for the plan, if it cannot be found out what the class does.

    Raises:
        ConfigError: its iteration changes batches.
    """
    name = _own_method(loader)
    if name is None or _LOOKED in vars(loader):
        return []
    changes = None if isinstance(loader.dataset, IterableDataset) else _changes(loader)
    if changes:
        raise ConfigError(
            f"{name} changes batches, and workers, which fetch each mini-batch from the data set, "
            "never call it: put that into collate_fn, or into the loop (x, y = changed(x, y))"
        )
    vars(loader)[_LOOKED] = True
    if changes is None:
        return [
            f"{name} is not called: workers fetch each mini-batch from the data set; if it changes "
            "batches, do that in collate_fn"
        ]
    return []


def _own_method(loader: DataLoader[Any]) -> str | None:
    """The method by which a class other than torch's iterates; None: torch's own."""
    for name in ("__iter__", "_get_iterator"):
        owner = next((kind for kind in loader.__class__.__mro__ if name in vars(kind)), DataLoader)
        if not _is_known(owner):
            return f"{owner.__name__}.{name}"
    return None


def _is_known(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "torchdata")


def _changes(loader: DataLoader[Any]) -> bool | None:
    """Whether iteration changes a batch; None: it cannot be found out."""
    try:
        with kept_random_state(), torch.no_grad():
            num_samples = min(loader.batch_size or _FEW, len(loader.dataset))  # type: ignore[arg-type]  # map-style
            batch = next(iter(of_one_batch(loader, range(num_samples))))
            double, left = _double(loader, copy.deepcopy(batch))
            result = next(iter(double), None)
    except Exception:  # the user's code, in a pass that we made up
        return None
    return None if left else not _are_alike(batch, result)


def _double(loader: DataLoader[Any], batch: Any) -> tuple[DataLoader[Any], list[Any]]:
    """A loader of the same class whose base gives one batch; and what it has not taken of it."""
    kind, left = loader.__class__, [batch]
    plain = next(base for base in kind.__mro__ if _is_known(base) and issubclass(base, DataLoader))

    def give(_: object) -> Iterator[Any]:
        while left:
            yield left.pop()

    base = type(
        plain.__name__, (plain,),
        {"__iter__": lambda self: self._get_iterator(), "_get_iterator": give},
    )  # fmt: skip
    double: DataLoader[Any] = object.__new__(type(kind.__name__, (kind, base), {}))
    vars(double).update(vars(loader))
    return double, left


def _are_alike(a: Any, b: Any) -> bool:
    """Whether two batches have the same values, on any device and in lists or tuples."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return digest_of(a.detach().cpu()) == digest_of(b.detach().cpu())
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_are_alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        pairs = zip(a, b, strict=False)
        return len(a) == len(b) and all(_are_alike(*pair) for pair in pairs)
    return digest_of(a) == digest_of(b)
