"""The devices of a bench: which one is meant, how many threads, and the most memory that was held.

A process on a CPU is counted whole, with Python and torch in it, so what is compared is compared
with a process that does the same without. This module must not know what is measured.
"""

import contextlib
import resource
import sys
from pathlib import Path

import torch

from ..errors import ConfigError
from ..replica.device import find_device


def chosen_device(name: str) -> str:
    """The device that ``--device`` means, as torch writes it.

    Raises:
        ConfigError: it is not here.
    """
    return str(find_device(name, 0))


def chosen_threads(threads: int | None) -> int:
    """``--threads``, or what torch would use.

    Raises:
        ConfigError: fewer than 1.
    """
    if threads is None:
        return torch.get_num_threads()
    if threads < 1:
        raise ConfigError(f"--threads must be >= 1, got {threads}")
    return threads


_STATUS = Path("/proc/self/status")


def reset_peak(device: torch.device) -> None:
    """Begin to look for the most; where the system cannot forget, it counts from the start."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "cpu":
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM


def peak_bytes(device: torch.device) -> int:
    """The most bytes held at once since ``reset_peak``."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if device.type != "cpu":
        return int(getattr(torch, device.type).driver_allocated_memory())
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
