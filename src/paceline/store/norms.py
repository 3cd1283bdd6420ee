"""The norms of the averaged gradients that were clipped, of the newest versions.

Who executes an update notes its norm before the version stands; who pushed into it asks for it by
that version. Others may have made versions meanwhile, so the last few are kept, each with its
number, which is written last. This module must not know what clips.
"""

import math

from .control import NORMS, NORMS_KEPT, Control

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
