"""What a script that runs inside this process changes of it, and what Python does behind one.

A script expects the interpreter that ``python train.py`` gives it: its own arguments, its folder
first on the path, itself as ``__main__``, and an end:

    last line -> threads that are no daemons end -> atexit -> what files have in memory is written

Who ends by ``os._exit``, having been forked with much that nobody has to take apart, does this by
hand. A thread that never ends holds it up as it holds up Python, and what is raised here is said,
and is no failure, as there. This module must not know who runs a script.
"""

import atexit
import gc
import io
import multiprocessing.process
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_TEXT, _BYTES = io.TextIOWrapper, (io.BufferedWriter, io.BufferedRandom)


@contextmanager
def kept_interpreter() -> Iterator[None]:
    """Leave ``sys.argv``, ``sys.path``, ``__main__`` and where spawned ones begin as they were."""
    main, argv, path = sys.modules["__main__"], sys.argv, list(sys.path)
    folder = multiprocessing.process.ORIGINAL_DIR  # type: ignore[attr-defined]  # it has it
    try:
        yield
    finally:
        sys.modules["__main__"], sys.argv, sys.path[:] = main, argv, path
        multiprocessing.process.ORIGINAL_DIR = folder  # type: ignore[attr-defined]  # as above


def leave_as_python_does() -> None:
    """Let the threads, handlers and files of a script that is over come to their ends."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter calls it
    except BaseException:  # of whatever a library has it call
        traceback.print_exc()
    atexit._run_exitfuncs()  # says by itself what one of them raises
    _write_files()


def leave_in_place() -> None:
    """Before members are forked: what is there now is taken apart by none of them.

    Of torch's operators, one by one, that would be most of a member's end.
    """
    for one in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # there is no other list
        one.atexit = False


def _write_files() -> None:
    """Python closes files where it takes modules apart; text first, which goes into bytes."""
    found = gc.get_objects()
    for kind in (_TEXT, _BYTES):
        for one in found:
            if issubclass(type(one), kind):
                with suppress(OSError, ValueError):  # closed, or its reader is gone
                    one.flush()
