"""How many accelerators this machine offers.

The default number of workers follows from it. Torch is imported only where the operating system
shows that there may be one, because that takes seconds. This module must not know runs or
settings.
"""

import sys
from pathlib import Path

_NODES = ("nvidia0", "nvidiactl", "kfd", "dri/renderD128", "dxg")
"""Files under /dev of the drivers: NVIDIA, AMD, Intel, and all of them under WSL2."""


def count_accelerators(device: str = "auto") -> int:
    """Accelerators of the kind that ``device`` names; 0 for a CPU, 1 for a numbered device."""
    kind, colon, _ = device.partition(":")
    if kind == "cpu" or not may_have_accelerator():
        return 0
    if colon:
        return 1
    import torch

    if kind == "auto":
        return int(torch.accelerator.device_count()) if torch.accelerator.is_available() else 0
    module = getattr(torch, kind, None)
    return int(module.device_count()) if module is not None and module.is_available() else 0


def may_have_accelerator() -> bool:
    """Whether a driver's device file is here; always true where none would tell (macOS)."""
    if sys.platform != "linux":
        return True
    return any((Path("/dev") / node).exists() for node in _NODES)
