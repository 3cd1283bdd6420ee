"""The process in which a script runs and is observed.

    python -m paceline.doctor.observed.child REQUEST script.py [its arguments]

REQUEST is JSON: the file to write to, and either the seconds for prices and which fixes to price, or
a text that runs in the script's place while its losses and gradients are recorded. The file always
holds the latest results: how many steps were made, an Observation or a StepRecord, and how the
script ended. This module must not know who reads it.
"""

import json
import math
import os
import runpy
import sys
import traceback
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic

from ...replica.seeding import seed_all
from .observation import Observation
from .patches import Patches
from .record import Recorder
from .session import Finished, Session

_WRITE_EVERY_S = 1.0
"""Seconds between writes of the number of steps; one write takes some 0.1 ms."""


class FoundFile:
    """The file of results, which is replaced as a whole at each write.

    Args:
        path: the path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._pid = path, os.getpid()
        self._known: dict[str, object] = {}
        self._steps, self._written_s = 0, -math.inf

    def add(self, **results: object) -> None:
        """Write further results; a process that the script has forked writes nothing."""
        if os.getpid() != self._pid:
            return
        self._known |= results
        partial = self._path.with_suffix(".half")
        partial.write_text(json.dumps(self._known))
        os.replace(partial, self._path)

    def observed(self, observation: Observation) -> None:
        """Write an observation."""
        self.add(observation=observation.to_json())

    def stepped(self) -> None:
        """Count a step; the first is written at once, later ones too rarely to cost anything."""
        self._steps += 1
        now_s = monotonic()
        if now_s - self._written_s > _WRITE_EVERY_S:
            self._written_s = now_s
            self.add(steps=self._steps)


def main() -> None:
    """Run the script that the command line names."""
    encoded, script, *args = sys.argv[1:]
    request = json.loads(encoded)
    file = FoundFile(Path(request["file"]))
    sys.argv = [script, *args]
    folder = str(Path(script).resolve().parent)
    if sys.flags.safe_path:
        sys.path.insert(0, folder)
    else:
        sys.path[0] = folder
    if "text" in request:
        _record(script, request["text"], request["num_steps"], file)
    else:
        session = Session(request["price_s"], request["only"], file.observed, file.stepped)
        session.feed.install(Patches())
        run = partial(runpy.run_path, script, run_name="__main__")
        _run(script, run, file, lambda: session.tried)


def _record(script: str, text: str, num_steps: int, file: FoundFile) -> None:
    recorder = Recorder(script, num_steps, file.stepped)
    recorder.install(Patches())
    seed_all(0)
    main = types.ModuleType("__main__")
    main.__file__, sys.modules["__main__"] = script, main
    code = compile(text, script, "exec")
    _run(script, lambda: exec(code, vars(main)), file)
    file.add(record=recorder.record().to_json() if recorder.record().gradients else None)


def _run(
    script: str, run: Callable[[], object], file: FoundFile, tried: Callable[[], str] = str
) -> None:
    """Run the script until it ends or all is known, and write how it ended, and with which fix."""
    try:
        run()
        file.add(how="returned", why="", where="")
    except Finished:
        pass
    except SystemExit as end:
        file.add(how="exit", why="" if end.code is None else str(end.code), where="")
        raise
    except BaseException as error:  # the script may raise anything, and is reported as failed
        stack = traceback.extract_tb(error.__traceback__)
        frames = [frame for frame in stack if frame.filename == script] or stack[-1:]
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        where = f"{frames[-1].filename}:{frames[-1].lineno}"
        file.add(how="failed", why=why, where=where, tried=tried())
        raise


if __name__ == "__main__":
    main()
