"""The outcome of a trial, kept for this model on this machine.

    ~/.cache/paceline/fast/KEY.json      KEY: digest of all that the outcome depends on

The first worker measures while it holds the file's lock; the others of the run wait and read the
outcome, so all of them compute alike. Later runs read it too, with two exceptions: the outcome of a
trial that ran out of time counts for a day, and one that was disturbed by other load counts only
for this run. This module must not know what is measured.
"""

import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from ..errors import ConfigError
from ..speed import Outcome
from ..system.files import OpenFolder, cache_home, read_text

FORMAT = 4
"""Raised when earlier outcomes no longer apply to the candidates."""


_MOST_BYTES = 1 << 20
_PARTIAL_S = 86_400.0
"""How long the outcome of a trial that ran out of time counts."""
_DISTURBED_S = 60.0
"""How long a disturbed outcome counts: for the other workers of that run."""


def key_of(parts: Sequence[object]) -> str:
    """A digest of everything that the outcome depends on."""
    return hashlib.sha256(repr((FORMAT, *parts)).encode()).hexdigest()[:16]


def folder() -> Path:
    """The folder of the outcomes. FileError: the user owns no folder for them."""
    with closing(_open()) as directory:
        return directory.path


def _open() -> OpenFolder:
    """Open that folder, and create it if needed. FileError: for example, another user owns it."""
    cache = cache_home() / "paceline" / "fast"
    scratch = Path(tempfile.gettempdir()) / f"paceline-fast-{os.geteuid()}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if os.access(cache, os.W_OK):
            return OpenFolder.open(cache)
    except OSError:
        pass
    with suppress(OSError):
        scratch.mkdir(mode=0o700)
    return OpenFolder.open(scratch)


def remembered(
    key: str, measure: Callable[[], Outcome], *, is_shared: bool = False
) -> tuple[Outcome, bool]:
    """Read the outcome of ``key``, or measure and keep it.

    A damaged file, or one of another version, is measured again.

    Args:
        is_shared: whether other workers need the same outcome, through the file. A single worker
            goes on if the outcome cannot be kept.

    Returns:
        The outcome, and whether it was read.

    Raises:
        ConfigError: ``is_shared``, and the file cannot be locked or written.
    """
    outcome = None
    try:
        with closing(_open()) as directory, _locked(directory, f"{key}.lock"):
            outcome = _read(directory, f"{key}.json")
            if outcome is not None:
                return outcome, True
            outcome = measure()
            directory.replace(f"{key}.json", json.dumps(outcome.write()).encode())
            return outcome, False
    except OSError as error:
        if is_shared:
            raise ConfigError(
                "--fast auto: the workers share the outcome of the trial in a file, which cannot "
                f"be written or locked ({error}); set XDG_CACHE_HOME to a folder on another disk"
            ) from error
    return outcome or measure(), False


def _read(directory: OpenFolder, name: str) -> Outcome | None:
    """The outcome in the file; None if it is missing, damaged or too old."""
    try:
        file = directory.read(name)
        age_s = time.time() - os.fstat(file.fileno()).st_mtime
        outcome = Outcome.read(json.loads(read_text(file, _MOST_BYTES)))
        limit_s = math.inf if outcome.is_whole else _PARTIAL_S
        return outcome if age_s < (limit_s if outcome.is_steady else _DISTURBED_S) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


@contextmanager
def _locked(directory: OpenFolder, name: str) -> Iterator[None]:
    """Hold the lock of a file; the system releases it if the process ends, also by a signal."""
    import fcntl

    with open(directory.append(name), "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
