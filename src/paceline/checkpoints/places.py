"""Where the checkpoints of a run go: its own folder; the last one elsewhere, where that takes none.

    any of them   runs/NAME/checkpoints, which is there again if it was deleted
    the last one  the same, with room kept for it before; else a temporary folder, with the trace

For the last one there is no other time, so it is tried whatever went wrong before. This module must
not know members, or when a checkpoint is due.
"""

import shutil
import tempfile
from pathlib import Path

from ..trace import FILE_NAME, Trace
from .folder import FOLDER, CheckpointFolder, number_of


class CheckpointPlaces:
    """The places of one run's checkpoints.

    Args:
        trace: of the run, in the run's folder.
        keep: how many checkpoints stay.

    Attributes:
        folder: where the next one goes.
        lost: why the last one is not where it should be; empty: it is, or there is none yet.
    """

    def __init__(self, trace: Trace, keep: int) -> None:
        self._trace = trace
        self._keep = keep
        self._own = CheckpointFolder(trace.path.parent / FOLDER, keep, trace.within)
        self.folder = self._own
        self._last_number = 0
        self._elsewhere: Path | None = None
        """The folder for the last one, where the run's own could not take it."""
        self.lost = ""

    def begin(self) -> Path:
        """An empty folder for the next one's files. OSError: there cannot be one."""
        return self._begin_in(self._find_own(), 0)

    def begin_last(self, num_bytes: int) -> Path | None:
        """An empty folder for the last one's files, with room for them; None: there is nowhere."""
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
        """The trace up to now lies beside the next one: its bytes. OSError: it does not."""
        if self._elsewhere is None:
            return self._trace.mark()
        return self._trace.copy(self._elsewhere / FILE_NAME)

    def leave_elsewhere(self) -> None:
        """Nothing came of it there."""
        if self._elsewhere is not None:
            shutil.rmtree(self._elsewhere, ignore_errors=True)
            self._elsewhere = None

    @property
    def unsaved(self) -> str:
        """Why the end of the run is not in its folder, and what there is; empty: it is there."""
        if not self.lost:
            return ""
        text = f"the end of the run could not be written to {self._trace.path.parent}: {self.lost}"
        if self._elsewhere is not None:
            where = self._elsewhere
            return f"{text}; it lies in {where}; what goes on from it: --resume {where}"
        older = CheckpointFolder(self._own.folder)
        has = "has none" if older.is_empty else "has an older one"
        return f"{text}; it is in no checkpoint; {older.folder} {has}"
