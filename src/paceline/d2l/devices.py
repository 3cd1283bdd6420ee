"""Devices by number, with the CPU in place of a GPU that is not there, and a batch over devices.

A "GPU" is any accelerator that torch knows: CUDA, ROCm, XPU, MPS.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..bench.clock import synchronize as wait_for_all
from ..errors import ConfigError


def cpu() -> torch.device:
    """Return the CPU."""
    return torch.device("cpu")


def gpu(i: int = 0) -> torch.device:
    """Return accelerator ``i``, whether it exists or not; without any, ``cuda:i``."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device(kind.type if kind is not None else "cuda", i)


def num_gpus() -> int:
    """Return the number of accelerators that torch can use."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def try_gpu(i: int = 0) -> torch.device:
    """Return accelerator ``i`` if it exists, else the CPU."""
    return gpu(i) if 0 <= i < num_gpus() else cpu()


def try_all_gpus() -> list[torch.device]:
    """Return all accelerators, or a list with the CPU alone."""
    return [gpu(i) for i in range(num_gpus())] or [cpu()]


def synchronize(device: torch.device | str | int | None = None) -> None:
    """Wait for the work that is queued on ``device``, on any machine.

    ``torch.cuda.synchronize`` raises where torch has no CUDA; on the CPU nothing is queued.

    Args:
        device: one device; None: all accelerators that this process has used.
    """
    if device is None:
        wait_for_all()
    elif isinstance(device, int) or torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)


def split_batch(
    inputs: Tensor, targets: Tensor, devices: Sequence[torch.device | str]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return ``inputs`` (B, ...) and ``targets`` (B, ...) in one part for each device, on it.

    Parts differ by at most one sample; a device may stand in the list more than once. Unlike
    ``nn.parallel.scatter`` it takes CPUs, and gives each device a part of any batch, an empty one
    if there are more devices than samples.

    Raises:
        ConfigError: there is no device, or the numbers of inputs and targets differ.
    """
    if not devices:
        raise ConfigError("split_batch needs at least one device, got none")
    if len(inputs) != len(targets):
        raise ConfigError(f"{len(inputs)} inputs and {len(targets)} targets: numbers must be equal")
    return _scatter(inputs, devices), _scatter(targets, devices)


def _scatter(values: Tensor, devices: Sequence[torch.device | str]) -> tuple[Tensor, ...]:
    parts = values.tensor_split(len(devices))
    return tuple(
        part.to(device, non_blocking=True) for part, device in zip(parts, devices, strict=True)
    )
