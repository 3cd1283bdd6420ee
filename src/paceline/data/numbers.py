"""The numbers of a loop without a loader, as the samples of a data set.

    pace.updates(2000)    update v averages the numbers v K to v K + K - 1, each a mini-batch
    range(0, n, 32)       the same for an epoch's numbers, by which a script slices its batches

A number stands for what the script itself draws, a batch of tokens or an episode, and its random
state follows from it. Numbers are leased like the samples of any data set, through deaths and
checkpoints. This module must not know what is drawn, nor who asks.
"""

from collections.abc import Iterator
from operator import itemgetter

from torch.utils.data import DataLoader, Dataset, Sampler

from ..errors import ConfigError
from ..events import Lease
from ..passes import FAR

_MOST_NUMBERS = 1 << 62


class Numbers(Sampler[int]):
    """Consecutive numbers.

    Args:
        size: numbers that an update averages (at each local step): a batch.

    Attributes:
        first, stop: the range of batches of the next pass.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.first, self.stop = 0, 1

    def go_far(self) -> None:
        """Give the next pass no end of its own, as for a stream."""
        self.first, self.stop = 0, FAR

    @property
    def numbers(self) -> range:
        return range(self.first * self.size, self.stop * self.size)

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


class Strides:
    """Guesses a member's next grant: the last stride again, if the last two are equal."""

    def __init__(self) -> None:
        self._last: Lease | None = None
        self._strides = (0, -1)

    def note(self, lease: Lease) -> None:
        """Note the first lease of a grant."""
        last, self._last = self._last, lease
        stride = lease.start - last.start if last and last.epoch == lease.epoch else 0
        self._strides = (self._strides[1], stride)

    @property
    def last(self) -> tuple[int, int] | None:
        """Pass and number of the newest lease; None: there is none."""
        return None if self._last is None else (self._last.epoch, self._last.start)

    def guess(self) -> tuple[int, int] | None:
        """Pass and number of the likely next lease; None: the strides differ."""
        previous, stride = self._strides
        if self._last is None or stride <= 0 or stride != previous:
            return None
        return self._last.epoch, self._last.start + stride


def note(size: int) -> str:
    """The plan's note on what a batch is in ``pace.updates``."""
    each = "each update is made of one" if size == 1 else f"an update averages {size} of them"
    return f"no loader: a batch is what a worker draws for one number, and {each}"


class OfRange(Dataset[int]):
    """The numbers of a range that a script goes through in each epoch: ``range(0, n, 32)``.

    Each is a mini-batch and comes once an epoch.
    """

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers

    def __getitem__(self, index: int) -> int:
        return self.numbers[index]

    def __len__(self) -> int:
        return len(self.numbers)


def through(numbers: range) -> "DataLoader[int]":
    """A loader of these numbers, one by one and in order.

    Raises:
        ConfigError: the range is empty.
    """
    if not numbers:
        raise ConfigError(
            f"prepare() was given {numbers!r}, which has no numbers: nothing to train on"
        )
    return DataLoader(OfRange(numbers), 1, collate_fn=itemgetter(0))


def note_of_range(numbers: range, size: int) -> str:
    """The plan's note on what a batch is in a loop over a range."""
    each = "each update is made of one" if size == 1 else f"an update averages {size} of them"
    return f"a loop over {numbers!r}: a batch is what a worker takes by one number, and {each}"


class _Each(Dataset[int]):
    """A data set in which every number is a sample."""

    def __getitem__(self, number: int) -> int:
        return number

    def __len__(self) -> int:
        return _MOST_NUMBERS


def numbered(numbers: Numbers, size: int | None = None) -> "DataLoader[int]":
    """A loader of numbers: a mini-batch is one number, a batch has ``size`` (None: all)."""
    return DataLoader(_Each(), size or numbers.size, sampler=numbers, collate_fn=itemgetter(0))
