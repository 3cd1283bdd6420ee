"""Advise a protocol and its number of pushes per update, before a long run.

    a profile: RUN's trace, or a short run made now        profiles.py
    each protocol and K in virtual time                    simulation.py: time, staleness, waste
    a race of all of them with real gradients              race.py: the loss after equal times
    or, with a target, which one reaches it first          pursuit.py: the time to the target

This module must not know terminals.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ..conditions.delays import NO_DELAY, parse_delays
from ..conditions.slowness import parse_slow
from ..conditions.world import Conditions
from ..config import check, of_flags, refuse_too_many
from ..errors import ConfigError
from ..launch.launcher import launch_run
from ..program import TaskProgram
from ..protocols import parse
from ..report.forecast import Forecast
from ..report.live import QuietObserver
from ..report.ranking import Advice, RankedProtocol, Standing, Target
from ..report.summary import Summary
from ..run_dir import fresh_folder
from ..simulation.timing import TimingRun
from ..system.processors import num_cores
from ..workloads import load_task
from ..workloads.base import Task
from .profiles import Profile, read_profile
from .pursuit import Goal, pursue
from .race import Training, check_accuracy, race
from .simulation import describe

Say = Callable[[str], None]
_FORECAST_PUSHES, _FEWEST_UPDATES = 20_000, 200
_PROFILE_STEPS = 100
"""The least number of steps of each worker in a profile with delays."""
_ALIKE = 0.01
"""Relative difference below which mean losses count as equal."""
_ALIKE_TIMES, _CLEAR = 0.05, 0.75
"""Times to a target count as equal if their medians differ by less than the first number
(relative) and the first protocol wins with a smaller share of the seeds than the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The planned run and the limits of the race.

    Attributes:
        profile: a recorded run; None: take a profile now, ``profile_s`` long.
        cores: number of cores that the workers share; None: each has its own.
        delay, slow: stragglers on top of the measured times, as on the command line.
        mini_batch_size: None: the task's batch divided among the workers.
        protocols: None: those of ``family``.
        race_s: about how many seconds the race may compute; on a busy machine it takes longer.
    """

    task: str
    workers: int
    profile: Path | None = None
    profile_s: float = 20.0
    cores: int | None = None
    protocols: tuple[str, ...] | None = None
    staleness: str = "none"
    delay: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    mini_batch_size: int | None = None
    lr: float | None = None
    init: str | None = None
    seed: int = 0
    race_s: float = 60.0
    goal: Goal | None = None


def advise(question: Question, say: Say = lambda text: None) -> Advice:
    """Measure, predict and race; return all protocols, best first.

    Raises:
        ConfigError: a name or number is invalid, or the profile is of another task or size.
    """
    names = _names(question)
    task = load_task(question.task, question.workers, question.init)
    size = question.mini_batch_size or max(1, task.batch_size // question.workers)
    splits = task.splits()
    task = replace(task, data=lambda: splits)  # load the data once for all protocols
    if question.goal is not None and question.goal.accuracy is not None:
        check_accuracy(task, "give --target-loss instead")
    profile = _profile(question, task, size, say)
    conditions = _conditions(question, profile)
    training = Training(task=task, mini_batch_size=size, lr=question.lr, seed=question.seed)
    forecasts = {name: _forecast(name, conditions) for name in names}
    say(f"{len(names)} protocols race for about {question.race_s:g} s")
    if question.goal is None:
        ranking = race(names, training, conditions, question.race_s, say)
    else:
        ranking = pursue(names, training, conditions, question.goal, question.race_s, say)
    candidates = tuple(
        RankedProtocol(
            forecast=forecasts[standing.protocol], standing=standing,
            num_steps=parse(standing.protocol, question.workers).num_steps,
        )
        for standing in ranking
    )  # fmt: skip
    return Advice(
        task=task.name, workers=question.workers, cores=question.cores, mini_batch_size=size,
        profile_dir=str(profile.run_dir), profile_steps=profile.num_steps,
        step_s=profile.mean_step_s, push_s=profile.push_s, candidates=candidates,
        are_alike=_are_alike(ranking[:2]),
        target=_target(question.goal, ranking[0]),
    )  # fmt: skip


def _names(question: Question) -> tuple[str, ...]:
    """The protocols to race; invalid flags are refused before anything is loaded."""
    refuse_too_many(question.workers, "--workers")
    if question.workers < 2:
        raise ConfigError(f"a protocol needs at least 2 workers, got --workers {question.workers}")
    names = question.protocols or family(question.workers)
    if question.cores is not None and question.cores < 1:
        raise ConfigError(f"cores must be >= 1, got {question.cores}")
    names = tuple(str(parse(name, question.workers, question.staleness)) for name in names)
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{name} appears twice in --protocols; give each once")
    _check_numbers(question)
    parse_delays(question.delay, question.workers)
    parse_slow(question.slow, question.workers)
    return names


def _check_numbers(question: Question) -> None:
    check("seed", question.seed, "--seed")
    if not 0.0 < question.race_s < math.inf:
        raise ConfigError(f"seconds must be > 0 and finite, got --seconds {question.race_s:g}")
    if question.lr is not None and not 0.0 < question.lr < math.inf:
        raise ConfigError(f"lr must be > 0 and finite, got --lr {question.lr:g}")
    if question.mini_batch_size is not None and question.mini_batch_size < 1:
        raise ConfigError(f"mini-batch-size must be >= 1, got {question.mini_batch_size}")
    if phased := [text for text in question.slow if "@" in text]:
        raise ConfigError(
            f"plan does not support slow phases, got --slow {phased[0]}: a worker that is always "
            "slow is 1=5x; phases can be simulated: paceline simulate"
        )


def family(num_workers: int) -> tuple[str, ...]:
    """Every kind of protocol, with K at a quarter, a half, three quarters of the workers."""
    ranks = sorted({max(1, round(quarters * num_workers / 4)) for quarters in (1, 2, 3)})
    ranks = [rank for rank in ranks if rank < num_workers]
    names = ["full-sync"]
    names += [f"k-sync:{rank}" for rank in ranks]
    names += [f"k-batch-sync:{rank}" for rank in (*ranks, num_workers)]
    names += [f"k-async:{rank}" for rank in ranks if rank > 1]
    names += [f"k-batch-async:{rank}" for rank in (*ranks, num_workers) if rank > 1]
    return (*names, "async")


def _profile(question: Question, task: Task, size: int, say: Say) -> Profile:
    """The profile of the question, or one that is taken now."""
    profile = read_profile(question.profile or _measure(question, task, size, say))
    profile.check(
        task.name, sum(parameter.numel() for parameter in task.module().parameters()), size
    )
    if question.delay and not profile.delay:
        say(
            f"the workers of the profile {profile.run_dir} had no --delay: after a sleep a step "
            "takes longer than measured there; leave --profile out, or give a run with this --delay"
        )
    return profile


def _measure(question: Question, task: Task, size: int, say: Say) -> Path:
    """Make a short run on this machine; return its folder.

    Workers have as many threads as in any run here, but no more than their share of ``cores``.
    """
    workers = min(question.workers, max(2, num_cores()))
    threads = None
    if question.cores is not None:
        threads = max(1, min(num_cores() // workers, question.cores // question.workers))
    say(f"a profile: {workers} workers train {task.name} for {question.profile_s:g} s")
    folder = fresh_folder(f"profile-{task.name}")  # does not change runs/latest
    flags: dict[str, object] = {
        "workers": workers, "threads": threads, "protocol": "k-batch-async:2", "path": "store",
        "mini_batch_size": size, "delay": _pauses(question, workers),
        "seconds": question.profile_s, "seed": question.seed, "lr": question.lr,
        "init": question.init, "nonfinite": "skip", "run_dir": str(folder),
    }  # fmt: skip
    flags = {name: value for name, value in flags.items() if value is not None}
    try:
        settings = of_flags(flags, is_call=True)
        summary = launch_run(TaskProgram(task=question.task), settings, QuietObserver())
    finally:
        with suppress(OSError):  # a run that wrote files keeps its folder
            folder.rmdir()
    assert isinstance(summary, Summary)  # not a dry run
    return Path(summary.run_dir)


def _pauses(question: Question, workers: int) -> tuple[str, ...]:
    """The question's delays for the profile's workers, so that caches are as cold as in the run.

    A delay too long for `_PROFILE_STEPS` steps in the profile's time is shortened: caches are
    equally cold after it.
    """
    longest_s = question.profile_s / _PROFILE_STEPS
    delays = parse_delays(question.delay, question.workers)[:workers]
    return tuple(
        f"{worker}={delay.text if delay.mean_s <= longest_s else f'{longest_s:g}s'}"
        for worker, delay in enumerate(delays) if delay is not None
    )  # fmt: skip


def _conditions(question: Question, profile: Profile) -> Conditions:
    """The measured times with the question's stragglers instead of the profile's."""
    delays = parse_delays(question.delay, question.workers)
    return Conditions(
        delays=tuple(delay or NO_DELAY for delay in delays),
        slow=parse_slow(question.slow, question.workers),
        machine=profile.machine(question.workers, question.cores),
        seed=question.seed,
    )


def _forecast(name: str, conditions: Conditions) -> Forecast:
    protocol = parse(name, conditions.num_workers)
    updates = max(_FEWEST_UPDATES, _FORECAST_PUSHES // protocol.num_pushes)
    start_s = time.perf_counter()
    counts = TimingRun(protocol, conditions).run(updates)
    return describe(protocol, conditions, counts, time.perf_counter() - start_s)


def _are_alike(first_two: Sequence[Standing]) -> bool:
    """Whether the first two count as equal."""
    if len(first_two) < 2:
        return False
    first, second = first_two
    if first.target_s and second.target_s:
        is_near = second.to_target_s <= (1 + _ALIKE_TIMES) * first.to_target_s
        return is_near and first.wins < _CLEAR * min(len(first.target_s), len(second.target_s))
    losses = (first.loss, second.loss)
    if first.target_s or not all(map(math.isfinite, losses)):
        return False
    return abs(losses[1] - losses[0]) <= _ALIKE * abs(losses[0])


def _target(goal: Goal | None, first: Standing) -> Target | None:
    """When the advised protocol reaches the target; None without a goal."""
    if goal is None:
        return None
    is_reached = first.to_target_s < math.inf
    return Target(
        name=goal.name, value=goal.value, is_reached=is_reached,
        best=first.best if math.isfinite(first.loss) else None,
        virtual_s=first.to_target_s if is_reached else first.virtual_s,
    )  # fmt: skip
