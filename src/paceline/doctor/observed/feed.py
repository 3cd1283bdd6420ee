"""Hand out the batches of a script's loader: timed, without end, or from a changed loader.

    for batch in loader:  ->  iter(loader) is a WatchedBatches  ->  next(): feed.fetch(...)

    the script's own loader | one batch again and again | a copy of the loader with n workers

While fixes are tried an epoch has no end, so that the script stays in its loop. This module must
not know what is measured.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from .patches import NOWHERE, Patches, Place, user_place

_TIMES = 8
"""A loop is no training loop if it fetches, without a step, more than this many batches and this
many times the most that one step has used."""


class WatchedBatches:
    """The iterator over a loader that the script gets in place of torch's."""

    def __init__(self, loader: DataLoader[Any], inner: Iterator[Any], feed: "WatchedFeed") -> None:
        self._loader, self._inner, self._feed = loader, inner, feed

    def __iter__(self) -> "WatchedBatches":
        return self

    def __next__(self) -> Any:
        return self._feed.fetch(self)

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]  # torch's iterators have a length

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def loader(self) -> DataLoader[Any]:
        """The loader that it iterates over."""
        return self._loader

    def draw(self, is_endless: bool) -> Any:
        """Return the next batch of the script's own loader, of a new epoch if it is endless."""
        try:
            return next(self._inner)
        except StopIteration:
            if not is_endless:
                raise
            self._inner = self._feed.begin(self._loader)
            return next(self._inner)


class WatchedFeed:
    """The source of all batches that the script fetches, from any of its loaders.

    Attributes:
        loader: the training loader, whose batches the last step used; None if it used none.
        is_endless: whether epochs of the training loader have no end.
        is_cached: whether its last batch is returned again and again.
        source: the iterator that its batches come from instead; None if from itself.
        settings: the changed settings that are on at present, in the order they were turned on.
        waited: called before and after each fetch, with whether it begins.
        begin: torch's own ``iter`` of a loader.
    """

    def __init__(self) -> None:
        self.loader: DataLoader[Any] | None = None
        self.is_endless = self.is_cached = False
        self.waited: Callable[[bool], None] | None = None
        self.begin: Callable[[DataLoader[Any]], Iterator[Any]] = DataLoader.__iter__
        self._last: DataLoader[Any] | None = None
        self._batch: Any = None
        self.source: Iterator[Any] | None = None
        self.settings: list[Mapping[str, Any]] = []
        self._sources: dict[frozenset[tuple[str, Any]], Iterator[Any]] = {}
        self._num_fetched = self._most_fetched = 0
        self._places: dict[int, Place] = {}

    def install(self, patches: Patches) -> None:
        """Watch all loaders from now on; the lines of those that are made later are recorded."""
        places, begin, feed = self._places, self.begin, self

        def recorded(init: Callable[..., None]) -> Callable[..., None]:
            def initialize(loader: Any, *args: Any, **kwargs: Any) -> None:
                places[id(loader)] = user_place()
                init(loader, *args, **kwargs)

            return initialize

        def watched(_: Callable[..., Any]) -> Callable[..., Any]:
            return lambda loader: WatchedBatches(loader, begin(loader), feed)

        patches.wrap(DataLoader, "__init__", recorded)
        patches.wrap(DataLoader, "__iter__", watched)

    def fetch(self, batches: WatchedBatches) -> Any:
        """Return the next batch of an iterator, from wherever batches come from at present."""
        if self.waited is not None:
            self.waited(True)
        try:
            self._num_fetched += 1
            is_replaceable = (
                self.is_endless and batches.loader is self.loader and self._is_training()
            )
            if is_replaceable and self.is_cached:
                return self._batch
            if is_replaceable and self.source is not None:
                return next(self.source)
            self._batch, self._last = batches.draw(is_replaceable), batches.loader
            return self._batch
        finally:
            if self.waited is not None:
                self.waited(False)

    def _is_training(self) -> bool:
        """Whether a step may still follow; if not, the loader is iterated over for a test."""
        return self._num_fetched <= _TIMES * self._most_fetched + _TIMES

    def step_done(self) -> None:
        """Count the batches since the last step as those of this step."""
        if not self.is_endless:
            self._most_fetched = max(self._most_fetched, self._num_fetched)
        self._num_fetched = 0
        if self._last is not None and not self.is_endless:
            self.loader, self._last = self._last, None

    @property
    def place(self) -> Place:
        """The line where the training loader was made."""
        return self._places.get(id(self.loader), NOWHERE)

    @property
    def may_have_workers(self) -> bool:
        """Whether the training loader gives the same batches with any number of workers."""
        return self.loader is not None and not isinstance(self.loader.dataset, IterableDataset)

    @property
    def num_workers(self) -> int:
        """The workers of the loader that batches come from at present."""
        assert self.loader is not None
        return int(self._changes().get("num_workers", self.loader.num_workers))

    def _changes(self) -> dict[str, Any]:
        return {name: value for one in self.settings for name, value in one.items()}

    def turn(self, settings: Mapping[str, Any], is_on: bool) -> None:
        """Turn changed settings of the training loader on beside the others that are on, or off.

        Batches come from one copy of the loader for all settings that are on. Each copy is kept,
        with its workers, so that no later turn starts them anew.
        """
        self.settings = [one for one in self.settings if one != settings] + [settings] * is_on
        changes = self._changes()
        key = frozenset(changes.items())
        if changes and key not in self._sources:
            self._sources[key] = self.varied(**changes)
        self.source = self._sources.get(key)

    def release(self, settings: Mapping[str, Any]) -> None:
        """Turn settings off, and end every copy of the loader that has them."""
        self.turn(settings, False)
        self._sources = {
            key: source for key, source in self._sources.items() if not settings.items() <= key
        }

    def varied(self, **changes: Any) -> Iterator[Any]:
        """Yield endless batches of a copy of the training loader with changed settings."""
        assert self.loader is not None
        return self._endless(varied(self.loader, **changes))

    def _endless(self, loader: DataLoader[Any]) -> Iterator[Any]:
        while True:
            yield from self.begin(loader)


def varied(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Return a copy of a loader with changed settings; data, sampler and collate_fn are shared."""
    duplicate = copy.copy(loader)
    workers = changes.get("num_workers", loader.num_workers)
    if workers and not loader.prefetch_factor:
        changes["prefetch_factor"] = 2
    # a loader's own __setattr__ refuses some of these once it is made
    vars(duplicate).update({"_iterator": None, "persistent_workers": workers > 0, **changes})
    return duplicate
