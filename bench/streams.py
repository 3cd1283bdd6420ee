"""The cost of a stream: LeNet from an iterable data set against the same samples by their numbers.

    python bench/streams.py [--rounds 30] [--write]

Two workers under full-sync, 256 samples an update. A stream goes between peers as other data does,
except at the end of each pass; its samples come one by one, where a data set of tensors gathers a
batch at once, so each of the two is compared with its alternatives:

    one by one    the samples by their numbers, each by itself: between peers, through the store;
                  and as a stream
    gathered      the samples by their numbers, a mini-batch at once: between peers; and as a stream
                  whose data set yields whole mini-batches; the former once more, against itself

All runs are alive at once and take turns of some seconds, in random order: all processes of the
other runs are stopped, so that they do not read ahead. Writes results/streams.md.
"""

import argparse
import contextlib
import mmap
import os
import random
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.config import RunSettings
from paceline.data.arrays import collate_batch
from paceline.launch.launcher import launch_run
from paceline.program import ScriptProgram
from paceline.report.live import QuietObserver
from paceline.workloads import load_task
from table import machine, say, spread, write_table

BATCH, WORKERS, WANTED = 256, 2, 0.97
WARM, SKIPPED, TURN_S = 30, 2, 5.0
"""Steps before a run's first turn, and at the start of each turn; measured seconds of a turn."""
_STEPS = struct.Struct("qd")
KINDS = {
    "one by one, between peers": ("samples", "peers"),
    "one by one, through the store": ("samples", "store"),
    "stream of samples": ("stream", "auto"),
    "gathered, between peers": ("batches", "peers"),
    "stream of mini-batches": ("stream of batches", "auto"),
    "gathered, between peers, again": ("batches", "peers"),
}
"""Name -> `kind` of `train`, and the path; each stream is compared with those before it."""
AGAIN = ", again"


class OneByOne(Dataset[Any]):
    """A data set that cannot gather a batch."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, number: int) -> Any:
        return self._data[number]


class Stream(IterableDataset[Any]):
    """The images one by one, or ``at_once`` at a time."""

    def __init__(self, data: Any, at_once: int = 0) -> None:
        self._data, self._at_once = data, at_once

    def __iter__(self) -> Iterator[Any]:
        size = self._at_once
        if not size:
            return (self._data[number] for number in range(len(self._data)))
        starts = range(0, len(self._data), size)
        return (
            collate_batch(self._data.__getitems__(range(start, min(start + size, len(self._data)))))
            for start in starts
        )


def loader_of(kind: str, data: Any) -> Any:
    """Return a loader with one loader worker, as a stream has."""
    if kind == "stream of batches":
        return DataLoader(Stream(data, BATCH // WORKERS), batch_size=None, num_workers=1)
    if kind == "batches":
        return DataLoader(data, batch_size=BATCH, num_workers=1, collate_fn=collate_batch)
    samples = Stream(data) if kind == "stream" else OneByOne(data)
    return DataLoader(samples, batch_size=BATCH, num_workers=1)


def train(kind: str, steps: Path) -> None:
    """Run the loop of a script in a worker; the main worker records the steps and their times."""
    import paceline

    pace = paceline.connect()
    task = load_task("lenet", pace.num_workers, "default")
    data: Any = task.data()
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = loader_of(kind, data.train)
    batch = "per-worker" if kind == "stream of batches" else "global"
    model, optimizer, loader = pace.prepare(model, optimizer, loader, batch=batch)
    loss_of = nn.functional.cross_entropy
    counter = Steps(steps)
    for _ in pace.epochs(1000):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
            if pace.is_main:
                counter.add()


def launch(kind: str, path: Any, steps: Path) -> None:
    """Launch a run in a process of its own, until it is killed."""
    settings = RunSettings(
        workers=WORKERS, protocol="full-sync", path=path, device="cpu", seed=0,
        run_dir=str(steps.parent / "run"), checkpoint_every="never",
    )  # fmt: skip
    program = ScriptProgram(path=__file__, args=("--kind", kind, "--steps", str(steps)))
    launch_run(program, settings, QuietObserver())


class Steps:
    """The number of steps of a run and the time of the last: sixteen bytes of a file."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _STEPS.size)

    def add(self) -> None:
        _STEPS.pack_into(self._memory, 0, self.read()[0] + 1, time.perf_counter())

    def read(self) -> tuple[int, float]:
        """Read until two reads agree, so that a value is not torn."""
        while (value := _STEPS.unpack(self._memory[:])) != _STEPS.unpack(self._memory[:]):
            pass
        return value


