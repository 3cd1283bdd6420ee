"""Time a module's forward and backward pass, or count its operations on the meta device.

A model on torch's meta device has no values to compute with: its floating-point operations and
bytes are counted, and divided by this machine's rates of matrix products and of copies. These are
read from the file of ceilings that `paceline probe` writes, or measured here. The cost of a message
is measured here, too.
"""

import functools
import mmap
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..collectives.base import LinkCost
from ..machine.ceilings import MachineCeilings, read_machine
from ..system.processors import num_cores
from .late_weights import LateWeights

_ENOUGH_S = 0.02
"""A piece is run again until its runs add up to this, or it has run ``_MOST_RUNS`` times."""
_LEAST_RUNS, _MOST_RUNS = 3, 25
_UPDATES_S, _MOST_UPDATES = 1.0, 20
"""The same limits for whole updates, which are longer."""
_MATRIX = 768
_COPIED_BYTES = 1 << 26
_ROUND_TRIPS = 100
_MESSAGE_BYTES = 1 << 24
_CHUNK_BYTES = 1 << 20


class TakenTimes(NamedTuple):
    """Seconds of a forward and backward pass.

    Attributes:
        backward_s: if gradients are added to existing ones.
        first_s: how much longer it takes if there are none, and memory for them is allocated.
        late_s: of the gradients that are computed after the backward pass.
    """

    forward_s: float
    backward_s: float
    first_s: float
    late_s: float = 0.0


def median_times(rounds: Sequence[TakenTimes]) -> TakenTimes:
    """Return the median of each time over several rounds."""
    return TakenTimes(*(statistics.median(times) for times in zip(*rounds, strict=True)))


