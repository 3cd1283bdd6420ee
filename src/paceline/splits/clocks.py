"""What something takes, forward and backward: by the clock, or counted where there are no numbers.

A model on torch's meta device has no numbers and takes no time: its floating-point operations and
bytes are counted, and divided by what a large product of matrices reaches here, and a copy: as
`paceline probe` has left it in the file of ceilings, else measured on the spot. So is a message.
"""

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
"""A piece is run again until it has taken that long, or has run ``_MOST_RUNS`` times."""
_LEAST_RUNS, _MOST_RUNS = 3, 25
_UPDATES_S, _MOST_UPDATES = 1.0, 20
"""So with updates, which are longer."""
_MATRIX = 768
_COPIED_BYTES = 1 << 26
_ROUND_TRIPS = 100
_MESSAGE_BYTES = 1 << 24
_CHUNK_BYTES = 1 << 20


class TakenTimes(NamedTuple):
    """What something takes.

    Attributes:
        backward_s: where gradients are added to those that are there.
        first_s: how much longer where there are none, and room is made for them.
        late_s: of gradients that are computed afterwards, where some are.
    """

    forward_s: float
    backward_s: float
    first_s: float
    late_s: float = 0.0


def median_times(rounds: Sequence[TakenTimes]) -> TakenTimes:
    """Return the median of each time over several rounds."""
    return TakenTimes(*(statistics.median(times) for times in zip(*rounds, strict=True)))


