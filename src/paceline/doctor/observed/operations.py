"""What the operations of a step are bound by, from torch's profiler.

    an operation takes self_s:   its beginning, at most what an empty one costs here -> overhead
                                 the rest, of matrix products and convolutions       -> arithmetic
                                 the rest, of all others                             -> bandwidth

On an accelerator its own seconds count, and what it does not compute in is overhead. This module
must not know what is done with it.

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
    """Of a step: seconds by what bounds them, how many there are, what they allocate."""

    arithmetic_s: float
    bandwidth_s: float
    number: float
    allocated_bytes: float
    op_per_s: float = 0.0
    """Of the matrix products and convolutions that the profiler counts; 0: none."""


def profiled(profiler: Any, num_steps: int) -> Operations:
    """What a profiler saw of so many steps."""
    empty_s = empty_operation_s()
    arithmetic_s = bandwidth_s = count = allocated = operations = counted_s = 0.0
    for one in profiler.key_averages():
        if not one.key.startswith(("aten::", "mkldnn::", "torchvision::")):
            continue
        device_s = one.self_device_time_total * 1e-6
        busy_s = device_s or max(0.0, one.self_cpu_time_total * 1e-6 - one.count * empty_s)
        if _ARITHMETIC.search(one.key):
            arithmetic_s += busy_s
            if one.flops:  # with what it calls: a convolution is counted where it is asked for
                operations += one.flops
                counted_s += (one.device_time_total or one.cpu_time_total) * 1e-6
        else:
            bandwidth_s += busy_s
        count += one.count
        allocated += max(0, one.self_cpu_memory_usage) + max(0, one.self_device_memory_usage)
    rate = operations / counted_s if counted_s else 0.0
    arithmetic_s, bandwidth_s, count, allocated = (
        one / num_steps for one in (arithmetic_s, bandwidth_s, count, allocated)
    )
    return Operations(arithmetic_s, bandwidth_s, count, allocated, rate)


def empty_operation_s(count: int = 300) -> float:
    """What an operation on one number costs here, the profiler's own part included."""
    one = torch.zeros(1)
    start_s = perf_counter()
    for _ in range(count):
        one.add_(0.0)
    return (perf_counter() - start_s) / count
