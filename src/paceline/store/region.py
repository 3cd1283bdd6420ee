"""One block of shared memory, seen as bytes, as 64-bit words and as an address.

A store of keys needs all three: tensors lie in the bytes, versions in the words, and the locks of
the C library want an address. This module must not know what lies where.
"""

import ctypes
import os
import weakref

from ..errors import ConfigError
from .memory import SharedMemory


class Region:
    """``memory`` mapped into this process; freed when the last tensor that looks into it is gone.

    Args:
        memory: of full size; the descriptor becomes the region's.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._finalizer = weakref.finalize(self, os.close, memory.fd)
        self.data = memory.tensor()
        """``(num_bytes,)`` uint8."""
        self.words = memoryview(memory.buffer).cast("q")
        """The same memory as int64: each is read and written whole."""
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory.buffer))

    @classmethod
    def attach(cls, fd: int) -> "Region":
        """The region behind a descriptor that another process has handed over."""
        try:
            return cls(SharedMemory(fd))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"descriptor {fd} is no shared memory of a store ({error}); hand over store.fd: "
                "subprocess.Popen(..., pass_fds=[store.fd])"
            ) from None

    @property
    def fd(self) -> int:
        return self._memory.fd

    @property
    def num_bytes(self) -> int:
        return len(self.data)

    def used_bytes(self) -> int:
        """Bytes of the pages that have been touched by anybody."""
        return self._memory.used_bytes()

    def close(self) -> None:
        """Give the descriptor back; the mapping goes with its last user."""
        self._finalizer()
