"""Imports modules once, before members are forked: `--preload lightning`.

    launcher      checks that they exist                                 -> the run begins
    fork server   imports them, and checks that it can still be forked   -> members

Members start with these modules already imported, so a setting that must precede the import (an
environment variable, for example) comes too late in the script. So only modules that the user names
are imported here. This module must not know what a run does.
"""

import gc
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ...errors import ConfigError


def check_modules(names: Sequence[str]) -> None:
    """Check that these modules exist, without importing them.

    Raises:
        ConfigError: a module does not exist, or a name is no module name.
    """
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError(
                f"preload: {name!r} is not a module name; write e.g. --preload lightning"
            )
        top = name.partition(".")[0]
        if top not in sys.modules and importlib.util.find_spec(top) is None:
            raise ConfigError(
                f"preload: no module named {top!r}; name a module that the script imports, e.g. "
                "--preload lightning"
            )


def import_once(names: Sequence[str], search_path: Sequence[str]) -> None:
    """Import these modules in this process, before it is forked.

    Args:
        search_path: further folders with modules.

    Raises:
        ConfigError: a module cannot be imported, or the process cannot be forked afterwards.
    """
    missing = [name for name in names if name not in sys.modules]
    if not missing:
        return
    with _with_path(search_path):
        for name in missing:
            try:
                importlib.import_module(name)
            except Exception as error:  # a library may raise anything; it is reported to the user
                raise ConfigError(
                    f"preload: {name} cannot be imported: {type(error).__name__}: {error}"
                ) from error
            _refuse_unforkable(name)
    gc.collect()
    gc.freeze()  # a collection in a member would copy each page that it reads


@contextmanager
def _with_path(search_path: Sequence[str]) -> Iterator[None]:
    before = sys.path[:]
    sys.path += [folder for folder in search_path if folder not in before]
    try:
        yield
    finally:
        sys.path[:] = before


def _refuse_unforkable(name: str) -> None:
    """Raise ConfigError if the import started threads or a GPU, which forked workers cannot use."""
    tasks = "/proc/self/task"
    if os.path.isdir(tasks) and (num := len(os.listdir(tasks)) - 1):
        raise ConfigError(
            f"preload: importing {name} starts {num} thread{'s' * (num > 1)}, which forked workers "
            "would not have: leave it out"
        )
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise ConfigError(
            f"preload: importing {name} uses a GPU, which forked workers could then no longer use: "
            "leave it out"
        )
