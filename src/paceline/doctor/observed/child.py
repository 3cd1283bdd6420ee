"""The process in which a script runs and is observed.

    python -m paceline.doctor.observed.child ASKED script.py [its arguments]

ASKED is JSON: the file to write to; seconds for prices, and which; or a text that runs in the
script's place while losses and gradients are kept. The file always holds the last that is known: an
Observation or a StepRecord, or how the script ended. This module must not know who reads it.
"""

import json
import os
import runpy
import sys
import traceback
import types
from pathlib import Path
from typing import Any

from ...replica.seeding import seed_all
from .observation import Observation
from .patches import Patches
from .record import Recorder
from .session import Finished, Session


class FoundFile:
    """The file.

    Args:
        path: of it; it is replaced as a whole.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._pid = path, os.getpid()
        self._known: dict[str, object] = {}

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
        session = Session(words["price_s"], words["only"], file.observed)
        session.feed.install(Patches())
        _run(script, lambda: runpy.run_path(script, run_name="__main__"), file)


def _record(script: str, text: str, num_steps: int, file: FoundFile) -> None:
    recorder = Recorder(num_steps)
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