class TimedClock:
    """Measures times: after one run that does not count, the median of a few.

    The minimum would be too optimistic: other processes slow every step of a real run, and a
    product with large weights takes one of two times, depending on where its memory lies.

    Args:
        rounds: rounds of which the caller takes the median; each gets its share of the runs.
    """

    def __init__(self, rounds: int = 1) -> None:
        self._least_runs = -(-_LEAST_RUNS // rounds)
        self._most_runs, self._enough_s = _MOST_RUNS // rounds, _ENOUGH_S / rounds
        self._most_updates, self._updates_s = _MOST_UPDATES // rounds, _UPDATES_S / rounds

    def both(
        self, forward: Callable[[], Any], module: nn.Module, late: LateWeights | None = None
    ) -> TakenTimes:
        """Return the seconds forward and backward.

        Args:
            late: layers of ``module`` whose gradients are computed after the backward pass.
        """
        late = late or LateWeights(())
        first_runs, later_runs = list[tuple[float, ...]](), list[tuple[float, ...]]()
        with late.kept():
            _step_late(forward, module, late)
            while len(first_runs) < self._least_runs or (
                len(first_runs) < self._most_runs
                and sum(map(sum, (*first_runs, *later_runs))) < self._enough_s
            ):
                module.zero_grad(set_to_none=True)
                first_runs.append(_step_late(forward, module, late))
                later_runs.append(_step_late(forward, module, late))
        forward_s = statistics.median(run[0] for run in (*first_runs, *later_runs))
        (first_backward_s, first_late_s), (backward_s, late_s) = (
            [statistics.median(run[column] for run in runs) for column in (1, 2)]
            for runs in (first_runs, later_runs)
        )
        longer_s = first_backward_s + first_late_s - backward_s - late_s
        if longer_s < 0:  # by chance: both measured the same; the lesser would be too optimistic
            backward_s, late_s = (first_backward_s + backward_s) / 2, (first_late_s + late_s) / 2
        return TakenTimes(forward_s, backward_s, max(0.0, longer_s), late_s)

    def updates(self, forward: Callable[[], Any], module: nn.Module) -> list[float]:
        """Return the seconds of some forward and backward passes without earlier gradients.

        The first run does not count.
        """
        updates_s = list[float]()
        while len(updates_s) <= self._least_runs or (
            len(updates_s) <= self._most_updates and sum(updates_s) < self._updates_s
        ):
            module.zero_grad(set_to_none=True)
            updates_s.append(sum(step_once(forward, module)))
        return updates_s[1:]


def _step_late(
    forward: Callable[[], Any], module: nn.Module, late: LateWeights
) -> tuple[float, float, float]:
    """Return the seconds forward, backward, and of the late gradients."""
    forward_s, backward_s = step_once(forward, module)
    start_s = time.perf_counter()
    late.add()
    return forward_s, backward_s, time.perf_counter() - start_s


def step_once(forward: Callable[[], Any], module: nn.Module) -> tuple[float, float]:
    """Return the seconds forward and backward; the outputs' gradients are ones."""
    start_s = time.perf_counter()
    outputs = _differentiable(forward())
    middle_s = time.perf_counter()
    ones = [torch.ones_like(output) for output in outputs]
    begin_s = time.perf_counter()
    if outputs:
        torch.autograd.backward(outputs, ones)
    return middle_s - start_s, time.perf_counter() - begin_s


class CountedClock:
    """Estimates times from counted operations and bytes, and this machine's rates."""

    def __init__(self) -> None:
        self._s_per_flop, self._s_per_byte = _machine_rates(torch.get_num_threads())

    def both(
        self, forward: Callable[[], Any], module: nn.Module, late: LateWeights | None = None
    ) -> TakenTimes:
        """Return the seconds forward and backward; backward is assumed to move twice the bytes."""
        with FlopCounterMode(display=False) as forward_flops:
            outputs = forward()
        num_bytes = sum(tensor.nbytes for tensor in tensors_in(outputs))
        num_bytes += sum(parameter.nbytes for parameter in module.parameters())
        with FlopCounterMode(display=False) as backward_flops:
            if results := _differentiable(outputs):
                torch.autograd.backward(results, [torch.ones_like(result) for result in results])
        return TakenTimes(
            forward_flops.get_total_flops() * self._s_per_flop + num_bytes * self._s_per_byte,
            backward_flops.get_total_flops() * self._s_per_flop + 2 * num_bytes * self._s_per_byte,
            0.0,
        )


@functools.cache  # so that estimates of two batches are of one machine
def _machine_rates(num_threads: int) -> tuple[float, float]:
    """Return seconds per operation and per byte, as saved for all cores, else measured now."""
    ceilings = read_machine() if num_threads == num_cores() else MachineCeilings()
    op_per_s = ceilings.get("matmul_fp32_op_per_s")
    bytes_per_s = ceilings.get("memory_copy_bytes_per_s")
    if op_per_s is not None and bytes_per_s is not None:
        return 1 / op_per_s, 1 / bytes_per_s
    matrix = torch.ones(_MATRIX, _MATRIX)
    return _least_s(lambda: matrix @ matrix) / (2 * _MATRIX**3), moved_s_per_byte()


def moved_s_per_byte() -> float:
    """Return the seconds to read or write a byte, by a copy with all of torch's threads."""
    source, target = torch.ones(_COPIED_BYTES // 4), torch.empty(_COPIED_BYTES // 4)
    return _least_s(lambda: target.copy_(source)) / (2 * _COPIED_BYTES)


def fresh_s_per_byte() -> float:
    """Return the seconds per byte that newly mapped memory takes beyond writing it.

    Large pages are used where the system has them. A block that the allocator returned to the
    system when it was freed takes this time again (system/pages.py).
    """
    mapped_s = []
    for _ in range(3):
        memory = mmap.mmap(-1, _COPIED_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        bytes_in = torch.frombuffer(memory, dtype=torch.uint8)
        start_s = time.perf_counter()
        bytes_in.fill_(1)
        middle_s = time.perf_counter()
        bytes_in.fill_(2)
        mapped_s.append(2 * middle_s - start_s - time.perf_counter())
    return max(0.0, statistics.median(mapped_s)) / _COPIED_BYTES


def _least_s(work: Callable[[], object]) -> float:
    runs_s = []
    for _ in range(4):
        start_s = time.perf_counter()
        work()
        runs_s.append(time.perf_counter() - start_s)
    return min(runs_s)


def tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _differentiable(values: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(values) if tensor.requires_grad]


@contextmanager
def threads(num: int) -> Iterator[None]:
    """Compute with this many of torch's threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# -- a message -------------------------------------------------------------------------------------


def measure_loopback() -> LinkCost:
    """Measure the least cost of a message over a socket between two processes of this machine.

    Latency is half the round trip of one byte, bandwidth that of a large message. Both ends are
    threads of this process, so the overhead of a message library is not included. Takes about
    50 ms.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        answerer = threading.Thread(target=_answer, args=(server,), daemon=True)
        answerer.start()
        with socket.create_connection(server.getsockname()) as end:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            latency_s = min(_round_trip_s(end) for _ in range(_ROUND_TRIPS)) / 2
            data = bytes(_MESSAGE_BYTES)
            large_s = min(_sent_s(end, data) for _ in range(3))
        answerer.join()
    return LinkCost(latency_s=latency_s, s_per_byte=max(0.0, large_s - latency_s) / _MESSAGE_BYTES)


def _round_trip_s(end: socket.socket) -> float:
    start_s = time.perf_counter()
    end.sendall(b"1")
    end.recv(1)
    return time.perf_counter() - start_s


def _sent_s(end: socket.socket, data: bytes) -> float:
    start_s = time.perf_counter()
    end.sendall(b"L")
    end.sendall(data)
    end.recv(1)
    return time.perf_counter() - start_s


def _answer(server: socket.socket) -> None:
    """Answer each byte with a byte, and a large message with one once all of it has arrived."""
    end, _ = server.accept()
    buffer = bytearray(_CHUNK_BYTES)
    with end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while word := end.recv(1):
            left = _MESSAGE_BYTES if word == b"L" else 0
            while left > 0:
                received = end.recv_into(buffer, min(left, _CHUNK_BYTES))
                if not received:  # the other end is gone
                    return
                left -= received
            end.sendall(b"1")
