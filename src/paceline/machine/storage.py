"""What kind of disk a folder lies on.

    folder -> /proc/self/mountinfo: file system, number of the device
           -> /sys/dev/block/NUMBER: the disk of that partition; does it rotate?

A network file system or a container's overlay has no disk here, and is reported as such. A virtual
disk reports what its host configured. This module must not know what lies there.
"""

import os
import re
from dataclasses import dataclass

from .source import MachineSource

_NETWORKS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "ceph", "beegfs", "9p", "virtiofs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The disk of one folder.

    Attributes:
        kind: for people: ``SSD (NVMe)``, ``hard disk``, ``memory``, ...
        name: the kernel's device name; empty: there is no local disk.
    """

    folder: str
    file_system: str
    kind: str
    name: str = ""
    model: str = ""


def read_disk(source: MachineSource, folder: str) -> Disk:
    """Return the disk that this folder lies on."""
    number, file_system = _mount(source, folder)
    name = _whole(source, source.link(f"/sys/dev/block/{number}"))
    return Disk(
        folder=folder, file_system=file_system, name=name,
        kind=_kind(source, file_system, name),
        model=source.text(f"/sys/block/{name}/device/model") if name else "",
    )  # fmt: skip


def _mount(source: MachineSource, folder: str) -> tuple[str, str]:
    """Return (major:minor, file system) of the nearest mount point above the folder."""
    best = ("", "", "")
    for line in source.text("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        words = before.split()
        if len(words) < 5 or not after:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), words[4])
        inside = folder == point or folder.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[0]):
            best = (point, words[2], after.split()[0])
    return best[1], best[2]


def _whole(source: MachineSource, name: str) -> str:
    """Return the disk of a partition."""
    if not name or source.exists(f"/sys/block/{name}"):
        return name
    disks = [disk for disk in source.names("/sys/block") if name.startswith(disk)]
    return max(disks, key=len, default=name)


def _kind(source: MachineSource, file_system: str, name: str) -> str:
    if file_system in ("tmpfs", "ramfs"):
        return "memory"
    if file_system in _NETWORKS or file_system.startswith("fuse."):
        return f"network or foreign file system ({file_system})"
    if file_system == "overlay":
        return "container overlay, on an unknown disk"
    rotates = source.text(f"/sys/block/{name}/queue/rotational") if name else ""
    if not rotates:
        return "unknown"
    if re.match(r"(vd|xvd)", name):
        return f"virtual disk, {'rotating' if rotates == '1' else 'not rotating'} as reported"
    if name.startswith("nvme"):
        return "SSD (NVMe)"
    return "hard disk" if rotates == "1" else "SSD"


def folders_of_interest() -> list[str]:
    """Return the folders that a run here writes to: the current one and the temporary one."""
    import tempfile

    return list(dict.fromkeys(os.path.realpath(folder) for folder in (".", tempfile.gettempdir())))
