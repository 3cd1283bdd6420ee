"""Full-sync under torchrun beside DDP at its best: two ranks, gloo, the same processes, by turns.

    python bench/torchrun.py [--rounds 7] [--quick] [--write]

Each pair of ranks has both models alive: one prepared by Paceline, one in DistributedDataParallel
with its buckets as views, over a loader that hands each rank the same part of every batch. They
take blocks of steps by turns, so whatever the machine does beside meets both; a ratio is of two
blocks in a row. Writes results/torchrun.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from table import interval, machine, spread, write_table
from worlds import SUBJECTS, Part, Step, as_it_is, data_of, endless, make_model

HERE = Path(__file__).resolve()
RANKS = 2
WANTED = 0.98


@dataclass(frozen=True, slots=True)
class Row:
    """A network, its batch over both ranks, and the steps of a block."""

    name: str
    batch: int
    steps: int


ROWS = (
    Row("lenet", 256, 20), Row("mlp", 32, 10), Row("mlp", 128, 10), Row("mlp", 256, 10),
    Row("resnet18", 64, 2), Row("gpt", 16, 6),
)  # fmt: skip


def ddp_steps(row: Row, rank: int) -> Step:
    """The bare loop with DDP's own settings at their best."""
    subject = SUBJECTS[row.name]
    model = DistributedDataParallel(make_model(row.name), gradient_as_bucket_view=True)
    optimizer = subject.optimizer(model.parameters())
    part = Part(subject.num_samples, row.batch, rank, RANKS)
    batches = endless(DataLoader(data_of(subject), batch_sampler=part, collate_fn=as_it_is))  # type: ignore[arg-type]

    def step() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        subject.loss(model(inputs), targets).backward()
        optimizer.step()

    return step


def pace_steps(row: Row) -> Iterator[None]:
    """The four lines; a step is made by ``next``."""
    import paceline

    pace, subject = paceline.connect(), SUBJECTS[row.name]
    model = make_model(row.name)
    optimizer = subject.optimizer(model.parameters())
    loader = DataLoader(data_of(subject), batch_size=row.batch, collate_fn=as_it_is, drop_last=True)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for _ in pace.epochs(1_000_000):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                subject.loss(model(inputs), targets).backward()
                optimizer.step()
            yield
            if pace.is_stopped:
                return


def be_a_rank(row: Row, rounds: int, out: Path) -> None:
    """Blocks by turns; rank 0 writes (Paceline's, DDP's) seconds a step of each."""
    rank = int(os.environ["RANK"])
    steps = pace_steps(row)
    next(steps)  # the groups of Paceline are made before DDP's
    dist.init_process_group("gloo")
    plain = ddp_steps(row, rank)
    times: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        pair = []
        for step in (lambda: next(steps), plain):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(row.steps):
                step()
            pair.append((time.perf_counter() - start) / row.steps)
        if number:  # the first is for warming up
            times.append((pair[0], pair[1]))
    dist.destroy_process_group()
    if rank == 0:
        out.write_text(json.dumps(times))
    os._exit(0)  # a run without an end: nobody wants its report


def measure(row: Row, rounds: int) -> list[tuple[float, float]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times"
        words = ["--row", str(ROWS.index(row)), "--rounds", str(rounds), "--out", str(out)]
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone",
             "--nproc-per-node", str(RANKS), str(HERE), *words],
            cwd=folder, capture_output=True, text=True, check=False,
            env={**os.environ, "PACELINE_CHECKPOINT_EVERY": "never", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        if not out.is_file():
            sys.exit(done.stdout[-2000:] + done.stderr[-4000:])
        return [(one, other) for one, other in json.loads(out.read_text())]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="the first two rows")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--row", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out is not None:
        torch.set_num_threads(1)
        be_a_rank(ROWS[options.row], options.rounds, options.out)
    note = machine()
    cells = []
    for row in ROWS[:2] if options.quick else ROWS:
        times = measure(row, options.rounds)
        middle, low, high = interval([other / one for one, other in times])
        cells.append([
            f"{row.name} {row.batch}", spread([1000 * one for one, _ in times]),
            spread([1000 * other for _, other in times]),
            f"{middle:.3f} ({low:.3f} to {high:.3f})", "yes" if middle >= WANTED else "no",
        ])  # fmt: skip
        print(" | ".join(cells[-1]), flush=True)
    if options.write:
        header = ["network, batch", "Paceline, ms", "DDP, ms", "DDP over Paceline", ">= 0.98"]
        write_table("torchrun", "Full-sync under torchrun beside DDP", header, cells,
                    f"{options.rounds} blocks of each by turns in the same two processes, a thread "
                    "each; median (least to most), of the ratio with its 95 % interval. "
                    f"{note}")  # fmt: skip


if __name__ == "__main__":
    main()
