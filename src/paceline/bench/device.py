"""The device to measure on, and its memory.

    free_bytes                   memory that a search may use
    limit_memory                 limit of this process, or of its GPU allocator
    reset_peak, peak_bytes       most memory held at once

On a CPU the peak is of the whole process, with Python and torch, so compare it with a process that
does the same otherwise. This module must not know what is measured.
"""

import contextlib
import resource
import sys
from pathlib import Path

import psutil
import torch

from ..errors import ConfigError
from ..system.limits import available_bytes
from ..system.processors import find_device

SHARE = 0.8
"""Share of the free memory that a search may use."""


def chosen_device(name: str) -> str:
    """Return torch's name of the device that ``--device`` means.

    Raises:
        ConfigError: this machine does not have it.
    """
    return str(find_device(name, 0))


def chosen_threads(threads: int | None) -> int:
    """Return ``--threads``, or torch's own number of threads.

    Raises:
        ConfigError: fewer than 1.
    """
    if threads is None:
        return torch.get_num_threads()
    if threads < 1:
        raise ConfigError(f"--threads must be >= 1, got {threads}")
    return threads


def free_bytes(device: str) -> int:
    """Return the memory that a search may use: a share of what is free on the host or the GPU."""
    if device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = min(psutil.virtual_memory().available, available_bytes())
    return int(free * SHARE)


def limit_memory(device: torch.device, limit_bytes: int) -> None:
    """Limit memory: on a GPU the allocator's total; on a CPU what this process adds from now on.

    On a CPU only Linux has a limit.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
    elif sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        held = _status_bytes("VmData") or 0  # RLIMIT_DATA counts private writable memory
        resource.setrlimit(resource.RLIMIT_DATA, (held + limit_bytes, hard))


def reset_peak(device: torch.device) -> None:
    """Reset the peak; if the system cannot, it counts from the start of the process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "cpu":
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes held at once since `reset_peak`; on MPS or XPU, the bytes held now."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if device.type != "cpu":
        return int(getattr(torch, device.type).driver_allocated_memory())
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _status_bytes("VmHWM") or (most if sys.platform == "darwin" else most * 1024)


def _status_bytes(name: str) -> int | None:
    """Return a value of /proc/self/status (proc(5)); None if there is none."""
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None
