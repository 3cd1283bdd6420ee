"""The state of accelerators, and which of them are busy although no process can be seen on them.

A kernel that was left behind keeps a device at 100 % with nothing in its memory and no entry in its
list of processes. This module compares how busy a device is with the processes that use it, by the
driver and by /proc. It must not know what trains.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ..machine.nvidia import Gpu, read_apps, read_gpus
from ..machine.source import MachineSource
from .snapshot import HOST, ProcessSnapshot

BUSY_SHARE = 0.2
"""The share of the time above which a device is busy; a driver's own housekeeping takes less."""
BUSY_BYTES = 1 << 30
"""The memory above which a device is busy; error correction and displays take some hundred MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """A device that is used by a process that cannot be seen.

    Attributes:
        device: its name, such as nvidia0.
        utilization: share of the time, 0 to 1.
    """

    device: str
    used_bytes: int
    utilization: float
    reason: str


def busy_devices(snapshot: ProcessSnapshot, source: MachineSource) -> list[Busy]:
    """Return NVIDIA devices that are busy without a process; empty if there is no such device."""
    gpus = read_gpus(source)
    if not gpus:
        return []
    apps = read_apps(source)
    open_files = {name for process in snapshot.processes for name in process.devices}
    return without_process(gpus, {uuid for _, uuid, _ in apps}, open_files)


def without_process(gpus: Iterable[Gpu], listed: set[str], held: set[str]) -> list[Busy]:
    """Return the busy devices that no known process uses.

    Args:
        gpus: all devices.
        listed: the uuids of those with a process, by the driver.
        held: the device files that a process has open, by /proc.
    """
    busy = []
    for gpu in gpus:
        is_busy = gpu.utilization >= BUSY_SHARE or gpu.used_bytes >= BUSY_BYTES
        if not is_busy or gpu.uuid in listed or f"/dev/nvidia{gpu.minor}" in held:
            continue
        usage = f"{gpu.utilization:.0%} busy, {gpu.used_bytes / 2**20:,.0f} MiB in use"
        busy.append(
            Busy(
                device=f"nvidia{gpu.index}", used_bytes=gpu.used_bytes,
                utilization=gpu.utilization,
                reason=f"{usage}, but no process here uses it: another container or another user "
                f"does, or a kernel was left behind; `sudo fuser -v /dev/nvidia{gpu.minor}` on the "
                f"host shows it, `sudo nvidia-smi --gpu-reset -i {gpu.index}` ends it",
            )
        )  # fmt: skip
    return busy


def device_memory(snapshot: ProcessSnapshot, source: MachineSource) -> dict[int, int]:
    """Return each process's bytes on devices.

    Empty inside a container, where the driver reports the host's process numbers, which belong to
    other processes here.
    """
    memory_bytes: dict[int, int] = {}
    if snapshot.namespace == HOST and read_gpus(source):
        for pid, _, used_bytes in read_apps(source):
            memory_bytes[pid] = memory_bytes.get(pid, 0) + used_bytes
    return memory_bytes
