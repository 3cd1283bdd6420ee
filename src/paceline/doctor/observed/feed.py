"""The batches of a script's loader, handed out by us: timed, without end, or by other workers.

    for batch in loader:  ->  iter(loader) is a WatchedBatches  ->  next(): feed.fetch(...)

    as the script has it | one batch again and again | a copy of the loader with n workers

While fixes are tried an epoch has no end, so that the script stays in its loop. This module must
not know what is measured.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from .patches import NOWHERE, Patches, Place, user_place

_TIMES = 8
"""Batches without a step, beside as many as a step has taken: then it is no epoch of training."""


class WatchedBatches:
    """An iterator over a loader, as the script sees one."""

    def __init__(self, loader: DataLoader[Any], inner: Iterator[Any], feed: "WatchedFeed") -> None:
        self._loader, self._inner, self._feed = loader, inner, feed

    def __iter__(self) -> "WatchedBatches":
        return self

    def __next__(self) -> Any:
        return self._feed.fetch(self)

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]  # torch's have a length

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def loader(self) -> DataLoader[Any]:
        return self._loader

    def draw(self, is_endless: bool) -> Any:
        """The next batch of the script's own loader."""
        try:
            return next(self._inner)
        except StopIteration:
            if not is_endless:
                raise
            self._inner = self._feed.begin(self._loader)
            return next(self._inner)


class WatchedFeed:
    """All loaders of the process.

    Attributes:
        loader: the one whose batches the last step was made from; None: no loader's.
        is_endless: whether epochs of that loader have no end.
        is_cached: whether its last batch is given again.
        source: what its batches come from instead; None: from itself.
        waited: called around each fetch, with whether it begins.
    """

    def __init__(self) -> None:
        self.loader: DataLoader[Any] | None = None
        self.is_endless = self.is_cached = False
        self.waited: Callable[[bool], None] | None = None
        self.begin: Callable[[DataLoader[Any]], Iterator[Any]] = DataLoader.__iter__
        self._last: DataLoader[Any] | None = None
        self._batch: Any = None
        self.source: Iterator[Any] | None = None
        self._num_fetched = self._most_fetched = 0
        self._places: dict[int, Place] = {}

    def install(self, patches: Patches) -> None:
        """From now on; loaders that were made before keep their places."""
        places, begin, feed = self._places, self.begin, self

        def noted(init: Callable[..., None]) -> Callable[..., None]:
            def made(loader: Any, *args: Any, **given: Any) -> None:
                places[id(loader)] = user_place()
                init(loader, *args, **given)

            return made

        def watched(_: Callable[..., Any]) -> Callable[..., Any]:
            return lambda loader: WatchedBatches(loader, begin(loader), feed)

        patches.wrap(DataLoader, "__init__", noted)
        patches.wrap(DataLoader, "__iter__", watched)

    def fetch(self, asked: WatchedBatches) -> Any:
        """A batch, as it is to be had now."""
        if self.waited is not None:
            self.waited(True)
        try:
            self._num_fetched += 1
            is_ours = self.is_endless and asked.loader is self.loader and self._is_training()
            if is_ours and self.is_cached:
                return self._batch
            if is_ours and self.source is not None:
                return next(self.source)
            self._batch, self._last = asked.draw(is_ours), asked.loader
            return self._batch
        finally:
            if self.waited is not None:
                self.waited(False)

    def _is_training(self) -> bool:
        """Whether a step is still to be expected: else the same loader is gone over for a test."""
        return self._num_fetched <= _TIMES * self._most_fetched + _TIMES

    def step_done(self) -> None:
        """The batches since the last step were for this one."""
        if not self.is_endless:
            self._most_fetched = max(self._most_fetched, self._num_fetched)
        self._num_fetched = 0
        if self._last is not None and not self.is_endless:
            self.loader, self._last = self._last, None

    @property
    def place(self) -> Place:
        """Where the loader was made."""
        return self._places.get(id(self.loader), NOWHERE)

    @property
    def may_have_workers(self) -> bool:
        """Whether another number of workers gives the same batches."""
        return self.loader is not None and not isinstance(self.loader.dataset, IterableDataset)

    def varied(self, **changes: Any) -> Iterator[Any]:
        """Batches without end of a copy of the loader that differs in this."""
        assert self.loader is not None
        return self._endless(varied(self.loader, **changes))

    def _endless(self, loader: DataLoader[Any]) -> Iterator[Any]:
        while True:
            yield from self.begin(loader)


def varied(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """A copy of a loader with other settings; its data, sampler and collate function are shared."""
    made = copy.copy(loader)
    workers = changes.get("num_workers", loader.num_workers)
    if workers and not loader.prefetch_factor:
        changes["prefetch_factor"] = 2
    # a loader's own __setattr__ refuses some of them once it is made
    vars(made).update({"_iterator": None, "persistent_workers": workers > 0, **changes})
    return made
