"""What accelerators say of themselves, and which one is busy though no process is to be seen.

A kernel that was left behind pins a device at 100 % with nothing in its memory and nobody in its
list of processes; who looks at that list alone never sees it. Here a device is asked what it does,
the driver and /proc who has it, and the two are compared. This module must not know what trains.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ..machine.nvidia import Gpu, read_apps, read_gpus
from ..machine.source import MachineSource
from .snapshot import HOST, ProcessSnapshot

BUSY_SHARE = 0.2
"""Of the time; a driver's own housekeeping shows less."""
BUSY_BYTES = 1 << 30
"""Of memory; a driver with error correction and display keeps up to some hundred MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """A device that somebody uses who cannot be seen.

    Attributes:
        utilization: share of the time, 0 to 1.
    """

    device: str
    used_bytes: int
    utilization: float
    reason: str


def busy_devices(snapshot: ProcessSnapshot, source: MachineSource) -> list[Busy]:
    """NVIDIA's that are busy without a process; none where there is no such device."""
    gpus = read_gpus(source)
    if not gpus:
        return []
    apps = read_apps(source)
    held = {name for one in snapshot.processes for name in one.devices}
    return without_process(gpus, {uuid for _, uuid, _ in apps}, held)


def without_process(gpus: Iterable[Gpu], listed: set[str], held: set[str]) -> list[Busy]:
    """Devices at work that neither the driver (``listed``) nor /proc (``held``) knows a user of."""
    found = []
    for gpu in gpus:
        is_busy = gpu.utilization >= BUSY_SHARE or gpu.used_bytes >= BUSY_BYTES
        if not is_busy or gpu.uuid in listed or f"/dev/nvidia{gpu.minor}" in held:
            continue
        what = f"{gpu.utilization:.0%} busy, {gpu.used_bytes / 2**20:,.0f} MiB in use"
        found.append(
            Busy(
                device=f"nvidia{gpu.index}", used_bytes=gpu.used_bytes,
                utilization=gpu.utilization,
                reason=f"{what}, and no process here has it: another container's or another "
                f"user's, or a kernel that was left behind; `sudo fuser -v /dev/nvidia{gpu.minor}` "
                f"on the host says, `sudo nvidia-smi --gpu-reset -i {gpu.index}` ends it",
            )
        )  # fmt: skip
    return found


def device_memory(snapshot: ProcessSnapshot, source: MachineSource) -> dict[int, int]:
    """Process -> bytes on devices; none inside of a container, where the driver tells the host's
    numbers, which are others' here."""
    found: dict[int, int] = {}
    if snapshot.namespace == HOST and read_gpus(source):
        for pid, _, used_bytes in read_apps(source):
            found[pid] = found.get(pid, 0) + used_bytes
    return found
