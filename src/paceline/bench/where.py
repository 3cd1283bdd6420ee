"""Which device and how many threads a bench uses.

This module must not know what is measured.
"""

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
