"""An accelerator: the cost of a launch, its memory, transfers to the host and to another device.

launch      an operation on one number, queued and waited for; and only queued
memory      a copy within the device, which reads and writes
transfer    64 MiB from pinned and from pageable host memory, to the device and back
peer        64 MiB from the first device to the second, over any link
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
    """Yield the figures of one accelerator."""
    yield from _launches(device)
    yield _device_copy(device)
    on_device = torch.ones(_BYTES, dtype=torch.uint8, device=device)
    for name, is_pinned in (("pinned", True), ("pageable", False)):
        try:
            on_host = torch.ones(_BYTES, dtype=torch.uint8, pin_memory=is_pinned)
        except RuntimeError as error:  # the backend cannot pin memory
            why_not = str(error).splitlines()[0]
            yield Figure(key=f"to_device_{name}_bytes_per_s", what=f"to the device, {name}",
                         group=Group.DEVICE, unit=Unit.BYTES, why_not=why_not)  # fmt: skip
            continue
        yield from _transfers(on_host, on_device, name, is_pinned)
    if torch.accelerator.device_count() > 1:
        second = torch.empty_like(on_device, device=torch.device(device.type, 1))
        yield _rate("between_devices_bytes_per_s", "device 0 to device 1", _BYTES,
                    lambda: second.copy_(on_device), "over the link between them")  # fmt: skip


def _device_copy(device: torch.device) -> Figure:
    source = torch.ones(_MEMORY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _rate("device_copy_bytes_per_s", "device memory, copied", 2 * _MEMORY_BYTES,
                 lambda: target.copy_(source), "read and written")  # fmt: skip


def _transfers(on_host: Tensor, on_device: Tensor, name: str, is_pinned: bool) -> Iterator[Figure]:
    yield _rate(
        f"to_device_{name}_bytes_per_s", f"to the device, {name}", _BYTES,
        lambda: on_device.copy_(on_host, non_blocking=is_pinned), "64 MiB",
    )  # fmt: skip
    yield _rate(
        f"from_device_{name}_bytes_per_s", f"from the device, {name}", _BYTES,
        lambda: on_host.copy_(on_device, non_blocking=is_pinned), "64 MiB",
    )  # fmt: skip


def _launches(device: torch.device) -> Iterator[Figure]:
    number = torch.ones(1, device=device)
    for key, what, count, how in (
        ("device_launch_s", "an operation, waited for", 1, "on one number"),
        ("device_queued_s", "an operation, queued", _QUEUED, f"one of {_QUEUED} on one number"),
    ):
        elapsed_s(lambda: number.add_(1), 10)
        samples = tuple(elapsed_s(lambda: number.add_(1), count) / count for _ in range(_REPEATS))
        yield Figure(key=key, what=what, group=Group.DEVICE, unit=Unit.SECONDS, samples=samples,
                     how=how)  # fmt: skip


def _rate(key: str, what: str, size: int, work: Callable[[], object], how: str) -> Figure:
    elapsed_s(work)
    return Figure(
        key=key, what=what, group=Group.DEVICE, unit=Unit.BYTES,
        samples=tuple(size / elapsed_s(work) for _ in range(_REPEATS)), how=how,
    )  # fmt: skip
