"""Runs a script only for its updates: it ends when they are made, between two steps.

    connect -> prepare and epochs are replaced -> the script, as __main__ --> Enough -> ended

What follows its loop (an evaluation, writing a file) is not run: at the next batch after the end
of the run, the loader raises an exception that the script's ``except Exception`` does not
catch. Its ``finally`` blocks and contexts still run. This module must not know why so many
updates are wanted.
"""

import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..script.loader import PreparedLoader
from ..script.worker import Pace


class Enough(BaseException):
    """Raised when the updates are made, or the script's epochs are over."""


class EndingLoader(PreparedLoader):
    """A prepared loader that ends the script when the run has ended."""

    OWN = PreparedLoader.OWN | {"pace"}
    pace: Pace

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        if torch.is_grad_enabled() and self.pace.is_stopped:  # else it is an evaluation
            raise Enough


def end_with_run(pace: Pace, made: Sequence[Any], kind: type[EndingLoader] = EndingLoader) -> None:
    """Let the loaders that ``prepare`` has returned end the script with the run."""
    for item in made if isinstance(made, tuple) else (made,):
        if isinstance(item, PreparedLoader):
            item.__class__ = kind
            item.pace = pace


def end_with_loop(loop: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """``pace.epochs`` or ``pace.updates``, which ends the script after its last turn."""

    def whole(*arguments: Any, **options: Any) -> Iterator[Any]:
        yield from loop(*arguments, **options)
        raise Enough

    return whole


def run_for_updates(script: str, args: Sequence[str]) -> None:
    """Run the script as ``__main__``, to its end or until ``Enough`` is raised."""
    sys.argv = [script, *args]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except Enough:
        pass
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
