"""The loss scale of mixed precision as data of a version: one for all members.

    GradScaler of a member --offer--> its line      slot of even versions | slot of odd versions
                                         \\-- first --> v: 1024, 2 whole  --bring-->  v + 1: 512, 0

Whoever writes version v + 1 brings the scale of v forward by the rule of ``torch.amp.GradScaler``:
it falls with an overflow and grows after so many updates without one. It reads one slot and writes
the other, so who does the work of a dead member again comes to the same. An overflow that was
computed before the scale last fell says nothing about the scale that stands: it is not counted.
This module must not know who overflowed, nor the scaler objects.
"""

from dataclasses import astuple, dataclass, replace

from .control import HAS_SCALE, SCALE, Control

NO_OVERFLOW = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The scale at one version, and the rule by which it changes.

    Attributes:
        value: what losses are multiplied with; more than 0.
        growth_tracker: updates without an overflow since it last changed.
        growth_interval: so many of them make it grow.
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
        """The scale of ``version``, the next one.

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
        """The scale that this seat's member begins with; it counts where there is none yet."""
        self._write(self._control.offers[seat], scale)
        self._control[HAS_SCALE] = 1

    def begin(self, version: int, scale: LossScale) -> None:
        """The run goes on at ``version`` with this scale."""
        self._write(SCALE[version & 1], scale)
        self._control[HAS_SCALE] = 1

    def of(self, version: int) -> LossScale | None:
        """The scale of one of the two newest versions; None: nobody scales."""
        return self._read(SCALE[version & 1]) if self._control[HAS_SCALE] else None

    def bring(self, version: int, *, is_update: bool, overflow_version: int) -> LossScale | None:
        """Write the scale of ``version`` from that of the version before."""
        if not self._control[HAS_SCALE]:
            return None
        places = (SCALE[~version & 1], *self._control.offers)
        scale = next(one for place in places if (one := self._read(place)) is not None)
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
        """The value last: without it the rest is not there."""
        for i, number in reversed(list(enumerate(astuple(scale)))):
            self._control.set_double(place + i, number)
