"""The order of an epoch's samples: the user's sampler, drawn once an epoch, the same by everybody.

    (seed, epoch) -> random state, generators, set_epoch -> sampler or batch sampler -> positions

This module must not know leases, nor what a sample is.
"""

import hashlib
from array import array
from collections.abc import Sequence, Sized
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from ..compute.seeding import kept_random_state, mix, seed_all
from ..errors import ConfigError

_ORDER_SALT = 3


class EpochOrder:
    """The orders of a loader.

    Args:
        seed: of the run: orders follow from it and the epoch.

    Attributes:
        indices: of the data set's samples, by position; of the epoch that was drawn last.
        has_own_batches: whether the user's batch sampler decides where batches end.
    """

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self._loader = loader
        self._seed = seed
        own = loader.batch_sampler
        self.has_own_batches = loader.batch_size is None or type(own) is not BatchSampler
        self._generators = [
            (one, one.initial_seed())
            for source in (loader, loader.sampler, own)
            if isinstance(one := getattr(source, "generator", None), torch.Generator)
        ]
        self._epoch = 0
        self.indices: Sequence[int] = ()
        self._digest: str | None = None
        self._expected: list[Any] | None = None

    @property
    def kind(self) -> str:
        """Whether `redraw` can draw this loader's orders again: "in order", "shuffled" or "own"."""
        sampler: Any = self._loader.sampler
        if self.has_own_batches or self._generators:
            return "own"
        if type(sampler) is SequentialSampler:
            return "in order"
        is_plain = type(sampler) is RandomSampler and not sampler.replacement
        has_all = is_plain and len(sampler) == len(sampler.data_source)
        return "shuffled" if has_all else "own"

    def count(self) -> tuple[int, int]:
        """Positions and batches an epoch; of the first one, where the user's differ."""
        sampler = self._loader.sampler
        if not self.has_own_batches and isinstance(sampler, Sized):
            return len(sampler), len(self._loader)
        ends = self.draw(0)
        return len(self.indices), len(ends) if ends is not None else len(self._loader)

    def draw(self, epoch: int) -> list[int] | None:
        """Draw the order of ``epoch``; the ends of the user's own batches, where there are any.

        A pure function of the seed and the epoch: every member draws the same.
        """
        self._epoch, self._digest = epoch, None
        loader = self._loader
        with kept_random_state():
            seed = mix(self._seed, epoch, _ORDER_SALT)
            seed_all(seed)
            for generator, first_seed in self._generators:
                generator.manual_seed(mix(first_seed, seed))
            if hasattr(loader.sampler, "set_epoch"):
                loader.sampler.set_epoch(epoch)
            if not self.has_own_batches:
                self.indices = list(loader.sampler)
                return None
            assert loader.batch_sampler is not None
            batches = [list(batch) for batch in loader.batch_sampler]
        self.indices = [index for batch in batches for index in batch]
        ends, end = [], 0
        for batch in batches:
            end += len(batch)
            ends.append(end)
        return ends

    def digest(self) -> list[Any]:
        """The epoch that was drawn last, and a digest of its order."""
        if self._digest is None:
            try:
                data = array("q", self.indices).tobytes()
            except (TypeError, OverflowError):  # indices of a data set of the user's own kind
                data = repr(list(self.indices)).encode()
            self._digest = hashlib.sha256(data).hexdigest()
        return [self._epoch, self._digest]

    def expect(self, digest: list[Any]) -> None:
        """Refuse another order than this when its epoch is drawn: the run goes on inside it."""
        self._expected = digest

    def check(self) -> None:
        """Raise ConfigError where another order was drawn than when the run was cut off."""
        expected = self._expected
        if expected is not None and expected[0] == self._epoch:
            if expected != self.digest():
                raise ConfigError(
                    f"the sampler gave another order for epoch {self._epoch + 1} than before the "
                    "run was cut off, so some samples would be used twice: has the data changed, "
                    "or does the sampler keep a state of its own? pace.keep(sampler=sampler)"
                )
            self._expected = None


def redraw(kind: str, num_samples: int, seed: int, epoch: int) -> Sequence[int]:
    """The order of an epoch once more, of a loader whose orders are of this ``kind``.

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
