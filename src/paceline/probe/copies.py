"""Gains from pinned memory, non_blocking copies and channels last; and CPU against device.

    a batch here --> [pinned?] --> [non_blocking?] --> the device: step        in turns, on a device
    images as they are (NCHW), or channels last (NHWC)                         in turns, anywhere
    a step on the CPU and on the device, for batches 1, 4, 16 ...              where they cross

Without a device its time is estimated, and the output says so: the step's operations and bytes at
`SHARE` of the data sheet's rates, `LAUNCH_S` for each operation, and the input over PCIe. Programs
do not reach the data sheet's rates; the share is what estimators usually assume.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ..bench.clock import elapsed_s
from ..bench.samples import Gain, Measured, Timing, gain_of, take_turns
from ..errors import ConfigError
from ..exports.subject import Subject
from ..report.text import table, three_figures
from ..system.reasons import reason

SHARE, LAUNCH_S = 0.7, 7e-6
"""Share of a data sheet's rates; least seconds of an operation on a device."""
BATCHES = (1, 4, 16, 64, 256)
_ROUNDS = 7
_VERDICTS = {True: "faster", False: "slower", None: "not clear"}
_MOST_S = 2.0
"""A step that takes longer than this ends the list of batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSheet:
    """Rates from a vendor's data sheet, in fp32 without tensor cores."""

    name: str
    op_per_s: float
    bytes_per_s: float
    link_bytes_per_s: float


