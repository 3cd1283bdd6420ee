"""Memory, CPU time and bytes written of each worker's process in a run of ``bench splits``.

    model()         after imports and a first small step: the memory before
    zero_grad 2     freed memory is returned to the system; the peak is reset
    zero_grad 3..   a line: peak memory so far, seconds of CPU, bytes written

Each worker calls zero_grad() once an update, however the model is divided; a loss is computed for
each micro-batch, and only where the last part is. This module must not know what is split, nor how.
"""

import json
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from ..data.arrays import Splits
from ..exchange.mapped import MappedGroup
from ..system.pages import give_back_freed
from ..workloads import load_task
from ..workloads.base import Task
from .device import peak_bytes, reset_peak

ASKED = "BENCH_SPLITS_ASKED"
"""The environment variable with the watched task and the folder of the notes, as JSON."""
_FIRST_NOTE = 2
"""The update at whose beginning the peak is reset: the first one still allocates."""
_CPU = torch.device("cpu")


def seen_task() -> Task:
    """Return the user's task with a watch on its process, and without test data."""
    order = json.loads(os.environ[ASKED])
    task = load_task(order["task"], order["workers"])
    watch = ProcessWatch(Path(order["folder"]))

    def model() -> nn.Module:
        watch.begin()
        return task.module()

    def optimizer(parameters: Iterable[nn.Parameter], rate: float) -> Optimizer:
        made = task.optimizer(parameters, rate)
        own = made.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            watch.note()
            own(set_to_none=set_to_none)

        made.zero_grad = zero_grad  # type: ignore[method-assign]  # of this optimizer alone
        return made

    def data() -> Splits:
        splits = task.splits()
        return Splits(train=splits.train, test=None, source=splits.source)

    return replace(task, model=model, optimizer=optimizer, data=data)


class ProcessWatch:
    """Writes a line of JSON at each update: the process's memory, CPU time and bytes written.

    Args:
        folder: of its file, which is named by the process id.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{os.getpid()}.jsonl"
        self._count = self._own_bytes = self._before = 0

    def begin(self) -> None:
        """Take the memory before the model is created, once a small step has loaded libraries."""
        layer = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        layer(torch.zeros(2, 8)).sum().backward()
        optimizer.step()
        reset_peak(_CPU)
        self._before = peak_bytes(_CPU)

    def note(self) -> None:
        """Count an update that begins; from the third on, write a line."""
        self._count += 1
        if self._count == _FIRST_NOTE:
            give_back_freed()
            reset_peak(_CPU)
        if self._count <= _FIRST_NOTE:
            return
        line = json.dumps(
            {
                "memory_bytes": peak_bytes(_CPU) - self._before,
                "busy_s": time.process_time(),
                "sent_bytes": _written_bytes() - self._own_bytes,
            }
        )
        with self._path.open("a") as file:
            self._own_bytes += file.write(f"{line}\n")


def _written_bytes() -> int:
    """Return the bytes that this process wrote to sockets and files (proc(5), ``wchar``), and those
    that it sent through mapped memory.

    Without /proc/self/io it is only the latter.
    """
    try:
        rows = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return MappedGroup.sent_bytes
    written = next(int(row.split()[1]) for row in rows if row.startswith("wchar"))
    return written + MappedGroup.sent_bytes


def read_watches(folder: Path) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Return, for each worker, its peak memory, and the bytes and seconds of CPU of a step."""
    memory, sent, busy = list[float](), list[float](), list[float]()
    for path in sorted(folder.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        memory.append(max(line["memory_bytes"] for line in lines))
        if len(lines) > 1:
            for key, values in (("sent_bytes", sent), ("busy_s", busy)):
                values.append((lines[-1][key] - lines[0][key]) / (len(lines) - 1))
    return tuple(memory), tuple(sent), tuple(busy)
