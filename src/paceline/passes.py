"""Which pass over the loader comes next, and which ones a script that goes on has behind it.

    pace.epochs     value 0      value 1      value 2      ...   the position
    loader          pass 0, 1    pass 2, 3    pass 4, 5    ...   each pass is an epoch of the run

A script may go over its loader more than once for a value: it looks at a batch before its loop, or
it has two loops. A run goes on in the middle of a pass, so the script begins at the position that
the pass belongs to. Passes of that position that were made already yield nothing there, and who
only looked looks again.

A script may go on from a file of its own as well, and give ``pace.epochs`` only what is left:

    before      value 0   value 1   value 2   ...             values   0, 1, 2, ...
    now                             value 2   ...                      2, ...

So the value itself is remembered, and which loop gave it, not only its position. A script that
counts by itself, ``for epoch in range(10)``, is at no position at all: passes are numbered on, its
count begins anew, and it is refused there. This module must not know loaders or processes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .errors import ConfigError
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
        loop: which of the loops over ``pace.epochs`` that is in, from 0.
        first, value: what that loop has given first and last; None: nothing yet, or in a run from
            before this was kept.
        ahead: how many positions this is behind that of ``value``.
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
        """Out of JSON. TypeError or ValueError: it is none."""
        position, began, before, looks, *rest = values
        loop, first, value, ahead = rest or (0, None, None, 0)
        return cls(
            integer(position), count(began), count(before), tuple(map(count, looks)), count(loop),
            first if first is None else integer(first), value if value is None else integer(value),
            count(ahead),
        )  # fmt: skip

    def after(self, epoch: int, passes_each: int) -> "ScriptPlace":
        """Where the script will probably be when pass ``epoch`` comes, which has not begun.

        Args:
            passes_each: how many passes it made for the value before; 0: nobody knows.
        """
        if self.position < 0 or epoch - self.began < max(1, passes_each):
            return self
        return self.at(self.position + 1, epoch)

    def at(self, position: int, began: int) -> "ScriptPlace":
        """A later position, which begins with this pass; nobody knows its value yet."""
        ahead = 0 if self.value is None else self.ahead + position - self.position
        return self._replace(
            position=position, began=began, looks=self._looks_before(), ahead=ahead
        )

    def with_look(self, number: int) -> "ScriptPlace":
        """This place, and pass ``number`` did nothing with its batches."""
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
    begin: int = field(init=False, default=0)
    """The position of the first value of the loop that is under way."""
    num_counted: int = field(init=False)
    """Passes that lie behind and were trained in without a position: by the script's own count."""
    _goes_on: bool = field(init=False)
    """Whether it is still to come to the position at which it goes on."""
    _loop: int = field(init=False, default=-1)
    _num_positions: int = field(init=False, default=0)
    """Of the loops over ``pace.epochs`` that have begun."""
    _first: int | None = field(init=False, default=None)
    """What the loop under way has given first in the run."""

    def __post_init__(self) -> None:
        self._goes_on = self.place.position >= 0
        self.next = 0 if self._goes_on else self.first
        self.num_counted = 0 if self._goes_on else self.num_trained

    @property
    def is_before(self) -> bool:
        """Whether the script is still to come to where the run goes on."""
        return self._goes_on

    @property
    def first_position(self) -> int:
        """Where ``pace.epochs`` begins."""
        return self.place.position if self._goes_on else 0

    @property
    def has_missed(self) -> bool:
        """Whether of the loops that have begun none was the one in which the run goes on."""
        place = self.place
        return self._goes_on and place.value is not None and -1 < self._loop < place.loop

    def enter(self, values: Sequence[int]) -> int | None:
        """A loop over these values begins.

        Returns:
            The index of the first that is to come; None: a later loop is what goes on, or nothing.

        Raises:
            ConfigError: the run goes on with a value that is none of them.
        """
        self._loop += 1
        place, begin = self.place, self._num_positions
        self._first = values[0] if values else None
        index = max(0, self.first_position - begin)
        if self.place.position < 0:  # it had a count of its own until now, one for each pass
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
        """Where the run goes on in the values of its loop, which may begin later than before."""
        place = self.place
        known = index - place.ahead
        if 0 <= known < len(values) and values[known] == place.value:
            return index
        if place.value in values:
            return values.index(place.value) + place.ahead
        if values and values[0] == place.first:  # fewer were asked for than there were
            return index
        if place.ahead:  # all of that one is done, and they begin behind it
            return place.ahead - 1
        raise not_among(place.value, values)

    def own_count(self, epochs: int | None, *, knows: bool) -> ConfigError | None:
        """Why the script must not train in a pass of its own count; None: it may.

        Args:
            epochs: how many were asked for beside the script.
            knows: whether it may count otherwise than from the first pass on: by versions, up to
                the run's end, or by what it keeps.
        """
        if self.place.position >= 0:
            return None
        remedy = "for epoch in pace.epochs(range(10)), where it says for epoch in range(10)"
        if epochs is not None and self.num_trained > 1:  # one may be a warm-up before its epochs
            return ConfigError(
                f"--epochs {epochs}: this script counts its epochs by itself, and would not end "
                f"there: {remedy}; or leave --epochs out"
            )
        if self.num_counted and not knows:
            return ConfigError(
                f"the run goes on with pass {self.first + 1} over the loader, and this script "
                f"counts its epochs by itself, so it would begin with the first again: {remedy}, "
                "and for a count of updates pace.updates(n, loader)"
            )
        return None

    def arrive(self, position: int, value: int | None = None) -> None:
        """The script is at this position of ``pace.epochs``, with this value; None: behind all."""
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


def not_among(value: int | None, values: Sequence[int] | None) -> ConfigError:
    """The error for a script that does not come to where its run goes on.

    Args:
        values: of its loop; None: there was no such loop.
    """
    given = "the script came to no such loop"
    if values is not None:
        given = "pace.epochs() was given no values"
        if values:
            given = f"pace.epochs() was given {values[0]} to {values[-1]}"
    return ConfigError(
        f"the run goes on with {value} of pace.epochs(), where its checkpoint was taken, and "
        f"{given}: the script begins later, by a file of its own (a start_epoch); leave one of "
        "them out, --resume or that file"
    )