class TimedClock:
    """By the clock: after a first run the median of a few.

    The least of them is what a run never has: what else runs here takes from each of its steps, and
    a product that moves large weights takes one of two times, by where its memory happens to lie.

    Args:
        rounds: that the caller makes, of which it takes the median itself; each has its share of
            the runs.
    """

    def __init__(self, rounds: int = 1) -> None:
        self._least_runs = -(-_LEAST_RUNS // rounds)
        self._most_runs, self._enough_s = _MOST_RUNS // rounds, _ENOUGH_S / rounds

    def both(
        self, forward: Callable[[], Any], module: nn.Module, late: LateWeights | None = None
    ) -> TakenTimes:
        """Seconds forward and backward.

        Args:
            late: of ``module``; its gradients come afterwards.
        """
        late = late or LateWeights(())
        first, more = list[tuple[float, ...]](), list[tuple[float, ...]]()
        with late.kept():
            _step_late(forward, module, late)
            while len(first) < self._least_runs or (
                len(first) < self._most_runs and sum(map(sum, (*first, *more))) < self._enough_s
            ):
                module.zero_grad(set_to_none=True)
                first.append(_step_late(forward, module, late))
                more.append(_step_late(forward, module, late))
        forward_s = statistics.median(one for one, *_ in (*first, *more))
        (back_s, late_s), (back_more_s, late_more_s) = (
            [statistics.median(one[at] for one in taken) for at in (1, 2)]
            for taken in (first, more)
        )
        longer_s = back_s + late_s - back_more_s - late_more_s
        return TakenTimes(
            forward_s, min(back_s, back_more_s), max(0.0, longer_s), min(late_s, late_more_s)
        )

    def update(self, forward: Callable[[], Any], module: nn.Module) -> float:
        """Seconds forward and backward of an update of its own; a first one is not counted."""
        taken = list[float]()
        while len(taken) <= _LEAST_RUNS or (
            len(taken) <= _MOST_UPDATES and sum(taken) < _UPDATES_S
        ):
            module.zero_grad(set_to_none=True)
            taken.append(sum(step_once(forward, module)))
        return statistics.median(taken[1:])


def _step_late(
    forward: Callable[[], Any], module: nn.Module, late: LateWeights
) -> tuple[float, float, float]:
    """Seconds forward, backward, and of what comes late."""
    forward_s, backward_s = step_once(forward, module)
    start_s = time.perf_counter()
    late.add()
    return forward_s, backward_s, time.perf_counter() - start_s


def step_once(forward: Callable[[], Any], module: nn.Module) -> tuple[float, float]:
    """Seconds forward and backward, from gradients that are ones."""
    start_s = time.perf_counter()
    outputs = _differentiable(forward())
    middle_s = time.perf_counter()
    ones = [torch.ones_like(one) for one in outputs]
    begin_s = time.perf_counter()
    if outputs:
        torch.autograd.backward(outputs, ones)
    return middle_s - start_s, time.perf_counter() - begin_s


class CountedClock:
    """By what is counted, and what this machine reaches."""

    def __init__(self) -> None:
        known = read_machine() if torch.get_num_threads() == num_cores() else MachineCeilings()
        rate, width = known.get("matmul_fp32_op_per_s"), known.get("memory_copy_bytes_per_s")
        if rate is not None and width is not None:
            self._s_per_flop, self._s_per_byte = 1 / rate, 1 / width
            return
        matrix = torch.ones(_MATRIX, _MATRIX)
        self._s_per_flop = _least_s(lambda: matrix @ matrix) / (2 * _MATRIX**3)
        self._s_per_byte = moved_s_per_byte()

    def both(
        self, forward: Callable[[], Any], module: nn.Module, late: LateWeights | None = None
    ) -> TakenTimes:
        """Seconds forward and backward, of which the second is said to move twice the bytes."""
        with FlopCounterMode(display=False) as first:
            outputs = forward()
        num_bytes = sum(one.nbytes for one in tensors_in(outputs))
        num_bytes += sum(one.nbytes for one in module.parameters())
        with FlopCounterMode(display=False) as second:
            if results := _differentiable(outputs):
                torch.autograd.backward(results, [torch.ones_like(one) for one in results])
        return TakenTimes(
            first.get_total_flops() * self._s_per_flop + num_bytes * self._s_per_byte,
            second.get_total_flops() * self._s_per_flop + 2 * num_bytes * self._s_per_byte,
            0.0,
        )


def moved_s_per_byte() -> float:
    """Of a byte of memory that is read or written, by a copy with all of torch's threads."""
    source, target = torch.ones(_COPIED_BYTES // 4), torch.empty(_COPIED_BYTES // 4)
    return _least_s(lambda: target.copy_(source)) / (2 * _COPIED_BYTES)


def fresh_s_per_byte() -> float:
    """Of a byte of memory that the system gives anew, in large pages where it can, beyond writing
    it: what a block takes that was given back when it was freed (system/pages.py)."""
    taken = []
    for _ in range(3):
        room = mmap.mmap(-1, _COPIED_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            room.madvise(mmap.MADV_HUGEPAGE)
        bytes_in = torch.frombuffer(room, dtype=torch.uint8)
        start_s = time.perf_counter()
        bytes_in.fill_(1)
        middle_s = time.perf_counter()
        bytes_in.fill_(2)
        taken.append(2 * middle_s - start_s - time.perf_counter())
    return max(0.0, statistics.median(taken)) / _COPIED_BYTES


def _least_s(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(4):
        start_s = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start_s)
    return min(taken)


def tensors_in(values: Any) -> list[Tensor]:
    return [one for one in torch.utils._pytree.tree_leaves(values) if isinstance(one, Tensor)]


def _differentiable(values: Any) -> list[Tensor]:
    return [one for one in tensors_in(values) if one.requires_grad]


@contextmanager
def threads(num: int) -> Iterator[None]:
    """So many of torch's threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# -- a message -------------------------------------------------------------------------------------


def measure_loopback() -> LinkCost:
    """What a message between two processes of this machine costs at least, over a socket.

    Latency is half of a way there and back of one byte, bandwidth that of a large message; both
    ends are threads of this process, so what a library for messages adds is not in it. Takes about
    50 ms.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = threading.Thread(target=_answer, args=(server,), daemon=True)
        other.start()
        with socket.create_connection(server.getsockname()) as end:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            latency_s = min(_round_trip_s(end) for _ in range(_ROUND_TRIPS)) / 2
            data = bytes(_MESSAGE_BYTES)
            took_s = min(_sent_s(end, data) for _ in range(3))
        other.join()
    return LinkCost(latency_s=latency_s, s_per_byte=max(0.0, took_s - latency_s) / _MESSAGE_BYTES)


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
    """A byte for a byte, and one for a large message when all of it is here."""
    end, _ = server.accept()
    buffer = bytearray(_CHUNK_BYTES)
    with end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while word := end.recv(1):
            left = _MESSAGE_BYTES if word == b"L" else 0
            while left > 0:
                left -= end.recv_into(buffer, min(left, _CHUNK_BYTES))
            end.sendall(b"1")
