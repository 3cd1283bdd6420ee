"""One row of the page: a script in every configuration, in a process of its own.

The page's processes run beside each other; each keeps the process that its workers are forked from.
This module must not know the page.
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
"""The process that workers are forked from, in each of the processes here."""


def begin_process() -> None:
    """One of the processes that scripts are run in, side by side.

    It was spawned, and a loader's workers would be, too: under ``python`` they are forked.
    """
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    _kept.enter_context(warm())


def row_of(name: str) -> tuple[list[Cell], float]:
    """One script in every configuration, and the seconds it took."""
    script = next(one for one in SCRIPTS if one.name == name)
    begun_s = time.perf_counter()
    said = io.StringIO()  # what scripts print
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        row = [cell(script, one) for one in CONFIGURATIONS]
    return row, time.perf_counter() - begun_s
