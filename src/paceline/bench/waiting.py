"""Waiting until all queued work is done, on every device that was used.

An operation on an accelerator returns when it is queued. A clock that does not wait measures the
queueing. This module must not import torch: what was not imported has queued nothing, and a device
that nobody touched must stay so.
"""

import sys
from collections.abc import Iterable
from typing import Any, Protocol


class Queue(Protocol):
    """What can be waited for: a ``torch.cuda.Stream``, a ``WorkQueue``, a device module."""

    def synchronize(self) -> object:
        """Return when everything that was put in is done."""


def synchronize(queues: Iterable[Queue] = ()) -> None:
    """Wait for ``queues`` and for each accelerator that this process has used."""
    for queue in queues:
        queue.synchronize()
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_initialized():
            for index in range(module.device_count()):
                if _was_used(torch, kind, index):
                    module.synchronize(index)
    if torch.backends.mps.is_available():
        torch.mps.synchronize()


def devices_in_use() -> tuple[str, ...]:
    """The accelerators that ``synchronize`` would wait for, such as ``cuda:0``."""
    torch = sys.modules.get("torch")
    if torch is None:
        return ()
    found = [
        f"{kind}:{index}"
        for kind in ("cuda", "xpu")
        if (module := getattr(torch, kind, None)) is not None and module.is_initialized()
        for index in range(module.device_count())
        if _was_used(torch, kind, index)
    ]
    return (*found, "mps") if torch.backends.mps.is_available() else tuple(found)


def _was_used(torch: Any, kind: str, index: int) -> bool:
    """Whether the device has a context: asking it to synchronise would else make one."""
    has_context = getattr(torch._C, f"_{kind}_hasPrimaryContext", None)
    return has_context is None or bool(has_context(index))
