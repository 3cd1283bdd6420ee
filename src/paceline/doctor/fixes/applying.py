"""Read a script's file, write it with its edits, and put it back.

    train.py                    --apply-->   train.py with the edits
                                             .train.py.before-doctor: its old text, and a digest of
                                             the new one
                                --undo-->    train.py as it was; the other file is gone

A file that was changed in the meantime is never overwritten. This module must not know what an edit
is.
"""

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import NamedTuple

from ...errors import ConfigError


class ScriptFile(NamedTuple):
    """A script as it was read.

    Attributes:
        path: its path.
        raw: its bytes.
        text: its decoded text, with the line ends as they are.
    """

    path: Path
    raw: bytes
    text: str

    @classmethod
    def read(cls, path: Path) -> "ScriptFile":
        """Read a file."""
        raw = path.read_bytes()
        return cls(path, raw, raw.decode("utf-8-sig"))

    def whole(self, text: str) -> str:
        """Return a text with this file's byte order mark, if it has one."""
        return f"\ufeff{text}" if self.raw.startswith(b"\xef\xbb\xbf") else text


def apply(source: ScriptFile, text: str) -> Path:
    """Write a text into the script's file, and return the path where the old text is kept.

    Raises:
        ConfigError: the file may not be written, or was changed since it was read.
    """
    path = source.path
    _check_writable(path)
    if path.read_bytes() != source.raw:
        raise ConfigError(
            f"{path} was changed since it was read, so nothing is written; run the command again"
        )
    new = source.whole(text).encode()
    backup = _backup(path)
    record = {"after": _digest(new), "before": source.raw.decode("utf-8")}
    _replace(backup, json.dumps(record).encode(), 0o600)
    _replace(path, new, stat.S_IMODE(path.stat().st_mode))
    return backup


def undo(path: Path) -> None:
    """Put the script back as it was before the last `apply`.

    Raises:
        ConfigError: nothing was applied, or the file was changed since.
    """
    backup = _backup(path)
    try:
        record = json.loads(backup.read_bytes())
        old, new_digest = record["before"].encode(), record["after"]
    except FileNotFoundError:
        raise ConfigError(f"nothing was applied to {path}, so there is nothing to undo") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{backup} is damaged, so {path} cannot be restored from it") from None
    if not path.is_file() or _digest(path.read_bytes()) != new_digest:
        raise ConfigError(
            f"{path} was changed since --apply, so it is not restored; its old text is in {backup}"
        )
    _check_writable(path)
    _replace(path, old, stat.S_IMODE(path.stat().st_mode))
    backup.unlink()


def _check_writable(path: Path) -> None:
    """Refuse a file or folder that is read-only, also for root, who could write it.

    Raises:
        ConfigError: the file or its folder is read-only.
    """
    if not path.stat().st_mode & 0o222 or not os.access(path, os.W_OK):
        raise ConfigError(f"{path} is read-only: chmod u+w {path}, or take the diff of --fix")
    if not os.access(path.resolve().parent, os.W_OK):
        raise ConfigError(f"the folder of {path} is read-only; take the diff of --fix")


def _replace(path: Path, content: bytes, mode: int) -> None:
    """Replace a file's content as a whole or not at all; a link stays a link."""
    path = path.resolve()
    partial = path.with_name(f".{path.name}.half")
    partial.write_bytes(content)
    partial.chmod(mode)
    os.replace(partial, path)


def _backup(path: Path) -> Path:
    return path.with_name(f".{path.name}.before-doctor")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
