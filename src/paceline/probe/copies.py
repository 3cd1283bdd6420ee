"""What moving a model's data well is worth: pinned, non_blocking, channels last; and CPU or device.

    a batch here --> [pinned?] --> [non_blocking?] --> the device: step        in turns, on a device
    images as they are (NCHW), or channels last (NHWC)                         in turns, anywhere
    a step by the processor and by the device, for batches 1, 4, 16 ...        where they cross

Where no device is, its side is counted, not measured, and said to be: the step's operations and
bytes by `SHARE` of a data sheet, `LAUNCH_S` an operation, and its input over PCIe. A sheet says
what nobody reaches; the share is what estimators take for usual.
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
"""Of a data sheet; seconds that a small operation takes on a device at least."""
BATCHES = (1, 4, 16, 64, 256)
_ROUNDS = 7
_VERDICTS = {True: "faster", False: "slower", None: "not clear"}
_MOST_S = 2.0
"""A step that takes longer ends the list of batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSheet:
    """What a maker's data sheet says, in fp32 without tensor cores."""

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
    """One way beside the plain one; both took turns."""

    name: str
    timing: Timing
    gain: Gain


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow(Measured):
    """One batch size: seconds of a step by each side.

    Args:
        device_s: name of a device -> seconds.
    """

    batch_size: int
    cpu_s: float
    device_s: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies(Measured):
    """What was found.

    Args:
        is_counted: whether devices' seconds are counted from data sheets, not measured.
        notes: what a reader must know of this machine.
    """

    name: str
    device: str
    batch_size: int
    ways: tuple[CopyWay, ...]
    batches: tuple[BatchRow, ...]
    is_counted: bool
    notes: tuple[str, ...]

    def crossing(self, device: str) -> int | None:
        """The smallest batch from which on the device is faster; None: it never is here."""
        found: int | None = None
        for row in reversed(self.batches):
            if row.device_s[device] >= row.cpu_s:
                break
            found = row.batch_size
        return found


class _Step:
    """A training step of a model on a device, from a batch in the processor's memory."""

    def __init__(
        self, subject: Subject, batch_size: int, device: torch.device, *, is_last: bool = False
    ) -> None:
        layout = torch.channels_last if is_last else torch.contiguous_format
        self.model: nn.Module = subject.model.to(device).train()
        self.model.to(memory_format=layout)  # type: ignore[call-overload]  # its stub lacks it
        self.device = device
        inputs = subject.inputs(batch_size)
        self.batch = tuple(
            one.contiguous(memory_format=layout) if one.ndim == 4 else one for one in inputs
        )

    def run(self, batch: Sequence[Tensor], *, non_blocking: bool = False) -> None:
        """Copy, forward, backward. ConfigError: the model does not run."""
        try:
            there = [one.to(self.device, non_blocking=non_blocking) for one in batch]
            outputs = torch.utils._pytree.tree_leaves(self.model(*there))
            loss = sum(one.float().sum() for one in outputs if isinstance(one, Tensor))
            if isinstance(loss, Tensor) and loss.requires_grad:
                torch.autograd.backward(loss)
        except Exception as error:  # the user's model may raise anything
            raise ConfigError(f"the model does not run: {reason(error)}") from error
        self.model.zero_grad(set_to_none=True)

    def timed(self, batch: Sequence[Tensor], *, non_blocking: bool = False) -> Callable[[], float]:
        """Its seconds, each time it is called."""
        return lambda: elapsed_s(lambda: self.run(batch, non_blocking=non_blocking))


