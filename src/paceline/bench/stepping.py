"""Training steps of one task in a process of its own, at any batch size, within a stated memory.

It is asked by `throughput` and by ``paceline tune batch-size``. Memory that ends is an answer and
not an accident: on a GPU the allocator says so; on a CPU the process sets itself a limit
(RLIMIT_DATA) below what the machine has, so that its allocator says so, too, and nobody is killed.
It must not know why it is asked.
"""

import contextlib
import resource
import sys
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import ConfigError
from ..workloads import load_task
from .waiting import synchronize
from .where import peak_bytes, reset_peak

DTYPES: Mapping[str, torch.dtype | None] = {
    "fp32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Precisions of autocast, as ``--precision`` takes them."""
_SAMPLES = 64
"""Different samples; a larger batch repeats them."""
_WARM_UP_STEPS = 2


class Stepper:
    """A model, its optimizer, and a batch.

    Args:
        spec: a task.
        precision: one of DTYPES.
        device: where.
        threads: of torch.
        limit_bytes: of memory for what a batch needs, beside the model and what is made once (on
            a GPU together with them); 0 for what there is.
    """

    def __init__(
        self, spec: str, precision: str, device: str, threads: int, limit_bytes: int
    ) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self._device = torch.device(device)
        self._dtype = DTYPES[precision]
        if precision == "fp16" and self._device.type == "cpu":
            raise ConfigError(
                "fp16 training needs a GPU: on a CPU gradients in fp16 are slow and overflow; "
                "use --precision bf16"
            )
        task = load_task(spec)
        self._loss = task.loss
        data = task.splits().train
        count = min(_SAMPLES, len(data))  # type: ignore[arg-type]
        samples = [data[i] for i in range(count)]
        self._inputs = torch.stack([one[0] for one in samples])
        self._targets = torch.stack([torch.as_tensor(one[1]) for one in samples])
        self._model = task.model().to(self._device).train()
        self._optimizer = task.optimizer(self._model.parameters(), task.learning_rate)
        self._step(*self._batch(2))  # what is made once: gradients, state, code
        if limit_bytes:
            self._limit(limit_bytes)

    def measure(self, batch_size: int, seconds: float, blocks: int) -> Mapping[str, object]:
        """Steps for about so long: samples a second of each block, and the most memory.

        Returns:
            "per_s" and "peak_bytes"; or "ended", where memory ended.
        """
        try:
            batch = self._batch(batch_size)
            reset_peak(self._device)
            start_s = time.perf_counter()
            for _ in range(_WARM_UP_STEPS):
                self._step(*batch)
            synchronize()
            step_s = (time.perf_counter() - start_s) / _WARM_UP_STEPS
            count = max(1, round(seconds / blocks / step_s))
            per_s = [batch_size / self._block_s(batch, count) for _ in range(blocks)]
            return {"per_s": per_s, "peak_bytes": peak_bytes(self._device)}
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            said = str(error).splitlines()[0][:160]
        # Outside the handler: the traceback holds the tensors that are to go.
        self._optimizer.zero_grad()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return {"ended": said}

    def _batch(self, size: int) -> tuple[Tensor, Tensor]:
        index = torch.arange(size) % len(self._inputs)
        return self._inputs[index].to(self._device), self._targets[index].to(self._device)

    def _block_s(self, batch: tuple[Tensor, Tensor], count: int) -> float:
        synchronize()
        start_s = time.perf_counter()
        for _ in range(count):
            self._step(*batch)
        synchronize()
        return (time.perf_counter() - start_s) / count

    def _step(self, inputs: Tensor, targets: Tensor) -> None:
        cast = (
            torch.autocast(self._device.type, dtype=self._dtype)
            if self._dtype is not None
            else contextlib.nullcontext()
        )
        self._optimizer.zero_grad()
        with cast:
            loss = self._loss(self._model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def _limit(self, limit_bytes: int) -> None:
        """Hold this process, or this device's allocator, to so many bytes from here on."""
        if self._device.type == "cuda":
            total = torch.cuda.get_device_properties(self._device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), self._device)
        elif sys.platform == "linux":
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + limit_bytes, hard))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator says that there is no more."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    words = (
        "not enough memory",
        "can't allocate memory",
        "out of memory",
        "could not create a primitive",
        "could not create a memory",
    )
    return any(word in str(error).lower() for word in words)


def _data_bytes() -> int:
    """What RLIMIT_DATA counts now: private writable memory (proc(5), VmData)."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    return 0
