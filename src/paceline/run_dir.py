"""The folder of one run: ``runs/NAME``, and the link ``runs/latest`` to it.

    make_folder: made, or found without a run        RunFolder(OpenFolder.open(path)): to be resumed
                        \\_____________ hold ____________/
                          lock: one run at a time, until it is closed or its process has ended

A run that is refused before its first step leaves nothing behind: ``discard`` removes what was made
for it and nothing else. This module must not know what a run writes into its folder.
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
"""In the folder of a script that has run trials, beside their folders."""
_LOCK, _TRACE = "lock", "trace.jsonl"


class RunFolder:
    """The folder of one run, open.

    Args:
        made: the folders that were made for it, innermost first.

    Attributes:
        goes_on: whether it holds a run that is resumed.
        unlinked: why ``runs/latest`` does not point here although it should; empty: it does.
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
        """Lock the folder until ``close``, or until this process ends.

        Partial files of a worker that was killed are removed.

        A file is locked, not the folder, since network file systems share only the locks of files;
        and no process that is started meanwhile inherits the lock.

        Returns:
            Why the folder cannot be locked, if the file system has no locks; None: it is locked.

        Raises:
            ConfigError: another run has locked it.
            FileNotFoundError: the run that had made it removed it.
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
                return f"{self.path} cannot be locked against other runs: {error.strerror}"
            raise ConfigError(
                f"another run is at work in {self.path}; wait for its end, or name another folder"
            ) from None
        if not is_there:  # the run that had it removed its files: this lock protects nothing
            os.close(lock)
            raise FileNotFoundError(self.path)
        self._lock = lock
        self.place.remove_parts()
        return None

    def close(self) -> None:
        """Unlock the folder and remove partial files; may be called twice."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self.place.remove_parts()
            self._remove_lock()
            os.close(self._lock)
            self._lock = None
        self.place.close()

    def _remove_lock(self) -> None:
        """Remove the lock file, unless it is another run's, which came after ``discard``."""
        with contextlib.suppress(OSError):
            named = os.stat(_LOCK, dir_fd=self.place.fd, follow_symlinks=False)
            if self._lock is None or os.path.samestat(os.fstat(self._lock), named):
                self.place.remove_file(_LOCK)

    def point_from(self, link: Path) -> None:
        """Point ``link`` here, unless something other than a link has its name.

        Some file systems have no links: the run goes on without one, and ``unlinked`` says so.
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
        """Remove the folder if it was made, and the new entries with these names; keep the rest.

        What cannot be removed stays: an error here would take the place of why the run ended.
        """
        for name in set(names) - {*self._found}:
            with contextlib.suppress(FileError):  # another process of the run still writes there
                self.place.remove(name)
        if self._link is not None:
            _turn_back(self._link, self.path.name, self._before)
        self._remove_lock()
        with contextlib.suppress(OSError):  # another's file is in it: it stays
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
    """Raise ConfigError if it holds a script's trials, which cannot be resumed."""
    if (folder / TRIALS).is_file():
        raise ConfigError(
            f"{folder} holds the trials of a script (pace.trial()), which --resume does not "
            "support: start the search in another folder"
        )


def make_folder(settings: RunSettings, program_name: str, *, is_latest: bool = True) -> RunFolder:
    """The folder given by ``--run-dir`` or ``--name``, else one named after the run.

    With ``--resume auto`` it may exist, and hold a run that was cut off.

    Args:
        is_latest: whether ``runs/latest`` points to it from now on: not for runs that only measure
            or go in virtual time.

    Raises:
        ConfigError: it already holds a run, or cannot be written to.
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
        ConfigError: it is not empty, or cannot be written to.
    """
    folder = _make_dated(stem) if path is None else _make_or_open(path)
    with contextlib.closing(folder):
        if folder.place.names():
            raise ConfigError(f"{folder.path} is not empty; name another --run-dir")
    return folder.path


def _make(path: Path) -> RunFolder:
    """Make a new folder. FileExistsError: the path exists."""
    made = [one for one in (path, *path.parents) if not os.path.exists(one)]
    return RunFolder(OpenFolder.make(path), made)


def _make_or_open(path: Path) -> RunFolder:
    try:
        return _make(path)
    except FileExistsError:
        return RunFolder(OpenFolder.open(path))


def _make_dated(stem: str) -> RunFolder:
    """Make a new folder under ``runs/``, named after the time."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", stem)
    first = RUNS / f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        with contextlib.suppress(FileExistsError):
            return _make(first if number == 1 else first.with_name(f"{first.name}-{number}"))
    raise AssertionError("there is always a next number")


def _turn_back(link: Path, own: str, before: str | None) -> None:
    """Point a link to ``own`` back to where it pointed before, if that still exists.

    If a later run has pointed it to its own folder, it stays.
    """
    if link.is_symlink() and str(link.readlink()) == own:
        is_there = before is not None and (link.parent / before).exists()
        _relink(link, before if is_there else None)


def _relink(link: Path, target: str | None) -> None:
    """Replace a link atomically; None: remove it."""
    if target is None:
        link.unlink(missing_ok=True)
        return
    beside = link.with_name(f".{link.name}.{secrets.token_hex(4)}")
    beside.symlink_to(target)
    beside.replace(link)
