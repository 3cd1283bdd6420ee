"""The last checkpoints of a run in one folder; each is complete or not there at all.

    checkpoints/.new-7/     1  written here: files, then manifest.json with the sha256 of each
                            2  every file and the folder are synced
    checkpoints/7/          3  renamed, and the folder around it synced
    checkpoints/latest      4  the pointer, itself written aside, synced and renamed: moved last
    checkpoints/5/          5  all but the last N are removed

Whenever the writer is interrupted, the pointer names a complete checkpoint. Later damage is
detected by sha256 before anything is used, and the previous checkpoint is used instead. JSON and
safetensors only: reading runs no code. Above 300 lines since writing and verifying belong together.
This module must not know what is in the files.
"""

import ctypes
import errno
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..system.files import OpenFolder, is_part, open_to_read, read_text

FOLDER = "checkpoints"
"""Name of the folder of checkpoints in a run's folder."""
MANIFEST, POINTER = "manifest.json", "latest"
FORMAT = 1
_SPACE = ".room"
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS)
_UNFINISHED, _OLD = ".new-", ".old-"
_MOST_DIGITS = 9
"""Limit of digits in a checkpoint's number; no run writes so many."""
_MOST_BYTES = 1 << 28
"""Limit of a JSON file; a coordinator with a million open mini-batches takes less."""


