"""Short runs of every split of a task that can run here, beside the predicted figures.

    plan TASK --memory -> names -> cannot run here: a row with the reason
                                -> paceline train seen_task --split NAME, in turns -> rows

A run is the command that a user would start; its task records what the process does
(split_watch.py), and the run itself is not instrumented. Step times are read from the trace, as in
`scaling`. This module must not know how a split is carried out, nor how it prints
(report/live_splits.py).
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError, Interrupted, unknown
from ..partition.names import read_split
from ..partition.prices import NONE, SplitPrice
from ..predict.split_models import SplitQuestion
from ..predict.splitting import plan_splits
from ..report.live_splits import LiveSplit, LiveSplits
from ..report.splits import SplitReport
from ..report.text import three_figures
from ..system.interpreter import safe_path_flag
from ..workloads import load_task
from .scaling import read_sample
from .split_watch import ASKED, read_watches, seen_task

_MOST_S = 600.0
"""A run that takes longer is terminated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSplitsQuestion:
    """The question.

    Args:
        workers: of each split except ``none``, >= 2.
        only: names of splits in the table; empty: all.
        updates: of a run, >= 6: the first three of each worker do not count.
        rounds: runs of each split, >= 1.
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
    """The result of one run.

    Attributes:
        memory_bytes, sent_bytes, busy_s: of each worker; ``sent_bytes`` and ``busy_s`` an update.
    """

    steps_s: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    sent_bytes: tuple[float, ...]
    busy_s: tuple[float, ...]


# -- runs ------------------------------------------------------------------------------------------


def measure_splits(
    question: LiveSplitsQuestion, say: Callable[[str], None] = lambda line: None
) -> LiveSplits:
    """Predict every split, run those that can run here, and return both.

    Raises:
        ConfigError: the task or a name in ``only`` is unknown.
        Interrupted: the user interrupted it after at least one run.
    """
    batch_size = question.batch_size or load_task(question.task, question.workers).batch_size
    load = os.getloadavg()[0]
    say("predicting")
    report = plan_splits(
        SplitQuestion(spec=question.task, num_workers=question.workers, batch_size=batch_size)
    )
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
    """Return the prices of the splits in ``only``, or all; ConfigError: a name is unknown."""
    prices = {price.name: price for price in report.table.prices}
    for name in only:
        if name not in prices:
            raise unknown("split", name, prices)
    return [price for price in prices.values() if not only or price.name in only]


@dataclass(slots=True)
class _Collected:
    """The samples so far; ``why``: split -> the reason why it cannot run."""

    question: LiveSplitsQuestion
    batch_size: int
    load: float
    report: SplitReport
    prices: Sequence[SplitPrice]
    samples: dict[str, list[SplitSample]] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for price in self.prices:
            try:
                if price.name != NONE:
                    read_split(price.name, self.question.workers)
            except ConfigError as error:
                self.why[price.name] = str(error)

    def result(self, interrupted_in: str = "") -> LiveSplits:
        """Return the result of the runs so far."""
        rows = [
            _row(price, self.samples.get(price.name, []), self.why.get(price.name, ""))
            for price in self.prices
        ]
        timed = [(row.step_s, row.split) for row in rows if row.step_s is not None]
        return LiveSplits(
            task=self.question.task, workers=self.question.workers, batch_size=self.batch_size,
            rounds=self.question.rounds, updates=self.question.updates, load=self.load,
            about=dict(self.report.about), rows=tuple(rows),
            advised=self.report.table.advised.name, fastest=min(timed)[1] if timed else "",
            interrupted_in=interrupted_in,
        )  # fmt: skip


def _row(price: SplitPrice, samples: Sequence[SplitSample], why: str) -> LiveSplit:
    def most(values: Callable[[SplitSample], Sequence[float]]) -> float | None:
        maxima = [max(values(sample)) for sample in samples if values(sample)]
        return statistics.median(maxima) if maxima else None

    balances = [
        statistics.mean(sample.busy_s) / max(sample.busy_s) for sample in samples if sample.busy_s
    ]
    is_priced = price.step_s is not None
    return LiveSplit(
        split=price.name,
        steps_s=tuple(step_s for sample in samples for step_s in sample.steps_s),
        sent_bytes=most(lambda sample: sample.sent_bytes),
        memory_bytes=most(lambda sample: sample.memory_bytes),
        balance=statistics.median(balances) if balances else None,
        predicted_step_s=price.step_s,
        predicted_sent_bytes=price.sent_bytes if is_priced else None,
        predicted_memory_bytes=price.memory_bytes if is_priced else None,
        predicted_balance=price.balance if is_priced else None,
        why=why or price.why,
    )


def command_of(question: LiveSplitsQuestion, split: str, batch_size: int, run: Path) -> list[str]:
    """Return the command that starts one run, as a user would write it."""
    workers, name = (1, "data") if split == NONE else (question.workers, split)
    return [
        sys.executable, *safe_path_flag(), "-m", "paceline",
        "train", f"{seen_task.__module__}:{seen_task.__name__}",
        "--workers", str(workers), "--split", name, "--protocol", "full-sync",
        "--batch-size", str(batch_size), "--updates", str(question.updates),
        "--epochs", str(question.updates), "--device", "cpu", "--nonfinite", "skip",
        "--checkpoint-every", "never", "--run-dir", str(run),
    ]  # fmt: skip


def _run(question: LiveSplitsQuestion, split: str, batch_size: int) -> SplitSample:
    """Make one run, delete its files, and return its figures.

    Raises:
        ConfigError: it failed, with the run's own error, or took longer than `_MOST_S`.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-", ignore_cleanup_errors=True) as folder:
        run = Path(folder) / "run"
        order = {"task": question.task, "workers": question.workers, "folder": folder}
        process = subprocess.Popen(
            command_of(question, split, batch_size, run),
            env={**os.environ, ASKED: json.dumps(order)},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, errors="replace",
        )  # fmt: skip
        try:
            _, errors = process.communicate(timeout=_MOST_S)
        except BaseException as error:  # raised again once the process has ended
            process.terminate()
            process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise ConfigError(f"the run did not end within {_MOST_S:g} s") from None
            raise
        if process.returncode:
            raise ConfigError(_cause(errors))
        sample = read_sample(run, {})
        memory, sent, busy = read_watches(Path(folder))
        return SplitSample(sample.steps_s, memory, sent, busy)


def _cause(errors: str) -> str:
    """Return the first line after ``error: ``, or the first exception, or the last line.

    Example:
        >>> _cause("Traceback ...\\n  x()\\nValueError: no x\\n======")
        'ValueError: no x'
    """
    lines = [line.strip() for line in errors.splitlines() if line.strip("=- ")]
    messages = [line.partition("error: ")[2] for line in lines if line.startswith("error: ")]
    exceptions = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt): ", line)]
    return (messages or exceptions or lines[-1:] or ["it failed without a message"])[0]
