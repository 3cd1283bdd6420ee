"""When a checkpoint is due, as ``--checkpoint-every`` says, and which folder it goes to.

    after seconds, updates or epochs -> due
    any checkpoint      -> runs/NAME/checkpoints, recreated if it was deleted
    the last checkpoint -> the same, with space reserved; else a temporary folder, with the trace

The last checkpoint cannot be retried later, so it is tried whatever failed before. This module must
not know clocks (times are arguments), nor members.
"""

import math
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import ConfigError
from ..trace import FILE_NAME, Trace
from .folder import FOLDER, CheckpointFolder, number_of

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|min|h|updates?|epochs?)\s*")
_REST = 10.0
"""Minimum time between two checkpoints by the clock, as a multiple of the last one's write time: a
disk that is slow for the model takes a tenth of the run's time, not all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """An interval of ``value`` times ``unit``; ``never``: not even at the end of the run."""

    value: float
    unit: Literal["s", "updates", "epochs", "never"]

    @property
    def is_never(self) -> bool:
        return self.unit == "never"


def parse_every(text: str) -> Every:
    """Parse ``30s``, ``5min``, ``1h``, ``500 updates``, ``1 epoch`` or ``never``.

    Raises:
        ConfigError: the text has none of these forms, or the number is 0 or too large.

    Example:
        >>> parse_every("5min").value
        300.0
        >>> parse_every("2 epochs").unit
        'epochs'
    """
    if text == "never":
        return Every(value=0.0, unit="never")
    match = _FORM.fullmatch(text)
    if match is None or not 0.0 < float(match[1]) < math.inf:
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
        every: the interval.
        now_s, version, epoch: where the run begins or is resumed.
    """

    def __init__(self, every: Every, now_s: float, version: int, epoch: int) -> None:
        self._every = every
        self._took_s = 0.0
        self.taken(now_s, version, epoch)

    def taken(self, now_s: float, version: int, epoch: int) -> None:
        """Note that a checkpoint was taken here."""
        self._last_s, self._last_version, self._last_epoch = now_s, version, epoch

    def wrote(self, took_s: float) -> None:
        """Note how long the last write took, in the background or while the run waited."""
        self._took_s = took_s

    def by_step(self, now_s: float, version: int) -> bool:
        """Return whether a checkpoint is due at the next step boundary."""
        if self._every.unit == "s":
            pause_s = max(self._every.value, _REST * self._took_s)
            return now_s - self._last_s >= pause_s and version > self._last_version
        return self._every.unit == "updates" and version - self._last_version >= self._every.value

    def by_epoch(self, now_s: float, version: int, epoch: int) -> bool:
        """Return whether a checkpoint is due before ``epoch`` begins."""
        if self._every.unit == "epochs":
            return epoch - self._last_epoch >= self._every.value
        return self.by_step(now_s, version)


class CheckpointPlaces:
    """The folders of one run's checkpoints.

    Args:
        trace: the run's trace, in the run's folder.
        keep: number of checkpoints to keep.

    Attributes:
        folder: where the next checkpoint goes.
        lost: why the last one is not in the run's folder; empty: it is, or there is none yet.
    """

    def __init__(self, trace: Trace, keep: int) -> None:
        self._trace = trace
        self._keep = keep
        self._own = CheckpointFolder(trace.path.parent / FOLDER, keep, trace.within)
        self.folder = self._own
        self._last_number = 0
        self._elsewhere: Path | None = None
        """The folder of the last checkpoint, if it could not go into the run's own."""
        self.lost = ""

    def begin(self) -> Path:
        """Return an empty folder for the next checkpoint. OSError: it cannot be created."""
        return self._begin_in(self._find_own(), 0)

    def begin_last(self, num_bytes: int) -> Path | None:
        """Return an empty folder with ``num_bytes`` free for the last checkpoint, or None."""
        self.lost = ""
        try:
            return self._begin_in(self._find_own(), num_bytes)
        except OSError as error:
            self.lost = error.strerror or str(error)
        try:
            self._elsewhere = Path(tempfile.mkdtemp(prefix=f"{self._trace.path.parent.name}-"))
            self.folder = CheckpointFolder(self._elsewhere / FOLDER, self._keep)
            return self._begin_in(self.folder, num_bytes)
        except OSError:
            self.leave_elsewhere()
            return None

    def _find_own(self) -> CheckpointFolder:
        self._trace.mark()
        self._own.within = self._trace.within
        self.folder = self._own
        return self._own

    def _begin_in(self, folder: CheckpointFolder, num_bytes: int) -> Path:
        aside = folder.begin(self._last_number + 1)
        self._last_number = number_of(aside)
        try:
            if num_bytes:
                folder.reserve(self._last_number, num_bytes)
        except OSError:
            folder.drop(aside)
            raise
        return aside

    def keep_trace(self) -> int:
        """Save the trace so far beside the next checkpoint; return its bytes. OSError: failed."""
        if self._elsewhere is None:
            return self._trace.mark()
        return self._trace.copy(self._elsewhere / FILE_NAME)

    def leave_elsewhere(self) -> None:
        """Remove the temporary folder: the last checkpoint could not be written there either."""
        if self._elsewhere is not None:
            shutil.rmtree(self._elsewhere, ignore_errors=True)
            self._elsewhere = None

    @property
    def unsaved(self) -> str:
        """Why the end of the run is not in its folder, and where it is; empty: it is there."""
        if not self.lost:
            return ""
        text = f"the end of the run could not be written to {self._trace.path.parent}: {self.lost}"
        if self._elsewhere is not None:
            elsewhere = self._elsewhere
            return (
                f"{text}; it is in {elsewhere} instead; to continue from it: --resume {elsewhere}"
            )
        own = CheckpointFolder(self._own.folder)
        state = "has none" if own.is_empty else "has an older one"
        return f"{text}; it is in no checkpoint; {own.folder} {state}"
