"""The batches of one worker, as the Trainer's loops request them.

    the user's DataLoader  ->  TrainData       has the length and the sampler for the Trainer
                           ->  prepare  ->  WorkerBatches  ->  (batch, batch_idx, dataloader_idx)

Lightning's own fetchers know the number of batches, or fetch one ahead; these do neither, because a
batch is a lease: a request for the next ends the work on the one before. This module must not know
steps.
"""

from collections.abc import Iterator
from typing import Any

from lightning.pytorch.loops.fetchers import _DataFetcher
from torch.utils.data import DataLoader, IterableDataset

from ..errors import ConfigError


class TrainData:
    """The user's train loader as the Trainer sees it; its batches come through ``WorkerBatches``.

    Args:
        parts: batches of the loader that an update averages.
    """

    def __init__(self, loader: DataLoader[Any], parts: int) -> None:
        self.loader = loader
        self._parts = parts

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        count = len(self.loader)
        return count // self._parts if self.loader.drop_last else -(-count // self._parts)

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class WorkerBatches(_DataFetcher):
    """The batches of this worker, epoch by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.loader: Any = None
        """As ``prepare`` returned it."""
        self._ahead: list[Any] = []

    def __iter__(self) -> "WorkerBatches":
        self.reset()
        self.iterator = iter(self.loader or ())
        return self

    def __next__(self) -> Any:
        if not self._ahead and not self.has_more():
            raise StopIteration
        self.fetched += 1
        return self._ahead.pop(), self.fetched - 1, 0

    def has_more(self) -> bool:
        """Fetch the next batch; whether this worker has one."""
        assert self.iterator is not None
        self._start_profiler()
        try:
            self._ahead = [next(self.iterator)]
        except StopIteration:
            self.done = True
        finally:
            self._stop_profiler()
        return not self.done

    def forget(self) -> None:
        """Drop the batch fetched ahead: it is another worker's now."""
        self._ahead.clear()

    def leave(self) -> None:
        """End the epoch for all workers, if it has not ended."""
        if self.iterator is not None and hasattr(self.iterator, "close"):
            self.iterator.close()

    def reset(self) -> None:
        self.fetched, self.length, self.done = 0, None, False
        self.forget()


def sole_loader(data: object) -> DataLoader[Any]:
    """The Trainer's only train loader.

    Raises:
        ConfigError: it is not one DataLoader over a map-style data set.
    """
    if not isinstance(data, DataLoader):
        raise ConfigError(
            f"PacelineStrategy trains on one DataLoader, but train_dataloader() gave a "
            f"{type(data).__name__}; join the data sets in one (torch.utils.data.ConcatDataset)"
        )
    if isinstance(data.dataset, IterableDataset):
        raise ConfigError(
            f"the train data set {type(data.dataset).__name__} is an IterableDataset, whose "
            "samples cannot be handed out by number; give it __len__ and __getitem__ (map-style)"
        )
    return data


def refuse_accumulation(number: int | None) -> None:
    """Raise ConfigError where ``--accumulate`` was given: a Trainer accumulates itself."""
    if number is not None and number > 1:
        raise ConfigError(
            f"--accumulate {number} is for a script's own loop; with a Trainer set it there: "
            f"Trainer(accumulate_grad_batches={number})"
        )
