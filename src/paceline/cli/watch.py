"""``paceline watch``: follow a run while it trains."""

import os
import sys
import time
from pathlib import Path

from .flags import Json, say

_EVERY_S = 1.0


def watch(run: Path = Path("runs/latest"), /, *, json: Json = False) -> None:
    """Follow a run live until it ends, then print its summary.

    Exit code 1 if the run was cut off (its processes are gone, and its trace has no end).

    Example: paceline watch runs/latest

    Parameters
    ----------
    run
        The run's folder.
    """
    from ..report.live import choose_observer
    from ..report.summary import summarize
    from ..report.watch import watch as follow

    os.nice(19 - os.nice(0))  # training goes first
    observer = choose_observer(json)

    def pause() -> None:
        if observer.trouble:
            raise BrokenPipeError  # the reader closed the pipe, as in `| head`
        time.sleep(_EVERY_S)

    try:
        has_ended = follow(run, observer, pause)
        summary = summarize(run)
        observer.finished(summary)
    finally:
        observer.close()
    if json:
        from json import dumps

        print(dumps(summary.to_json(), allow_nan=False))
    if not has_ended:
        say(f"the run in {run} was cut off: no process works on it, and its trace has no end")
        sys.exit(1)
