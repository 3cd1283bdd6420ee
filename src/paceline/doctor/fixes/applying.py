"""A script's file: read, written with its edits, and put back.

    train.py                    --apply-->   train.py with the edits
                                             .train.py.before-doctor: what it was, and a digest of
                                             what it became
                                --undo-->    train.py as it was; the other file is gone

Nothing is written over what somebody changed meanwhile. This module must not know what an edit is.
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
        raw: its bytes; text: decoded, each line with its own end.
    """

    path: Path
    raw: bytes
    text: str

    @classmethod
    def read(cls, path: Path) -> "ScriptFile":
        raw = path.read_bytes()
        return cls(path, raw, raw.decode("utf-8-sig"))

    def whole(self, text: str) -> str:
        """A text with the mark that this file begins with, if it has one."""
        return f"\ufeff{text}" if self.raw.startswith(b"\xef\xbb\xbf") else text


def apply(source: ScriptFile, text: str) -> Path:
    """Write the text into the script's file; where what it was is kept.

    Raises:
        ConfigError: the file may not be written, or is another than was read.
    """
    path = source.path
    _check_writable(path)
    if path.read_bytes() != source.raw:
        raise ConfigError(
            f"{path} was changed since it was read, so nothing is written; ask once more"
        )
    after = source.whole(text).encode()
    kept = _beside(path)
    words = {"after": _digest(after), "before": source.raw.decode("utf-8")}
    _replace(kept, json.dumps(words).encode(), 0o600)
    _replace(path, after, stat.S_IMODE(path.stat().st_mode))
    return kept


def undo(path: Path) -> None:
    """Put the script back as it was before the last `apply`.

    Raises:
        ConfigError: there was none, or the file was changed since.
    """
    kept = _beside(path)
    try:
        words = json.loads(kept.read_bytes())
        before, after = words["before"].encode(), words["after"]
    except FileNotFoundError:
        raise ConfigError(f"nothing was applied to {path}, so there is nothing to undo") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{kept} is damaged, so {path} cannot be put back from it") from None
    if not path.is_file() or _digest(path.read_bytes()) != after:
        raise ConfigError(
            f"{path} was changed since --apply, so it is not put back; what it was is in {kept}"
        )
    _check_writable(path)
    _replace(path, before, stat.S_IMODE(path.stat().st_mode))
    kept.unlink()


def _check_writable(path: Path) -> None:
    """Also for root, who may write what is read-only."""
    if not path.stat().st_mode & 0o222 or not os.access(path, os.W_OK):
        raise ConfigError(f"{path} is read-only: chmod u+w {path}, or take the diff of --fix")
    if not os.access(path.resolve().parent, os.W_OK):
        raise ConfigError(f"the folder of {path} is read-only; take the diff of --fix")


def _replace(path: Path, content: bytes, mode: int) -> None:
    """As a whole or not at all; a link stays a link."""
    path = path.resolve()
    half = path.with_name(f".{path.name}.half")
    half.write_bytes(content)
    half.chmod(mode)
    os.replace(half, path)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.before-doctor")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
