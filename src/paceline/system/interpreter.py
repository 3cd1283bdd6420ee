"""What a script that runs inside this process changes of it.

A script expects the interpreter that ``python train.py`` gives it: its own arguments, its folder
first on the path, itself as ``__main__``. This module must not know who runs it.
"""

import multiprocessing.process
import sys
from collections.abc import Iterator
from contextlib import contextmanager


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
