"""Arithmetic: what vector units reach in registers, and products of matrices through torch.

    vector     multiply-adds on sixteen independent sums, without memory, on all cores
    matmul     a product of two square matrices by torch, at the best size

An instruction that this processor lacks is not measured; torch computes the products with other
instructions, and that is what a model gets. This module must not know devices' kernels.
"""

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..bench.clock import elapsed_s
from .figures import Figure, Group, Unit
from .kernels import Kernels, VectorFormat

_REPEATS = 5
_ROUND_S = 0.03
"""Approximate duration of one repeat of vector instructions."""
_TRY_ROUNDS = 200_000
_SIDES = (512, 1024, 2048)
_PRODUCT_S = 0.5
"""Approximate limit for all products of one size and format."""
FORMATS = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8,
    "fp64": torch.float64,
}  # fmt: skip


def vector_figures(kernels: Kernels, cores: int) -> Iterator[Figure]:
    """Yield the rate of multiply-adds in registers, all cores together."""
    for kind in (VectorFormat[name.upper()] for name in FORMATS):
        name = kind.name.lower()
        trial = kernels.arithmetic(kind, _TRY_ROUNDS, cores, 1)
        samples: list[float] = []
        if trial is not None:
            start_s = time.perf_counter()
            kernels.arithmetic(kind, _TRY_ROUNDS, cores, 1)
            took_s = max(time.perf_counter() - start_s, 1e-5)
            rounds = int(_TRY_ROUNDS * max(1.0, _ROUND_S / took_s))
            samples = kernels.arithmetic(kind, rounds, cores, _REPEATS) or []
        yield Figure(
            key=f"vector_{name}_op_per_s", what=f"vector units, {name}", group=Group.RATES,
            unit=Unit.OPERATIONS, samples=tuple(samples),
            how=f"{kernels.vector_bits()} bits, {cores} cores",
            why_not="" if samples else "this processor has no vector instruction for this format",
        )  # fmt: skip


def matmul_figures(device: torch.device) -> Iterator[Figure]:
    """Yield the rate of matrix products in each format that torch supports on the device."""
    is_cpu = device.type == "cpu"
    for name, dtype in FORMATS.items():
        best: list[float] = []
        how = why_not = ""
        for side in _SIDES if is_cpu else (*_SIDES, 4096, 8192):
            try:
                work = _product(side, dtype, device)
                per_s, is_slow = _rates(work, 2.0 * side**3)
            except (RuntimeError, NotImplementedError) as error:  # no kernel for this format
                why_not = str(error).splitlines()[0]
                break
            if not best or max(per_s) > max(best):
                best, how = per_s, f"{side} x {side}"
            if is_slow:
                break
        if is_cpu:
            how += f", {torch.get_num_threads()} threads"
        yield Figure(
            key=f"{'' if is_cpu else 'device_'}matmul_{name}_op_per_s",
            what=f"product of matrices, {name}", group=Group.RATES if is_cpu else Group.DEVICE,
            unit=Unit.OPERATIONS, samples=tuple(best), how=how, why_not="" if best else why_not,
        )  # fmt: skip


def _product(side: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    if dtype is torch.int8:
        left = torch.randint(-8, 8, (side, side), dtype=dtype, device=device)
        right = torch.randint(-8, 8, (side, side), dtype=dtype, device=device)
        return lambda: torch._int_mm(left, right)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty(side, side, dtype=dtype, device=device)
    return lambda: torch.mm(left, right, out=out)


def _rates(work: Callable[[], Tensor], operations: float) -> tuple[list[float], bool]:
    """Return operations a second of some products, and whether a larger one would take too long."""
    first_s = elapsed_s(work)
    if first_s > _PRODUCT_S:
        return [operations / first_s], True
    warm_s = elapsed_s(work)
    count = max(1, int(0.02 / warm_s))
    repeats = max(3, min(_REPEATS, int(_PRODUCT_S / (warm_s * count))))
    rates = [operations * count / elapsed_s(work, count) for _ in range(repeats)]
    return rates, warm_s * 8 * repeats > 2 * _PRODUCT_S