SHEETS = (
    DeviceSheet(name="T4", op_per_s=8.1e12, bytes_per_s=320e9, link_bytes_per_s=16e9),
    DeviceSheet(name="A100 40 GB", op_per_s=19.5e12, bytes_per_s=1.555e12, link_bytes_per_s=32e9),
)
"""NVIDIA's: T4 (2018), A100 SXM (2020), PCIe 3.0 and 4.0 with 16 lanes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyWay(Measured):
    """One way compared with the plain one, measured in turns."""

    name: str
    timing: Timing
    gain: Gain


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow(Measured):
    """One batch size: seconds of a step on the CPU and on each device.

    Args:
        device_s: name of a device -> seconds.
    """

    batch_size: int
    cpu_s: float
    device_s: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies(Measured):
    """The result for one model.

    Args:
        is_counted: whether devices' seconds are estimated from data sheets, not measured.
        notes: remarks on this machine and model.
    """

    name: str
    device: str
    batch_size: int
    ways: tuple[CopyWay, ...]
    batches: tuple[BatchRow, ...]
    is_counted: bool
    notes: tuple[str, ...]

    def crossing(self, device: str) -> int | None:
        """Return the smallest batch from which the device stays faster; None: it never is."""
        smallest: int | None = None
        for row in reversed(self.batches):
            if row.device_s[device] >= row.cpu_s:
                break
            smallest = row.batch_size
        return smallest


class _Step:
    """A training step of a model on a device, with the batch in host memory."""

    def __init__(
        self, subject: Subject, batch_size: int, device: torch.device, *, is_last: bool = False
    ) -> None:
        layout = torch.channels_last if is_last else torch.contiguous_format
        self.model: nn.Module = subject.model.to(device).train()
        self.model.to(memory_format=layout)  # type: ignore[call-overload]  # its stub lacks it
        self.device = device
        inputs = subject.inputs(batch_size)
        self.batch = tuple(
            tensor.contiguous(memory_format=layout) if tensor.ndim == 4 else tensor
            for tensor in inputs
        )

    def run(self, batch: Sequence[Tensor], *, non_blocking: bool = False) -> None:
        """Run copy, forward and backward. ConfigError: the model does not run."""
        try:
            on_device = [tensor.to(self.device, non_blocking=non_blocking) for tensor in batch]
            outputs = torch.utils._pytree.tree_leaves(self.model(*on_device))
            loss = sum(output.float().sum() for output in outputs if isinstance(output, Tensor))
            if isinstance(loss, Tensor) and loss.requires_grad:
                torch.autograd.backward(loss)
        except Exception as error:  # the user's model may raise anything
            raise ConfigError(f"the model does not run: {reason(error)}") from error
        self.model.zero_grad(set_to_none=True)

    def timed(self, batch: Sequence[Tensor], *, non_blocking: bool = False) -> Callable[[], float]:
        """Return a function that runs the step and returns its seconds."""
        return lambda: elapsed_s(lambda: self.run(batch, non_blocking=non_blocking))


def measure_copies(
    subject: Subject, batch_size: int, device: torch.device, say: Callable[[str], None]
) -> Copies:
    """Measure everything for one model.

    Raises:
        ConfigError: the model does not run, or the batch size is not >= 1.
    """
    if batch_size < 1:
        raise ConfigError(f"--batch-size must be >= 1, got {batch_size}")
    notes, ways = list[str](), list[CopyWay]()
    if device.type == "cpu":
        notes.append("no device: batches are already in the memory that the model computes in, so "
                     "pinned memory and non_blocking gain nothing")  # fmt: skip
    else:
        say("pinned, non_blocking")
        ways += _copy_ways(subject, batch_size, device)
    if any(tensor.ndim == 4 for tensor in subject.inputs(1)):
        say("channels last")
        ways += _layouts(subject, batch_size, device)
    else:
        notes.append("channels last: this model takes no images (N, C, H, W)")
    say("batches")
    batches = _batches(subject, device, notes)
    return Copies(
        name=subject.name, device=str(device), batch_size=batch_size, ways=tuple(ways),
        batches=tuple(batches), is_counted=device.type == "cpu", notes=tuple(notes),
    )  # fmt: skip


def _copy_ways(subject: Subject, batch_size: int, device: torch.device) -> list[CopyWay]:
    step = _Step(subject, batch_size, device)
    pinned = [tensor.pin_memory() for tensor in step.batch]
    return _compared({
        "as it is": step.timed(step.batch),
        "non_blocking": step.timed(step.batch, non_blocking=True),
        "pinned": step.timed(pinned),
        "pinned, non_blocking": step.timed(pinned, non_blocking=True),
    })  # fmt: skip


def _layouts(subject: Subject, batch_size: int, device: torch.device) -> list[CopyWay]:
    def timed(is_last: bool) -> Callable[[], float]:
        def seconds() -> float:
            step = _Step(subject, batch_size, device, is_last=is_last)
            step.run(step.batch)
            return step.timed(step.batch)()

        return seconds

    return _compared({"channels first": timed(False), "channels last": timed(True)})


def _compared(contenders: dict[str, Callable[[], float]]) -> list[CopyWay]:
    """Compare each contender with the first."""
    for work in contenders.values():
        work()
    times = take_turns(contenders, _ROUNDS)
    first = next(iter(times.values()))
    return [
        CopyWay(name=name, timing=timing, gain=gain_of(first, timing))
        for name, timing in times.items()
    ]


# -- by batch --------------------------------------------------------------------------------------


class Launches(TorchDispatchMode):
    """Counts operations and their input and output bytes; views do not count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.count = self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # torch's own contract
        arguments = (args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if getattr(func, "is_view", False):  # operators have it, higher-order operators do not
            return result
        self.count += 1
        tensors = torch.utils._pytree.tree_leaves((arguments, result))
        self.num_bytes += sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
        return result


def _batches(subject: Subject, device: torch.device, notes: list[str]) -> list[BatchRow]:
    """Return a row for each size; if the model cannot train on one sample, add a note instead."""
    rows = list[BatchRow]()
    for size in BATCHES:
        step = _Step(subject, size, torch.device("cpu"))
        try:
            cpu_s = _least_s(step.timed(step.batch))
        except ConfigError as error:
            if size > 1:
                raise
            notes.append(f"the model cannot train on a batch of one sample: {error}")
            continue
        if device.type == "cpu":
            device_s = _counted(step)
        else:
            on_device = _Step(subject, size, device)
            device_s = {str(device): _least_s(on_device.timed(on_device.batch))}
        rows.append(BatchRow(batch_size=size, cpu_s=cpu_s, device_s=device_s))
        if cpu_s > _MOST_S:
            break
    return rows


def _least_s(work: Callable[[], float]) -> float:
    work()
    return min(work() for _ in range(3))


def _counted(step: _Step) -> dict[str, float]:
    """Estimate the seconds of this step on each device of `SHEETS` from operations and bytes."""
    with FlopCounterMode(display=False) as flops, Launches() as launches:
        step.run(step.batch)
    operations, input_bytes = flops.get_total_flops(), sum(tensor.nbytes for tensor in step.batch)
    return {
        sheet.name: launches.count * LAUNCH_S
        + max(operations / sheet.op_per_s, launches.num_bytes / sheet.bytes_per_s) / SHARE
        + input_bytes / sheet.link_bytes_per_s / SHARE
        for sheet in SHEETS
    }


# -- how it is shown -------------------------------------------------------------------------------


def render_copies(copies: Copies) -> list[str]:
    """Return the lines: the gain of each way, a row for each batch, then where they cross."""
    lines = [f"{copies.name} on {copies.device}, batch {copies.batch_size}, forward and backward"]
    if copies.ways:
        rows = [
            (way.name, three_figures(way.timing.median_s), f"x {way.gain.speedup:.2f}",
             _VERDICTS[way.gain.is_faster] if way is not copies.ways[0] else "")
            for way in copies.ways
        ]  # fmt: skip
        lines += ["", *table(("way", "a step", "beside the first", ""), rows)]
    names = list(copies.batches[0].device_s)
    rows_of_batches = [
        (f"{row.batch_size}", three_figures(row.cpu_s),
         *(three_figures(row.device_s[name]) for name in names))
        for row in copies.batches
    ]  # fmt: skip
    lines += ["", *table(("batch", "this processor", *names), rows_of_batches)]
    if copies.is_counted:
        lines.append(
            f"device times are estimated, not measured: {SHARE:.0%} of the vendor's data sheet, "
            f"{LAUNCH_S * 1e6:.0f} us for each operation, the batch over PCIe"
        )
    for name in names:
        batch = copies.crossing(name)
        where = f"faster from batch {batch}" if batch else "never faster at these batches"
        lines.append(f"{name}: {where}")
    return [*lines, *copies.notes]
