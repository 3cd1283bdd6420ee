"""``free_memory()`` gives back what this process holds and no longer needs, without ending it.

    a traceback that Python keeps  -> the frames of the failed training, with its model and batches
    cycles of objects              -> gc.collect
    torch's caches                 -> empty_cache of the accelerator, pinned memory of the host
    the heap of C                  -> malloc_trim

In a notebook the first one matters most: after an error ``sys.last_value`` keeps every tensor of
the frames that it passed through, and no cache can be emptied while they live. This module ends no
process and changes no variable of the caller's.
"""

import contextlib
import gc
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..plan import format_bytes
from ..system.pages import give_back_freed

if TYPE_CHECKING:
    from types import ModuleType

_LAST = ("last_exc", "last_value", "last_traceback", "last_type")


class Freed(NamedTuple):
    """The memory that was given back.

    Attributes:
        memory_bytes: by how much this process's resident memory shrank.
        device_bytes: by how much the memory that torch had reserved on accelerators shrank.
        num_objects: unreachable objects that the garbage collector found.
    """

    memory_bytes: int
    device_bytes: int
    num_objects: int

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.memory_bytes)} of memory, {format_bytes(self.device_bytes)} of "
            f"devices, {self.num_objects:,} objects"
        )


def free_memory() -> Freed:
    """Give back memory that nothing in this process needs any more, on the host and on devices.

    It does not import torch. Objects that a variable still refers to stay; in a notebook that may
    be the model itself (``del model`` first) or an output (``Out``).

    Returns:
        How much was given back; a number is 0 if the system does not report it, never negative.

    Example:
        >>> freed = free_memory()
        >>> freed.device_bytes
        0
    """
    torch: Any = sys.modules.get("torch")
    memory, device = _memory_bytes(), _device_bytes(torch)
    _forget_errors()
    num_objects = gc.collect()
    if torch is not None:
        _empty_caches(torch)
    give_back_freed()
    return Freed(
        memory_bytes=max(0, memory - _memory_bytes()),
        device_bytes=max(0, device - _device_bytes(torch)),
        num_objects=num_objects,
    )


def _forget_errors() -> None:
    """Clear the frames of the last error, which the interpreter keeps for a debugger."""
    for name in ("last_exc", "last_value"):
        error, seen = getattr(sys, name, None), set[int]()
        while isinstance(error, BaseException) and id(error) not in seen:
            seen.add(id(error))
            if error.__traceback__ is not None:
                traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__
    for name in _LAST:
        if hasattr(sys, name):
            delattr(sys, name)


def _empty_caches(torch: "ModuleType | Any") -> None:
    """Empty torch's caches of the kinds of devices in use here, without initializing any other."""
    for kind in ("cuda", "xpu"):
        backend = getattr(torch, kind, None)
        if backend is not None and backend.is_initialized():
            backend.synchronize()
            backend.empty_cache()
    if "cuda" in dir(torch) and torch.cuda.is_initialized():
        torch.cuda.ipc_collect()
        with contextlib.suppress(AttributeError):  # pinned memory; since torch 2.5
            torch._C._host_emptyCache()
    mps = getattr(torch, "mps", None)
    if mps is not None and torch.backends.mps.is_available():
        mps.empty_cache()


def _device_bytes(torch: "ModuleType | Any") -> int:
    if torch is None:
        return 0
    total = 0
    for kind in ("cuda", "xpu"):
        backend = getattr(torch, kind, None)
        if backend is not None and backend.is_initialized():
            total += sum(backend.memory_reserved(index) for index in range(backend.device_count()))
    if torch.backends.mps.is_available():
        total += torch.mps.driver_allocated_memory()
    return int(total)


def _memory_bytes() -> int:
    """The resident memory now; 0 if there is no /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
