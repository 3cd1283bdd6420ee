"""``paceline plan`` and ``paceline compare``: choose a protocol by prediction or by runs.

plan       from a profile and a race in virtual time: which protocol and K, and why
compare    several on one task, under the same stragglers and seeds: a table and a picture

Above 300 lines with the flags of both.
"""

import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from ..config import of_flags
from ..errors import ConfigError, Interrupted
from ..protocols import split_names
from .flags import Json, num_columns, say, show
from .simulate import NO_TRAINING, NO_WORLD, TrainingFlags, WorldFlags, world_of

if TYPE_CHECKING:
    from ..predict.advice import Question
    from ..predict.comparison import Contest
    from ..report.compared import Comparison, RunOutcome

_EVERY_S = 5.0

# -- plan ------------------------------------------------------------------------------------------


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """What plan is to advise, and for which workers.

    Parameters
    ----------
    workers
        Number of workers of the run.
    cores
        Number of cores of one machine that they share [default: each has a core or a machine of its
        own].
    profile
        A recorded run whose times are used [default: a run of 20 s now, with the same delay].
    protocols
        Consider only these protocols: full-sync,k-sync:6,async [default: all, with K on a grid].
    staleness
        What a stale gradient is worth, as for train; NAME+RULE sets it for one protocol.
    delay
        Add a straggler to what was measured: exp:20ms, 1=exp:20ms.
    slow
        Make one worker slow: 1=5x.
    mini_batch_size
        Number of samples a worker takes at once [default: the task's batch shared by all workers].
    lr
        Learning rate [default: the task's].
    init
        Weights at the start: default is torch's; otherwise the task's own.
    seed
        Seed of the data's order, the weights and the stragglers.
    seconds
        About how many seconds the race may compute; on a busy machine it takes longer.
    target_accuracy
        Advise the protocol that first reaches this test accuracy (0 to 1), and say when.
    target_loss
        Advise the protocol that first reaches this training loss, and say when.
    memory
        Memory of each worker, as 512MiB or 2GiB: advises how to split the model instead of a
        protocol, with all splits in one table. A model of 500 million parameters or more, or one
        that does not fit this machine, gets that table without this flag.
    batch_size
        Number of samples in an update, for that table [default: the task's, or 32].
    micro_batches
        Number of micro-batches that a batch is divided into, for that table [default: as many as a
        run uses].
    input
        Shape of one input of package.module:function, batch first, for that table: 1,3,32,32 or
        1,128:int64.
    """

    workers: int
    cores: int | None = None
    profile: Path | None = None
    protocols: str | None = None
    staleness: str = "none"
    delay: list[str] | None = None
    slow: list[str] | None = None
    mini_batch_size: int | None = None
    lr: float | None = None
    init: str | None = None
    seed: int = 0
    seconds: float = 60.0
    target_accuracy: float | None = None
    target_loss: float | None = None
    memory: str | None = None
    batch_size: int | None = None
    micro_batches: int | None = None
    input: list[str] | None = None


def plan(task: str, /, *, flags: PlanFlags, json: Json = False) -> None:
    """Advise a protocol for a number of workers, by measurement, prediction and a race.

    With --memory, or for a large model, advise how to split it instead.

    Parameters
    ----------
    task
        A built-in task or package.module:attribute.
    """
    from ..predict.advice import advise
    from ..report.ranking import render_advice
    from .partition import CutFlags, planned_splits

    idle = _given(flags, {field.name for field in fields(flags)} - _SHARED - _SPLIT_ONLY)
    if flags.memory is not None and idle:
        raise ConfigError(f"{idle}: no effect with --memory, which plans how to split the model")
    cut = CutFlags(
        workers=flags.workers, memory=flags.memory, micro_batches=flags.micro_batches,
        batch_size=flags.batch_size, input=flags.input,
    )  # fmt: skip
    if planned_splits(task, cut, json, idle):
        return
    if given := _given(flags, _SPLIT_ONLY):
        raise ConfigError(f"{given}: only for the table of splits; add --memory")
    start_s = time.perf_counter()

    def say_when(text: str) -> None:
        say(f"{time.perf_counter() - start_s:5.0f} s  {text}")

    advice = advise(_question(task, flags), say_when)
    show(json, advice.to_json, lambda: render_advice(advice))


_SHARED = {"workers"}
_SPLIT_ONLY = {"memory", "batch_size", "micro_batches", "input"}


def _given(flags: PlanFlags, names: Collection[str]) -> str:
    """Those of these flags that are given, in words."""
    return ", ".join(
        "--" + field.name.replace("_", "-")
        for field in fields(flags)
        if field.name in names and getattr(flags, field.name) != field.default
    )


