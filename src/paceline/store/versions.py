"""Counts, loss scales and norms of versions, in words that each update brings forward.

    Applied       how many updates changed the parameters: what a schedule counts
    LossScales    the loss scale of mixed precision, one for all members
    Norms         the norms of the averaged gradients that were clipped
    RhythmWords   of each prepared scheduler: its rhythm, its steps, the argument of the last one

An update that is skipped, because a gradient was not finite, makes a version, too. The executor of
version v + 1 reads the words of v and writes those of v + 1, in separate places, so repeating this
for a dead member, or in several members, gives the same:

    GradScaler of a member --offer--> its line      slot of even versions | slot of odd versions
                                         \\-- first --> v: 1024, 2 whole  --bring-->  v + 1: 512, 0

A norm may be read some versions later, so the last few are kept, each with its version, which is
written last. This module must not know why an update was skipped, who overflowed, what clips, nor
schedulers and scaler objects.
"""

import math
from dataclasses import astuple, dataclass, replace

from .control import (
    ARGUMENTS,
    COUNTS,
    HAS_SCALE,
    MOST_SCHEDULES,
    NORMS,
    NORMS_KEPT,
    RHYTHMS,
    SCALE,
    SKIPPED,
    Control,
)

NO_OVERFLOW = -1


class Applied:
    """The counts of the two newest versions, in the run's words."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def of(self, version: int) -> int:
        """Updates until ``version`` that changed something; for older versions a lower bound."""
        return version - self._control[SKIPPED[version & 1]]

    def bring(self, version: int, *, is_update: bool) -> None:
        """Note, before ``version`` is published, whether it differs from the one before."""
        skipped = self._control[SKIPPED[~version & 1]]
        self._control[SKIPPED[version & 1]] = skipped + (not is_update)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The scale at one version, and the rule by which it changes: that of ``torch.amp.GradScaler``.

    It falls with an overflow and grows after ``growth_interval`` updates without one. An overflow
    that was computed before the scale last fell is not counted.

    Attributes:
        value: the factor of losses, > 0.
        growth_tracker: updates without an overflow since it last changed.
        growth_interval: updates without an overflow until it grows.
        fell_at: the version at which it last fell.
    """

    value: float
    growth_tracker: int
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    fell_at: int = 0

    @property
    def rule(self) -> tuple[float, float, int]:
        return self.growth_factor, self.backoff_factor, self.growth_interval

    def after(self, version: int, *, is_update: bool, overflow_version: int) -> "LossScale":
        """The scale of the next version, ``version``.

        Args:
            is_update: whether the parameters changed.
            overflow_version: the newest version from which a push was computed that overflowed,
                or ``NO_OVERFLOW``.
        """
        import torch  # here: the launcher reads no scale and starts without torch

        has_overflowed = overflow_version >= self.fell_at
        if not is_update and not has_overflowed:
            return self
        value, tracker = torch.tensor(self.value), torch.tensor(self.growth_tracker).int()
        torch._amp_update_scale_(value, tracker, torch.tensor(float(has_overflowed)), *self.rule)
        fell_at = version if has_overflowed else self.fell_at
        return replace(self, value=float(value), growth_tracker=int(tracker), fell_at=fell_at)


class LossScales:
    """The scales of the two newest versions, in the run's words."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def offer(self, seat: int, scale: LossScale) -> None:
        """Offer the initial scale of this seat's member; used if there is none yet."""
        self._write(self._control.offers[seat], scale)
        self._control[HAS_SCALE] = 1

    def begin(self, version: int, scale: LossScale) -> None:
        """Set the scale with which the run goes on at ``version``."""
        self._write(SCALE[version & 1], scale)
        self._control[HAS_SCALE] = 1

    def of(self, version: int) -> LossScale | None:
        """The scale of one of the two newest versions; None: no member scales."""
        return self._read(SCALE[version & 1]) if self._control[HAS_SCALE] else None

    def standing(self, version: int) -> LossScale | None:
        """The scale of a version; if no update has written one, the first that was offered."""
        if not self._control[HAS_SCALE]:
            return None
        places = (SCALE[version & 1], *self._control.offers)
        return next((scale for place in places if (scale := self._read(place)) is not None), None)

    def bring(self, version: int, *, is_update: bool, overflow_version: int) -> LossScale | None:
        """Compute and write the scale of ``version`` from that of the version before."""
        if not self._control[HAS_SCALE]:
            return None
        scale = self.standing(version - 1)
        assert scale is not None
        scale = scale.after(version, is_update=is_update, overflow_version=overflow_version)
        self._write(SCALE[version & 1], scale)
        return scale

    def _read(self, place: int) -> LossScale | None:
        value, tracker, growth, backoff, interval, fell_at = (
            self._control.double(place + i) for i in range(6)
        )
        if value == 0.0:
            return None
        return LossScale(
            value=value, growth_tracker=int(tracker), growth_factor=growth, backoff_factor=backoff,
            growth_interval=int(interval), fell_at=int(fell_at),
        )  # fmt: skip

    def _write(self, place: int, scale: LossScale) -> None:
        """Write the value last: without it the rest is not valid."""
        for i, number in reversed(list(enumerate(astuple(scale)))):
            self._control.set_double(place + i, number)


_NONE = -1.0


class Norms:
    """The norms of one run, in its words: pairs of a version and a norm."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def note(self, version: int, norm: float) -> None:
        """Note the gradient norm of the update to ``version``."""
        control, place = self._control, _place(version)
        control.set_double(place, _NONE)
        control.set_double(place + 1, norm)
        control.set_double(place, float(version))

    def of(self, version: int) -> float:
        """The norm before clipping; nan if not clipped, not made yet, or too old."""
        control, place = self._control, _place(version)
        if version <= 0 or control.double(place) != version:
            return math.nan
        norm = control.double(place + 1)
        return norm if control.double(place) == version else math.nan


def _place(version: int) -> int:
    return NORMS + 2 * (version % NORMS_KEPT)


class _Word:
    """A descriptor: a word of a scheduler as an attribute.

    Args:
        first: the word of scheduler 0.
    """

    def __init__(self, first: int) -> None:
        self._first = first

    def __get__(self, words: "RhythmWords", _: object) -> int:
        return words.control[self._first + words.number]

    def __set__(self, words: "RhythmWords", value: int) -> None:
        words.control[self._first + words.number] = value


class RhythmWords:
    """The words of scheduler ``number``, below ``MOST_SCHEDULES``.

    Members that write a word at the same time write the same value.
    """

    rhythm = _Word(RHYTHMS)
    count = _Word(COUNTS)
    """Steps taken in the loop until now."""
    end = _Word(COUNTS + MOST_SCHEDULES)
    """Steps taken in the loop when the last epoch ended."""

    def __init__(self, control: Control, number: int) -> None:
        self.control, self.number = control, number

    @property
    def argument(self) -> float:
        """The argument of the last counted step; written before the count."""
        return self.control.double(ARGUMENTS + self.number)

    @argument.setter
    def argument(self, value: float) -> None:
        self.control.set_double(ARGUMENTS + self.number, value)
