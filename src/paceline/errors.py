"""Every error that Paceline raises; the class says whose fault it is.

    PacelineError
    |- ConfigError      yours: a setting, a name, a file or a script that cannot work
    |  `- FileError     a file or folder that cannot be used; also an OSError
    |- WorkerError      a worker's: its script raised, it died, its loss is not finite
    |  |- AllGone       no worker is left: the run can only be restarted
    |  `- ScriptLost    the run ended, but the main worker's script did not
    |- LinkError        the wire's: shared memory, a socket or a peer is not there or too small
    `- ProtocolError    ours: an invariant of the pure core was broken; please report it

A message says what was wanted, what was found, where, and what to try next.
"""

import difflib
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class PacelineError(Exception):
    """The root: catch this to catch everything that Paceline raises on purpose."""


class ConfigError(PacelineError):
    """The user asked for something that does not exist or cannot work."""


class FileError(ConfigError, OSError):
    """A file or folder that cannot be used: the system or Paceline refuses it."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class WorkerError(PacelineError):
    """A worker failed: its script raised, it died, or it computed something not finite."""


class AllGone(WorkerError):
    """All workers have died, possibly with the process they are forked from."""


class ScriptLost(WorkerError):
    """The run ended, and the main worker died in its script's code after the run."""


class LinkError(PacelineError):
    """A channel failed: shared memory, a socket or a peer is missing or too small."""


class ProtocolError(PacelineError):
    """The pure core got an impossible input: a bug in Paceline."""


class Interrupted(KeyboardInterrupt, Generic[T]):
    """The user interrupted the work; not an error, so it is outside the tree.

    Args:
        summary: the result until then.
        number: the signal that ended it; Ctrl-C by default.
    """

    def __init__(self, summary: T, number: int = 2) -> None:
        super().__init__()
        self.summary = summary
        self.signal = number


class BeginsAnew(BaseException):
    """The run restarts from its newest checkpoint in new processes; not an error either."""


def from_os_error(error: OSError) -> PacelineError:
    """The error for an ``OSError``, with the file if it names one."""
    if isinstance(error, PacelineError):
        return error
    if error.filename is None:
        return LinkError(error.strerror or str(error))
    return FileError(error.errno, error.strerror, error.filename)


def unknown(kind: str, name: str, known: Iterable[str], where: str = "") -> ConfigError:
    """The error for an unknown name, with the nearest and all known names."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    place = f" ({where})" if where else ""
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return ConfigError(f"unknown {kind} {name!r}{place}{hint} Known: {', '.join(names)}")
