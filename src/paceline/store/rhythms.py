"""What all members see of each prepared scheduler: four numbers in the run's words.

Which rhythm it has, how many steps it has taken, with which argument the last one, and how many at
the end of the last epoch. This module must not know what a rhythm means, nor schedulers.
"""

from .control import ARGUMENTS, COUNTS, MOST_SCHEDULES, RHYTHMS, Control


class RhythmWords:
    """The words of the scheduler of this number, below ``MOST_SCHEDULES``.

    Members that write one of them at the same time write the same value.
    """

    def __init__(self, control: Control, number: int) -> None:
        self._control = control
        self._rhythm = RHYTHMS + number
        self._count = COUNTS + number
        self._end = COUNTS + MOST_SCHEDULES + number
        self._argument = ARGUMENTS + number

    @property
    def rhythm(self) -> int:
        return self._control[self._rhythm]

    @rhythm.setter
    def rhythm(self, value: int) -> None:
        self._control[self._rhythm] = value

    @property
    def count(self) -> int:
        """Steps taken in the loop by now."""
        return self._control[self._count]

    @count.setter
    def count(self, value: int) -> None:
        self._control[self._count] = value

    @property
    def end(self) -> int:
        """The same, when the last epoch ended."""
        return self._control[self._end]

    @end.setter
    def end(self, value: int) -> None:
        self._control[self._end] = value

    @property
    def argument(self) -> float:
        """Of the last step that was counted; written before it is."""
        return self._control.double(self._argument)

    @argument.setter
    def argument(self, value: float) -> None:
        self._control.set_double(self._argument, value)
