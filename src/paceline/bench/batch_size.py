"""Training steps at any batch size within a memory limit, and the largest batch that fits.

    fits     2 4 8 16 32          48 56
    does not             64           60        -> 56, if 60 is within about 5 % of it

`Stepper` trains in a process of its own. It reports when memory runs out: on a GPU the allocator
raises an error; on a CPU the process limits its memory (RLIMIT_DATA) to less than the machine's, so
that its allocator also raises an error and the kernel kills no process.

The search begins with two samples, since batch norm cannot train on one, doubles until memory runs
out, then bisects: the batch reported to fit has been trained with, and the one above it was tried
and did not fit. This module must not know how memory is divided.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ..errors import ConfigError, WorkerError
from ..system.limits import is_out_of_memory
from ..tuning.candidates import autocast
from ..workloads import load_task
from .apart import Answer, Apart
from .clock import elapsed_s
from .device import limit_memory, peak_bytes, reset_peak

_NO_KERNEL = re.compile("could not create a (primitive|memory)")
"""Errors of torch's kernels for a batch that is too large for them."""
_SAMPLES = 64
"""Different samples; a larger batch repeats them."""
_LEAST = 2
"""Samples of the first batch: batch norm needs two; one is tried if two do not fit."""
_WARM_UP_STEPS = 2
TOLERANCE = 0.05
_ONCE = {"seconds": 0.0, "blocks": 1}
"""Arguments of `Stepper.measure` for memory alone."""


def refuse_fp16(precision: str, device: str) -> None:
    """Raise ConfigError for fp16 on a CPU."""
    if precision == "fp16" and torch.device(device).type == "cpu":
        raise ConfigError(
            "fp16 training needs a GPU: on a CPU gradients in fp16 are slow and overflow; "
            "use --precision bf16"
        )


class Stepper:
    """Trains a task's model with batches of any size.

    Args:
        spec: a task.
        precision: one of `tuning.candidates.DTYPES`.
        device: torch's name of it.
        threads: of torch.
        limit_bytes: memory for a batch, without the model and other one-time allocations (on a
            GPU including them); 0: no limit.
    """

    def __init__(
        self, spec: str, precision: str, device: str, threads: int, limit_bytes: int
    ) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self._device = torch.device(device)
        self._precision = precision
        refuse_fp16(precision, device)
        task = load_task(spec)
        self._loss = task.loss
        data = task.splits().train
        count = min(_SAMPLES, len(data))  # type: ignore[arg-type]  # a map-style data set has a length
        samples = [data[i] for i in range(count)]
        self._inputs = torch.stack([sample[0] for sample in samples])
        self._targets = torch.stack([torch.as_tensor(sample[1]) for sample in samples])
        self._model = task.module().to(self._device).train()
        self._optimizer = task.optimizer(self._model.parameters(), task.learning_rate)
        self._step(*self._batch(_LEAST))  # one-time allocations: gradients, state, code
        if limit_bytes:
            limit_memory(self._device, limit_bytes)

    def measure(self, batch_size: int, seconds: float, blocks: int) -> Mapping[str, object]:
        """Train for about ``seconds`` and measure speed and peak memory.

        Returns:
            "per_s" (samples a second of each block), "peak_bytes" and "op_per_sample"; or "ended",
            the error, if memory ran out.
        """
        try:
            batch = self._batch(batch_size)
            reset_peak(self._device)
            step_s = elapsed_s(lambda: self._step(*batch), _WARM_UP_STEPS) / _WARM_UP_STEPS
            count = max(1, round(seconds / blocks / step_s))
            blocks_s = [elapsed_s(lambda: self._step(*batch), count) for _ in range(blocks)]
            per_s = [batch_size * count / block_s for block_s in blocks_s]
            figures = {"per_s": per_s, "peak_bytes": peak_bytes(self._device)}
            return {**figures, "op_per_sample": self._operations(batch) / batch_size}
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) and not _NO_KERNEL.search(str(error)):
                raise
            message = str(error).splitlines()[0][:160]
        # Outside the handler, since the traceback holds the tensors that must be freed.
        self._optimizer.zero_grad()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return {"ended": message}

    def _operations(self, batch: tuple[Tensor, Tensor]) -> int:
        """Return the operations of a step as torch counts them: matrix products, convolutions."""
        with FlopCounterMode(display=False) as counter:
            self._step(*batch)
        return int(counter.get_total_flops())

    def _batch(self, size: int) -> tuple[Tensor, Tensor]:
        index = torch.arange(size) % len(self._inputs)
        return self._inputs[index].to(self._device), self._targets[index].to(self._device)

    def _step(self, inputs: Tensor, targets: Tensor) -> None:
        self._optimizer.zero_grad()
        with autocast(self._device, self._precision):
            loss = self._loss(self._model(inputs), targets)
        loss.backward()
        self._optimizer.step()


