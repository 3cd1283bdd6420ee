"""Memory of this process that is given back to the machine, where Linux and its C library can.

    give_back(address, num_bytes)     whole pages of a private stretch: what they hold is lost
    give_back_freed()                 what C's heap keeps of memory that was freed

Elsewhere both do nothing. Sources: madvise(2), malloc_trim(3). This module must not know tensors.
"""

import contextlib
import ctypes
import mmap
import sys


def give_back(address: int, num_bytes: int) -> None:
    """Its whole pages; they read as zeros, or as before, when they are next looked at."""
    page = mmap.PAGESIZE
    first, last = -(-address // page) * page, (address + num_bytes) // page * page
    if sys.platform == "linux" and last > first:
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        advise(first, last - first, mmap.MADV_DONTNEED)


def give_back_freed() -> None:
    """What the heap keeps for later; only glibc knows how."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
