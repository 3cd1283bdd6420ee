"""Full-sync under torchrun against tuned DDP: two ranks each, gloo, alive at once, in turn.

    python bench/torchrun.py [--rounds 8] [--quick] [--only ROW ...] [--write]

Four pairs of ranks train the same network on the same parts of every batch: the four lines of
Paceline twice, which shows how far equal figures differ on this machine, and DDP with its buckets
beside the gradients and with the gradients as views into them. All use memory that glibc keeps and
one thread a rank. They take blocks of steps in turn, rank 0 of each held between two steps while
another pair has its turn; each round begins with another pair, so that each has every position
equally often. A ratio is of blocks in one round: the DDP with the lower median, over the mean of
both pairs of Paceline. Writes results/torchrun.md.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from peers import Turn
from table import interval, machine, spread, write_table
from worlds import KEEP_MEMORY, SUBJECTS, Part, data_of, endless, identity, make_model

HERE = Path(__file__).resolve()
RANKS = 2
WANTED = 0.98
START_S = 300.0
"""Paceline's own default on a CPU (``--keep-memory auto``)."""


@dataclass(frozen=True, slots=True)
class Row:
    """A network, its batch over both ranks, and the number of steps of a block."""

    name: str
    batch: int
    steps: int

    def __str__(self) -> str:
        return f"{self.name} {self.batch}"


ROWS = (
    Row("lenet", 256, 30), Row("mlp", 32, 10), Row("mlp", 128, 10), Row("mlp", 256, 10),
    Row("resnet18", 64, 2), Row("gpt", 16, 6),
)  # fmt: skip


def run_ddp(row: Row, turn: Turn, *, views: bool) -> None:
    """Run the bare loop."""
    dist.init_process_group("gloo")
    subject, rank = SUBJECTS[row.name], dist.get_rank()
    model = DistributedDataParallel(make_model(row.name), gradient_as_bucket_view=views)
    optimizer = subject.optimizer(model.parameters())
    part = Part(subject.num_samples, row.batch, rank, RANKS)
    loader = DataLoader(data_of(subject), batch_sampler=part, collate_fn=identity)
    for inputs, targets in endless(loader):
        turn.wait()
        optimizer.zero_grad()
        subject.loss(model(inputs), targets).backward()
        optimizer.step()


def run_pace(row: Row, turn: Turn) -> None:
    """Run the loop with the four lines."""
    import paceline

    pace, subject = paceline.connect(), SUBJECTS[row.name]
    model = make_model(row.name)
    optimizer = subject.optimizer(model.parameters())
    loader = DataLoader(data_of(subject), batch_size=row.batch, collate_fn=identity, drop_last=True)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for _ in pace.epochs(1_000_000):
        for inputs, targets in loader:
            turn.wait()
            with pace.step():
                optimizer.zero_grad()
                subject.loss(model(inputs), targets).backward()
                optimizer.step()


KINDS: dict[str, Callable[[Row, Turn], None]] = {
    "Paceline": run_pace,
    "again": run_pace,
    "DDP": lambda row, turn: run_ddp(row, turn, views=False),
    "DDP, views": lambda row, turn: run_ddp(row, turn, views=True),
}


