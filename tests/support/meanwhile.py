"""Actions on a run in this process while it runs, from another thread."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path


@contextmanager
def meanwhile(do: Callable[[], None], *files: Path) -> Iterator[None]:
    """Inside, ``do`` is called once as soon as these files, made by a run, exist.

    If it fails, the run is stopped and the error is raised here.
    """
    is_over = threading.Event()
    failed: list[Exception] = []

    def watch() -> None:
        while not all(file.exists() for file in files):
            if is_over.wait(0.01):
                failed.append(AssertionError("the run was over before"))
                return
        try:
            do()
        except Exception as error:
            failed.append(error)
            stop()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()
    for error in failed:
        raise error


def stop() -> None:
    """TERM, as from outside."""
    os.kill(os.getpid(), signal.SIGTERM)


def stopped_at(file: Path) -> AbstractContextManager[None]:
    """Inside, a run is told to stop as soon as this file, which it makes, exists."""
    return meanwhile(stop, file)
