"""The candidates, and the table of them in the order in which they are tried.

    threads           how many a worker computes with
    memory            what is freed stays with the process, for the next step       allocator.py
    optimizer         one pass over each parameter, or over all at once
    precision         forward passes in 16 bits, only where the user lets numbers change
    channels last     weights of convolutions with their channels last in memory
    compile           forward and backward as compiled code
    loader workers    processes that load batches ahead of the step
    ahead             the next batch is copied to the device while this one is computed

What changes how memory lies or how many compute comes before what is compiled for it. This module
must not know how anything is measured.
"""

import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..replica.layers import is_compiled
from ..speed import AS_IT_IS, Speed, Value
from ..store.layout import in_one_memory
from ..store.optimizer_copy import order_as_parameters
from . import allocator
from .candidate import Candidate, Objects, TrialSubject

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_COMPILERS = ("g++", "clang++", "c++")


class Threads(Candidate):
    """More threads than cores wait for each other, and small operations cost more to share than to
    do; so fewer are tried, and all cores where torch was started with fewer.
    """

    name = "threads"
    keeps_bits = True  # the trace has their number, and a replay takes as many

    def options(self, subject: TrialSubject, speed: Speed) -> Sequence[Value]:
        if not subject.is_on_cpu:
            return ()
        now = torch.get_num_threads()
        fair = max(1, subject.num_cores // subject.num_workers)
        return [
            count for count in dict.fromkeys((fair, fair // 2, 1)) if count >= 1 and count != now
        ]

    def apply(self, objects: Objects, value: Value) -> None:
        if value:
            torch.set_num_threads(int(value))

    def words(self, value: Value) -> str:
        return f"{value} thread{'s' * (value != 1)}"


class KeptMemory(Candidate):
    """A setting of the whole process, which is left alone where the user made it."""

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
    """``fused`` makes the whole update of a parameter in one pass over its memory, ``foreach`` each
    operation for all parameters together; the numbers are the same up to rounding. The store has
    kernels of its own, so this matters where the user's optimizer steps itself.

    Source: PyTorch documentation, torch.optim, "Algorithms": foreach and fused implementations.
    """

    name = "optimizer"
    fused = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
    """Exact classes that have a fused kernel on the CPU and on CUDA."""

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
                f"use {', '.join(one.__name__ for one in self.fused)}"
            )
        for group in (*optimizer.param_groups, optimizer.defaults):
            group["fused"], group["foreach"] = value == "fused", value == "foreach"
        if value == "fused":
            order_as_parameters(optimizer)

    def words(self, value: Value) -> str:
        return f"{value} optimizer"


class AutocastPrecision(Candidate):
    """bf16 has the range of fp32 with 8 bits of precision; fp16 has 11 bits and a small range, so
    its losses are scaled. Without units that compute in them both are slower.

    Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018.
    """

    name = "precision"

    def options(self, subject: TrialSubject, speed: Speed) -> Sequence[Value]:
        if not subject.may_change_numbers:
            return ()
        # fp16 on a CPU is emulated by most kernels; bf16 is the same speed where both are there.
        return ("bf16",) if subject.is_on_cpu else ("bf16", "fp16")

    def words(self, value: Value) -> str:
        return str(value)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context of a forward pass in ``precision``; fp32 is none at all."""
    if precision == "fp32":
        return torch.autocast(device.type, enabled=False)
    return torch.autocast(device.type, dtype=DTYPES[precision])


class ChannelsLast(Candidate):
    """Kernels of cuDNN and oneDNN take images as (N, H, W, C); in that order they need no
    reordering. It has been measured at +48 %, at nothing and, with grouped convolutions, at a
    fraction of the speed, so only a trial can tell. Shapes stay, strides change, and the store lays
    parameters out with the strides that they have.

    Source: PyTorch tutorials, "Channels Last Memory Format in PyTorch".
    """

    name = "channels_last"

    def options(self, subject: TrialSubject, speed: Speed) -> Sequence[Value]:
        named = subject.objects.model.named_parameters()
        with_planes = [(name, one) for name, one in named if one.ndim == 4]
        if speed.channels_last or in_one_memory(with_planes):  # it would move them apart
            return ()
        return (True,) if any(one.shape[2:] != (1, 1) for _, one in with_planes) else ()

    def apply(self, objects: Objects, value: Value) -> None:
        if value:
            objects.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch says so
            order_as_parameters(objects.optimizer)

    def words(self, value: Value) -> str:
        return "channels last"


class Compilation(Candidate):
    """The model's forward and backward pass as compiled code (``torch.compile``).

        call(batch) -- training, a usual number of samples --> compiled graph
              |
              `------- anything else (evaluation, an epoch's last batch) --> eager

    An epoch's last batch and an evaluation have shapes of their own; to compile for each of them
    would cost more than it brings, and a graph for all shapes is slower for the usual one. The
    model object stays the user's: names in ``state_dict``, ``isinstance`` and ``copy.deepcopy``
    (which leaves the compiled code behind) are as before.

    Source: Ansel et al., "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode
    Transformation and Graph Compilation", ASPLOS 2024.
    """

    name = "compile"

    def options(self, subject: TrialSubject, speed: Speed) -> Sequence[Value]:
        if is_compiled(subject.objects.model) or not may_compile(subject.device):
            return ()
        # The others tune kernels for minutes; they are there by hand.
        return ("default",) if subject.is_on_cpu else ("default", "reduce-overhead")

    def apply(self, objects: Objects, value: Value) -> None:
        if value != "none":
            compile_model(objects.model, str(value), objects.sizes)

    def words(self, value: Value) -> str:
        return "compile" if value == "default" else f"compile {value}"


def may_compile(device: torch.device) -> bool:
    """Whether there is what generated code is compiled with: g++ for a CPU, Triton for a GPU."""
    if device.type == "cpu":
        return "CXX" in os.environ or any(shutil.which(one) for one in _COMPILERS)
    return importlib.util.find_spec("triton") is not None


def compile_model(model: nn.Module, mode: str, sizes: frozenset[int]) -> None:
    """From now on training calls with ``sizes`` samples run compiled code.

    Raises:
        ConfigError: it is compiled already, or there is nothing to compile with.
    """
    device = next(model.parameters()).device
    if is_compiled(model):
        raise ConfigError("the model is compiled already; leave --compile out")
    if not may_compile(device):
        needed = "a C++ compiler (g++)" if device.type == "cpu" else "Triton"
        raise ConfigError(f"--compile {mode} needs {needed}, and there is none here; install it")
    import torch._inductor.config as inductor

    if (
        torch.get_num_threads() == 1
    ):  # the other cores belong to other workers, which compile as well
        inductor.compile_threads = 1
    eager: Callable[..., Any] = model._call_impl

    def run(*arguments: Any, **options: Any) -> Any:
        # A frame of ours: torch leaves frames of its own alone, so a model that is nothing but
        # an nn.Sequential would silently stay as it is (torch 2.13, model.compile()).
        return eager(*arguments, **options)

    compiled: Callable[..., Any] = torch.compile(run, mode=mode, dynamic=False)

    def call(*arguments: Any, **options: Any) -> Any:
        is_usual = model.training and torch.is_grad_enabled()
        if is_usual and _num_samples(arguments, options) in sizes:
            return compiled(*arguments, **options)
        return eager(*arguments, **options)

    model._compiled_call_impl = call


def _num_samples(arguments: tuple[Any, ...], options: dict[str, Any]) -> int:
    for one in (*arguments, *options.values()):
        if isinstance(one, Tensor) and one.ndim:
            return len(one)
    held = torch.utils._pytree.tree_leaves((arguments, options))  # in dicts and lists
    return next((len(one) for one in held if isinstance(one, Tensor) and one.ndim), 0)


class LoaderWorkers(Candidate):
    """They help only where a step waits for its batch, so the trial compares the loader with one
    cached batch first and asks for options only if that is more than 2 % faster. Processes cost
    cores: no more are tried than the container's quota leaves, and none where samples might be
    others then; what the loader takes is reported.
    """

    name = "loader_workers"
    needs_feed = True
    keeps_bits = is_repeatable = True

    def options(self, subject: TrialSubject, speed: Speed) -> Sequence[Value]:
        if not subject.may_load_elsewhere:
            return ()
        fair = max(1, subject.num_cores // subject.num_workers)
        counts = [1]
        while counts[-1] * 2 <= fair:
            counts.append(counts[-1] * 2)
        return [count for count in counts if count != speed.loader_workers]

    def words(self, value: Value) -> str:
        return f"{value} loader worker{'s' * (value != 1)}"


class CopiesAhead(Candidate):
    """The copy leaves from pinned memory on a stream of its own, so it costs the step nothing where
    the device has a copy engine. On a CPU there is nothing to copy. A loader without processes
    would make its next batch before the step on this one, so it is left as it is.
    """

    name = "ahead"
    needs_feed = True
    keeps_bits = is_repeatable = True

    def options(self, subject: TrialSubject, speed: Speed) -> Sequence[Value]:
        is_made_before = subject.loader_workers > 0 or subject.may_load_elsewhere
        return (True,) if is_made_before and not (subject.is_on_cpu or speed.ahead) else ()

    def words(self, value: Value) -> str:
        return "copies ahead"


CANDIDATES: tuple[Candidate, ...] = (
    Threads(), KeptMemory(), OptimizerKernel(), AutocastPrecision(), ChannelsLast(), Compilation(),
    LoaderWorkers(), CopiesAhead(),
)  # fmt: skip
