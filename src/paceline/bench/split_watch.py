"""What the process of each worker holds, computes and writes in a run of ``bench splits``.

    model()   everything is loaded: what the process holds before
    loss 2    what was freed is given back; look for the most from here
    loss 3..  the most so far, seconds of CPU, bytes written: a line

This module must not know what is split, nor how.
"""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ..data.arrays import Splits
from ..system.pages import give_back_freed
from ..workloads import load_task
from ..workloads.base import Task
from .device import peak_bytes, reset_peak

ASKED = "BENCH_SPLITS_ASKED"
"""The environment's name for which task is watched, and where notes go."""
_FIRST_NOTE = 2
"""Losses until a worker has what its steps take: the first allocates."""
_CPU = torch.device("cpu")


def seen_task() -> Task:
    """The task that a run of this bench trains: the user's, with its workers' processes noted."""
    asked = json.loads(os.environ[ASKED])
    task = load_task(asked["task"], asked["workers"])
    watch = ProcessWatch(Path(asked["folder"]))

    def model() -> nn.Module:
        watch.begin()
        return task.module()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        result = task.loss(outputs, targets)
        if result.requires_grad:
            watch.note()
        return result

    def data() -> Splits:
        result = task.splits()
        return Splits(train=result.train, test=None, source=result.source)

    return replace(task, model=model, loss=loss, data=data)


class ProcessWatch:
    """What this process holds, computes and writes while it trains, a line of JSON a loss.

    Args:
        folder: where its file lies.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{os.getpid()}.jsonl"
        self._count = self._own_bytes = self._before = 0

    def begin(self) -> None:
        """The model is about to be made; what a first step loads is loaded."""
        layer = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        layer(torch.zeros(2, 8)).sum().backward()
        optimizer.step()
        reset_peak(_CPU)
        self._before = peak_bytes(_CPU)

    def note(self) -> None:
        """A training step has come to its loss."""
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
    """By this process so far, to sockets and files (proc(5), ``wchar``); 0 where nobody counts."""
    try:
        rows = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return next(int(row.split()[1]) for row in rows if row.startswith("wchar"))


def read_watches(folder: Path) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Of each worker: the most memory; bytes and seconds of CPU from one loss to the next."""
    memory, sent, busy = list[float](), list[float](), list[float]()
    for path in sorted(folder.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        memory.append(max(line["memory_bytes"] for line in lines))
        if len(lines) > 1:
            for key, values in (("sent_bytes", sent), ("busy_s", busy)):
                values.append((lines[-1][key] - lines[0][key]) / (len(lines) - 1))
    return tuple(memory), tuple(sent), tuple(busy)
