"""What five documents claim and no other page measures: latencies, threads, gradients, bytes.

    python bench/claims.py [--write]

    paceline probe                caches, memory, the disk, vector units
    paceline bench concurrency    threads, processes, the interpreter's lock
    paceline plan --memory        bytes that LeNet's workers send, split in three ways
    below                         gradients, throughput, activations, what torch can do

Each row is one figure; docs/claims.md puts them beside the documents' words. Writes
results/claims.md.
"""

import argparse
import dis
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from subprocess import PIPE
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline import Task
from paceline.collectives.base import LinkCost
from paceline.collectives.choose import choose
from paceline.machine.processor import read_processor
from paceline.machine.source import MachineSource
from paceline.plan import format_bytes
from paceline.predict.split_models import SplitQuestion
from paceline.predict.splitting import plan_splits
from paceline.probe.concurrency import WAYS
from paceline.probe.probing import ProbeQuestion, probe_machine
from paceline.report.text import three_figures
from paceline.workloads import load_task
from table import machine, say, write_table

HEADER = ("figure", "value", "as text", "how")
PROBED = (
    "l1_latency_s", "l2_latency_s", "l3_latency_s", "memory_latency_s", "memory_banks_latency_s",
    "memory_burst_latency_s", "memory_read_bytes_per_s", "disk_read_latency_s", "disk_reads_per_s",
    "disk_read_bytes_per_s",
)  # fmt: skip
ROUNDS, STEPS = 5, 20
SMALL, LARGE = 16, 256
"""Samples of the batches that are compared."""
NUM_GRADIENTS = 60
ELEMENTS = 1 << 20
RING_BYTES, RING_LINK = 1 << 30, LinkCost(latency_s=0.0, s_per_byte=1e-9)


class Row(NamedTuple):
    """One figure: its name, its value in the unit of the name, the same for readers."""

    name: str
    value: float
    text: str
    how: str


# -- the machine -----------------------------------------------------------------------------------


def machine_rows() -> Iterator[Row]:
    probe = probe_machine(ProbeQuestion(folder=Path.cwd()), say)
    figures = {figure.key: figure for figure in probe.figures}
    for key in PROBED:
        if (best := figures[key].best) is not None:
            yield Row(key, best, figures[key].unit.render(best), figures[key].how)
    processor = read_processor(MachineSource())
    if processor.vector_bits is not None:
        bits = processor.vector_bits
        yield Row("vector_bits", bits, f"{bits} bits", "the widest registers")
    for cache in processor.caches:
        size = format_bytes(cache.num_bytes)
        yield Row(f"{cache.kind.lower()}_bytes", cache.num_bytes, size, "of one cache")


def thread_rows() -> Iterator[Row]:
    # In a process of its own: a spawned one imports the program of its parent again.
    command = [sys.executable, "-m", "paceline", "bench", "concurrency", "--json"]
    flags = ["--jobs", "8", "--at-once", "2"]
    result = json.loads(subprocess.run([*command, *flags], stdout=PIPE, check=True).stdout)
    in_turn, _, threads, processes = WAYS
    for jobs in result["kinds"]:
        took_s = {way: one["median_s"] for way, one in jobs["ways"].items()}
        for way in (threads, processes) if jobs["kind"] != "waiting" else ():
            ratio = took_s[in_turn] / took_s[way]
            how = f"8 jobs in two {way}, beside one after the other"
            yield Row(f"{way}_{jobs['kind'].lower()}_speedup", ratio, f"{ratio:.2f} times", how)
    for way in (threads, processes):
        made_s, talk_s = result["make_s"][way], result["talk_s"][way]
        yield Row(f"{way}_start_s", made_s, three_figures(made_s), "to start and end one")
        yield Row(f"{way}_talk_s", talk_s, three_figures(talk_s), "a word there and back")


# -- models ----------------------------------------------------------------------------------------


