"""The process in which a script runs and is observed.

    python -m paceline.doctor.observed.child ASKED script.py [its arguments]

ASKED is JSON: the file to write to; seconds for prices, and which; or a text that runs in the
script's place while losses and gradients are kept. The file always holds the last that is known: how
many steps were made, an Observation or a StepRecord, or how the script ended. This module must not
know who reads it.
"""

import json
import math
import os
import runpy
import sys
import traceback
import types
from pathlib import Path
from time import monotonic
from typing import Any

from ...replica.seeding import seed_all
from .observation import Observation
from .patches import Patches
from .record import Recorder
from .session import Finished, Session

_TOLD_EVERY_S = 1.0
"""Steps are written down so often: some 0.1 ms each time, of a second."""


class FoundFile:
    """The file.

    Args:
        path: of it; it is replaced as a whole.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._pid = path, os.getpid()
        self._known: dict[str, object] = {}
        self._steps, self._told_s = 0, -math.inf

    def add(self, **known: object) -> None:
        """What is known from now on; a process that the script forked writes nothing."""
        if os.getpid() != self._pid:
            return
        self._known |= known
        half = self._path.with_suffix(".half")
        half.write_text(json.dumps(self._known))
        os.replace(half, self._path)

    def observed(self, found: Observation) -> None:
        self.add(observation=found.to_json())

    def stepped(self) -> None:
        """One more step; the first is written at once, later ones so seldom that it takes nothing."""
        self._steps += 1
        now_s = monotonic()
        if now_s - self._told_s > _TOLD_EVERY_S:
            self._told_s = now_s
            self.add(steps=self._steps)


def main() -> None:
    """Run the script."""
    asked, script, *args = sys.argv[1:]
    words = json.loads(asked)
    file = FoundFile(Path(words["file"]))
    sys.argv = [script, *args]
    sys.path[0] = str(Path(script).resolve().parent)
    if "text" in words:
        _record(script, words["text"], words["num_steps"], file)
    else:
        session = Session(words["price_s"], words["only"], file.observed, file.stepped)
        session.feed.install(Patches())
        _run(script, lambda: runpy.run_path(script, run_name="__main__"), file)


def _record(script: str, text: str, num_steps: int, file: FoundFile) -> None:
    recorder = Recorder(num_steps, file.stepped)
    recorder.install(Patches())
    seed_all(0)
    main = types.ModuleType("__main__")
    main.__file__, sys.modules["__main__"] = script, main
    code = compile(text, script, "exec")
    _run(script, lambda: exec(code, vars(main)), file)
    file.add(record=recorder.record().to_json() if recorder.record().gradients else None)


def _run(script: str, run: Any, file: FoundFile) -> None:
    """Run it to its end or to ours, and write down how it ended."""
    try:
        run()
        file.add(how="returned", why="", where="")
    except Finished:
        pass
    except SystemExit as end:
        file.add(how="exit", why="" if end.code is None else str(end.code), where="")
        raise
    except BaseException as error:  # the script may raise anything, and its end is told
        stack = traceback.extract_tb(error.__traceback__)
        own = [one for one in stack if one.filename == script] or stack[-1:]
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        file.add(how="failed", why=why, where=f"{own[-1].filename}:{own[-1].lineno}")
        raise


if __name__ == "__main__":
    main()
