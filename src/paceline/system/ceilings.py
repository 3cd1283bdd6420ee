"""Measured limits of this machine, in one file.

    ~/.cache/paceline/ceilings.json        (XDG_CACHE_HOME)

        {"format": 1, "machines": {"NAME": {"machine": ..., "collectives": ...}}}

Several machines may share a home folder: each finds its entry by its name. Each kind of measurement
writes and reads its own section. A file that is damaged or of another version is ignored, since its
content can be measured again. This module must not know what sections mean.
"""

import errno
import fcntl
import json
import platform
from contextlib import closing
from pathlib import Path
from typing import Any

from ..errors import FileError
from .files import OpenFolder, cache_home, open_to_read, read_text

FORMAT = 1
_NAME = "ceilings.json"
_MOST_BYTES = 1 << 20


def ceilings_path() -> Path:
    """Return the path of the file."""
    return cache_home() / "paceline" / _NAME


def read_ceilings(section: str) -> tuple[object, str]:
    """Return a section of this machine, or None; and why the file was ignored, or "".

    The content is not validated: the caller has to check it.
    """
    path = ceilings_path()
    try:
        machines = _machines(read_text(open_to_read(path), _MOST_BYTES))
        return machines.get(platform.node(), {}).get(section), ""
    except OSError as error:
        if error.errno == errno.ENOENT:
            return None, ""
        return None, f"{path} is ignored: {error.strerror}"
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None, f"{path} is ignored: it is damaged, or of another version of Paceline"


def write_ceilings(section: str, value: object) -> Path:
    """Write a section of this machine to the file; the others stay.

    Raises:
        FileError: it cannot be written there.
    """
    path = ceilings_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(error.errno or errno.EIO, str(error.strerror), str(path)) from None
    with (
        closing(OpenFolder.open(path.parent)) as folder,
        open(folder.append(f"{_NAME}.lock"), "ab") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            machines = _machines(read_text(folder.read(_NAME), _MOST_BYTES))
            own = dict(machines.get(platform.node(), {}))
        except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
            machines, own = {}, {}
        machines[platform.node()] = {**own, section: value}
        text = json.dumps({"format": FORMAT, "machines": machines}, indent=1)
        folder.replace(_NAME, text.encode())
    return path


def _machines(text: str) -> dict[str, Any]:
    whole = json.loads(text)
    if whole["format"] != FORMAT:
        raise ValueError("another version")
    return dict(whole["machines"])
