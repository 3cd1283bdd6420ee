"""All positions that a sampler gives for an epoch: 8 bytes each, and an end to them.

    sampler        -> positions
    batch sampler  -> positions, and where each batch ends

A sampler that never ends, or that gives another number than it says, is refused before it fills the
memory. This module must not know seeds or epochs.
"""

from array import array
from collections.abc import Iterable, Sequence, Sized
from itertools import islice
from typing import Any

from torch.utils.data import SequentialSampler

from ..errors import ConfigError

MOST_POSITIONS = 1 << 28
"""Of an epoch: 2 GiB in every worker."""
_CHUNK = 1 << 16
"""Positions that are looked at in one go."""
_MOST_UNSAID, _MOST_ROUNDS = 1 << 20, 16
"""Positions from a sampler without a length: so many, or so many times the data set."""


def length_of(source: Any) -> int | None:
    """How long it says that it is; None: it does not."""
    try:
        return len(source) if isinstance(source, Sized) else None
    except (TypeError, NotImplementedError):
        return None


def list_positions(
    source: Iterable[Any], dataset: Any, ends: list[int] | None = None
) -> Sequence[int]:
    """What a sampler gives, or with ``ends`` a batch sampler; where its batches end goes there.

    Raises:
        ConfigError: it has no end, or gives another number than it says.
    """
    if type(source) is SequentialSampler:
        return range(len(source))
    said, listed, num_given, drawn = length_of(source), _Positions(), 0, iter(source)
    unsaid = max(_MOST_UNSAID, _MOST_ROUNDS * (length_of(dataset) or 0))
    most = unsaid if said is None else said
    while chunk := list(islice(drawn, min(_CHUNK, most + 1 - num_given))):
        num_given += len(chunk)
        for batch in [chunk] if ends is None else chunk:
            listed.add(batch if isinstance(batch, list) else list(batch))
            if ends is not None:
                ends.append(len(listed.values))
        if num_given > most or len(listed.values) > MOST_POSITIONS:
            break
    kind, what = ("sampler", "samples") if ends is None else ("batch sampler", "batches")
    name = f"the {kind} {type(source).__name__}"
    if len(listed.values) > MOST_POSITIONS:
        raise ConfigError(f"{name} gave {too_many(len(listed.values))}")
    if said is None and num_given > most:
        raise ConfigError(
            f"{name} has no __len__ and gave more than {most:,} {what} for "
            f"{type(dataset).__name__}: an epoch must end; end its __iter__, give it a __len__"
        )
    if said is not None and num_given != said:
        raise ConfigError(
            f"{name} says that an epoch has {said:,} {what} (__len__) and gave "
            f"{'more' if num_given > said else f'{num_given:,}'}; let both say the same"
        )
    values: Sequence[int] = listed.values
    return values


def too_many(num_positions: int) -> str:
    """The words for an epoch that is too long to be listed."""
    return (
        f"{num_positions:,} samples an epoch: at most {MOST_POSITIONS:,} can be shared out; make "
        "epochs shorter (num_samples=...) and more of them"
    )


class _Positions:
    """Positions as they come: 8 bytes each, unless one is of another kind than ``int``."""

    def __init__(self) -> None:
        self.values: Any = array("q")

    def add(self, some: list[Any]) -> None:
        if isinstance(self.values, array):
            try:
                if set(map(type, some)) <= {int}:
                    self.values.fromlist(some)
                    return
            except OverflowError:
                pass  # beyond 8 bytes: an index of the user's own kind
            self.values = list(self.values)
        self.values += some
