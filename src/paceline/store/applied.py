"""What is known of the newest versions beside their parameters: words that go from one to the next.

    Applied       how many updates changed the parameters: what a schedule counts
    Norms         the norms of the averaged gradients that were clipped
    RhythmWords   of each prepared scheduler: its rhythm, its steps, the argument of the last one

An update that is skipped, because a gradient in it was not finite, makes a version all the same.
Who writes version v + 1 reads the count of v and writes that of v + 1, each in a word of its own,
so who does it again for a dead member, or beside others, comes to the same. Others may have made
versions before somebody asks for a norm, so the last few are kept, each with its number, which is
written last. This module must not know why an update was skipped, what clips, nor schedulers.
"""

import math

from .control import ARGUMENTS, COUNTS, MOST_SCHEDULES, NORMS, NORMS_KEPT, RHYTHMS, SKIPPED, Control


class Applied:
    """The counts of the two newest versions, in the run's words."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def of(self, version: int) -> int:
        """Updates until ``version`` that changed something; for an older version, never more."""
        return version - self._control[SKIPPED[version & 1]]

    def bring(self, version: int, *, is_update: bool) -> None:
        """Note, before ``version`` stands, whether it differs from the one before it."""
        skipped = self._control[SKIPPED[~version & 1]]
        self._control[SKIPPED[version & 1]] = skipped + (not is_update)


_NONE = -1.0


class Norms:
    """The norms of one run, in its words: pairs of a version and a norm."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def note(self, version: int, norm: float) -> None:
        """The gradient of the update that makes ``version`` had this norm."""
        control, place = self._control, _place(version)
        control.set_double(place, _NONE)
        control.set_double(place + 1, norm)
        control.set_double(place, float(version))

    def of(self, version: int) -> float:
        """The norm before clipping; nan where it was not clipped, is not made yet or is too old."""
        control, place = self._control, _place(version)
        if version <= 0 or control.double(place) != version:
            return math.nan
        norm = control.double(place + 1)
        return norm if control.double(place) == version else math.nan


def _place(version: int) -> int:
    return NORMS + 2 * (version % NORMS_KEPT)


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
