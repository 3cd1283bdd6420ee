"""Cuts of models: the time to find one, and its predicted gain.

    python bench/partition.py [--rounds 3] [--only NAME ...] [--write]

Each model is traced and measured again in each round, and cut for its number of workers with 8
micro-batches. The cut is compared with the even one, for models of at most 12 pieces with the best
of all, and with one worker alone, all predicted from the same measurement. The last row is a
transformer of 100 blocks over 8 workers, whose search should take less than 5 s. Writes
results/partition.md.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from paceline.partition.brute_force import MOST_NODES, try_all_cuts
from paceline.partition.cuts import best_cut
from paceline.partition.pipeline import Pipeline, workers
from paceline.partition.placement import even_cut
from paceline.splits.clocks import measure_loopback
from paceline.splits.measuring import measure
from paceline.splits.tracing import trace
from paceline.workloads.images import build_alexnet, build_lenet, build_mlp
from paceline.workloads.resnets import build_resnet18
from paceline.workloads.transformer import Transformer
from table import machine, spread, write_table

MICRO_BATCHES = 8
IMAGES, WORDS = (1, 28, 28), (64,)


@dataclass(frozen=True, slots=True)
class Case:
    """A model, its number of workers, and the micro-batch to measure."""

    name: str
    model: Callable[[], nn.Module]
    num_workers: int
    micro_batch: int
    shape: tuple[int, ...]

    def inputs(self) -> Tensor:
        if self.shape == WORDS:
            return torch.randint(0, 200, (self.micro_batch, *self.shape))
        return torch.randn(self.micro_batch, *self.shape)


CASES = (
    Case("lenet", lambda: build_lenet("default"), 2, 32, IMAGES),
    Case("mlp", build_mlp, 2, 32, IMAGES),
    Case("alexnet", build_alexnet, 2, 4, IMAGES),
    Case("alexnet", build_alexnet, 4, 4, IMAGES),
    Case("resnet18", lambda: build_resnet18(num_classes=10, num_channels=1), 3, 8, IMAGES),
    Case("transformer, 6 blocks", lambda: Transformer(depth=6), 3, 4, WORDS),
    Case("transformer, 100 blocks", lambda: Transformer(depth=100, width=64), 8, 2, WORDS),
)


@dataclass(slots=True)
class Row:
    """The figures of one model, round by round, in seconds; pieces and words of the last round."""

    pieces: int = 0
    words: str = ""
    trace_s: list[float] = field(default_factory=list)
    measure_s: list[float] = field(default_factory=list)
    search_s: list[float] = field(default_factory=list)
    to_even: list[float] = field(default_factory=list)
    to_best: list[float] = field(default_factory=list)
    balance: list[float] = field(default_factory=list)


def measure_round(case: Case, row: Row) -> None:
    """Measure one round."""
    torch.manual_seed(0)
    model, inputs = case.model(), case.inputs()
    start_s = time.perf_counter()
    traced = trace(model, (inputs,))
    traced_s = time.perf_counter()
    graph = measure(traced, (inputs,)).graph
    measured_s = time.perf_counter()
    pipeline = Pipeline(
        workers=workers(case.num_workers), link=measure_loopback(), micro_batches=MICRO_BATCHES
    )
    search_start_s = time.perf_counter()
    cut = best_cut(graph, pipeline, case.num_workers)
    row.search_s.append(time.perf_counter() - search_start_s)
    row.trace_s.append(traced_s - start_s)
    row.measure_s.append(measured_s - traced_s)
    row.to_even.append(even_cut(graph, pipeline).step_s / cut.placement.step_s)
    row.balance.append(cut.placement.balance)
    if len(graph) <= MOST_NODES:
        best = try_all_cuts(graph, pipeline)
        assert best is not None
        row.to_best.append(best.step_s / cut.placement.step_s)
    row.pieces = len(graph)
    row.words = "all cuts" if cut.is_exact else "along the order"


HEADER = (
    "model", "workers", "pieces", "trace (s)", "measure (s)", "search (s)", "searched", "balance",
    "even / found", "best of all / found",
)  # fmt: skip


def cells(case: Case, row: Row) -> tuple[str, ...]:
    return (
        case.name, str(case.num_workers), str(row.pieces), spread(row.trace_s),
        spread(row.measure_s), spread(row.search_s, 3), row.words, spread(row.balance),
        spread(row.to_even, 3), spread(row.to_best, 3) if row.to_best else "-",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    machine_note = machine()
    rows = [(case, Row()) for case in CASES if not arguments.only or case.name in arguments.only]
    for number in range(arguments.rounds):
        for case, row in rows:
            print(f"round {number}: {case.name} over {case.num_workers}", file=sys.stderr)
            measure_round(case, row)
    table = [cells(*pair) for pair in rows]
    print("\n".join(" | ".join(texts) for texts in (HEADER, *table)))
    note = (
        f"{machine_note}. Median of {arguments.rounds} rounds, with the least and the most. even / "
        "found: how many times as long the even cut's step is predicted to take, at least 1; best "
        f"of all / found: of models that are small enough to try every cut, 1. {MICRO_BATCHES} "
        "micro-batches, each worker with cores of its own."
    )
    if arguments.write:
        write_table("partition", "Cuts of models", HEADER, table, note)


if __name__ == "__main__":
    main()
