"""The process in which a script runs and is observed.

    python -m paceline.doctor.observed.child ASKED script.py [its arguments]

ASKED is JSON: the file to write to, and the seconds for prices. The file always holds the last that
is known: an Observation, or how the script ended. This module must not know who reads it.
"""

import json
import os
import runpy
import sys
import traceback
from pathlib import Path

from .observation import Observation
from .patches import Patches
from .session import Finished, Session


class Result:
    """The file.

    Args:
        path: of it; it is replaced as a whole.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._pid = path, os.getpid()
        self._found: Observation | None = None

    def found(self, observation: Observation) -> None:
        self._found = observation
        self._write({"observation": observation.to_json()})

    def ended(self, how: str, why: str, where: str = "") -> None:
        """The script ended by itself."""
        seen = None if self._found is None else self._found.to_json()
        self._write({"observation": seen, "how": how, "why": why, "where": where})

    def _write(self, value: dict[str, object]) -> None:
        if os.getpid() != self._pid:
            return
        half = self._path.with_suffix(".half")
        half.write_text(json.dumps(value))
        os.replace(half, self._path)


def main() -> None:
    """Run the script."""
    asked, script, *args = sys.argv[1:]
    words = json.loads(asked)
    result = Result(Path(words["file"]))
    session = Session(words["price_s"], result.found)
    session.feed.install(Patches())
    sys.argv = [script, *args]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
        result.ended("returned", "")
    except Finished:
        pass
    except SystemExit as end:
        result.ended("exit", "" if end.code is None else str(end.code))
        raise
    except KeyboardInterrupt:
        result.ended("interrupted", "")
    except BaseException as error:
        if not session.is_done:
            last = traceback.extract_tb(error.__traceback__)
            own = [one for one in last if one.filename == script] or last[-1:]
            result.ended(
                "failed", f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
                f"{own[-1].filename}:{own[-1].lineno}",
            )  # fmt: skip
            raise


if __name__ == "__main__":
    main()
