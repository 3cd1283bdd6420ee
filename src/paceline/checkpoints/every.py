"""When a checkpoint is due: after seconds, updates or epochs, as ``--checkpoint-every`` says.

This module must not know clocks: times are arguments.
"""

import re
from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|min|h|updates?|epochs?)\s*")
_REST = 10.0
"""At least so many times as long as the last one took to write lies between two by the clock: a
disk that is slow for the model costs a tenth of its time, not all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """How often: ``value`` of ``unit``; ``never``: only when the run stops or ends is none, too."""

    value: float
    unit: Literal["s", "updates", "epochs", "never"]

    @property
    def is_never(self) -> bool:
        return self.unit == "never"


def parse_every(text: str) -> Every:
    """``30s``, ``5min``, ``1h``, ``500 updates``, ``1 epoch`` or ``never``.

    Raises:
        ConfigError: it is none of these, or not more than 0.

    Example:
        >>> parse_every("5min").value
        300.0
        >>> parse_every("2 epochs").unit
        'epochs'
    """
    if text == "never":
        return Every(value=0.0, unit="never")
    match = _FORM.fullmatch(text)
    if match is None or float(match[1]) <= 0:
        raise ConfigError(
            f"checkpoint_every must be like 30s, 5min, 500 updates, 1 epoch or never, got {text!r}"
        )
    value, unit = float(match[1]), match[2]
    if unit in _SECONDS:
        return Every(value=value * _SECONDS[unit], unit="s")
    if value != int(value):
        raise ConfigError(f"checkpoint_every needs a whole number of {unit}, got {text!r}")
    return Every(value=value, unit="updates" if unit.startswith("update") else "epochs")


class Due:
    """Whether a checkpoint is due.

    Args:
        every: how often.
        now_s, version, epoch: where the run begins, or goes on.
    """

    def __init__(self, every: Every, now_s: float, version: int, epoch: int) -> None:
        self._every = every
        self._took_s = 0.0
        self.taken(now_s, version, epoch)

    def taken(self, now_s: float, version: int, epoch: int) -> None:
        """One was taken here."""
        self._last_s, self._last_version, self._last_epoch = now_s, version, epoch

    def wrote(self, took_s: float) -> None:
        """It took so long to write, beside the run."""
        self._took_s = took_s

    def by_step(self, now_s: float, version: int) -> bool:
        """Whether one is due at the next step border."""
        if self._every.unit == "s":
            pause_s = max(self._every.value, _REST * self._took_s)
            return now_s - self._last_s >= pause_s and version > self._last_version
        return self._every.unit == "updates" and version - self._last_version >= self._every.value

    def by_epoch(self, now_s: float, version: int, epoch: int) -> bool:
        """Whether one is due before ``epoch`` begins."""
        if self._every.unit == "epochs":
            return epoch - self._last_epoch >= self._every.value
        return self.by_step(now_s, version)
