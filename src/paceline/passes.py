"""Which pass over the loader comes next, and which ones a script that goes on has behind it.

    pace.epochs     value 0      value 1      value 2      ...   the position
    loader          pass 0, 1    pass 2, 3    pass 4, 5    ...   each pass is an epoch of the run

A script may go over its loader more than once for a value: it looks at a batch before its loop, or
it has two loops. A run goes on in the middle of a pass, so the script begins at the position that
the pass belongs to. Passes of that position that were made already yield nothing there, and who
only looked looks again. This module must not know sessions, loaders or processes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .fields import count, integer

FAR = 1 << 40
"""Batches of a pass whose end nobody knows before it is there."""


def is_far(end: int) -> bool:
    """Whether a pass ends where a stream does."""
    return end >= FAR


def stream_place(saved: Any) -> tuple[int, int, str]:
    """Out of JSON: a pass, -1 for none, the number that its state stands before, and that state.

    None, as runs from before there were streams have it, is that of no pass. TypeError or
    ValueError: it is none.
    """
    if saved is None or saved == {}:
        return -1, 0, ""
    if not isinstance(saved, dict) or not isinstance(state := saved.get("state"), str):
        raise TypeError(f"{saved!r:.50} is no place in a stream")
    return integer(saved.get("epoch")), count(saved.get("number")), state


class ScriptPlace(NamedTuple):
    """Where a script is.

    Attributes:
        position: index of the value of ``pace.epochs`` that it is at, counted on over several
            loops; -1: at none yet.
        began: the first pass of that position.
        before: how many passes were made before the first one.
        looks: those of them, and of this position, that did nothing with their batches.
    """

    position: int = -1
    began: int = 0
    before: int = 0
    looks: tuple[int, ...] = ()

    @classmethod
    def read(cls, values: Sequence[Any]) -> "ScriptPlace":
        """Out of JSON. TypeError or ValueError: it is none."""
        position, began, before, looks = values
        return cls(integer(position), count(began), count(before), tuple(map(count, looks)))

    def after(self, epoch: int, passes_each: int) -> "ScriptPlace":
        """Where the script will probably be when pass ``epoch`` comes, which has not begun.

        Args:
            passes_each: how many passes it made for the value before; 0: nobody knows.
        """
        if self.position < 0 or epoch - self.began < max(1, passes_each):
            return self
        return ScriptPlace(self.position + 1, epoch, self.before, self._looks_before())

    def with_look(self, number: int) -> "ScriptPlace":
        """The same, and pass ``number`` did nothing with its batches."""
        if number in self.looks:
            return self
        return self._replace(looks=(*self.looks, number))

    def _looks_before(self) -> tuple[int, ...]:
        return tuple(one for one in self.looks if one < self.before)


START = ScriptPlace()


@dataclass(slots=True)
class Passes:
    """The passes of one script.

    Args:
        first: the first one that is made here: those before it lie behind.
        place: where the script is at that one.
    """

    first: int = 0
    place: ScriptPlace = START
    next: int = field(init=False)
    """The number of the pass that comes."""
    _goes_on: bool = field(init=False)
    """Whether it is still to come to the position at which it goes on."""

    def __post_init__(self) -> None:
        self._goes_on = self.place.position >= 0
        self.next = 0 if self._goes_on else self.first

    @property
    def is_before(self) -> bool:
        """Whether the script is still to come to where the run goes on."""
        return self._goes_on

    @property
    def first_position(self) -> int:
        """Where ``pace.epochs`` begins."""
        return self.place.position if self._goes_on else 0

    def arrive(self, position: int) -> None:
        """The script is at this value of ``pace.epochs``."""
        place = self.place
        if self._goes_on:
            self._goes_on, self.next = False, place.began
        elif place.position < 0:
            self.place = ScriptPlace(position, self.next, self.next, place.looks)
        else:
            self.place = ScriptPlace(position, self.next, place.before, place._looks_before())

    @property
    def num_trained(self) -> int:
        """Passes until now, without those that did nothing with their batches."""
        return self.next - sum(one < self.next for one in self.place.looks)

    def take(self) -> int:
        """The number of the pass that begins."""
        self.next += 1
        return self.next - 1

    def is_behind(self, number: int) -> bool:
        return number < self.first

    def looked(self, number: int) -> None:
        """Nothing was done with any batch of this pass."""
        self.place = self.place.with_look(number)

    def was_look(self, number: int) -> bool:
        return number in self.place.looks