class Pair:
    """Two ranks started by torchrun that wait for their turns; a context manager ends them."""

    def __init__(self, kind: str, row: Row) -> None:
        self._kind, self._row = kind, row
        self.times_s: list[float] = []

    def __enter__(self) -> "Pair":
        self._folder = tempfile.TemporaryDirectory()
        folder = self._folder.name
        server = socket.socket(socket.AF_UNIX)
        server.bind(f"{folder}/socket")
        server.listen(1)
        server.settimeout(START_S)
        flags = ["--kind", self._kind, "--row", str(ROWS.index(self._row)), "--folder", folder]
        environment = {
            **os.environ, **KEEP_MEMORY, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
            "PACELINE_CHECKPOINT_EVERY": "never", "PACELINE_RUN_DIR": f"{folder}/run",
        }  # fmt: skip
        self._log = Path(folder, "log")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", "--standalone",
                 "--nproc-per-node", str(RANKS), str(HERE), *flags],
                env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        try:
            self._channel, _ = server.accept()
        except TimeoutError:
            sys.exit(f"{self._kind} did not start:\n{self._log.read_text()}")
        self._file = self._channel.makefile("rw")
        return self

    def block(self, *, counts: bool) -> None:
        self._file.write(f"{self._row.steps}\n")
        self._file.flush()
        answer = self._file.readline()
        if not answer:
            sys.exit(f"{self._kind} has ended:\n{self._log.read_text()}")
        if counts:
            self.times_s.append(float(json.loads(answer)) / self._row.steps)

    def __exit__(self, *_: object) -> None:
        children = f"/proc/{self._process.pid}/task/{self._process.pid}/children"
        ranks = [int(pid_text) for pid_text in Path(children).read_text().split()]
        for pid in (*ranks, self._process.pid):  # a rank has its own session
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        self._process.wait()
        self._channel.close()
        self._folder.cleanup()


def measure(row: Row, rounds: int) -> list[Pair]:
    with contextlib.ExitStack() as stack:
        pairs = [stack.enter_context(Pair(kind, row)) for kind in KINDS]
        for number in range(rounds + 1):
            first = number % len(pairs)
            for pair in (*pairs[first:], *pairs[:first]):
                pair.block(counts=number > 0)  # the first warms up
    return pairs


def cells_of(row: Row, pairs: Sequence[Pair]) -> list[str]:
    first, again, *ddp_times_s = [pair.times_s for pair in pairs]
    paceline_s = [statistics.fmean(pair_s) for pair_s in zip(first, again, strict=True)]
    best = min(ddp_times_s, key=statistics.median)
    times = [spread([1000 * s for s in times_s]) for times_s in (paceline_s, *ddp_times_s)]
    reached = "yes" if interval(ratios(paceline_s, best))[0] >= WANTED else "no"
    return [
        str(row), *times, format_interval(ratios(first, again)),
        format_interval(ratios(paceline_s, best)), reached,
    ]  # fmt: skip


def ratios(baseline: Sequence[float], values: Sequence[float]) -> list[float]:
    """Return the ratios of ``values`` to ``baseline``, round by round."""
    return [b / a for a, b in zip(baseline, values, strict=True)]


def format_interval(values: Sequence[float]) -> str:
    median, low, high = interval(values)
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="run the first two rows")
    parser.add_argument("--only", nargs="+", default=[], help='run these rows: "lenet 256" ...')
    parser.add_argument("--write", action="store_true")
    for name in ("--kind", "--folder"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--row", type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind:
        torch.set_num_threads(1)
        turn = Turn(options.folder, int(os.environ["RANK"]))
        KINDS[options.kind](ROWS[options.row], turn)
        return
    note = machine()
    cells = []
    rows = [row for row in ROWS if not options.only or str(row) in options.only]
    for row in rows[:2] if options.quick else rows:
        cells.append(cells_of(row, measure(row, options.rounds)))
        print(" | ".join(cells[-1]), flush=True)
    if options.write:
        times = [f"{kind}, ms" for kind in KINDS if kind != "again"]
        write_table(
            "torchrun", "Full-sync under torchrun beside DDP",
            ["network, batch", *times, "again : Paceline", "DDP : Paceline", "reached"], cells,
            f"Wanted: the better DDP : Paceline >= {WANTED}. {options.rounds} interleaved blocks; "
            "ms a step, median (least to most), of Paceline the mean of its two pairs; of a ratio, "
            f"which is of blocks in one round, its 95 % interval. {RANKS} ranks, gloo. {note}",
        )  # fmt: skip


if __name__ == "__main__":
    main()
