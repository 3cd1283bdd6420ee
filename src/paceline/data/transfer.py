"""Batches on their way to an accelerator, one ahead of the step, on a stream of their own.

    host      load n+1 | ................ | load n+2 |
    copies             | n+1 ->|                     | n+2 ->|
    compute   | step n                    | step n+1

A copy overlaps with computing only if it leaves from pinned memory and lies in another queue. Who
takes the batch lets its own queue wait for the copy's event, so nothing is read half-copied; and
tells the allocator that this queue uses the memory, so that it is not given away meanwhile. This
module must not know leases or what a batch is for.

Source: PyTorch documentation, "CUDA semantics": streams, ``record_stream``, pinned memory buffers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Arriving:
    """A batch that may still be copied; ``host`` is kept until it has arrived."""

    batch: Any
    host: Any
    event: Any


class Transfer:
    """The way to one accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        module: Any = getattr(torch, device.type, None) if device.type != "cpu" else None
        self._module = module if hasattr(module, "current_stream") else None
        self._stream: Any = module.Stream(device) if self._module is not None else None

    def begin(self, host: Any) -> Arriving:
        """Start the copy; returns at once."""
        if self._module is None:  # one queue, as on mps and a CPU: ordered in it
            return Arriving(move(host, self._device, is_pinned=False), host, None)
        pinned = apply(_pinned, host)
        with self._module.stream(self._stream):
            batch = move(pinned, self._device, is_pinned=True)
            event = self._stream.record_event()
        return Arriving(batch, pinned, event)

    def finish(self, arriving: Arriving) -> Any:
        """The batch, for the queue that computes now."""
        if arriving.event is None or self._module is None:
            return arriving.batch
        queue = self._module.current_stream(self._device)
        queue.wait_event(arriving.event)

        def used(tensor: Tensor) -> Tensor:
            tensor.record_stream(queue)
            return tensor

        return apply(used, arriving.batch)


def move(batch: Any, device: torch.device, *, is_pinned: bool) -> Any:
    """``batch`` on ``device``; without waiting for it where it lies in pinned memory."""
    return apply(lambda tensor: tensor.to(device, non_blocking=is_pinned), batch)


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_pinned() else tensor.pin_memory()


def apply(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``change`` every tensor in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return type(value)({key: apply(change, one) for key, one in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(apply(change, one) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(apply(change, one) for one in value)
    return value
