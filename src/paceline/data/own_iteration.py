"""A loader class that does something with batches while it is iterated, which workers leave out.

    plain PyTorch   iter(loader) -> the class's __iter__ -> DataLoader's -> data set, collate_fn
    workers         lease -> data set, collate_fn

A class that fetches ahead, or puts batches on a device, gives what it was given, and is let by: a
batch is sent through it to see. This module must not know leases or workers.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ..errors import ConfigError
from ..replica.seeding import kept_random_state
from .feed import remade
from .likeness import digest_of

_FEW = 8
"""Samples of the batch, where the loader does not say how many there are."""
_LOOKED = "_paceline_has_looked"


def refuse_own_iteration(loader: DataLoader[Any]) -> list[str]:
    """What is to be known for the plan, where nobody can say what the class does.

    Raises:
        ConfigError: it gives other batches than it is given.
    """
    name = _own_method(loader)
    if name is None or _LOOKED in vars(loader):
        return []
    changes = None if isinstance(loader.dataset, IterableDataset) else _changes(loader)
    if changes:
        raise ConfigError(
            f"{name} makes other batches of those that it is given, and workers, which fetch each "
            "mini-batch from the data set, never call it: put that into collate_fn, or into the "
            "loop (x, y = changed(x, y))"
        )
    vars(loader)[_LOOKED] = True
    if changes is None:
        return [
            f"{name} is not called: workers fetch each mini-batch from the data set; what it does "
            "with batches belongs into collate_fn"
        ]
    return []


def _own_method(loader: DataLoader[Any]) -> str | None:
    """What a class that is not torch's iterates by."""
    for name in ("__iter__", "_get_iterator"):
        owner = next((one for one in loader.__class__.__mro__ if name in vars(one)), DataLoader)
        if not _is_known(owner):
            return f"{owner.__name__}.{name}"
    return None


def _is_known(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "torchdata")


def _changes(loader: DataLoader[Any]) -> bool | None:
    """Whether what comes out is another batch than what goes in; None: nobody can say."""
    try:
        with kept_random_state(), torch.no_grad():
            batch = next(iter(_of_one_batch(loader)))
            double, given = _double(loader, copy.deepcopy(batch))
            found = next(iter(double), None)
    except Exception:  # code of the user's, in a pass that is made up
        return None
    return None if given else not _are_alike(batch, found)


def _of_one_batch(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Over the first samples; where the loader has workers, one of its own fetches them."""
    data: Any = loader.dataset
    indices = list(range(min(loader.batch_size or _FEW, len(data))))
    which: dict[str, Any] = {"batch_sampler": [indices]}
    if loader.batch_sampler is None:
        which = {"batch_size": None, "sampler": indices}
    workers = min(1, loader.num_workers)
    return remade(loader, workers, init=loader.worker_init_fn, dataset=data, **which)


def _double(loader: DataLoader[Any], batch: Any) -> tuple[DataLoader[Any], list[Any]]:
    """A loader of the same class, under which lies one batch; what it has not taken of that."""
    kind, given = loader.__class__, [batch]
    plain = next(one for one in kind.__mro__ if _is_known(one) and issubclass(one, DataLoader))

    def give(_: object) -> Iterator[Any]:
        while given:
            yield given.pop()

    below = type(
        plain.__name__, (plain,),
        {"__iter__": lambda self: self._get_iterator(), "_get_iterator": give},
    )  # fmt: skip
    double: DataLoader[Any] = object.__new__(type(kind.__name__, (kind, below), {}))
    vars(double).update(vars(loader))
    return double, given


def _are_alike(one: Any, other: Any) -> bool:
    """The same numbers, wherever they lie, and in whichever sequence."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return digest_of(one.detach().cpu()) == digest_of(other.detach().cpu())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_are_alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_are_alike(*pair) for pair in pairs)
    return digest_of(one) == digest_of(other)
