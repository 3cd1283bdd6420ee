"""The source tree of the tests: every process of a test imports the package from it.

An editable install may be of another tree. It must not know what tests assert.
"""

import os
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"


def python_path(*folders: object) -> str:
    """``PYTHONPATH`` with these folders and this tree's package, before what it already has."""
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    entries = [*map(str, folders), str(SRC), *inherited]
    return os.pathsep.join(dict.fromkeys(entry for entry in entries if entry))
