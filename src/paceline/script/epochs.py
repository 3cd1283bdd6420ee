"""What a script's loop over epochs yields: numbers from 0, or those of a range or list of its own.

This module must not know runs, nor where an interrupted one goes on.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError


def values_of(epochs: Any, num_asked: int | None) -> Sequence[int]:
    """The values of all epochs, in order.

    Args:
        epochs: how many, or the values: a range, or a list, tuple or array of whole numbers.
        num_asked: how many there are to be instead; a range goes on, a list cannot.

    Raises:
        ConfigError: it is none of these, or more values are asked for than a list has.
    """
    if isinstance(epochs, range):
        if num_asked is None:
            return epochs
        return range(epochs.start, epochs.start + num_asked * epochs.step, epochs.step)
    listed = _listed(epochs)
    if listed is None:
        num_epochs = _whole(epochs)
        if num_epochs is None:
            raise _wrong(f"{epochs!r:.60}")
        return range(num_epochs if num_asked is None else num_asked)
    if num_asked is not None and num_asked > len(listed):
        raise ConfigError(
            f"{num_asked} epochs were asked for (--epochs), but the list given to pace.epochs() "
            f"has {len(listed)} values; give it a range(), which goes on"
        )
    return listed[:num_asked]


def _listed(epochs: Any) -> list[int] | None:
    """The values of a list or its like; None: it is none."""
    if isinstance(epochs, str | bytes | Mapping) or not hasattr(epochs, "__getitem__"):
        return None
    try:
        found = [epochs[i] for i in range(len(epochs))]
    except TypeError:  # a tensor or array of one number, which has no length
        return None
    values = []
    for one in found:
        value = _whole(one)
        if value is None:
            raise _wrong(f"{one!r:.60} in it")
        values.append(value)
    return values


def _whole(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _wrong(found: str) -> ConfigError:
    return ConfigError(
        "pace.epochs() takes a number of epochs, a range or a list of whole numbers "
        f"(pace.epochs(range(1, 11))), got {found}"
    )
