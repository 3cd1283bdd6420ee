"""Modules that a user wants imported once, before members are forked: `--preload lightning`.

    launcher      are there such modules?      -> the run begins
    fork server   imports them, and is still a process that can be forked      -> members

A member has them from its first line, in the state in which the import left them, so what a script
sets for an import (an environment variable, say) comes too late: that is why nothing is imported
here that was not asked for. This module must not know what a run does.
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
    """Before anything begins; nothing is imported for it.

    Raises:
        ConfigError: there is no such module, or it is no name of one.
    """
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError(
                f"preload: {name!r} is not a module as an import names it: --preload lightning"
            )
        top = name.partition(".")[0]
        if top not in sys.modules and importlib.util.find_spec(top) is None:
            raise ConfigError(
                f"preload: there is no module {top!r} here; name one that the script imports: "
                "--preload lightning"
            )


def import_once(names: Sequence[str], search_path: Sequence[str]) -> None:
    """Import what is not there yet, in the process that is forked.

    Args:
        search_path: where modules are also looked for.

    Raises:
        ConfigError: one cannot be imported, or leaves a process that cannot be forked.
    """
    missing = [one for one in names if one not in sys.modules]
    if not missing:
        return
    with _found_in(search_path):
        for name in missing:
            try:
                importlib.import_module(name)
            except Exception as error:  # a library may raise anything, and it is told
                raise ConfigError(
                    f"preload: {name} cannot be imported: {type(error).__name__}: {error}"
                ) from error
            _refuse_unforkable(name)
    gc.collect()
    gc.freeze()  # so members do not get their own copy of each page that would be looked at


@contextmanager
def _found_in(search_path: Sequence[str]) -> Iterator[None]:
    before = sys.path[:]
    sys.path += [one for one in search_path if one not in before]
    try:
        yield
    finally:
        sys.path[:] = before


def _refuse_unforkable(name: str) -> None:
    """Raise ConfigError where threads would be missing in what is forked, or a device broken."""
    tasks = "/proc/self/task"
    if os.path.isdir(tasks) and (num := len(os.listdir(tasks)) - 1):
        raise ConfigError(
            f"preload: {name} begins {num} thread{'s' * (num > 1)} when it is imported, which "
            "workers that are forked would not have: leave it out"
        )
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise ConfigError(
            f"preload: {name} uses a GPU when it is imported, which workers that are forked could "
            "not: leave it out"
        )
