"""Safe files in a folder of ours: checked on the open descriptor, not by name.

    Place (a folder, held by its descriptor) --name, no link, no wait--> descriptor -> is it sound?

Whoever can write to a folder or its parent can put a link, a pipe or another folder where a file of
ours is expected, even between a check and the open. So a folder is opened once, its files are
opened relative to it, and the open descriptor is checked.

    to write   the folder is ours, and only its group may also write to it; a new file is
               created, never overwritten; an existing one is regular, ours, and has no second name
    to read    the file is regular: no waiting for a pipe; any owner

    .NAME.1a2b3c4d.part   replaces NAME once it is complete; locked while it is written

An unlocked part belongs to a process that was killed: ``remove_parts`` removes it.

Folders that a group may write to are accepted, since a usual umask (002) makes them; links and
pipes are refused there, too. Above 300 lines because every file is opened through this module. This
module must not know what is in the files.
"""

import errno
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

from ..errors import FileError

if sys.platform != "win32":
    import fcntl

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_FILE = {errno.ELOOP: "it is a link", errno.ENXIO: "it is not a regular file",
            errno.EISDIR: "it is a folder", errno.ENOTDIR: "it is not a folder"}  # fmt: skip
"""The meaning of these errors where a file or a folder was expected."""
_TRIES, _MOST_LINKS = 3, 8
_PART = re.compile(r"\..+\.[0-9a-f]{8}\.part")


