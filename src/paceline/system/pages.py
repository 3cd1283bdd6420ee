"""Memory of this process that is given back to the machine, where Linux and its C library can.

Elsewhere nothing is done. Source: malloc_trim(3). This module must not know tensors.
"""

import contextlib
import ctypes
import sys


def give_back_freed() -> None:
    """What C's heap keeps of memory that was freed; only glibc knows how."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