class Checkpoint:
    """One checkpoint that was found complete.

    Attributes:
        number: counts the checkpoints of a run.
        files: names of its files.
        note: a sentence, if it is not the newest one that should be there.
    """

    def __init__(self, path: Path, number: int, files: tuple[str, ...], note: str = "") -> None:
        self.path = path
        self.number = number
        self.files = files
        self.note = note

    def json(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file. ConfigError: the file holds none."""
        try:
            value = json.loads(read_text(open_to_read(self.path / name), _MOST_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            raise damaged(self.path / name, error) from None
        if not isinstance(value, dict):
            raise damaged(self.path / name, f"holds {type(value).__name__}, not an object")
        return value


def number_of(aside: Path) -> int:
    """Return the number of an unfinished checkpoint."""
    return int(aside.name.removeprefix(_UNFINISHED))


def damaged(path: Path, why: object) -> ConfigError:
    """Return the error for a file that is not what was written."""
    reason = str(getattr(why, "strerror", None) or why).partition("\n")[0][:200]
    return ConfigError(f"the checkpoint is damaged: {path}: {reason}")


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        folder: ``runs/NAME/checkpoints``.
        keep: number of checkpoints to keep.
        within: the identity of ``runs/NAME``, if that is open already.

    Invariant: whenever the writer is interrupted, ``newest`` finds a complete checkpoint if one was
    ever written (bench/checkpoints.py, tests/checkpoints/test_folder.py).
    """

    def __init__(self, folder: Path, keep: int = 2, within: Sequence[int] | None = None) -> None:
        self.folder = folder
        self._keep = keep
        self.within = within

    # -- writing --------------------------------------------------------------------------------

    def begin(self, least: int = 1) -> Path:
        """Return a new empty folder for the next checkpoint; its name contains the number.

        Args:
            least: the lowest number allowed.
        """
        taken = set(self._numbers(_UNFINISHED))
        number = max([least - 1, *self._numbers()]) + 1
        while number in taken:
            number += 1
        if len(str(number)) > _MOST_DIGITS:
            raise OSError(
                errno.EEXIST, f"{self.folder / str(number - 1)} has the last number: move it away"
            )
        with self._open() as place:
            place.make_inner(f"{_UNFINISHED}{number}", is_new=True).close()
        return self.folder / f"{_UNFINISHED}{number}"

    def seal(self, aside: Path) -> Path:
        """Make what was written into ``aside`` the newest checkpoint; return its path.

        Raises:
            OSError: the disk is full or gone; readers see no change.
        """
        number = number_of(aside)
        with self._open() as place:
            with closing(place.inner(aside.name)) as folder:
                # An interrupted writer may have left a manifest, and a late one writes a part now.
                names = [name for name in folder.names() if name != MANIFEST and not is_part(name)]
                rows = {name: _row(folder, name) for name in names}
                body = {"format": FORMAT, "files": rows}
                folder.write(MANIFEST, _as_json({**body, "sha256": _digest_of(body)}))
                _row(folder, MANIFEST)
                folder.sync()
            place.rename(aside.name, str(number))
            self._settle(place, number)
        return self.folder / str(number)

    def settle(self, number: int) -> Path:
        """Make a renamed checkpoint the newest, if the pointer does not name it; return its path.

        Raises:
            OSError: it is not there, or the disk is full or gone.
        """
        with self._open() as place:
            place.inner(str(number)).close()
            self._settle(place, number)
        return self.folder / str(number)

    def _settle(self, place: OpenFolder, number: int) -> None:
        """Finish a renamed checkpoint: move the pointer, and remove the oldest ones."""
        place.sync()
        self._point(place, number)
        for old in self._numbers()[: -self._keep]:
            _retire(place, old)

    @contextmanager
    def open_aside(self, number: int) -> Iterator[OpenFolder]:
        """Open the folder of the unfinished checkpoint ``number`` for writing."""
        with self._open() as place:
            aside = place.inner(f"{_UNFINISHED}{number}")
        with closing(aside):
            yield aside

    def reserve(self, number: int, num_bytes: int) -> None:
        """Check that the disk has ``num_bytes`` for an unfinished checkpoint. OSError: it lacks."""
        with self.open_aside(number) as aside:
            fd = aside.new(_SPACE)
            try:
                os.write(fd, b".")
                _allocate(fd, num_bytes)
            finally:
                os.close(fd)
                aside.remove_file(_SPACE)

    def drop(self, aside: Path) -> None:
        """Remove an unsealed checkpoint."""
        with suppress(OSError), self._open() as place:
            place.remove(aside.name)

    def rewind(self, number: int) -> None:
        """Remove checkpoints after ``number``, which the run resumes from, and unfinished ones."""
        with self._open() as place:
            self._point(place, number)
            for later in self._numbers():
                if later > number:
                    _retire(place, later)
            for prefix in (_UNFINISHED, _OLD):
                for unfinished in self._numbers(prefix):
                    with suppress(OSError):
                        place.remove(f"{prefix}{unfinished}")
            place.remove_parts()

    @contextmanager
    def _open(self) -> Iterator[OpenFolder]:
        """Open the folder; create it if it is missing."""
        if self.within is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            place = OpenFolder.open(self.folder)
        else:
            with closing(OpenFolder.open(self.folder.parent, self.within)) as run:
                place = run.make_inner(self.folder.name)
        with closing(place):
            yield place

    def _point(self, place: OpenFolder, number: int) -> None:
        place.replace(POINTER, _as_json({"checkpoint": number}), is_synced=True)
        place.sync()

    # -- reading --------------------------------------------------------------------------------

    def newest(
        self, is_usable: Callable[[Checkpoint], None] = lambda checkpoint: None
    ) -> Checkpoint:
        """Return the newest complete checkpoint, with its files verified.

        Args:
            is_usable: raises ConfigError if the content is wrong.

        Raises:
            ConfigError: there is none, or all are damaged; the message names each fault.
        """
        pointer = self.folder / POINTER
        if pointer.is_dir():
            raise ConfigError(f"{pointer} is a folder; move it away: a file of this name is needed")
        faults: list[str] = []
        for number in self._candidates(faults):
            try:
                checkpoint = self.check(number)
                is_usable(checkpoint)
            except ConfigError as error:
                faults.append(str(error))
                continue
            if faults:
                checkpoint.note = (
                    f"{faults[0]}; checkpoint {number}, the one before, is used instead"
                )
            return checkpoint
        if not faults:
            raise ConfigError(f"{self.folder} holds no checkpoint")
        raise ConfigError(f"no checkpoint of {self.folder} can be used: " + "; ".join(faults))

    def check(self, number: int) -> Checkpoint:
        """Return checkpoint ``number`` after verifying every file. ConfigError: it is damaged."""
        path = self.folder / str(number)
        raw = Checkpoint(path, number, ()).json(MANIFEST)
        digest = raw.pop("sha256", None)
        if digest != _digest_of(raw):
            raise damaged(path / MANIFEST, "its sha256 does not match")
        if raw.get("format") != FORMAT:
            raise damaged(path / MANIFEST, f"format {raw.get('format')!r}, expected {FORMAT}")
        files = raw.get("files")
        if not isinstance(files, dict):
            raise damaged(path / MANIFEST, "it names no files")
        for name, row in files.items():
            _check_file(path, name, row)
        return Checkpoint(path, number, tuple(files))

    @property
    def is_empty(self) -> bool:
        """Whether no checkpoint was ever sealed here."""
        return not self._numbers()

    def _candidates(self, faults: list[str]) -> Iterator[int]:
        """Yield the number in the pointer, then older ones; all numbers if there is no pointer.

        Args:
            faults: gets what is wrong with the pointer.
        """
        numbers = self._numbers()[::-1]
        newest = None
        if (self.folder / POINTER).exists():
            try:
                newest = Checkpoint(self.folder, 0, ()).json(POINTER).get("checkpoint")
            except ConfigError as error:
                faults.append(str(error))
            if isinstance(newest, int) and newest not in numbers:
                faults.append(str(damaged(self.folder / str(newest), "it is missing")))
        yield from (number for number in numbers if not isinstance(newest, int) or number <= newest)

    def _numbers(self, prefix: str = "") -> list[int]:
        form = rf"{re.escape(prefix)}([0-9]{{1,{_MOST_DIGITS}}})"
        matches = (re.fullmatch(form, path.name) for path in self.folder.glob(f"{prefix}*"))
        return sorted(int(match[1]) for match in matches if match is not None)


def _retire(place: OpenFolder, number: int) -> None:
    """Remove a checkpoint; renamed first, so that no half of it counts as one."""
    with suppress(OSError):
        place.rename(str(number), f"{_OLD}{number}")
        place.remove(f"{_OLD}{number}")


def _check_file(folder: Path, name: str, row: object) -> None:
    path = folder / name
    if not isinstance(row, dict) or Path(name).name != name:
        raise damaged(folder / MANIFEST, f"its entry for {name!r} is invalid")
    try:
        size = path.stat().st_size
        with open_to_read(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise damaged(path, error) from None
    except ValueError:  # a name that no file can have
        raise damaged(folder / MANIFEST, f"its entry for {name!r} is invalid") from None
    if size != row.get("bytes"):
        raise damaged(path, f"{size} bytes instead of {row.get('bytes')}")
    if digest != row.get("sha256"):
        raise damaged(path, "its sha256 does not match")


def _allocate(fd: int, num_bytes: int) -> None:
    """Reserve space. OSError: the disk has too little, or the quota does not allow it.

    Not by ``os.posix_fallocate``, which writes block by block if the file system lacks the call.
    """
    if sys.platform != "linux" or not num_bytes:
        return
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if call(fd, 0, 0, num_bytes) and (code := ctypes.get_errno()) not in _UNSUPPORTED:
        raise OSError(code, os.strerror(code))


def _row(folder: OpenFolder, name: str) -> dict[str, object]:
    """Sync a file to disk; return its entry in the manifest."""
    with folder.read(name) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return {"sha256": digest, "bytes": os.fstat(file.fileno()).st_size}


def _digest_of(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _as_json(value: object) -> bytes:
    return json.dumps(value, allow_nan=False).encode()
