"""The cores that this process may use, and the machine's accelerators.

CPU affinity and the container's quota limit the usable cores. Torch considers the affinity only, so
in a container with a quota it starts more threads than there are cores. The default number of
workers follows from the number of accelerators. Torch is imported only if the operating system
shows that there may be one, because the import takes seconds. This module must not know runs or
settings.
"""

import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .control_groups import MOUNT, control_groups

if TYPE_CHECKING:
    import torch

_ROOT = Path("/")
_NODES = ("nvidia0", "nvidiactl", "kfd", "dri/renderD128", "dxg")
"""Device files under /dev of NVIDIA, AMD and Intel, and of all under WSL2."""


def num_cores(root: Path = _ROOT) -> int:
    """Return the number of whole cores, at least 1; ``root`` is the file system's."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    mount = root / MOUNT
    folders = dict.fromkeys((*control_groups("cpu", root), mount, mount / "cpu"))
    quotas = [one for folder in folders if (one := _quota_cores(folder)) is not None]
    quota = min(quotas, default=None)
    return max(1, min(cores or 1, int(quota))) if quota else cores or 1


def _quota_cores(folder: Path) -> float | None:
    """Return the cores that a control group allows (version 2, then 1); None: no limit."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else float(quota) / float(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us = float((folder / "cpu.cfs_quota_us").read_text())
        period_us = float((folder / "cpu.cfs_period_us").read_text())
        return quota_us / period_us if quota_us > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def processor_name(device: "torch.device | None" = None) -> str:
    """Return the model name of the CUDA or ROCm device, else of the processor."""
    if device is not None and device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.partition(":")[2].strip() for line in file if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def count_accelerators(device: str = "auto") -> int:
    """Count accelerators of the kind ``device``; 0 for a CPU, 1 for a numbered device."""
    kind, colon, _ = device.partition(":")
    if kind == "cpu" or not may_have_accelerator():
        return 0
    if colon:
        return 1
    import torch

    if kind not in ("auto", _kind_here()):
        return 0
    return int(torch.accelerator.device_count()) if torch.accelerator.is_available() else 0


def _kind_here() -> str:
    """Return the kind of accelerator that this torch uses; ``cpu`` if there is none."""
    import torch

    if not torch.accelerator.is_available():
        return "cpu"
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None else accelerator.type


def may_have_accelerator() -> bool:
    """Whether there is a driver's device file; always true on systems without them (macOS)."""
    if sys.platform != "linux":
        return True
    return any((Path("/dev") / node).exists() for node in _NODES)


def find_device(name: str, seat: int) -> "torch.device":
    """Return the device of a seat: workers share the accelerators evenly.

    Args:
        seat: number of the worker on this machine.

    Raises:
        ConfigError: the device does not exist here.
    """
    import torch

    if name == "auto":
        name = _kind_here()  # the same choice as in count_accelerators
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"unknown device {name!r}; use auto, cpu, cuda, cuda:0, mps or xpu"
        ) from None
    if device.type == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and not torch.accelerator.is_available():
        accelerator = None  # built for one, but there is no driver or no device
    if accelerator is None or accelerator.type != device.type:
        raise ConfigError(
            f"device {name!r} is not here: this torch ({torch.__version__}) finds "
            f"{accelerator or 'no accelerator'}; use --device auto"
        )
    num_devices = torch.accelerator.device_count()
    if (device.index or 0) >= max(1, num_devices):
        raise ConfigError(
            f"device {name!r} is not here: this machine has {num_devices}, from {device.type}:0 on"
        )
    if device.index is None and device.type != "mps":
        device = torch.device(device.type, seat % num_devices)
    torch.accelerator.set_device_index(device.index or 0)
    return device
