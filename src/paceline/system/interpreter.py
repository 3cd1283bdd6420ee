"""State that a script running inside this process changes, and Python's shutdown after it.

A script expects the interpreter that ``python train.py`` gives it: its own arguments, its folder
first on the path, itself as ``__main__``, and an end:

    last line -> threads that are no daemons end -> atexit -> what files have in memory is written

A forked process that ends by ``os._exit``, to skip the teardown of what it inherited, does this by
hand. A thread that never ends blocks it as it blocks Python, and an exception here is printed but
is no failure, as there. This module must not know who runs a script.
"""

import atexit
import gc
import io
import multiprocessing.process
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_TEXT, _BYTES = io.TextIOWrapper, (io.BufferedWriter, io.BufferedRandom)


def safe_path_flag() -> list[str]:
    """Return the flag that keeps the current folder off the module path, where ``-m`` puts it.

    Otherwise ``queue.py`` or ``datasets`` in the folder of the run would be imported in place of
    Python's own or an installed package's.
    """
    with suppress(OSError):  # the current folder may be gone
        if os.path.samefile(Path(__file__).parents[2], os.curdir):  # Paceline is imported from it
            return []
    return ["-P"]


@contextmanager
def kept_interpreter() -> Iterator[None]:
    """Restore ``sys.argv``, ``sys.path``, ``__main__`` and multiprocessing's start folder."""
    main, argv, path = sys.modules["__main__"], sys.argv, list(sys.path)
    folder = multiprocessing.process.ORIGINAL_DIR  # type: ignore[attr-defined]  # not in the stubs
    try:
        yield
    finally:
        sys.modules["__main__"], sys.argv, sys.path[:] = main, argv, path
        multiprocessing.process.ORIGINAL_DIR = folder  # type: ignore[attr-defined]  # as above


def leave_as_python_does() -> None:
    """Finish the threads, atexit handlers and files of a script that has ended."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter calls it
    except BaseException:  # a library may have registered anything
        traceback.print_exc()
    atexit._run_exitfuncs()  # it prints what a handler raises
    _write_files()


def leave_in_place() -> None:
    """Before a fork of members: disable the finalizers that exist now.

    Finalizing torch's operators one by one would take most of the time of a member's exit.
    """
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # there is no public list
        finalizer.atexit = False


def _write_files() -> None:
    """Flush open files, as Python's shutdown does; text first, which goes into bytes."""
    objects = gc.get_objects()
    for kind in (_TEXT, _BYTES):
        for file in objects:
            if issubclass(type(file), kind):
                with suppress(OSError, ValueError):  # closed, or its reader is gone
                    file.flush()
