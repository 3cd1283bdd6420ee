"""What a verb prints: its result on standard output, what it does meanwhile on standard error."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ..system.streams import Lasting

Json = Annotated[bool, Parameter(negative=(), help="One JSON object.")]
"""The flag of every verb that has a result."""


def show(
    is_json: bool, fields: Callable[[], Mapping[str, Any]], lines: Callable[[], Iterable[str]]
) -> None:
    """The result, as one JSON object or in lines."""
    print(json.dumps(fields(), allow_nan=False) if is_json else "\n".join(lines()))


def writable(path: Path | None) -> None:
    """Notice before the work that a picture cannot be written there afterwards.

    Raises:
        ConfigError: there is no such folder, or the path is one.
    """
    if path is None:
        return
    from ..errors import ConfigError

    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"cannot be written: {path.parent} is no folder"
        raise ConfigError(f"{path} {what}; name a file in a folder that is there")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written: you may not; name another file")


def say(line: str) -> None:
    """What is being done."""
    errors = Lasting(sys.stderr)
    errors.write(f"{line}\n")
    errors.flush()


def num_columns() -> int:
    """Of the terminal; 80 where the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 80