def stepper_apart(arguments: Answer) -> Apart:
    """Return a `Stepper` in a process of its own."""
    return Apart(f"{__name__}:Stepper", arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The result of the search.

    Args:
        fits: the largest batch that fits; 0: not even one sample.
        ends: the smallest batch tried that does not fit; None: all fit, up to the search's limit.
        tried: all batches, in the order tried.
    """

    fits: int
    ends: int | None
    tried: tuple[int, ...]


def largest_batch(does_fit: Callable[[int], bool], most: int) -> Largest:
    """Find the largest batch by trial.

    Args:
        does_fit: trains with a batch of this size and returns whether memory sufficed.
        most: largest batch to try, >= 1.

    Example:
        >>> largest = largest_batch(lambda batch: batch <= 1000, most=100_000)
        >>> largest.fits <= 1000 < largest.ends <= 1.05 * largest.fits + 1
        True
    """
    tried: list[int] = []
    low, high = 0, None
    while low < most if high is None else high - low > max(1, TOLERANCE * low):
        batch = min(max(_LEAST, 2 * low), most) if high is None else (low + high) // 2
        tried.append(batch)
        if does_fit(batch):
            low = batch
        else:
            high = batch
    return Largest(fits=low, ends=high, tried=tuple(tried))


def do_fit_together(arguments: Mapping[str, object], batch: int, count: int) -> bool:
    """Return whether ``count`` processes, each a `Stepper`, can train with the batch at once."""
    seats = [stepper_apart(arguments) for _ in range(count)]
    try:
        for seat in seats:
            seat.begin("measure", batch_size=batch, **_ONCE)
        return all("ended" not in seat.end() for seat in seats)
    except WorkerError:
        if not any(seat.has_ended for seat in seats):
            raise
        return False
    finally:
        for seat in seats:
            seat.close()


class Trials:
    """Tries one batch size after another.

    Args:
        arguments: of the `Stepper`.
        say: gets a line for each trial.
    """

    def __init__(self, arguments: Mapping[str, object], say: Callable[[str], None]) -> None:
        self._arguments = arguments
        self._say = say
        self._seat: Apart | None = None

    def does_fit(self, batch: int) -> bool:
        """Return whether the batch fits in memory.

        Raises:
            ConfigError: the task cannot be trained with these arguments.
            WorkerError: training failed for another reason than memory.
        """
        if self._seat is None:
            self._seat = stepper_apart(self._arguments)
        try:
            answer = self._seat.ask("measure", batch_size=batch, **_ONCE)
        except WorkerError as error:
            if not self._seat.has_ended:
                raise
            answer = {"ended": f"memory ran out: {error}"}  # the process died without an answer
        self._say(f"batch {batch:,}: {answer.get('ended', 'fits')}")
        if "ended" in answer:
            self.close()
        return "ended" not in answer

    def close(self) -> None:
        """End the process."""
        if self._seat is not None:
            self._seat.close()
        self._seat = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
