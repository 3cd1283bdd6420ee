"""The control groups of this process and their ancestors: each may set a limit.

    /proc/self/cgroup    version 2   0::/user.slice/run.scope
                         version 1   4:cpu,cpuacct:/batch/job

This module must not know what is limited, nor by how much.
"""

from collections.abc import Iterator
from pathlib import Path

MOUNT = "sys/fs/cgroup"


def control_groups(kind: str, root: Path) -> Iterator[Path]:
    """Yield their folders, innermost first.

    Args:
        kind: the controller's name in version 1: ``cpu``, ``memory``.
        root: root of the file system.
    """
    mount = root / MOUNT
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        kinds, _, path = rest.partition(":")
        if number == "0" and not kinds:
            top = mount if (mount / "cgroup.controllers").exists() else mount / "unified"
        elif kind in kinds.split(","):
            top = mount / kinds if (mount / kinds).is_dir() else mount / kind
        else:
            continue
        inner = top / path.lstrip("/")
        if ".." in inner.parts or not inner.is_dir():  # in a container its own group is the mount
            inner = top
        for folder in (inner, *inner.parents):
            yield folder
            if folder == top:
                break