def measure_copies(
    subject: Subject, batch_size: int, device: torch.device, say: Callable[[str], None]
) -> Copies:
    """All of it, for one model.

    Raises:
        ConfigError: the model does not run, or the batch is not >= 1.
    """
    if batch_size < 1:
        raise ConfigError(f"--batch-size must be >= 1, got {batch_size}")
    notes, ways = list[str](), list[CopyWay]()
    if device.type == "cpu":
        notes.append("no device: batches lie where the model computes, so nothing is copied, and "
                     "pinned memory and non_blocking are worth nothing")  # fmt: skip
    else:
        say("pinned, non_blocking")
        ways += _copy_ways(subject, batch_size, device)
    if any(one.ndim == 4 for one in subject.inputs(1)):
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
    pinned = [one.pin_memory() for one in step.batch]
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
    """Each beside the first."""
    for work in contenders.values():
        work()
    times = take_turns(contenders, _ROUNDS)
    first = next(iter(times.values()))
    return [CopyWay(name=name, timing=one, gain=gain_of(first, one)) for name, one in times.items()]


# -- by batch --------------------------------------------------------------------------------------


class Launches(TorchDispatchMode):
    """Counts operations, and the bytes that go in and out of them; a view is none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.count = self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # torch's own contract
        given = (args, kwargs or {})
        made = func(*args, **(kwargs or {}))
        if getattr(func, "is_view", False):  # an operation of torch has it, one of higher order not
            return made
        self.count += 1
        tensors = torch.utils._pytree.tree_leaves((given, made))
        self.num_bytes += sum(one.nbytes for one in tensors if isinstance(one, Tensor))
        return made


def _batches(subject: Subject, device: torch.device, notes: list[str]) -> list[BatchRow]:
    """One row a size; a size of one that the model cannot train on is a note instead."""
    rows = list[BatchRow]()
    for size in BATCHES:
        step = _Step(subject, size, torch.device("cpu"))
        try:
            cpu_s = _least_s(step.timed(step.batch))
        except ConfigError as error:
            if size > 1:
                raise
            notes.append(f"no batch of one sample, as with batch norm: {error}")
            continue
        if device.type == "cpu":
            device_s = _counted(step)
        else:
            there = _Step(subject, size, device)
            device_s = {str(device): _least_s(there.timed(there.batch))}
        rows.append(BatchRow(batch_size=size, cpu_s=cpu_s, device_s=device_s))
        if cpu_s > _MOST_S:
            break
    return rows


def _least_s(work: Callable[[], float]) -> float:
    work()
    return min(work() for _ in range(3))


def _counted(step: _Step) -> dict[str, float]:
    """Seconds of this step on each device of `SHEETS`, from its operations and bytes."""
    with FlopCounterMode(display=False) as counted, Launches() as launches:
        step.run(step.batch)
    operations, input_bytes = counted.get_total_flops(), sum(one.nbytes for one in step.batch)
    return {
        one.name: launches.count * LAUNCH_S
        + max(operations / one.op_per_s, launches.num_bytes / one.bytes_per_s) / SHARE
        + input_bytes / one.link_bytes_per_s / SHARE
        for one in SHEETS
    }


# -- how it is shown -------------------------------------------------------------------------------


def render_copies(found: Copies) -> list[str]:
    """What each way is worth, then a row a batch, then where they cross."""
    lines = [f"{found.name} on {found.device}, batch {found.batch_size}, forward and backward"]
    if found.ways:
        rows = [
            (one.name, three_figures(one.timing.median_s), f"x {one.gain.speedup:.2f}",
             _VERDICTS[one.gain.is_faster] if one is not found.ways[0] else "")
            for one in found.ways
        ]  # fmt: skip
        lines += ["", *table(("way", "a step", "beside the first", ""), rows)]
    names = list(found.batches[0].device_s)
    rows_of_batches = [
        (f"{row.batch_size}", three_figures(row.cpu_s),
         *(three_figures(row.device_s[name]) for name in names))
        for row in found.batches
    ]  # fmt: skip
    lines += ["", *table(("batch", "this processor", *names), rows_of_batches)]
    if found.is_counted:
        lines.append(
            f"devices are not measured but counted: {SHARE:.0%} of the maker's data sheet, "
            f"{LAUNCH_S * 1e6:.0f} us an operation, the batch over PCIe"
        )
    for name in names:
        batch = found.crossing(name)
        where = f"faster from batch {batch} on" if batch else "never faster at these batches"
        lines.append(f"{name}: {where}")
    return [*lines, *found.notes]
