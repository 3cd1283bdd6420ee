"""The folder of one run: ``runs/NAME``, and ``runs/latest`` that points to it.

    make_folder: made, or found without a run        RunFolder(OpenFolder.open(path)): a run goes on
                        \\_____________ hold ____________/
                          lock: one run at a time, until it is closed or its process has ended

A run that is refused before its first step leaves no trace of itself: ``discard`` takes away what
was made for it and nothing else. This module must not know what a run writes into its folder.
"""

import contextlib
import errno
import itertools
import os
import re
import secrets
import time
from collections.abc import Iterable
from pathlib import Path

from .config import RunSettings
from .errors import ConfigError, FileError
from .system.files import OpenFolder

RUNS = Path("runs")
TRIALS = "trials.json"
"""In the folder of a script that has made trials, beside theirs."""
_LOCK, _TRACE = "lock", "trace.jsonl"


class RunFolder:
    """The folder of one run, open.

    Args:
        made: the folders that were made for it, the innermost first.

    Attributes:
        goes_on: whether a run is in it that goes on.
        unlinked: why ``runs/latest`` does not point here, where it was to; empty: all is well.
    """

    def __init__(self, place: OpenFolder, made: Iterable[Path] = ()) -> None:
        self.place = place
        self.path = place.path
        self.goes_on, self.unlinked = False, ""
        self._made = [*made]
        self._found = place.names()
        self._lock: int | None = None
        self._link: Path | None = None
        self._before: str | None = None

    def hold(self) -> str | None:
        """Keep all other runs out until ``close``, or until this process has ended.

        What a worker that was killed had half written is taken away.

        A file is locked, not the folder, since network file systems tell other machines of files
        only; and no process that is begun meanwhile inherits it.

        Returns:
            Why others cannot be kept out, where the file system knows no locks; None where they
            are.

        Raises:
            ConfigError: another run holds it.
            FileNotFoundError: it was taken away by the run that had made it.
        """
        import fcntl

        try:
            lock = self.place.append(_LOCK)
        except FileError as error:
            raise (FileNotFoundError(self.path) if error.errno == errno.ENOENT else error) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_there = os.path.samestat(os.fstat(lock), os.stat(_LOCK, dir_fd=self.place.fd))
        except OSError as error:
            os.close(lock)
            if isinstance(error, FileNotFoundError):
                raise
            if not isinstance(error, BlockingIOError):
                return f"{self.path} cannot be kept from other runs: {error.strerror}"
            raise ConfigError(
                f"another run is at work in {self.path}; wait for its end, or name another folder"
            ) from None
        if not is_there:  # who had it has taken away what it had made: this lock is nobody's
            os.close(lock)
            raise FileNotFoundError(self.path)
        self._lock = lock
        self.place.remove_parts()
        return None

    def close(self) -> None:
        """Let other runs in, and leave nothing half written; may be called twice."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self.place.remove_parts()
            self._remove_lock()
            os.close(self._lock)
            self._lock = None
        self.place.close()

    def _remove_lock(self) -> None:
        """Take its name away, unless that is another run's by now, which came after ``discard``."""
        with contextlib.suppress(OSError):
            named = os.stat(_LOCK, dir_fd=self.place.fd, follow_symlinks=False)
            if self._lock is None or os.path.samestat(os.fstat(self._lock), named):
                self.place.remove_file(_LOCK)

    def point_from(self, link: Path) -> None:
        """Let ``link`` point here, unless something that is no link has its name.

        Some file systems know no links: the run goes without one, and ``unlinked`` says so.
        """
        if link.exists() and not link.is_symlink():
            return
        before = str(link.readlink()) if link.is_symlink() else None
        try:
            _relink(link, self.path.name)
        except OSError as error:
            self.unlinked = f"{link} does not point to {self.path}: {error.strerror}"
        else:
            self._link, self._before = link, before

    def discard(self, names: Iterable[str]) -> None:
        """Take back the folder and, in it, what has these names and was made; all else stays."""
        for name in set(names) - {*self._found}:
            self.place.remove(name)
        if self._link is not None:
            _turn_back(self._link, self.path.name, self._before)
        self._remove_lock()
        with contextlib.suppress(OSError):  # somebody else's file lies there: it stays
            for folder in self._made:
                folder.rmdir()


