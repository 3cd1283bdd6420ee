"""The draws of a loop that has no loader: their numbers, as the samples of a data set.

    pace.updates(2000)    update v is made of the numbers v K to v K + K - 1, one a mini-batch
    range(0, n, 32)       the same of an epoch's numbers, which a script takes its batches by

A number stands for what the script draws by itself, a batch of tokens or an episode, and its random
state follows from it. It is its own sample, so leases, deaths and checkpoints are those of any data
set. This module must not know what is drawn, nor who asks.
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
        size: numbers that an update averages (of each local step): a batch.

    Attributes:
        first, stop: of the batches that the next pass gives.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.first, self.stop = 0, 1

    def go_far(self) -> None:
        """The next pass ends where a stream does."""
        self.first, self.stop = 0, FAR

    @property
    def numbers(self) -> range:
        return range(self.first * self.size, self.stop * self.size)

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


class Strides:
    """What a member will probably be granted next: as far on as the last two times."""

    def __init__(self) -> None:
        self._last: Lease | None = None
        self._strides = (0, -1)

    def note(self, lease: Lease) -> None:
        """The first one of a grant."""
        last, self._last = self._last, lease
        stride = lease.start - last.start if last and last.epoch == lease.epoch else 0
        self._strides = (self._strides[1], stride)

    @property
    def last(self) -> tuple[int, int] | None:
        """Pass and number of the newest one."""
        return None if self._last is None else (self._last.epoch, self._last.start)

    def guess(self) -> tuple[int, int] | None:
        """Its pass and number; None: it goes on unevenly."""
        before, stride = self._strides
        if self._last is None or stride <= 0 or stride != before:
            return None
        return self._last.epoch, self._last.start + stride


def note(size: int) -> str:
    """What a batch is then, for the plan."""
    each = "each update is made of one" if size == 1 else f"an update averages {size} of them"
    return f"no loader: a batch is what a worker draws for one number, and {each}"


class OfRange(Dataset[int]):
    """The numbers of a range that a script goes through in each epoch: ``range(0, n, 32)``.

    Each is a mini-batch of its own, and comes once an epoch.
    """

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers

    def __getitem__(self, place: int) -> int:
        return self.numbers[place]

    def __len__(self) -> int:
        return len(self.numbers)


def through(numbers: range) -> "DataLoader[int]":
    """A loader of these, one by one and in their order.

    Raises:
        ConfigError: there are none.
    """
    if not numbers:
        raise ConfigError(f"prepare() was given {numbers!r}, which has no numbers")
    return DataLoader(OfRange(numbers), 1, collate_fn=itemgetter(0))


def note_of_range(numbers: range, size: int) -> str:
    """What a batch is then, for the plan."""
    each = "each update is made of one" if size == 1 else f"an update averages {size} of them"
    return f"a loop over {numbers!r}: a batch is what a worker takes by one number, and {each}"


class _Each(Dataset[int]):
    """Every number is a sample."""

    def __getitem__(self, number: int) -> int:
        return number

    def __len__(self) -> int:
        return _MOST_NUMBERS


def numbered(numbers: Numbers, size: int | None = None) -> "DataLoader[int]":
    """A loader of these: a mini-batch is one number, of which a batch has ``size``; None: all."""
    return DataLoader(_Each(), size or numbers.size, sampler=numbers, collate_fn=itemgetter(0))