class OpenFolder:
    """A folder of ours, kept open.

    Args:
        fd: its descriptor, closed by ``close``.
        path: its path, for messages.
    """

    def __init__(self, fd: int, path: Path) -> None:
        self.fd = fd
        self.path = path
        self._owner = os.fstat(fd).st_uid

    @classmethod
    def open(cls, path: Path, identity: Sequence[int] | None = None) -> "OpenFolder":
        """Open the folder at ``path``, through links of ours. FileError: it is unsafe to write to.

        Args:
            identity: identity of the folder that another process opened, which it must have.
        """
        place, target = None, path
        try:
            for _ in range(_MOST_LINKS):
                try:
                    place = cls(os.open(target, _FOLDER), path)
                    break
                except OSError:
                    if not target.is_symlink():
                        raise
                    if target.lstat().st_uid not in (os.geteuid(), 0):
                        raise _refused(path, "it is another user's link") from None
                    target = target.parent / target.readlink()
        except (OSError, ValueError) as error:
            raise _file_error(error, path) from None
        if place is None:
            raise _refused(path, "too many links")
        place._check_owner()
        if identity is not None and place.identity[-len(identity) :] != tuple(identity):
            place.close()
            raise _refused(path, "it is another folder than the one that the run began in")
        return place

    @classmethod
    def make(cls, path: Path) -> "OpenFolder":
        """Create a folder. FileExistsError: the name is taken."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(0o755)
        except FileExistsError as error:
            if Path(error.filename) == path:
                raise
            raise FileError(errno.ENOTDIR, "it is not a folder", error.filename) from None
        except (OSError, ValueError) as error:
            raise _file_error(error, path) from None
        return cls.open(path)

    @property
    def identity(self) -> tuple[int, int]:
        """A key unique among the folders of this machine while this one exists.

        The first of its two numbers, of the file system, differs between machines that share it.
        """
        now = os.fstat(self.fd)
        return now.st_dev, now.st_ino

    def close(self) -> None:
        """Close the descriptor; may be called twice."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def inner(self, name: str) -> "OpenFolder":
        """Open a folder in it."""
        path = self.path / name
        try:
            return OpenFolder(os.open(name, _FOLDER, dir_fd=self.fd), path)._check_owner()
        except OSError as error:
            raise _file_error(error, path) from None

    def make_inner(self, name: str, *, is_new: bool = False) -> "OpenFolder":
        """Open a folder in it, created if missing; ``is_new``: FileExistsError if it exists."""
        try:
            os.mkdir(name, 0o755, dir_fd=self.fd)
        except FileExistsError:
            if is_new:
                raise
        except OSError as error:
            raise _file_error(error, self.path / name) from None
        return self.inner(name)

    # -- files ----------------------------------------------------------------------------------

    def fresh(self, name: str) -> int:
        """Create a file to write and read; it replaces anything but a folder."""
        for _ in range(_TRIES):
            self.remove_file(name)
            with suppress(FileExistsError):
                return self._open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        raise _refused(self.path / name, "another process keeps creating it")

    def new(self, name: str) -> int:
        """Create a file to write and read. FileExistsError: the name is taken."""
        return self._open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def again(self, name: str) -> int:
        """Open an existing file of ours to write and read."""
        return self._sound(self._open(name, os.O_RDWR), name)

    def append(self, name: str) -> int:
        """Open a file of ours to append to; it is created if missing."""
        return self._sound(self._open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), name)

    def read(self, name: str) -> BufferedReader:
        """Open a file of any owner to read."""
        return _regular(self._open(name, os.O_RDONLY), self.path / name)

    def write(self, name: str, data: bytes) -> None:
        """Write a new file; it replaces anything but a folder."""
        with os.fdopen(self.fresh(name), "wb") as file:
            file.write(data)

    def replace(self, name: str, data: bytes | Iterator[Any], *, is_synced: bool = False) -> None:
        """Write completely or not at all: a reader sees the old file or the new one.

        Args:
            data: all bytes, or pieces of them.
        """
        beside = part_of(name)
        with os.fdopen(self.new(beside), "wb") as file:
            lock_part(file.fileno())
            try:
                file.writelines([data] if isinstance(data, bytes) else data)
                file.flush()
                if is_synced:
                    os.fsync(file.fileno())
                self.rename(beside, name)
            except BaseException:  # raised again: leave no partial file
                self.remove_file(beside)
                raise

    def _open(self, name: str, flags: int) -> int:
        try:
            return os.open(name, flags | _FILE, 0o644, dir_fd=self.fd)
        except FileExistsError:
            raise
        except (OSError, ValueError) as error:
            raise _file_error(error, self.path / name) from None

    def _sound(self, fd: int, name: str) -> int:
        """Return the descriptor if it is a regular file of ours with one name."""
        now = os.fstat(fd)
        why = ""
        if not stat.S_ISREG(now.st_mode):
            why = "it is not a regular file"
        elif now.st_uid != self._owner:
            why = f"it belongs to user {now.st_uid}"
        elif now.st_nlink > 1:
            why = "it has a second name (a hard link)"
        if why:
            os.close(fd)
            raise _refused(self.path / name, why)
        return fd

    # -- names ----------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Whether something has this name."""
        return name in self.names()

    def names(self) -> list[str]:
        return sorted(os.listdir(self.fd))

    def rename(self, name: str, other: str, into: "OpenFolder | None" = None) -> None:
        """Rename in the folder or ``into`` another one, replacing ``other`` there."""
        target = self if into is None else into
        try:
            os.replace(name, other, src_dir_fd=self.fd, dst_dir_fd=target.fd)
        except OSError as error:
            raise _file_error(error, target.path / other) from None

    def remove_file(self, name: str) -> None:
        """Remove this file if it exists. FileError: it is a folder."""
        try:
            os.unlink(name, dir_fd=self.fd)
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._not_removed(error, name) from None

    def remove(self, name: str) -> None:
        """Remove this file or folder with its content; links are not followed.

        FileError: it cannot be removed, or another process goes on writing into it.
        """
        try:
            self.remove_file(name)
        except FileError as error:
            if error.errno != errno.EISDIR:
                raise
            self._remove_folder(name)

    def _remove_folder(self, name: str) -> None:
        for number in range(_TRIES):
            try:
                shutil.rmtree(name, dir_fd=self.fd)
            except OSError as failure:
                if failure.errno != errno.ENOTEMPTY or number == _TRIES - 1:
                    raise _file_error(failure, self.path / name) from None
            else:
                return

    def remove_parts(self) -> None:
        """Remove unfinished parts that killed processes left."""
        for name in filter(_PART.fullmatch, self.names()):
            with suppress(OSError):  # it is being written, or was just finished
                fd = self._open(name, os.O_RDWR)
                try:
                    _lock(fd)
                    self.remove_file(name)
                finally:
                    os.close(fd)

    def _not_removed(self, error: OSError, name: str) -> FileError:
        with suppress(OSError):  # not every system reports that it is a folder
            if stat.S_ISDIR(os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_mode):
                error = OSError(errno.EISDIR, "")
        return _file_error(error, self.path / name)

    def sync(self) -> None:
        """Flush created and changed names to disk."""
        os.fsync(self.fd)

    # -- whose it is ----------------------------------------------------------------------------

    def _check_owner(self) -> "OpenFolder":
        now = os.fstat(self.fd)
        is_ours, is_open = now.st_uid == os.geteuid(), bool(now.st_mode & stat.S_IWOTH)
        if is_ours and not is_open:
            return self
        probe = self._probe()
        why = ""
        if not is_ours and (probe is None or probe.st_uid != now.st_uid):
            why = f"it belongs to user {now.st_uid}; use a folder of your own"
        elif is_open and (probe is None or not probe.st_mode & stat.S_IWOTH):
            why = "everybody may write to it: chmod o-w, or use another folder"
        if why:
            self.close()
            raise _refused(self.path, why)
        return self

    def _probe(self) -> os.stat_result | None:
        """Return the status of a new file here: some file systems have no owners or modes."""
        name = f".{secrets.token_hex(4)}"
        try:
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=self.fd)
        except OSError:
            return None
        try:
            return os.fstat(fd)
        finally:
            os.close(fd)
            with suppress(OSError):
                os.unlink(name, dir_fd=self.fd)