def _question(task: str, flags: PlanFlags) -> "Question":
    from ..predict.advice import Question
    from ..predict.pursuit import Goal

    goal = None
    if flags.target_accuracy is not None or flags.target_loss is not None:
        goal = Goal(accuracy=flags.target_accuracy, loss=flags.target_loss)
    protocols = None if flags.protocols is None else split_names(flags.protocols)
    return Question(
        task=task, workers=flags.workers, cores=flags.cores, profile=flags.profile,
        protocols=protocols, delay=tuple(flags.delay or ()), slow=tuple(flags.slow or ()),
        lr=flags.lr, init=flags.init, mini_batch_size=flags.mini_batch_size, seed=flags.seed,
        race_s=flags.seconds, staleness=flags.staleness, goal=goal,
    )  # fmt: skip


# -- compare ---------------------------------------------------------------------------------------


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ContestFlags:
    """How often, where and for how long each protocol runs.

    Parameters
    ----------
    workers
        Number of workers in each run; also -n.
    staleness
        What a stale gradient is worth, as for train; NAME+RULE sets it for one protocol.
    simulated
        Run in virtual time, in one process, instead of with real workers.
    repeats
        How many seeds to run each protocol with: --seed and those after it.
    evaluations
        With --simulated, how often to evaluate in each epoch, for a finer curve and time to the
        target; from 2 on the start is evaluated, too.
    updates
        Stop each run after this many updates.
    device
        Where live workers compute: auto, cpu, cuda, cuda:1, mps, xpu [default: auto].
    run_dir
        Where to put the folders of the runs [default: runs/compare-TASK-...].
    """

    workers: int
    staleness: str = "none"
    simulated: Annotated[bool, Parameter(negative=())] = False
    repeats: int = 1
    evaluations: int = 1
    updates: int | None = None
    device: str | None = None
    run_dir: Path | None = None


def compare(
    task: str,
    /,
    *,
    protocols: str,
    contest: ContestFlags,
    world: WorldFlags = NO_WORLD,
    training: TrainingFlags = NO_TRAINING,
    json: Json = False,
) -> None:
    """Compare protocols by time to a target, error, updates and staleness, with a picture.

    Parameters
    ----------
    task
        softmax, mlp, mlp488k, lenet, alexnet, resnet18, resnet50, transformer, quadratic, or your
        own: package.module:task.
    protocols
        Which protocols to compare, separated by commas:
        full-sync,k-sync:6,async,async+inverse,local-sgd:8+nesterov:0.7,0.9.
    """
    from ..predict.comparison import compare as run_all

    plan_of_runs = _contest(task, protocols, contest, world, training)
    progress = _Progress(len(plan_of_runs.protocols) * plan_of_runs.repeats)
    try:
        result = run_all(plan_of_runs, progress, contest.run_dir)
    except Interrupted as end:
        _show(end.summary, json)
        raise
    _show(result, json)
    if not any(contender.outcomes for contender in result.contenders):
        sys.exit(1)


def _contest(
    task: str, protocols: str, contest: ContestFlags, world: WorldFlags, training: TrainingFlags
) -> "Contest":
    from ..predict.comparison import Contest

    chosen = {name: value for name, value in asdict(training).items() if value is not None}
    places: dict[str, object] = {
        "workers": contest.workers,
        "staleness": contest.staleness,
        "updates": contest.updates,
        "seed": world.seed,
    }
    if contest.device is not None:
        places["device"] = contest.device
    return Contest(
        task=task,
        protocols=split_names(protocols),
        settings=of_flags({**chosen, **places}),
        world=world_of(world),
        repeats=contest.repeats,
        evaluations=contest.evaluations,
        is_simulated=contest.simulated,
    )


def _show(result: "Comparison", wants_json: bool) -> None:
    from ..report.compared_lines import render_comparison

    show(wants_json, result.to_json, lambda: render_comparison(result, num_columns()))


class _Progress:
    """Prints progress on standard error: each run's start and end, and a line every 5 s."""

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
        self._say("starts")

    def progress(self, done: int) -> None:
        now_s = time.perf_counter()
        if done and now_s >= self._next_s:
            self._next_s = now_s + _EVERY_S
            self._say(f"{done:,} updates after {now_s - self._run_s:.0f} s")

    def evaluated(self, epoch: int, at_s: float, metrics: Mapping[str, float]) -> None:
        from ..report.live import format_metrics

        if time.perf_counter() >= self._next_s:
            self._say(format_metrics(epoch, metrics, None))

    def note(self, text: str) -> None:
        say(f"note: {text}")

    def ended(self, outcome: "RunOutcome | str") -> None:
        from ..report.text import format_duration

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
        say(f"{self._name}: {text}")
