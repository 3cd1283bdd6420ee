"""Determine what bounds the operations of a step, from torch's profiler.

    an operation takes self_s:   its launch, at most what an empty one costs here -> overhead
                                 the rest, of matrix products and convolutions    -> arithmetic
                                 the rest, of all others                          -> bandwidth

On an accelerator the device's own seconds count, and time in which it does not compute is overhead.
This module must not know what the figures are for.

Source: Williams, Waterman, Patterson, Roofline, CACM 52(4), 2009; H. He, Making Deep Learning Go
Brrrr From First Principles, 2022 (compute, bandwidth, overhead).
"""

import re
from time import perf_counter
from typing import Any, NamedTuple

import torch

_ARITHMETIC = re.compile(
    r"(^|::)(mm|addmm|bmm|baddbmm|addbmm|matmul|linear|conv\w*|_convolution\w*|\w*convolution\w*"
    r"|_slow_conv\w*|slow_conv\w*|thnn_conv\w*|\w*scaled_dot_product\w*|\w*flash_attention\w*"
    r"|mkldnn_rnn_layer\w*|_thnn_fused\w*|\w*_mm|mkldnn_linear\w*)$"
)


class Operations(NamedTuple):
    """The operations of one step.

    Attributes:
        arithmetic_s: seconds in matrix products and convolutions.
        bandwidth_s: seconds in operations that move memory.
        number: how many operations there are.
        allocated_bytes: what they allocate.
        op_per_s: the rate of the matrix products and convolutions that the profiler counts; 0 if
            it counts none.
    """

    arithmetic_s: float
    bandwidth_s: float
    number: float
    allocated_bytes: float
    op_per_s: float = 0.0


def profiled(profiler: Any, num_steps: int) -> Operations:
    """Return the operations of one step, as the mean of the steps that a profiler recorded."""
    empty_s = empty_operation_s()
    arithmetic_s = bandwidth_s = count = allocated = operations = counted_s = 0.0
    for event in profiler.key_averages():
        if not event.key.startswith(("aten::", "mkldnn::", "torchvision::")):
            continue
        device_s = event.self_device_time_total * 1e-6
        busy_s = device_s or max(0.0, event.self_cpu_time_total * 1e-6 - event.count * empty_s)
        if _ARITHMETIC.search(event.key):
            arithmetic_s += busy_s
            if event.flops:  # counted at the outer call: its time includes what it calls
                operations += event.flops
                counted_s += (event.device_time_total or event.cpu_time_total) * 1e-6
        else:
            bandwidth_s += busy_s
        count += event.count
        allocated += max(0, event.self_cpu_memory_usage) + max(0, event.self_device_memory_usage)
    rate = operations / counted_s if counted_s else 0.0
    arithmetic_s, bandwidth_s, count, allocated = (
        total / num_steps for total in (arithmetic_s, bandwidth_s, count, allocated)
    )
    return Operations(arithmetic_s, bandwidth_s, count, allocated, rate)


def empty_operation_s(count: int = 300) -> float:
    """Return the seconds of an operation on a single number here, profiling included."""
    scalar = torch.zeros(1)
    start_s = perf_counter()
    for _ in range(count):
        scalar.add_(0.0)
    return (perf_counter() - start_s) / count