class Learner:
    """A task's model and its gradient on batches of its training data."""

    def __init__(self, task: Task, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self._task, self._model = task, task.module().to(dtype)
        self._optimizer = task.optimizer(self._model.parameters(), 0.01)
        train = task.splits().train
        self._inputs = torch.stack([train[i][0] for i in range(NUM_GRADIENTS * LARGE)]).to(dtype)
        self._targets = torch.tensor([int(train[i][1]) for i in range(NUM_GRADIENTS * LARGE)])

    def gradient(self, first: int, size: int) -> Tensor:
        """The gradient of the mean loss of ``size`` samples, as one vector."""
        self._optimizer.zero_grad()
        rows = slice(first, first + size)
        self._task.loss(self._model(self._inputs[rows]), self._targets[rows]).backward()
        parts = [p.grad.flatten() for p in self._model.parameters() if p.grad is not None]
        return torch.cat(parts)

    def samples_per_s(self, size: int) -> float:
        """The rate of whole training steps."""
        start_s = time.perf_counter()
        for step in range(STEPS):
            self.gradient(step * size, size)
            self._optimizer.step()
        return STEPS * size / (time.perf_counter() - start_s)

    def noise(self, size: int) -> float:
        """The mean squared distance of mini-batches' gradients from their mean."""
        gradients = torch.stack([self.gradient(i * size, size) for i in range(NUM_GRADIENTS)])
        return float(gradients.var(0).sum())


def gradient_rows() -> Iterator[Row]:
    say("gradients")
    exact = Learner(load_task("lenet", 1), torch.float64)
    halves = exact.gradient(0, LARGE // 2) + exact.gradient(LARGE // 2, LARGE // 2)
    whole = 2 * exact.gradient(0, LARGE)
    off = float((halves - whole).norm() / whole.norm())
    yield Row("gradient_sum_error", off, f"{off:.1e}", "LeNet, float64, two halves of 256")
    ratio = exact.noise(SMALL) / exact.noise(LARGE)
    how = f"variance in batches of {SMALL} over that in batches of {LARGE}, LeNet at its start"
    yield Row("gradient_noise_ratio", ratio, f"{ratio:.1f} times", how)


def throughput_rows() -> Iterator[Row]:
    say("throughput")
    learner = Learner(load_task("lenet", 1))
    rates: dict[int, list[float]] = {SMALL: [], LARGE: []}
    for _ in range(ROUNDS):
        for size, taken in rates.items():
            taken.append(learner.samples_per_s(size))
    ratio = statistics.median(b / a for a, b in zip(*rates.values(), strict=True))
    how = f"samples a second in batches of {LARGE} over those of {SMALL}, LeNet"
    yield Row("batch_throughput_ratio", ratio, f"{ratio:.2f} times", how)


def activation_rows() -> Iterator[Row]:
    say("activations")
    inputs = torch.randn(ELEMENTS, requires_grad=True)

    def took_s(function: Callable[[Tensor], Tensor]) -> float:
        start_s = time.perf_counter()
        function(inputs).sum().backward()
        return time.perf_counter() - start_s

    times = [(took_s(torch.tanh), took_s(torch.relu)) for _ in range(STEPS)][1:]
    ratio = statistics.median(tanh_s / relu_s for tanh_s, relu_s in times)
    yield Row("tanh_relu_ratio", ratio, f"{ratio:.2f} times", "tanh over ReLU, both ways, 2^20")


def split_rows() -> Iterator[Row]:
    say("splits of LeNet")
    table = plan_splits(SplitQuestion(spec="lenet", num_workers=2)).table
    for price in table.prices:
        if price.name in ("data", "network", "layer") and price.step_s is not None:
            sent = price.sent_bytes
            yield Row(
                f"{price.name}_bytes", sent, format_bytes(round(sent)),
                "an update of LeNet's 256 samples, two workers",
            )  # fmt: skip


# -- what follows from rules -----------------------------------------------------------------------


def ring_rows() -> Iterator[Row]:
    for ranks in (2, 16):
        for name in ("ring", "hub"):
            took_s = choose(RING_BYTES, ranks, RING_LINK, names=[name]).seconds
            how = f"computed: {ranks} ranks, 1 GiB, 1 GB/s, without latency"
            yield Row(f"{name}_{ranks}_s", took_s, three_figures(took_s), how)


def torch_rows() -> Iterator[Row]:
    with torch.autocast("cpu"):
        is_cast = nn.Linear(8, 8)(torch.zeros(2, 8)).dtype == torch.bfloat16
    yield Row("autocast_cpu", is_cast, "bfloat16" if is_cast else "float32", "a Linear on the CPU")
    has = importlib.util.find_spec("torch.utils.bottleneck") is not None
    yield Row("bottleneck", has, "present" if has else "gone", "`torch.utils.bottleneck`")
    code = compile("print((1 + 2) + (3 + 4))", "", "eval")
    is_folded = any(
        one.opname == "LOAD_CONST" and one.argval == 10 for one in dis.get_instructions(code)
    )
    yield Row(
        "constant_folded", is_folded, "10" if is_folded else "the sum", "Python's own compiler"
    )


def all_rows() -> Iterator[Row]:
    parts: Sequence[Callable[[], Iterator[Row]]] = (
        machine_rows, thread_rows, gradient_rows, throughput_rows, activation_rows, split_rows,
        ring_rows, torch_rows,
    )  # fmt: skip
    for part in parts:
        yield from part()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    machine_note = machine()
    rows = [(row.name, f"{float(row.value):.6g}", row.text, row.how) for row in all_rows()]
    for row in rows:
        print(" | ".join(row))
    if options.write:
        note = f"Of the machine the best of several, of the rest medians. {machine_note}"
        write_table("claims", "Figures for the documents' claims", HEADER, rows, note)


if __name__ == "__main__":
    main()