def cache_home(env: Mapping[str, str] | None = None) -> Path:
    """Return the cache folder; one in the temporary folder for users without a home."""
    named = (os.environ if env is None else env).get("XDG_CACHE_HOME")
    home = os.path.expanduser("~")
    if not named and home == "~":
        return Path(tempfile.gettempdir()) / f"paceline-{os.geteuid()}"
    return Path(named or Path(home) / ".cache")


def part_of(name: str) -> str:
    """Return a name for the unfinished part that will replace this file."""
    return f".{name}.{secrets.token_hex(4)}.part"


def is_part(name: str) -> bool:
    """Whether this is a name of such a part."""
    return name.startswith(".") and name.endswith(".part")


def lock_part(fd: int) -> None:
    """Lock this part as being written, as long as it is open."""
    with suppress(OSError):  # a file system without locks, where parts are not removed either
        _lock(fd)


def _lock(fd: int) -> None:
    """Lock a file. OSError: another process has it, or there are no locks here."""
    if sys.platform == "win32":
        raise OSError(errno.ENOSYS, "no locks")
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def open_to_read(path: Path) -> BufferedReader:
    """Open a regular file of any owner, also through links. FileError: it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise _file_error(error, path) from None
    return _regular(fd, path)


def read_text(file: BufferedReader, most_bytes: int) -> str:
    """Read all text. ValueError: it is longer than ``most_bytes``, or not UTF-8."""
    with file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"it has more than {most_bytes:,} bytes")
    return data.decode()


def name_of(fd: int, path: Path) -> Path:
    """Return a path to this open file, whatever its own path means by now."""
    own = Path(f"/proc/self/fd/{fd}")  # not /dev/fd: on macOS that shares the file's position
    return own if own.exists() else path


def _regular(fd: int, path: Path) -> BufferedReader:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _refused(path, "it is not a regular file")
    return os.fdopen(fd, "rb")


def _refused(path: Path, why: str) -> FileError:
    return FileError(errno.EPERM, why, str(path))


def _file_error(error: OSError | ValueError, path: Path) -> FileError:
    """Convert an error of the system or Python to a FileError for this path."""
    if isinstance(error, FileError):
        return error
    if not isinstance(error, OSError):
        return FileError(errno.EINVAL, str(error), str(path))
    text = _NO_FILE.get(error.errno or 0, error.strerror)
    return FileError(error.errno, text, str(path))
