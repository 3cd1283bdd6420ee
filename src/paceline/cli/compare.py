"""``paceline compare``: several protocols on one task, under the same stragglers and seeds."""

import json as json_format
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from ..config import resolve
from .simulate import NO_TRAINING, NO_WORLD, TrainingFlags, WorldFlags, world_of

if TYPE_CHECKING:
    from ..report.compared import Comparison, Outcome

_EVERY_S = 5.0


def register(app: App) -> None:
    """Put the verb into the application."""
    app.command(compare)


def compare(
    task: str,
    /,
    *,
    protocols: str,
    workers: int = 1,
    simulated: Annotated[bool, Parameter(negative=())] = False,
    repeats: int = 1,
    evaluations: int = 1,
    updates: int | None = None,
    world: WorldFlags = NO_WORLD,
    training: TrainingFlags = NO_TRAINING,
    run_dir: Path | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Compare protocols: time to a target, error, updates, staleness; a table and a picture.

    Parameters
    ----------
    task
        softmax, mlp, lenet, resnet18, quadratic, or your own: package.module:task.
    protocols
        With commas: full-sync,k-sync:6,k-batch-async:4,async.
    workers
        Of each run.
    simulated
        In virtual time, in one process, instead of with real workers one run after the other.
    repeats
        Seeds: the first is --seed, the others follow it.
    evaluations
        An epoch, with --simulated: a finer curve and time to the target.
    updates
        Stop each run after so many updates.
    run_dir
        Where the runs lie, a folder each [default: runs/compare-TASK-...].
    json
        One JSON object.
    """
    from ..comparison import Contest, ContestInterrupted
    from ..comparison import compare as run_all

    chosen = {name: value for name, value in asdict(training).items() if value is not None}
    places = {"workers": workers, "updates": updates, "seed": world.seed}
    contest = Contest(
        task=task,
        protocols=tuple(text.strip() for text in protocols.split(",") if text.strip()),
        settings=resolve({**chosen, **places}, env={}, is_call=False).settings,
        world=world_of(world),
        repeats=repeats,
        evaluations=evaluations,
        is_simulated=simulated,
    )
    try:
        found = run_all(contest, _Lines(len(contest.protocols) * repeats), run_dir)
    except ContestInterrupted as end:
        _show(end.summary, json)
        raise
    _show(found, json)


def _show(found: "Comparison", wants_json: bool) -> None:
    from ..report.compared_lines import render_comparison

    if wants_json:
        print(json_format.dumps(found.to_json(), allow_nan=False))
        return
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 80
    print("\n".join(render_comparison(found, columns)))


class _Lines:
    """Lines on standard error: each run's begin and end, and between them one every 5 s."""

    def __init__(self, num_runs: int) -> None:
        self._num_runs = num_runs
        self._number = 0
        self._name = ""
        self._start_s = self._run_s = self._next_s = time.perf_counter()

    def began(self, protocol: str, seed: int) -> None:
        self._number += 1
        self._name = f"[{self._number}/{self._num_runs}] {protocol}, seed {seed}"
        self._run_s = time.perf_counter()
        self._next_s = self._run_s + _EVERY_S
        self._say("begins")

    def progress(self, done: int) -> None:
        now_s = time.perf_counter()
        if done and now_s >= self._next_s:
            self._next_s = now_s + _EVERY_S
            self._say(f"{done:,} updates after {now_s - self._run_s:.0f} s")

    def evaluated(self, epoch: int, at_s: float, metrics: Mapping[str, float]) -> None:
        from ..report.live import format_metrics

        if time.perf_counter() >= self._next_s:
            self._say(format_metrics(epoch, metrics))

    def note(self, text: str) -> None:
        print(f"note: {text}", file=sys.stderr, flush=True)

    def ended(self, outcome: "Outcome | str") -> None:
        from ..report.terminal import format_duration

        now_s = time.perf_counter()
        left_s = (now_s - self._start_s) / self._number * (self._num_runs - self._number)
        left = f"; about {format_duration(left_s)} left" if left_s else ""
        if isinstance(outcome, str):
            self._say(f"failed: {outcome}{left}")
            return
        best = outcome.best_accuracy
        words = "no accuracy" if best is None else f"best test accuracy {best:.4f}"
        trained = format_duration(outcome.trained_s)
        self._say(f"{words} in {trained}, {now_s - self._run_s:.1f} s here{left}")

    def _say(self, text: str) -> None:
        print(f"{self._name}: {text}", file=sys.stderr, flush=True)
