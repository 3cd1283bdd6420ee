"""The last checkpoints of a run in one folder; each is whole or not there at all.

    checkpoints/.new-7/     1  written aside: files, then manifest.json with the sha256 of each
                            2  every file and the folder are synced
    checkpoints/7/          3  renamed, and the folder around it synced
    checkpoints/latest      4  the pointer, itself written aside, synced and renamed: moved last
    checkpoints/5/          5  older ones than the last N are taken away

Whatever ends the writer at whatever moment, the pointer names a whole checkpoint. What was damaged
later is found by its sha256 before anything of it is used, and the one before is taken instead.
JSON and safetensors only: reading runs no code. This module must not know what is in the files.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import ConfigError

MANIFEST, POINTER = "manifest.json", "latest"
FORMAT = 1
_ASIDE = ".new-"


class Checkpoint:
    """One checkpoint that was found whole.

    Attributes:
        number: counts the checkpoints of a run.
        note: one sentence, where it is not the newest one that should be there.
    """

    def __init__(self, path: Path, number: int, files: tuple[str, ...], note: str = "") -> None:
        self.path = path
        self.number = number
        self.files = files
        self.note = note

    def json(self, name: str) -> dict[str, Any]:
        """The object in a JSON file. ConfigError where there is none."""
        try:
            value = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise damaged(self.path / name, error) from None
        if not isinstance(value, dict):
            raise damaged(self.path / name, f"holds {type(value).__name__}, no object")
        return value


def damaged(path: Path, why: object) -> ConfigError:
    """The error for a file that is not what was written."""
    text = str(why).partition("\n")[0][:200]
    return ConfigError(f"the checkpoint is damaged: {path}: {text}")


class Shelf:
    """The checkpoints of one run.

    Args:
        folder: ``runs/NAME/checkpoints``.
        keep: how many stay.

    Invariant: after any end, at any moment, ``newest`` finds a whole checkpoint if ever one was
    written (bench/checkpoints.py, tests/checkpoints/test_shelf.py).
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder
        self._keep = keep

    # -- writing --------------------------------------------------------------------------------

    def begin(self, least: int = 1) -> Path:
        """An empty folder to write the next checkpoint's files into; its number is the name's."""
        number = max([least - 1, *self._numbers(), *self._numbers(_ASIDE)]) + 1
        aside = self.aside(number)
        aside.mkdir(parents=True)
        return aside

    def seal(self, aside: Path) -> Path:
        """Make what was written into ``aside`` the newest checkpoint; its path.

        Raises:
            OSError: the disk is full or gone; nothing has changed for a reader.
        """
        rows = {}
        for one in sorted(aside.iterdir()):
            rows[one.name] = {"sha256": _digest(one), "bytes": one.stat().st_size}
            _sync(one)
        body = {"format": FORMAT, "files": rows}
        _write(aside / MANIFEST, {**body, "sha256": _digest_of(body)})
        _sync(aside)
        number = aside.name.removeprefix(_ASIDE)
        path = self.folder / number
        aside.rename(path)
        _sync(self.folder)
        self._point(int(number))
        self._prune()
        return path

    def aside(self, number: int) -> Path:
        """Where the files of the unfinished checkpoint ``number`` are written."""
        return self.folder / f"{_ASIDE}{number}"

    def drop(self, aside: Path) -> None:
        """Take away what was not sealed."""
        shutil.rmtree(aside, ignore_errors=True)

    def rewind(self, number: int) -> None:
        """The run goes on from checkpoint ``number``: later ones, and unfinished ones, go away."""
        self._point(number)
        for later in self._numbers():
            if later > number:
                self._take_away(later)
        for name in (_ASIDE, ".old-"):
            for one in self._numbers(name):
                shutil.rmtree(self.folder / f"{name}{one}", ignore_errors=True)

    def _point(self, number: int) -> None:
        beside = self.folder / f".{POINTER}"
        _write(beside, {"checkpoint": number})
        beside.replace(self.folder / POINTER)
        _sync(self.folder)

    def _prune(self) -> None:
        for number in self._numbers()[: -self._keep]:
            self._take_away(number)

    def _take_away(self, number: int) -> None:
        old = self.folder / f".old-{number}"
        with contextlib.suppress(OSError):
            (self.folder / str(number)).rename(old)
        shutil.rmtree(old, ignore_errors=True)

    # -- reading --------------------------------------------------------------------------------

    def newest(self, is_usable: Callable[[Checkpoint], None] = lambda one: None) -> Checkpoint:
        """The newest whole checkpoint, its files checked.

        Args:
            is_usable: raises ConfigError where the content is not what it should be.

        Raises:
            ConfigError: there is none, or every one is damaged; each is named with its fault.
        """
        faults: list[str] = []
        for number in self._candidates(faults):
            try:
                found = self.check(number)
                is_usable(found)
            except ConfigError as error:
                faults.append(str(error))
                continue
            if faults:
                found.note = f"{faults[0]}; checkpoint {number}, the one before, is used instead"
            return found
        if not faults:
            raise ConfigError(f"{self.folder} holds no checkpoint")
        raise ConfigError(f"no checkpoint of {self.folder} can be used: " + "; ".join(faults))

    def check(self, number: int) -> Checkpoint:
        """Checkpoint ``number``, every file compared with its sha256. ConfigError: damaged."""
        path = self.folder / str(number)
        raw = Checkpoint(path, number, ()).json(MANIFEST)
        digest = raw.pop("sha256", None)
        if digest != _digest_of(raw):
            raise damaged(path / MANIFEST, "its sha256 is another")
        if raw.get("format") != FORMAT:
            raise damaged(path / MANIFEST, f"format {raw.get('format')!r}, known is {FORMAT}")
        files = raw.get("files")
        if not isinstance(files, dict):
            raise damaged(path / MANIFEST, "it names no files")
        for name, row in files.items():
            _check_file(path, name, row)
        return Checkpoint(path, number, tuple(files))

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever sealed here."""
        return not self._numbers()

    def _candidates(self, faults: list[str]) -> Iterator[int]:
        """The one that the pointer names, then those before it; all where there is no pointer."""
        numbers = self._numbers()[::-1]
        newest = None
        if (self.folder / POINTER).exists():
            try:
                newest = Checkpoint(self.folder, 0, ()).json(POINTER).get("checkpoint")
            except ConfigError as error:
                faults.append(str(error))
            if isinstance(newest, int) and newest not in numbers:
                faults.append(str(damaged(self.folder / str(newest), "it is missing")))
        yield from (one for one in numbers if not isinstance(newest, int) or one <= newest)

    def _numbers(self, prefix: str = "") -> list[int]:
        names = [one.name for one in self.folder.glob(f"{prefix}*")]
        texts = [name.removeprefix(prefix) for name in names]
        return sorted(int(text) for text in texts if text.isascii() and text.isdigit())


def _check_file(folder: Path, name: str, row: object) -> None:
    path = folder / name
    if not isinstance(row, dict) or Path(name).name != name:
        raise damaged(folder / MANIFEST, f"its line for {name!r} is none")
    try:
        size, digest = path.stat().st_size, _digest(path)
    except OSError as error:
        raise damaged(path, error.strerror or error) from None
    if size != row.get("bytes"):
        raise damaged(path, f"{size} bytes instead of {row.get('bytes')}")
    if digest != row.get("sha256"):
        raise damaged(path, "its sha256 is another")


def reserve(folder: Path, num_bytes: int) -> None:
    """See whether so much can be written into ``folder``. OSError: it cannot."""
    beside = folder / ".room"
    try:
        with beside.open("xb") as file:
            if hasattr(os, "posix_fallocate") and num_bytes:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
    finally:
        beside.unlink(missing_ok=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _write(path: Path, value: object) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """What was written to a file, or into a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
