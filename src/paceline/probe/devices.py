"""An accelerator: what a launch takes, its memory, the way to it and back, and to another one.

launch      an operation on one number, queued and waited for; and queued alone
memory      a copy within it, which reads and writes
the way     64 MiB from pinned memory and from pageable memory, to it and back
another     64 MiB from the first device to the second, by whatever connects them
products    of matrices, in each format (`rates.matmul_figures`)
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..bench.clock import elapsed_s
from .figures import Figure, Group, Unit

_BYTES = 64 << 20
_MEMORY_BYTES = 256 << 20
_REPEATS = 9
_QUEUED = 200


def device_figures(device: torch.device) -> Iterator[Figure]:
    """Of one accelerator that torch computes on."""
    yield from _launches(device)
    yield _within(device)
    there = torch.ones(_BYTES, dtype=torch.uint8, device=device)
    for name, is_pinned in (("pinned", True), ("pageable", False)):
        try:
            here = torch.ones(_BYTES, dtype=torch.uint8, pin_memory=is_pinned)
        except RuntimeError as error:  # the backend pins nothing
            why_not = str(error).splitlines()[0]
            yield Figure(key=f"to_device_{name}_bytes_per_s", what=f"to the device, {name}",
                         group=Group.DEVICE, unit=Unit.BYTES, why_not=why_not)  # fmt: skip
            continue
        yield from _ways(here, there, name, is_pinned)
    if torch.accelerator.device_count() > 1:
        other = torch.empty_like(there, device=torch.device(device.type, 1))
        yield _rate("between_devices_bytes_per_s", "device 0 to device 1", _BYTES,
                    lambda: other.copy_(there), "by what connects them")  # fmt: skip


def _within(device: torch.device) -> Figure:
    source = torch.ones(_MEMORY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _rate("device_copy_bytes_per_s", "device memory, copied", 2 * _MEMORY_BYTES,
                 lambda: target.copy_(source), "read and written")  # fmt: skip


def _ways(here: Tensor, there: Tensor, name: str, is_pinned: bool) -> Iterator[Figure]:
    yield _rate(
        f"to_device_{name}_bytes_per_s", f"to the device, {name}", _BYTES,
        lambda: there.copy_(here, non_blocking=is_pinned), "64 MiB",
    )  # fmt: skip
    yield _rate(
        f"from_device_{name}_bytes_per_s", f"from the device, {name}", _BYTES,
        lambda: here.copy_(there, non_blocking=is_pinned), "64 MiB",
    )  # fmt: skip


def _launches(device: torch.device) -> Iterator[Figure]:
    one = torch.ones(1, device=device)
    for key, what, count, how in (
        ("device_launch_s", "an operation, waited for", 1, "on one number"),
        ("device_queued_s", "an operation, queued", _QUEUED, f"one of {_QUEUED} on one number"),
    ):
        elapsed_s(lambda: one.add_(1), 10)
        samples = tuple(elapsed_s(lambda: one.add_(1), count) / count for _ in range(_REPEATS))
        yield Figure(key=key, what=what, group=Group.DEVICE, unit=Unit.SECONDS, samples=samples,
                     how=how)  # fmt: skip


def _rate(key: str, what: str, size: int, work: Callable[[], object], how: str) -> Figure:
    elapsed_s(work)
    return Figure(
        key=key, what=what, group=Group.DEVICE, unit=Unit.BYTES,
        samples=tuple(size / elapsed_s(work) for _ in range(_REPEATS)), how=how,
    )  # fmt: skip
