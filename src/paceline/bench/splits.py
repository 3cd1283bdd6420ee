"""Every split of a task that runs here, run for a few steps, beside what the table predicts.

    plan TASK --memory -> names -> cannot run here: a row in words
                                -> paceline train seen_task --split NAME, in turn -> rows

    in each worker     model()   everything is loaded: what the process holds before
                       loss 2    what was freed is given back; look for the most from here
                       loss 3..  the most so far, seconds of CPU, bytes written: a line

So a run is what a user begins, and its task notes what its process does; nothing of it is in the
run. Steps are the trace's, as `scaling` reads them. Above 300 lines, since the question, the
runs and what is noted in them are read together. This module must not know how a split is carried
out, nor how it prints (report/live_splits.py).
"""

import contextlib
import ctypes
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..data.arrays import Splits
from ..errors import ConfigError, Interrupted, unknown
from ..partition.names import read_split
from ..partition.prices import NONE, SplitPrice
from ..predict.split_models import SplitQuestion
from ..predict.splitting import plan_splits
from ..report.live_splits import LiveSplit, LiveSplits
from ..report.splits import SplitReport
from ..report.text import three_figures
from ..workloads import load_task
from ..workloads.base import Task
from .device import peak_bytes, reset_peak
from .scaling import read_sample

_SEEN = "BENCH_SPLITS_ASKED"
_FIRST_NOTE = 2
"""Losses until a worker has what its steps take: the first allocates."""
_MOST_S = 600.0
"""A run that takes longer is ended."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSplitsQuestion:
    """What is measured.

    Args:
        workers: n, of each split but ``none``.
        only: names as the table has them; empty: all.
        updates: of a run, >= 6: the first three of each worker are not counted.
        rounds: runs of each, >= 1.
        batch_size: samples an update; None: the task's.
    """

    task: str
    workers: int = 2
    only: tuple[str, ...] = ()
    updates: int = 12
    rounds: int = 1
    batch_size: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("workers", 2), ("updates", 6), ("rounds", 1), ("batch_size", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} must be >= {least}, got {value}")


class SplitSample(NamedTuple):
    """What one run came to.

    Attributes:
        memory_bytes, sent_bytes, busy_s: of each worker; ``sent_bytes`` and ``busy_s`` an update.
    """

    steps_s: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    sent_bytes: tuple[float, ...]
    busy_s: tuple[float, ...]


# -- in each worker --------------------------------------------------------------------------------


def seen_task() -> Task:
    """The task that a run of this bench trains: the user's, with its workers' processes noted."""
    asked = json.loads(os.environ[_SEEN])
    task = load_task(asked["task"], asked["workers"])
    watch = ProcessWatch(Path(asked["folder"]))

    def model() -> nn.Module:
        watch.begin()
        return task.module()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        found = task.loss(outputs, targets)
        if found.requires_grad:
            watch.note()
        return found

    def data() -> Splits:
        found = task.splits()
        return Splits(train=found.train, test=None, source=found.source)

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
            _trim()
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


def _trim() -> None:
    """Give back what was freed, as after measuring a cut (malloc_trim(3)), where there is that."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _written_bytes() -> int:
    """By this process so far, to sockets and files (proc(5), ``wchar``); 0 where nobody counts."""
    try:
        rows = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return next(int(row.split()[1]) for row in rows if row.startswith("wchar"))


# -- runs ------------------------------------------------------------------------------------------


def measure_splits(
    question: LiveSplitsQuestion, say: Callable[[str], None] = lambda line: None
) -> LiveSplits:
    """Predict all, and run what runs.

    Raises:
        ConfigError: the task or a name of ``only`` is unknown.
        Interrupted: the user ended it after one split was measured.
    """
    batch_size = question.batch_size or load_task(question.task, question.workers).batch_size
    load = os.getloadavg()[0]
    say("predicting")
    report = plan_splits(
        SplitQuestion(
            spec=question.task, num_workers=question.workers, batch_size=batch_size,
            schedule="gpipe",
        )
    )  # fmt: skip
    prices = _wanted(report, question.only)
    collected = _Collected(question, batch_size, load, report, prices)
    for number in range(question.rounds):
        first = number % len(prices)
        for price in (*prices[first:], *prices[:first]):
            if price.name in collected.why:
                continue
            where = f"round {number + 1} of {question.rounds}: {price.name}"
            try:
                sample = _run(question, price.name, batch_size)
            except ConfigError as error:
                collected.why[price.name] = str(error)
                say(f"{where}: {error}")
                continue
            except KeyboardInterrupt:
                if not collected.samples:
                    raise
                raise Interrupted(collected.result(where)) from None
            collected.samples.setdefault(price.name, []).append(sample)
            say(f"{where}: {three_figures(statistics.median(sample.steps_s))} a step")
    return collected.result()


