"""The positions of an epoch: listed, 8 bytes each, or drawn as far as they are needed.

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
"""At most this many positions in an epoch: 2 GiB in every worker."""
CHUNK = 1 << 16
"""Positions that are read from a sampler at once."""
_COMPARED = 1 << 10
"""Of positions that are drawn later, two orders are compared by the first so many."""


def refuse_many(who: str, num_positions: int) -> None:
    """Raise ConfigError for an epoch that is too long to be listed."""
    if num_positions > MOST_POSITIONS:
        raise ConfigError(
            f"{who} {num_positions:,} samples an epoch: at most {MOST_POSITIONS:,} can be shared "
            "out; use more and shorter epochs (num_samples=...)"
        )


def is_drawn_later(source: Any) -> bool:
    """Whether this is torch's sampler with replacement, with more positions than can be listed.

    It must have its own generator, made when it begins, so that no other draws come in between.
    """
    is_own = type(source) is RandomSampler and source.replacement and source.generator is None
    return is_own and len(source) > MOST_POSITIONS


class DrawnLater(Sequence[int]):
    """The positions of a sampler, drawn as far as they are needed, 8 bytes each."""

    def __init__(self, sampler: Any) -> None:
        self._length = len(sampler)
        self._drawn = iter(sampler)
        self._positions: array[int] = array("q")
        self._draw_to(1)  # so that the sampler takes its seed now

    def _draw_to(self, stop: int) -> None:
        """Draw the positions up to ``stop``."""
        refuse_many("this run has drawn", stop)
        while len(self._positions) < min(stop, self._length):
            self._positions.extend(islice(self._drawn, CHUNK))

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...
    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        stop = place.stop if isinstance(place, slice) else place + 1
        self._draw_to(self._length if stop is None or stop < 1 else stop)
        return self._positions[place]

    def __repr__(self) -> str:
        """Its length and first positions, which tell it from other orders."""
        self._draw_to(_COMPARED)
        return f"{self._length} from {list(self._positions[:_COMPARED])}"


class Positions:
    """A growing list of positions: 8 bytes each, unless one is not an ``int``."""

    def __init__(self) -> None:
        self.values: array[int] | list[Any] = array("q")

    def add(self, chunk: list[Any]) -> None:
        if isinstance(self.values, array):
            with suppress(OverflowError):  # more than 8 bytes: an index type of the user's own
                if set(map(type, chunk)) <= {int}:
                    self.values.fromlist(chunk)
                    return
            self.values = list(self.values)
        self.values += chunk
