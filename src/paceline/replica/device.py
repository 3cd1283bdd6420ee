"""How many accelerators this machine offers, and which of them is a seat's.

The default number of workers follows from their number. Torch is imported only where the
operating system shows that there may be one, because that takes seconds. This module must not
know runs or settings.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    import torch

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

    if kind not in ("auto", _kind_here()):
        return 0
    return int(torch.accelerator.device_count()) if torch.accelerator.is_available() else 0


def _kind_here() -> str:
    """The kind of accelerator that this torch computes on; ``cpu`` where there is none."""
    import torch

    if not torch.accelerator.is_available():
        return "cpu"
    found = torch.accelerator.current_accelerator()
    return "cpu" if found is None else found.type


def may_have_accelerator() -> bool:
    """Whether a driver's device file is here; always true where none would tell (macOS)."""
    if sys.platform != "linux":
        return True
    return any((Path("/dev") / node).exists() for node in _NODES)


def find_device(name: str, seat: int) -> "torch.device":
    """The device of a seat: workers share the accelerators that are here evenly.

    Raises:
        ConfigError: the device does not exist here.
    """
    import torch

    if name == "auto":
        name = _kind_here()  # what workers are counted by is what they compute on
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"unknown device {name!r}; write auto, cpu, cuda, cuda:0, mps or xpu"
        ) from None
    if device.type == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        raise ConfigError(
            f"device {name!r} is not here: this torch ({torch.__version__}) finds "
            f"{accelerator or 'no accelerator'}; use --device auto"
        )
    if device.index is None and device.type != "mps":
        device = torch.device(device.type, seat % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index or 0)
    return device
