"""A script run by itself for each of several cases, in processes forked from one with torch in it.

    python each_alone.py SCRIPT FOLDER CASE ...     as if: python SCRIPT CASE FOLDER, for each

Exits with 1 where one of them failed.
"""

import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path


def run_each_alone(script: Path, folder: Path, cases: Iterable[str]) -> None:
    """Run the script for each case; what it wrote lies in the folder."""
    words = [sys.executable, __file__, str(script), str(folder), *cases]
    subprocess.run(words, check=True, timeout=120)


def main(script: str, folder: str, *cases: str) -> int:
    import torch._dynamo  # noqa: F401  the first optimizer would import it, in every process

    import paceline.script.worker  # noqa: F401

    sys.path.insert(0, str(Path(script).parent))
    codes = []
    for case in cases:
        pid = os.fork()
        if pid == 0:
            os._exit(_code_of(script, case, folder))
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return int(any(codes))


def _code_of(script: str, *words: str) -> int:
    sys.argv = [script, *words]
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