def is_at_work(folder: Path, locks: Path = Path("/proc/locks")) -> bool:
    """Whether a run is at work in a folder, as far as the system tells; takes no lock itself.

    Args:
        locks: the kernel's table of locks; without one a lock file counts as held, since a run
            removes it at its end.
    """
    try:
        inode = os.stat(folder / _LOCK).st_ino
    except OSError:
        return False
    try:
        rows = [line.split() for line in locks.read_text().splitlines()]
    except OSError:
        return True
    # 1: FLOCK  ADVISORY  WRITE 4242 08:02:131 0 EOF      the process, then device and inode
    places = [field for row in rows if "FLOCK" in row for field in row if field.count(":") == 2]
    return any(place.rpartition(":")[2] == str(inode) for place in places)


def refuse_trials(folder: Path) -> None:
    """Raise ConfigError where a script's trials are in it: no run goes on there."""
    if (folder / TRIALS).is_file():
        raise ConfigError(
            f"{folder} holds the trials of a script (pace.trial()), and --resume goes on with a "
            "run that has none: begin the search in another folder"
        )


def make_folder(settings: RunSettings, program_name: str, *, is_latest: bool = True) -> RunFolder:
    """The folder that ``--run-dir`` or ``--name`` asks for, else one named after the run.

    With ``--resume auto`` it may be there, and hold what a run left that was cut off.

    Args:
        is_latest: whether ``runs/latest`` points to it from now on: to a run that somebody wants
            to go on with, not to one that was made to measure or in virtual time.

    Raises:
        ConfigError: there is a run in it already, or it is not one to write into.
    """
    may_be_there = settings.resume == "auto"
    if settings.run_dir is not None:
        folder = _make_or_open(Path(settings.run_dir))
        if (folder.place.has(_TRACE) or folder.place.has(TRIALS)) and not may_be_there:
            raise ConfigError(f"{folder.path} already holds a run; name another --run-dir")
        return folder
    if settings.name and may_be_there:
        folder = _make_or_open(RUNS / settings.name)
    elif settings.name:
        try:
            folder = _make(RUNS / settings.name)
        except FileExistsError as error:
            raise ConfigError(f"{error.filename} exists already; choose another --name") from None
    else:
        folder = _make_dated(f"{program_name}-{settings.protocol}")
    if is_latest:
        folder.point_from(RUNS / "latest")
    return folder


def fresh_folder(stem: str, path: Path | None = None) -> Path:
    """A folder for several runs: ``path``, or one named after ``stem`` and the time.

    Raises:
        ConfigError: there is something in it already, or it is not one to write into.
    """
    folder = _make_dated(stem) if path is None else _make_or_open(path)
    with contextlib.closing(folder):
        if folder.place.names():
            raise ConfigError(f"{folder.path} is not empty; name another --run-dir")
    return folder.path


def _make(path: Path) -> RunFolder:
    """A new one. FileExistsError: something is there."""
    made = [one for one in (path, *path.parents) if not os.path.exists(one)]
    return RunFolder(OpenFolder.make(path), made)


def _make_or_open(path: Path) -> RunFolder:
    try:
        return _make(path)
    except FileExistsError:
        return RunFolder(OpenFolder.open(path))


def _make_dated(stem: str) -> RunFolder:
    """One under ``runs/`` where nothing was."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", stem)
    first = RUNS / f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        with contextlib.suppress(FileExistsError):
            return _make(first if number == 1 else first.with_name(f"{first.name}-{number}"))
    raise AssertionError("there is always a next number")


def _turn_back(link: Path, own: str, before: str | None) -> None:
    """Let a link that leads to ``own`` lead where it did before, if that is still there.

    A run that has begun since then has turned it to itself: there it stays.
    """
    if link.is_symlink() and str(link.readlink()) == own:
        is_there = before is not None and (link.parent / before).exists()
        _relink(link, before if is_there else None)


def _relink(link: Path, target: str | None) -> None:
    """Let a link point there, at once; None: take it away."""
    if target is None:
        link.unlink(missing_ok=True)
        return
    beside = link.with_name(f".{link.name}.{secrets.token_hex(4)}")
    beside.symlink_to(target)
    beside.replace(link)