def _wanted(report: SplitReport, only: Sequence[str]) -> list[SplitPrice]:
    prices = {one.name: one for one in report.table.prices}
    for name in only:
        if name not in prices:
            raise unknown("split", name, prices)
    return [one for one in prices.values() if not only or one.name in only]


@dataclass(slots=True)
class _Collected:
    """What there is so far."""

    question: LiveSplitsQuestion
    batch_size: int
    load: float
    report: SplitReport
    prices: Sequence[SplitPrice]
    samples: dict[str, list[SplitSample]] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for one in self.prices:
            try:
                if one.name != NONE:
                    read_split(one.name, self.question.workers)
            except ConfigError as error:
                self.why[one.name] = str(error)

    def result(self, interrupted_in: str = "") -> LiveSplits:
        rows = [
            _row(one, self.samples.get(one.name, []), self.why.get(one.name, ""))
            for one in self.prices
        ]
        timed = [(one.step_s, one.split) for one in rows if one.step_s is not None]
        return LiveSplits(
            task=self.question.task, workers=self.question.workers, batch_size=self.batch_size,
            rounds=self.question.rounds, updates=self.question.updates, load=self.load,
            about=dict(self.report.about), rows=tuple(rows),
            advised=self.report.table.advised.name, fastest=min(timed)[1] if timed else "",
            interrupted_in=interrupted_in,
        )  # fmt: skip


def _row(price: SplitPrice, samples: Sequence[SplitSample], why: str) -> LiveSplit:
    def most(values: Callable[[SplitSample], Sequence[float]]) -> float | None:
        found = [max(values(one)) for one in samples if values(one)]
        return statistics.median(found) if found else None

    balances = [statistics.mean(one.busy_s) / max(one.busy_s) for one in samples if one.busy_s]
    is_priced = price.step_s is not None
    return LiveSplit(
        split=price.name,
        steps_s=tuple(step_s for one in samples for step_s in one.steps_s),
        sent_bytes=most(lambda one: one.sent_bytes),
        memory_bytes=most(lambda one: one.memory_bytes),
        balance=statistics.median(balances) if balances else None,
        predicted_step_s=price.step_s,
        predicted_sent_bytes=price.sent_bytes if is_priced else None,
        predicted_memory_bytes=price.memory_bytes if is_priced else None,
        predicted_balance=price.balance if is_priced else None,
        why=why or price.why,
    )


def command_of(question: LiveSplitsQuestion, split: str, batch_size: int, run: Path) -> list[str]:
    """What begins one run, as a user would write it."""
    workers, name = (1, "data") if split == NONE else (question.workers, split)
    return [
        sys.executable, "-m", "paceline", "train", f"{__name__}:{seen_task.__name__}",
        "--workers", str(workers), "--split", name, "--protocol", "full-sync",
        "--batch-size", str(batch_size), "--updates", str(question.updates),
        "--epochs", str(question.updates), "--device", "cpu", "--nonfinite", "skip",
        "--checkpoint-every", "never", "--run-dir", str(run),
    ]  # fmt: skip


def _run(question: LiveSplitsQuestion, split: str, batch_size: int) -> SplitSample:
    """One run; its files are thrown away.

    Raises:
        ConfigError: it did not end as it should; the run's own words.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        run = Path(folder) / "run"
        asked = {"task": question.task, "workers": question.workers, "folder": folder}
        process = subprocess.Popen(
            command_of(question, split, batch_size, run),
            env={**os.environ, _SEEN: json.dumps(asked)},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, errors="replace",
        )  # fmt: skip
        try:
            _, said = process.communicate(timeout=_MOST_S)
        except BaseException as error:
            process.terminate()
            process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise ConfigError(f"it did not end within {_MOST_S:g} s") from None
            raise
        if process.returncode:
            raise ConfigError(_cause(said))
        sample = read_sample(run, {})
        memory, sent, busy = read_watches(Path(folder))
        return SplitSample(sample.steps_s, memory, sent, busy)


def _cause(said: str) -> str:
    """The first error that a run named, or the first exception; else its last line.

    Example:
        >>> _cause("Traceback ...\\n  x()\\nValueError: no x\\n======")
        'ValueError: no x'
    """
    lines = [line.strip() for line in said.splitlines() if line.strip("=- ")]
    named = [line.partition("error: ")[2] for line in lines if line.startswith("error: ")]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt): ", line)]
    return (named or raised or lines[-1:] or ["it failed, and said nothing"])[0]


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
