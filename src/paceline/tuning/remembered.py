"""The outcome of a trial, kept for this model on this machine.

    ~/.cache/paceline/fast/KEY.json      KEY: digest of all that the outcome depends on

Whoever comes first measures while it holds the file's lock; other workers of the run wait for it
and read, so all of them compute alike. A run that begins again reads what was found before, but
for a trial that ran out of time: that one counts for a day; and one in a disturbed moment: that
one is for this run alone. This module must not know what is
measured.
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

FORMAT = 3
"""Grows when an outcome of before says nothing of today's candidates."""


_MOST_BYTES = 1 << 20
_PARTIAL_S = 86_400.0
"""So long counts an outcome that lacks something for want of time."""
_DISTURBED_S = 60.0
"""So long one that was measured in a disturbed moment: for the other workers of that run."""


def key_of(parts: Sequence[object]) -> str:
    """A name from everything that the outcome depends on."""
    return hashlib.sha256(repr((FORMAT, *parts)).encode()).hexdigest()[:16]


def folder() -> Path:
    """Where outcomes lie; FileError: nowhere, since no folder is the user's own to write to."""
    with closing(_open()) as place:
        return place.path


def _open() -> OpenFolder:
    """That folder. FileError: there is none, as where it is another user's."""
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
    """The outcome of ``key``, and whether it was there; else it is measured and kept.

    A damaged file or one of another version is ignored: measure again.

    Args:
        is_shared: whether other workers have to come to the same outcome, by the file. One worker
            alone goes on where nothing can be kept.

    Raises:
        ConfigError: it is to be shared, and the file cannot be locked or written.
    """
    outcome = None
    try:
        with closing(_open()) as place, _locked(place, f"{key}.lock"):
            outcome = _read(place, f"{key}.json")
            if outcome is not None:
                return outcome, True
            outcome = measure()
            place.replace(f"{key}.json", json.dumps(outcome.write()).encode())
            return outcome, False
    except OSError as error:
        if is_shared:
            raise ConfigError(
                "--fast auto: workers agree on what was found by a file that cannot be written or "
                f"locked ({error}); set XDG_CACHE_HOME to a folder on another disk"
            ) from error
    return outcome or measure(), False


def _read(place: OpenFolder, name: str) -> Outcome | None:
    try:
        file = place.read(name)
        age_s = time.time() - os.fstat(file.fileno()).st_mtime
        outcome = Outcome.read(json.loads(read_text(file, _MOST_BYTES)))
        counts_s = _PARTIAL_S if not outcome.is_whole else math.inf
        return outcome if age_s < (counts_s if outcome.is_steady else _DISTURBED_S) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


@contextmanager
def _locked(place: OpenFolder, name: str) -> Iterator[None]:
    """One process at a time; its end, also by a signal, lets the next one in."""
    import fcntl

    with open(place.append(name), "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
