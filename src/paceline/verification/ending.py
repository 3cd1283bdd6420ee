"""A script that is run for its updates alone: it ends where they are made, at a step's border.

    connect -> prepare and epochs are replaced -> the script, as __main__ --> Enough -> ended

What stands behind its loop (an evaluation, a file that is written) is not run: the loader, asked
for one more batch after the run has ended, raises what no ``except Exception`` of the script's own
stops. Its ``finally`` and its contexts are left in order. This module must not know why so many
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
    """The updates are made, or the script's epochs are over."""


class EndingLoader(PreparedLoader):
    """A prepared loader that ends the script where the run has ended."""

    OWN = PreparedLoader.OWN | {"pace"}
    pace: Pace

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        if torch.is_grad_enabled() and self.pace.is_stopped:  # else it evaluates over it
            raise Enough


def end_with_run(pace: Pace, made: Sequence[Any], kind: type[EndingLoader] = EndingLoader) -> None:
    """Let the loaders among what ``prepare`` has made end the script with the run."""
    for one in made if isinstance(made, tuple) else (made,):
        if isinstance(one, PreparedLoader):
            one.__class__ = kind
            one.pace = pace


def end_with_loop(loop: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """``pace.epochs`` or ``pace.updates``, after whose last turn the script is over."""

    def whole(*arguments: Any, **options: Any) -> Iterator[Any]:
        yield from loop(*arguments, **options)
        raise Enough

    return whole


def run_for_updates(script: str, args: Sequence[str]) -> None:
    """The script as ``__main__``, to its end or until there is enough."""
    sys.argv = [script, *args]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except Enough:
        pass
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
