"""Which pass over the loader comes next, and which passes a resumed script skips.

    pace.epochs     value 0      value 1      value 2      ...   the position
    loader          pass 0, 1    pass 2, 3    pass 4, 5    ...   each pass is an epoch of the run

A script may go over its loader more than once for a value: it looks at a batch before its loop, or
it has two loops. A run is resumed in the middle of a pass, so the script begins at the position of
that pass. Passes of the position that were made before yield nothing then, and a pass that
only looked at batches looks again.

A script may also resume from a file of its own, and give ``pace.epochs`` only what is left:

    before      value 0   value 1   value 2   ...             values   0, 1, 2, ...
    now                             value 2   ...                      2, ...

So the value itself is saved, and which loop gave it, not only its position. A script that
counts its epochs itself, ``for epoch in range(10)``, has no position: passes are numbered on, its
count restarts, and training is refused there. This module must not know loaders or processes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .errors import ConfigError
from .fields import count, integer

FAR = 1 << 40
"""Batches of a pass whose end is not known in advance."""


def is_far(end: int) -> bool:
    """Whether a pass ends where a stream does."""
    return end >= FAR


def stream_place(saved: Any) -> tuple[int, int, str]:
    """Read from JSON a pass (-1: none), the number after its state, and that state.

    None, from runs of before there were streams, is no pass. TypeError or ValueError: it is not a
    place in a stream.
    """
    if saved is None or saved == {}:
        return -1, 0, ""
    if not isinstance(saved, dict) or not isinstance(state := saved.get("state"), str):
        raise TypeError(f"{saved!r:.50} is no place in a stream")
    return integer(saved.get("epoch")), count(saved.get("number")), state


class ScriptPlace(NamedTuple):
    """Where a script is.

    Attributes:
        position: index of the current value of ``pace.epochs``, counted over several loops; -1:
            none yet.
        began: the first pass of that position.
        before: passes made before the first position.
        looks: those of them, and of this position, that did nothing with their batches.
        loop: which of the loops over ``pace.epochs`` it is in, from 0.
        first, value: the first and the newest value of that loop; None: none yet, or a run from
            before this was saved.
        ahead: positions since that of ``value``.
    """

    position: int = -1
    began: int = 0
    before: int = 0
    looks: tuple[int, ...] = ()
    loop: int = 0
    first: int | None = None
    value: int | None = None
    ahead: int = 0

    @classmethod
    def read(cls, values: Sequence[Any]) -> "ScriptPlace":
        """Read from JSON. TypeError or ValueError: it is not a place."""
        position, began, before, looks, *rest = values
        loop, first, value, ahead = rest or (0, None, None, 0)
        return cls(
            integer(position), count(began), count(before), tuple(map(count, looks)), count(loop),
            first if first is None else integer(first), value if value is None else integer(value),
            count(ahead),
        )  # fmt: skip

    def after(self, epoch: int, passes_each: int) -> "ScriptPlace":
        """The script's probable place at pass ``epoch``, which has not begun.

        Args:
            passes_each: passes that it made for the value before; 0: unknown.
        """
        if self.position < 0 or epoch - self.began < max(1, passes_each):
            return self
        return self.at(self.position + 1, epoch)

    def at(self, position: int, began: int) -> "ScriptPlace":
        """The place at a later position, which begins with this pass and has no value yet."""
        ahead = 0 if self.value is None else self.ahead + position - self.position
        return self._replace(
            position=position, began=began, looks=self._looks_before(), ahead=ahead
        )

    def with_look(self, number: int) -> "ScriptPlace":
        """This place, with pass ``number`` noted as one that did nothing with its batches."""
        if number in self.looks:
            return self
        return self._replace(looks=(*self.looks, number))

    def _looks_before(self) -> tuple[int, ...]:
        return tuple(number for number in self.looks if number < self.before)


START = ScriptPlace()


@dataclass(slots=True)
class Passes:
    """The passes of one script.

    Args:
        first: the first pass that is made here; earlier ones were made before.
        place: where the script is at that pass.
    """

    first: int = 0
    place: ScriptPlace = START
    next: int = field(init=False)
    """The number of the next pass."""
    begin: int = field(init=False, default=0)
    """The position of the first value of the current loop."""
    num_counted: int = field(init=False)
    """Earlier passes that were trained in without a position: by the script's own count."""
    _goes_on: bool = field(init=False)
    """Whether the script has not reached the position at which it resumes."""
    _loop: int = field(init=False, default=-1)
    _num_positions: int = field(init=False, default=0)
    """Positions of the loops over ``pace.epochs`` that have begun."""
    _first: int | None = field(init=False, default=None)
    """The first value that the current loop has given in the run."""

    def __post_init__(self) -> None:
        self._goes_on = self.place.position >= 0
        self.next = 0 if self._goes_on else self.first
        self.num_counted = 0 if self._goes_on else self.num_trained

    @property
    def is_before(self) -> bool:
        """Whether the script has not reached the place where the run resumes."""
        return self._goes_on

    @property
    def first_position(self) -> int:
        """Where ``pace.epochs`` begins."""
        return self.place.position if self._goes_on else 0

    @property
    def has_missed(self) -> bool:
        """Whether none of the loops so far was the one in which the run resumes."""
        place = self.place
        return self._goes_on and place.value is not None and -1 < self._loop < place.loop

    def enter(self, values: Sequence[int]) -> int | None:
        """Start a loop over these values.

        Returns:
            The index of the first value to give; None: the run resumes in a later loop, or none is
            left.

        Raises:
            ConfigError: the run resumes at a value that is not among them.
        """
        self._loop += 1
        place, begin = self.place, self._num_positions
        self._first = values[0] if values else None
        index = max(0, self.first_position - begin)
        if self.place.position < 0:  # it counted its passes itself until now
            index = self.num_counted
        if self._goes_on and place.value is not None:
            if self._loop < place.loop:
                self._num_positions += len(values)
                return None
            index = 0 if self._loop > place.loop else self._find(values, index)
            begin = place.position - index
        if self._loop == place.loop and place.first is not None:
            self._first = place.first
        self.begin, self._num_positions = begin, begin + len(values)
        return index if index <= len(values) else None

    def _find(self, values: Sequence[int], index: int) -> int:
        """The index at which the run resumes, in values that may begin later than before."""
        place = self.place
        known = index - place.ahead
        if 0 <= known < len(values) and values[known] == place.value:
            return index
        if place.value in values:
            return values.index(place.value) + place.ahead
        if values and values[0] == place.first:  # fewer values than before
            return index
        if place.ahead:  # all passes of that value are done, and the values begin after it
            return place.ahead - 1
        raise not_among(place.value, values)

    def own_count(self, epochs: int | None, *, knows: bool) -> ConfigError | None:
        """The error of training in a pass of the script's own count; None: it may train.

        Args:
            epochs: the number of epochs that the command line asks for.
            knows: whether the script may know where it resumes: by versions, up to the run's end,
                or by what it keeps.
        """
        if self.place.position >= 0:
            return None
        remedy = "for epoch in pace.epochs(range(10)) instead of for epoch in range(10)"
        if epochs is not None and self.num_trained > 1:  # one may be a warm-up before its epochs
            return ConfigError(
                f"--epochs {epochs}: this script counts its epochs itself, and would not end "
                f"there: {remedy}; or leave out --epochs"
            )
        if self.num_counted and not knows:
            return ConfigError(
                f"the run resumes at pass {self.first + 1} over the loader, but this script counts "
                f"its epochs itself and would begin with the first again: {remedy}, "
                "and for a count of updates pace.updates(n, loader)"
            )
        return None

    def arrive(self, position: int, value: int | None = None) -> None:
        """Move to this position of ``pace.epochs``, with this value; None: past all values."""
        place = self.place
        if self._goes_on:
            self._goes_on, self.next = False, place.began
        elif place.position < 0:
            self.place = place._replace(position=position, began=self.next, before=self.next)
        else:
            self.place = place.at(position, self.next)
        if value is not None:
            self.place = self.place._replace(
                loop=self._loop, first=self._first, value=value, ahead=0
            )

    def end(self) -> None:
        """The script is over: what it did for its last value is done, if it made a pass for it."""
        if self.place.position >= 0 and self.next > self.place.began and not self._goes_on:
            self.arrive(self.place.position + 1)

    @property
    def num_trained(self) -> int:
        """Passes so far, without those that did nothing with their batches."""
        return self.next - sum(number < self.next for number in self.place.looks)

    def take(self) -> int:
        """Begin a pass; returns its number."""
        self.next += 1
        return self.next - 1

    def is_behind(self, number: int) -> bool:
        return number < self.first

    def looked(self, number: int) -> None:
        """Note that nothing was done with any batch of this pass."""
        self.place = self.place.with_look(number)

    def was_look(self, number: int) -> bool:
        return number in self.place.looks


def not_among(value: int | None, values: Sequence[int] | None) -> ConfigError:
    """The error for a script that does not reach the place where its run resumes.

    Args:
        values: of its loop; None: there was no such loop.
    """
    values_text = "the script reached no such loop"
    if values is not None:
        values_text = "pace.epochs() was given no values"
        if values:
            values_text = f"pace.epochs() was given {values[0]} to {values[-1]}"
    return ConfigError(
        f"the run resumes at {value} of pace.epochs(), where its checkpoint was taken, but "
        f"{values_text}: the script begins later, by a file of its own (a start_epoch); use only "
        "one of them, --resume or that file"
    )
