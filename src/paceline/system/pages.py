"""Memory that is given back to the machine, where Linux and its C library can.

Elsewhere nothing is done. Source: malloc_trim(3). This module must not know tensors.
"""

import contextlib
import ctypes
import sys
from collections.abc import Mapping

_TUNABLES = "GLIBC_TUNABLES"
_LEAN = (
    "glibc.malloc.mmap_threshold=4194304", "glibc.malloc.trim_threshold=33554432",
    "glibc.malloc.hugetlb=1",
)  # fmt: skip

SMALL_BYTES = 64 << 20
"""Up to here a divided model is no reason to give back what a step frees, which takes time."""


def give_back_freed() -> None:
    """What C's heap keeps of memory that was freed; only glibc knows how."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def lean_heap(env: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment of a process, so that it holds little more than it needs.

    Blocks of 4 MiB on are mapped when they are made, in large pages, and unmapped when they are
    freed. In the heap one that was freed is too small for the next of its size: torch asks for
    aligned ones, and glibc before 2.38 takes an aligned block out of a larger one. Of a part of 190
    MiB that trains, the heap had 245 MiB more than was in use; mapped in small pages, steps took up
    to 1.7 times as long. Source: the manual of glibc, "Memory Allocation Tunables".

    Args:
        env: of this process; what its user has set up stays.

    Example:
        >>> lean_heap({"MALLOC_TRIM_THRESHOLD_": "0"})
        {}
    """
    is_tuned = any(name.startswith("MALLOC_") for name in env)
    if is_tuned or "glibc.malloc" in env.get(_TUNABLES, ""):
        return {}
    return {_TUNABLES: ":".join(filter(None, (env.get(_TUNABLES), *_LEAN)))}


def is_lean(env: Mapping[str, str]) -> bool:
    """Whether this process was begun with what `lean_heap` adds.

    Example:
        >>> is_lean(lean_heap({})), is_lean({})
        (True, False)
    """
    return env.get(_TUNABLES, "").endswith(":".join(_LEAN))
