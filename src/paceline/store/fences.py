"""Memory fences: other processes see writes in the order in which they were made.

    writer   data, fence, word, fence, data          reader   word, fence, data, fence, word

An x86 processor keeps the order of stores, and that of loads: plain words are enough. Others (ARM,
POWER, RISC-V) do not; there a fence of the C library is on both sides of every access to a word.
This module must not know what the words mean.
"""

import ctypes
import platform
import sys
from collections.abc import Callable
from typing import Any

from ..errors import ConfigError

HAS_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")
"""Whether the processor keeps the order of stores and that of loads."""

_SEQ_CST = 5
"""``memory_order_seq_cst`` of C11."""


class Fenced:
    """Words with a fence on both sides of every access."""

    def __init__(self, words: Any, fence: Callable[[], object]) -> None:
        self._words = words
        self._fence = fence

    def __getitem__(self, index: int | slice) -> Any:
        self._fence()
        value = self._words[index]
        if isinstance(index, slice):
            value = value.tolist()
        self._fence()
        return value

    def __setitem__(self, index: int, value: Any) -> None:
        self._fence()
        self._words[index] = value
        self._fence()


def ordered(words: Any, *, has_order: bool = HAS_ORDER) -> Any:
    """``words``, with fences if this processor needs them.

    Raises:
        ConfigError: this processor needs a fence, but no library here has one.
    """
    return words if has_order else Fenced(words, find_fence())


def find_fence() -> Callable[[], object]:
    """A function that orders all memory accesses around its call.

    Raises:
        ConfigError: no library here has one.
    """
    try:
        if sys.platform == "darwin":
            barrier: Callable[[], object] = ctypes.CDLL(None).OSMemoryBarrier
            return barrier
        fence = ctypes.CDLL("libatomic.so.1").atomic_thread_fence
        return lambda: fence(_SEQ_CST)
    except (OSError, AttributeError):
        raise ConfigError(
            f"several workers need a memory fence on {platform.machine()}, and libatomic.so.1 was "
            "not found: install it (Debian: libatomic1, Fedora: libatomic), or train with one "
            "worker: python SCRIPT"
        ) from None
