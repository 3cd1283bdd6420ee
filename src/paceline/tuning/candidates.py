"""The candidates, and the table of them in the order in which they are tried.

    threads           CPU threads of a worker
    memory            freed memory stays with the process, for the next step        allocator.py
    optimizer         one pass over each parameter, or over all at once
    precision         forward passes in 16 bits, only where the user lets numbers change
    channels last     weights of convolutions with their channels last in memory
    compile           forward and backward as compiled code                         compilation.py
    loader workers    processes that load batches ahead of the step
    ahead             the next batch is copied to the device while this one is computed

Candidates that change the memory layout or the number of threads come before compilation, which
depends on both. This module must not know how anything is measured.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import ConfigError
from ..replica.layers import is_compiled
from ..speed import AS_IT_IS, Speed, Value
from ..store.joint import parts_of
from ..store.layout import in_one_memory
from . import allocator
from .candidate import Candidate, Objects, TrialSubject
from .compilation import compile_model, may_compile
from .saved_state import KeptKernel, KeptOrder

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Threads(Candidate):
    """Tries fewer threads, or all cores if torch was started with fewer. More threads than cores
    wait for each other, and sharing out a small operation costs more than computing it.
    """

    name = "threads"
    keeps_bits = True  # the trace records the number, and a replay uses as many

    def options(self, subject: TrialSubject, speed: Speed) -> Sequence[Value]:
        if not subject.is_on_cpu:
            return ()
        current = torch.get_num_threads()
        share = max(1, subject.num_cores // subject.num_workers)
        counts = dict.fromkeys((share, share // 2, 1))
        return [count for count in counts if count >= 1 and count != current]

    def apply(self, objects: Objects, value: Value) -> None:
        if value:
            torch.set_num_threads(int(value))

    def words(self, value: Value) -> str:
        return f"{value} thread{'s' * (value != 1)}"


class KeptMemory(Candidate):
    """Keep freed memory: a setting of the whole process, left alone if the user made it."""

    name = "keep_memory"
    needs_whole_batch = True
    keeps_bits = is_repeatable = True

    def options(self, subject: TrialSubject, speed: Speed) -> Sequence[Value]:
        is_possible = subject.is_on_cpu and allocator.may_keep()
        return (True,) if is_possible and not speed.keep_memory else ()

    def apply(self, objects: Objects, value: Value) -> None:
        if value:
            allocator.keep(True)

    def words(self, value: Value) -> str:
        return "memory kept"


class OptimizerKernel(Candidate):
    """``fused`` updates a parameter in one pass over its memory; ``foreach`` makes each operation
    for all parameters together. Results are equal up to rounding. The store has its own kernels, so
    this matters only where the user's optimizer object makes the updates.

    Source: PyTorch documentation, torch.optim, "Algorithms": foreach and fused implementations.
    """

    name = "optimizer"
    fused = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
    """The exact classes with a fused kernel on both CPU and CUDA."""

    def options(self, subject: TrialSubject, speed: Speed) -> Sequence[Value]:
        optimizer = subject.objects.optimizer
        groups = optimizer.param_groups
        is_chosen = any(group.get("fused") or group.get("foreach") for group in groups)
        if not subject.steps_itself or is_chosen or "foreach" not in groups[0]:
            return ()
        return ("fused", "foreach") if type(optimizer) in self.fused else ("foreach",)

    def apply(self, objects: Objects, value: Value) -> None:
        if value == AS_IT_IS:
            return
        optimizer = objects.optimizer
        if value == "fused" and type(optimizer) not in self.fused:
            raise ConfigError(
                f"{type(optimizer).__name__} has no fused kernel; leave --fused-optimizer out, or "
                f"use {', '.join(kind.__name__ for kind in self.fused)}"
            )
        for part in parts_of(optimizer):
            KeptKernel(part, str(value))

    def words(self, value: Value) -> str:
        return f"{value} optimizer"


class AutocastPrecision(Candidate):
    """bf16 has the range of fp32 with 8 bits of precision; fp16 has 11 bits and a small range, so
    its losses are scaled. Both are slower on a device without units for them.

    Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018.
    """

    name = "precision"

    def options(self, subject: TrialSubject, speed: Speed) -> Sequence[Value]:
        if not subject.may_change_numbers:
            return ()
        # Most CPU kernels emulate fp16; where both are native, bf16 is as fast.
        return ("bf16",) if subject.is_on_cpu else ("bf16", "fp16")

    def words(self, value: Value) -> str:
        return str(value)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The autocast context of a forward pass in ``precision``; disabled for fp32."""
    if precision == "fp32":
        return torch.autocast(device.type, enabled=False)
    return torch.autocast(device.type, dtype=DTYPES[precision])


