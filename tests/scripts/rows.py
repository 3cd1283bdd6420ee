"""One row of the page: a script in every configuration, in a process of its own.

The processes of the page run in parallel; each keeps the process that forks its workers. This
module must not know the page.
"""

import contextlib
import io
import multiprocessing
import time

import torch

from paceline.engines.local.client import warm

from . import SCRIPTS
from .base import CONFIGURATIONS
from .harness import Cell, cell

_kept = contextlib.ExitStack()
"""The process that forks workers, in each of the processes here."""


def begin_process() -> None:
    """Initialize one of the parallel processes that run scripts.

    It was spawned, as would be loader workers, which are forked under ``python``.
    """
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    _kept.enter_context(warm())


def row_of(name: str) -> tuple[list[Cell], float]:
    """Run one script in every configuration; return the row and its duration in seconds."""
    script = next(one for one in SCRIPTS if one.name == name)
    begun_s = time.perf_counter()
    said = io.StringIO()  # what scripts print
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        row = [cell(script, one) for one in CONFIGURATIONS]
    return row, time.perf_counter() - begun_s
