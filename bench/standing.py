"""Standing runs of splits, which take turns with the measurements that predict their steps.

    runs          start, reach their speed, are stopped (SIGSTOP)
    a round       a prediction: before each thing that it measures, each run goes on for a window
    its result    the predicted step, and the median of the run's steps in these windows

A shared machine's speed moves by a tenth within minutes: what is predicted in one and run in the
next says little. Within a round both see the same minutes. A step during which its run was stopped
does not count.
"""

import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from paceline.bench.split_watch import ASKED
from paceline.bench.splits import LiveSplitsQuestion, command_of
from paceline.partition.prices import price_splits
from paceline.predict.split_costs import prepare
from paceline.predict.split_models import SplitQuestion
from paceline.trace import FILE_NAME, read_trace
from paceline.trace.records import Handed
from table import say

UPDATES = 1_000_000
"""More than a run makes before it is ended."""
WARM_UP, STEPS, LEAST_S = 8, 3.5, 1.5
"""Steps of a run before its first window; steps of a window, and its least seconds."""
LONGEST_S = 300.0
"""How long a run may take to make its first steps."""


class Round(NamedTuple):
    """Seconds of a step, measured and predicted in the same minutes; how many were measured."""

    measured_s: float
    predicted_s: float
    num_steps: int


class StandingRun:
    """One run, stopped except in its windows.

    Raises:
        RuntimeError: it ends, or makes no steps, with what it wrote.
    """

    def __init__(self, task: str, workers: int, batch_size: int, split: str, folder: Path) -> None:
        question = LiveSplitsQuestion(
            task=task, workers=workers, updates=UPDATES, batch_size=batch_size
        )
        order = {"task": task, "workers": workers, "folder": str(folder)}
        self.split, self._trace = split, folder / "run" / FILE_NAME
        self._errors = folder / "errors"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                command_of(question, split, batch_size, folder / "run"),
                env={**os.environ, ASKED: json.dumps(order)},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
            )  # fmt: skip
        self._num_read, self._shortest_stop_s, self._stopped_s = 0, float("inf"), 0.0
        self.window_s = LEAST_S

    def begin(self) -> None:
        """Wait until it has made a few steps, and stop."""
        deadline_s = time.monotonic() + LONGEST_S
        steps_s: list[float] = []
        while len(steps_s) < WARM_UP:
            steps_s += self._new_steps()
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{self.split}: no steps: {self._errors.read_text()}")
            time.sleep(0.5)  # its trace is a file, which nothing announces
        self.window_s = max(LEAST_S, STEPS * statistics.median(steps_s))
        self._send(signal.SIGSTOP)
        self._stopped_s = time.monotonic()
        self._new_steps()  # those so far do not count

    def go_on(self, window_s: float) -> None:
        """Run for a window."""
        self._shortest_stop_s = min(self._shortest_stop_s, time.monotonic() - self._stopped_s)
        self._send(signal.SIGCONT)
        time.sleep(window_s)  # the window: this process must not take a core from the run
        if self._process.poll() is not None:
            raise RuntimeError(f"{self.split}: it ended: {self._errors.read_text()}")
        self._send(signal.SIGSTOP)
        self._stopped_s = time.monotonic()

    def take_steps(self) -> list[float]:
        """Return the seconds of the steps since the last call."""
        return [s for s in self._new_steps() if s < self._shortest_stop_s]

    def end(self) -> None:
        with suppress(psutil.NoSuchProcess):
            for process in reversed(self._processes()):
                process.kill()
        self._process.wait()

    def _pushes(self) -> Iterator[tuple[int, float]]:
        """Yield the member and the time of each push so far."""
        if self._trace.exists():
            for record in read_trace(self._trace):
                if isinstance(record, Handed):
                    yield record.fact.ticket.member, record.fact.at_s

    def _new_steps(self) -> list[float]:
        """Return the seconds of the steps that no call has returned."""
        pushes, last_s, steps_s = list(self._pushes()), dict[int, float](), list[float]()
        for number, (member, at_s) in enumerate(pushes):
            if member in last_s and number >= self._num_read:
                steps_s.append(at_s - last_s[member])
            last_s[member] = at_s
        self._num_read = len(pushes)
        return steps_s

    def _processes(self) -> list[psutil.Process]:
        launcher = psutil.Process(self._process.pid)
        return [launcher, *launcher.children(recursive=True)]

    def _send(self, number: signal.Signals) -> None:
        for process in self._processes():
            process.send_signal(number)


@contextmanager
def standing_runs(
    task: str, workers: int, batch_size: int, splits: Sequence[str]
) -> Iterator[list[StandingRun]]:
    """Yield stopped runs of these splits, and end them."""
    with ExitStack() as stack:
        runs = []
        for split in splits:
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="standing-", ignore_cleanup_errors=True)
            )
            run = StandingRun(task, workers, batch_size, split, Path(folder))
            stack.callback(run.end)
            run.begin()
            runs.append(run)
        yield runs


def measure_in_turns(
    task: str, workers: int, batch_size: int, splits: Sequence[str], rounds: int
) -> dict[str, list[Round]]:
    """Return the rounds of each split."""
    results: dict[str, list[Round]] = {split: [] for split in splits}
    with standing_runs(task, workers, batch_size, splits) as runs:
        window_s = max(run.window_s for run in runs)

        def in_turn(_: str) -> None:
            for run in runs:
                run.go_on(window_s)

        question = SplitQuestion(spec=task, num_workers=workers, batch_size=batch_size)
        for number in range(rounds):
            costs = prepare(question, in_turn, is_cut_only=True).costs
            in_turn("")
            prices = {price.name: price for price in price_splits(costs).prices}
            for run in runs:
                steps_s, predicted_s = run.take_steps(), prices[run.split].step_s
                assert predicted_s is not None
                result = Round(statistics.median(steps_s), predicted_s, len(steps_s))
                results[run.split].append(result)
                say(
                    f"{task}, {workers} workers, round {number + 1} of {rounds}, {run.split}: "
                    f"{result.measured_s:.3f} s ({result.num_steps} steps), predicted "
                    f"{predicted_s:.3f} s"
                )
    return results