class ChannelsLast(Candidate):
    """cuDNN and oneDNN kernels take images as (N, H, W, C), so this order saves them a reordering.
    Measured gains range from +48 % through nothing to, with grouped convolutions, a fraction of the
    speed, so only a trial can tell. Shapes stay, strides change, and the store keeps the strides
    that parameters have.

    Source: PyTorch tutorials, "Channels Last Memory Format in PyTorch".
    """

    name = "channels_last"

    def options(self, subject: TrialSubject, speed: Speed) -> Sequence[Value]:
        parameters = subject.objects.model.named_parameters()
        filters = [(name, tensor) for name, tensor in parameters if tensor.ndim == 4]
        if speed.channels_last or in_one_memory(filters):  # it would separate tied ones
            return ()
        return (True,) if any(tensor.shape[2:] != (1, 1) for _, tensor in filters) else ()

    def apply(self, objects: Objects, value: Value) -> None:
        if value:
            strides = {each: each.stride() for each in objects.model.parameters()}
            objects.model._apply(_with_channels_last)
            for part in parts_of(objects.optimizer):
                KeptOrder(part, strides)

    def words(self, value: Value) -> str:
        return "channels last"


def _with_channels_last(tensor: Tensor) -> Tensor:
    """The tensor in that order; one of other dimensions, as of ``nn.Conv3d``, as it is."""
    return tensor.to(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


class Compilation(Candidate):
    """The model's forward and backward pass as compiled code (``torch.compile``)."""

    name = "compile"

    def options(self, subject: TrialSubject, speed: Speed) -> Sequence[Value]:
        if is_compiled(subject.objects.model) or not may_compile(subject.device):
            return ()
        # The other modes tune kernels for minutes; the user can choose them by hand.
        return ("default",) if subject.is_on_cpu else ("default", "reduce-overhead")

    def apply(self, objects: Objects, value: Value) -> None:
        if value != "none":
            compile_model(objects.model, str(value), objects.sizes)

    def words(self, value: Value) -> str:
        return "compile" if value == "default" else f"compile {value}"


class LoaderWorkers(Candidate):
    """They help only where a step waits for its batch, so the trial first compares the loader with
    one cached batch and asks for options only if that is more than 2 % faster. Processes take
    cores: no more are tried than the container's quota allows. None are tried where they might
    change the samples; the cost of the loader is reported all the same.
    """

    name = "loader_workers"
    needs_feed = True
    keeps_bits = is_repeatable = True

    def options(self, subject: TrialSubject, speed: Speed) -> Sequence[Value]:
        if not subject.may_load_elsewhere:
            return ()
        is_own = speed.loader_workers < 0
        current = subject.loader_workers if is_own else speed.loader_workers
        share = max(1, subject.num_cores // subject.num_workers)
        counts = [1]
        while counts[-1] * 2 <= share:
            counts.append(counts[-1] * 2)
        return [count for count in counts if count != current]

    def words(self, value: Value) -> str:
        return f"{value} loader worker{'s' * (value != 1)}"


class CopiesAhead(Candidate):
    """Copies from pinned memory on a separate stream, at no cost to the step where the device has a
    copy engine. A CPU has nothing to copy. A loader without processes is not tried: it would make
    its next batch before the step on the current one.
    """

    name = "ahead"
    needs_feed = True
    keeps_bits = is_repeatable = True

    def options(self, subject: TrialSubject, speed: Speed) -> Sequence[Value]:
        has_processes = subject.loader_workers > 0 or subject.may_load_elsewhere
        return (True,) if has_processes and not (subject.is_on_cpu or speed.ahead) else ()

    def words(self, value: Value) -> str:
        return "copies ahead"


CANDIDATES: tuple[Candidate, ...] = (
    Threads(), KeptMemory(), OptimizerKernel(), AutocastPrecision(), ChannelsLast(), Compilation(),
    LoaderWorkers(), CopiesAhead(),
)  # fmt: skip
