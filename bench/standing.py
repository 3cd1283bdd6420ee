"""Standing runs, which take turns with each other, or with what predicts their steps.

    runs          start, reach their speed, are stopped (SIGSTOP)
    a round       a prediction: before each thing that it measures, each run goes on for a window
    its result    the predicted step, and the median of the run's steps in these windows

A shared machine's speed moves by a tenth within minutes: what is predicted in one and run in the
next says little. Within a round both see the same minutes. A step during which its run was stopped
does not count.
"""

import abc
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
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
WARM_UP, STEPS, LEAST_S = 8, 2.2, 1.2
"""Steps of a run before its first window; steps of a window, and its least seconds."""
LONGEST_S = 300.0
"""How long a run may take to make its first steps."""


class Round(NamedTuple):
    """Seconds of a step, measured and predicted in the same minutes; how many were measured."""

    measured_s: float
    predicted_s: float
    num_steps: int


class StandingCommand(abc.ABC):
    """A command and its processes, stopped except in windows.

    Args:
        errors: the file that gets what it writes to stderr.

    Raises:
        RuntimeError: it ends, or makes no steps, with what it wrote.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], errors: Path
    ) -> None:
        self.name, self._errors = name, errors
        with errors.open("wb") as opened:
            self._process = subprocess.Popen(
                command, env={**os.environ, **environment},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=opened,
            )  # fmt: skip
        self._shortest_stop_s, self._stopped_s = float("inf"), 0.0
        self.window_s = LEAST_S

    def begin(self) -> None:
        """Wait until it has made a few steps, and stop."""
        deadline_s = time.monotonic() + LONGEST_S
        steps_s: list[float] = []
        while len(steps_s) < WARM_UP:
            steps_s += self._new_steps()
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{self.name}: no steps: {self._errors.read_text()}")
            time.sleep(0.5)  # its steps are in a file, which nothing announces
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
            raise RuntimeError(f"{self.name}: it ended: {self._errors.read_text()}")
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

    @abc.abstractmethod
    def _new_steps(self) -> list[float]:
        """Return the seconds of the steps that no call has returned."""

    def _processes(self) -> list[psutil.Process]:
        launcher = psutil.Process(self._process.pid)
        return [launcher, *launcher.children(recursive=True)]

    def _send(self, number: signal.Signals) -> None:
        for process in self._processes():
            process.send_signal(number)


class StandingRun(StandingCommand):
    """One run of Paceline, which is named by its split."""

    def __init__(self, task: str, workers: int, batch_size: int, split: str, folder: Path) -> None:
        question = LiveSplitsQuestion(
            task=task, workers=workers, updates=UPDATES, batch_size=batch_size
        )
        order = {"task": task, "workers": workers, "folder": str(folder)}
        self._trace, self._num_read = folder / "run" / FILE_NAME, 0
        command = command_of(question, split, batch_size, folder / "run")
        super().__init__(split, command, {ASKED: json.dumps(order)}, folder / "errors")

    def _pushes(self) -> Iterator[tuple[int, float]]:
        """Yield the member and the time of each push so far."""
        if self._trace.exists():
            for record in read_trace(self._trace):
                if isinstance(record, Handed):
                    yield record.fact.ticket.member, record.fact.at_s

    def _new_steps(self) -> list[float]:
        pushes, last_s, steps_s = list(self._pushes()), dict[int, float](), list[float]()
        for number, (member, at_s) in enumerate(pushes):
            if member in last_s and number >= self._num_read:
                steps_s.append(at_s - last_s[member])
            last_s[member] = at_s
        self._num_read = len(pushes)
        return steps_s


Start = Callable[[Path], StandingCommand]
"""Starts a run that may write into a folder."""


@contextmanager
def standing(starts: Sequence[Start]) -> Iterator[list[StandingCommand]]:
    """Yield stopped runs, and end them."""
    with ExitStack() as stack:
        runs = []
        for start in starts:
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="standing-", ignore_cleanup_errors=True)
            )
            run = start(Path(folder))
            stack.callback(run.end)
            run.begin()
            runs.append(run)
        yield runs


def measure_in_turns(
    task: str, workers: int, batch_size: int, splits: Sequence[str], rounds: int
) -> dict[str, list[Round]]:
    """Return the rounds of each split."""
    results: dict[str, list[Round]] = {split: [] for split in splits}
    starts = [partial(StandingRun, task, workers, batch_size, split) for split in splits]
    with standing(starts) as runs:
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
                steps_s, predicted_s = run.take_steps(), prices[run.name].step_s
                assert predicted_s is not None
                result = Round(statistics.median(steps_s), predicted_s, len(steps_s))
                results[run.name].append(result)
                say(
                    f"{task}, {workers} workers, round {number + 1} of {rounds}, {run.name}: "
                    f"{result.measured_s:.3f} s ({result.num_steps} steps), predicted "
                    f"{predicted_s:.3f} s"
                )
    return results
