"""Every split of a task that runs here, run for a few steps, beside what the table predicts.

    plan TASK --memory -> names -> cannot run here: a row in words
                                -> paceline train seen_task --split NAME, in turn -> rows

So a run is what a user begins, and its task notes what its process does (split_watch.py); nothing
of it is in the run. Steps are the trace's, as `scaling` reads them. This module must not know how a
split is carried out, nor how it prints (report/live_splits.py).
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
from ..workloads import load_task
from .scaling import read_sample
from .split_watch import ASKED, read_watches, seen_task

_MOST_S = 600.0
"""A run that takes longer is ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSplitsQuestion:
    """The question.

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
    """Predict every split, and run those that can run.

    Raises:
        ConfigError: the task or a name of ``only`` is unknown.
        Interrupted: the user ended it after one split was measured.
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
    prices = {price.name: price for price in report.table.prices}
    for name in only:
        if name not in prices:
            raise unknown("split", name, prices)
    return [price for price in prices.values() if not only or price.name in only]


@dataclass(slots=True)
class _Collected:
    """The result so far."""

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
        found = [max(values(sample)) for sample in samples if values(sample)]
        return statistics.median(found) if found else None

    balances = [
        statistics.mean(sample.busy_s) / max(sample.busy_s) for sample in samples if sample.busy_s
    ]
    is_priced = price.step_s is not None
    return LiveSplit(
        split=price.name,
        steps_s=tuple(step_s for sample in samples for step_s in sample.steps_s),
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
    """The command that starts one run, as a user would write it."""
    workers, name = (1, "data") if split == NONE else (question.workers, split)
    return [
        sys.executable, "-m", "paceline", "train", f"{seen_task.__module__}:{seen_task.__name__}",
        "--workers", str(workers), "--split", name, "--protocol", "full-sync",
        "--batch-size", str(batch_size), "--updates", str(question.updates),
        "--epochs", str(question.updates), "--device", "cpu", "--nonfinite", "skip",
        "--checkpoint-every", "never", "--run-dir", str(run),
    ]  # fmt: skip


def _run(question: LiveSplitsQuestion, split: str, batch_size: int) -> SplitSample:
    """Make one run and delete its files.

    Raises:
        ConfigError: it did not end as it should; the run's own words.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-", ignore_cleanup_errors=True) as folder:
        run = Path(folder) / "run"
        asked = {"task": question.task, "workers": question.workers, "folder": folder}
        process = subprocess.Popen(
            command_of(question, split, batch_size, run),
            env={**os.environ, ASKED: json.dumps(asked)},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, errors="replace",
        )  # fmt: skip
        try:
            _, said = process.communicate(timeout=_MOST_S)
        except BaseException as error:  # raised again: no process stays
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