class Run:
    """One of the runs that take turns; its processes are stopped except while it is measured."""

    def __init__(self, kind: str, path: str, folder: Path) -> None:
        folder.mkdir()
        steps = folder / "steps"
        steps.write_bytes(bytes(_STEPS.size))
        self.steps = Steps(steps)
        self._launcher = psutil.Popen(
            [sys.executable, __file__, "--kind", kind, "--path", path, "--steps", str(steps)]
        )
        self._wait_for(WARM)
        self._send(signal.SIGSTOP)

    def take_turn(self) -> tuple[int, float]:
        """Return the steps and seconds of a turn, without its first steps."""
        self._send(signal.SIGCONT)
        self._wait_for(self.steps.read()[0] + SKIPPED)
        first, start_s = self.steps.read()
        time.sleep(TURN_S)
        self._send(signal.SIGSTOP)
        last, end_s = self.steps.read()
        return last - first, end_s - start_s

    def end(self) -> None:
        self._send(signal.SIGKILL)
        self._launcher.wait()

    def _wait_for(self, count: int) -> None:
        while self.steps.read()[0] < count:
            if self._launcher.poll() is not None:
                sys.exit("a run has ended")
            time.sleep(0.002)

    def _send(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the run, also to those that start meanwhile."""
        reached: set[psutil.Process] = set()
        while new := {self._launcher, *self._launcher.children(recursive=True)} - reached:
            for process in new:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            if number is signal.SIGKILL:
                return
            reached |= new


Turn = tuple[int, float]


def rows_of(turns: dict[str, list[Turn]]) -> list[list[str]]:
    """Return a row for each kind, with the ratio of its stream."""
    names = list(KINDS)
    rows = []
    for position, name in enumerate(names):
        cells = [name, spread([BATCH * steps / seconds for steps, seconds in turns[name]], 0)]
        if "stream of" in name:
            rows.append([*cells, "", "", "", ""])
            continue
        is_again = name.endswith(AGAIN)
        stream = (
            name.removesuffix(AGAIN)
            if is_again
            else next(candidate for candidate in names[position:] if "stream of" in candidate)
        )
        ratio, low, high = interval_of(turns[stream], turns[name])
        is_reached = low <= 1.0 <= high if is_again else ratio >= WANTED
        rows.append([
            *cells, f"{ratio:.3f}", f"{low:.3f} to {high:.3f}",
            "1 inside" if is_again else f">= {WANTED}", "yes" if is_reached else "no",
        ])  # fmt: skip
    return rows


def interval_of(stream: list[Turn], baseline: list[Turn]) -> tuple[float, float, float]:
    """Return the ratio of steps a second, over all turns, and its 95 % bootstrap interval (seeded).

    Over all turns, since only a few contain the border of an epoch and its cost.
    """

    def ratio(indices: Sequence[int]) -> float:
        drawn_stream, drawn_baseline = (
            [turns[index] for index in indices] for turns in (stream, baseline)
        )
        return _steps_per_s(drawn_stream) / _steps_per_s(drawn_baseline)

    all_indices, rng = range(len(stream)), random.Random(0)
    ratios = sorted(ratio(rng.choices(all_indices, k=len(all_indices))) for _ in range(2000))
    return ratio(all_indices), ratios[50], ratios[-51]


def _steps_per_s(turns: list[Turn]) -> float:
    steps, seconds = map(sum, zip(*turns, strict=True))
    return steps / seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--kind", help="for a run, and its workers")
    parser.add_argument("--path", help="for a run")
    parser.add_argument("--steps", type=Path, help="for a run, and its workers")
    options = parser.parse_args()
    if options.path:
        launch(options.kind, options.path, options.steps)
        return
    if options.kind:
        train(options.kind, options.steps)
        return
    note, rng = machine(), random.Random(0)
    turns: dict[str, list[Turn]] = {name: [] for name in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        runs: dict[str, Run] = {}
        try:
            for number, (name, (kind, path)) in enumerate(KINDS.items()):
                runs[name] = Run(kind, path, Path(folder) / str(number))
            for number in range(options.rounds):
                for name in rng.sample(list(KINDS), len(KINDS)):
                    turns[name].append(runs[name].take_turn())
                say(f"round {number + 1} of {options.rounds}")
        finally:
            for run in runs.values():
                run.end()
    rows = rows_of(turns)
    for row in rows:
        print(" | ".join(row), flush=True)
    header = ["input", "images/s", "its stream : input", "95 % interval", "wanted", "reached"]
    if options.write:
        write_table("streams", "A stream against samples by their numbers, LeNet", header, rows,
                    f"{options.rounds} rounds of a turn of {TURN_S:g} s for each of six runs, in "
                    f"a random order, {WORKERS} workers, {len(os.sched_getaffinity(0))} cores; "
                    "images/s: median of the turns (least to most); the ratio is of all turns "
                    f"together. {note}",
        )  # fmt: skip


if __name__ == "__main__":
    main()
