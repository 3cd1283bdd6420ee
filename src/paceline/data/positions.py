"""The positions of an epoch: listed, 8 bytes each, or drawn as far as they are asked for.

This module must not know whose sampler gives them, nor what a sample is.
"""

from array import array
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, overload

from torch.utils.data import RandomSampler

from ..errors import ConfigError

MOST_POSITIONS = 1 << 28
"""Of an epoch: 2 GiB in every worker."""
CHUNK = 1 << 16
"""Positions that are looked at in one go."""
_TOLD = 1 << 10
"""Of positions that are drawn later: those by which two orders are compared."""


def refuse_many(who: str, num_positions: int) -> None:
    """Raise ConfigError for an epoch that is too long to be listed."""
    if num_positions > MOST_POSITIONS:
        raise ConfigError(
            f"{who} {num_positions:,} samples an epoch: at most {MOST_POSITIONS:,} can be shared "
            "out; make epochs shorter (num_samples=...) and more of them"
        )


def is_drawn_later(source: Any) -> bool:
    """Whether this is torch's sampler with replacement, of more positions than can be listed.

    Its generator is its own, made when it begins, so that nobody else's draws come between.
    """
    is_own = type(source) is RandomSampler and source.replacement and source.generator is None
    return is_own and len(source) > MOST_POSITIONS


class DrawnLater(Sequence[int]):
    """The positions of a sampler, drawn as far as they are asked for, 8 bytes each."""

    def __init__(self, sampler: Any) -> None:
        self._length = len(sampler)
        self._drawn = iter(sampler)
        self._known: array[int] = array("q")
        self._reach(1)  # so that it takes its seed now

    def _reach(self, stop: int) -> None:
        """Know the positions up to here."""
        refuse_many("this run has drawn", stop)
        while len(self._known) < min(stop, self._length):
            self._known.extend(islice(self._drawn, CHUNK))

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...
    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        stop = place.stop if isinstance(place, slice) else place + 1
        self._reach(self._length if stop is None or stop < 1 else stop)
        return self._known[place]

    def __repr__(self) -> str:
        """What tells it from others, as far as anybody does."""
        self._reach(_TOLD)
        return f"{self._length} from {list(self._known[:_TOLD])}"


class Positions:
    """Positions as they come: 8 bytes each, unless one is of another kind than ``int``."""

    def __init__(self) -> None:
        self.values: array[int] | list[Any] = array("q")

    def add(self, some: list[Any]) -> None:
        if isinstance(self.values, array):
            with suppress(OverflowError):  # beyond 8 bytes: an index of the user's own kind
                if set(map(type, some)) <= {int}:
                    self.values.fromlist(some)
                    return
            self.values = list(self.values)
        self.values += some
