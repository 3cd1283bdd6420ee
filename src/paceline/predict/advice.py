"""Which protocol to run with how many pushes an update, before anything is paid for.

    a profile: RUN's trace, or a short run made now        profiles.py
    each protocol and K in virtual time                    simulation.py: time, staleness, waste
    a race of all of them with real gradients              race.py: the loss after equal times
    the winner goes on until the target                    when, or the best it reached

This module must not know terminals.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..compute.cores import num_cores
from ..conditions.delays import NO_DELAY, parse_delays, parse_slow
from ..conditions.world import Conditions
from ..config import resolve
from ..engines.timing import TimingRun
from ..errors import ConfigError
from ..launcher import launch_run
from ..program import TaskProgram
from ..protocols import parse
from ..report.forecast import Forecast
from ..report.live import QuietObserver
from ..report.ranking import Advice, Candidate, Target
from ..workloads import load_task
from ..workloads.base import Task
from .profiles import Profile, read_profile
from .race import Contender, Training, race
from .simulation import describe

Say = Callable[[str], None]
_FORECAST_PUSHES, _FEWEST_UPDATES = 20_000, 200
_ALIKE = 0.01
"""Mean losses that differ by less, relatively, are not told apart."""
_EVALUATIONS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked.

    Attributes:
        profile: a recorded run; None: take a profile now, ``profile_s`` long.
        cores: that the workers share; None: one each.
        delay, slow: on top of what the profile measured, as on the command line.
        mini_batch_size: None: the task's batch, shared by all workers.
        protocols: None: the family, with K on a grid.
        race_s: about how many real seconds the race may take.
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
    target_accuracy: float | None = None


def advise(asked: Question, say: Say = lambda text: None) -> Advice:
    """Measure, predict, race, advise.

    Raises:
        ConfigError: something asked for does not exist, or the profile is of something else.
    """
    names = _names(asked)
    task = load_task(asked.task, asked.workers, asked.init)
    size = asked.mini_batch_size or max(1, task.batch_size // asked.workers)
    profile = _profile(asked, task, size, say)
    conditions = _conditions(asked, profile)
    training = Training(task=task, mini_batch_size=size, lr=asked.lr, seed=asked.seed)
    forecasts = {name: _forecast(name, conditions) for name in names}
    say(f"{len(names)} protocols race for about {asked.race_s:g} s")
    ranking = race(names, training, conditions, asked.race_s, say)
    candidates = tuple(Candidate(forecast=forecasts[one.protocol], standing=one) for one in ranking)
    return Advice(
        task=task.name, workers=asked.workers, cores=asked.cores, mini_batch_size=size,
        profile_dir=str(profile.run_dir), profile_steps=profile.num_steps,
        step_s=profile.mean_step_s, push_s=profile.push_s, candidates=candidates,
        are_alike=_are_alike([one.standing.loss for one in candidates[:2]]),
        target=_reach(asked, candidates[0], training, conditions, say),
    )  # fmt: skip


def _names(asked: Question) -> tuple[str, ...]:
    """The protocols to race; what is nonsense is refused before anything is loaded."""
    if asked.workers < 2:
        raise ConfigError(f"a protocol joins at least 2 workers, got --workers {asked.workers}")
    names = asked.protocols or family(asked.workers)
    if asked.cores is not None and asked.cores < 1:
        raise ConfigError(f"cores must be >= 1, got {asked.cores}")
    names = tuple(str(parse(name, asked.workers, asked.staleness)) for name in names)
    parse_delays(asked.delay, asked.workers)
    parse_slow(asked.slow, asked.workers)
    return names


def family(num_workers: int) -> tuple[str, ...]:
    """Every kind of protocol, with K at a quarter, a half, three quarters of the workers."""
    ranks = sorted({max(1, round(part * num_workers / 4)) for part in (1, 2, 3)})
    ranks = [rank for rank in ranks if rank < num_workers]
    names = ["full-sync"]
    names += [f"k-sync:{rank}" for rank in ranks]
    names += [f"k-batch-sync:{rank}" for rank in (*ranks, num_workers)]
    names += [f"k-async:{rank}" for rank in ranks if rank > 1]
    names += [f"k-batch-async:{rank}" for rank in (*ranks, num_workers) if rank > 1]
    return (*names, "async")


def _profile(asked: Question, task: Task, size: int, say: Say) -> Profile:
    """The profile that was named, or one that is taken now."""
    profile = read_profile(asked.profile or _measure(asked, task, size, say))
    profile.check(task.name, sum(one.numel() for one in task.model().parameters()), size)
    return profile


def _measure(asked: Question, task: Task, size: int, say: Say) -> Path:
    """A short run of workers on this machine; the folder where it lies."""
    workers = min(asked.workers, max(2, num_cores()))
    say(f"a profile: {workers} workers train {task.name} for {asked.profile_s:g} s")
    flags = {
        "workers": workers, "protocol": "k-batch-async:2", "path": "store",
        "mini_batch_size": size,
        "seconds": asked.profile_s, "seed": asked.seed, "lr": asked.lr, "init": asked.init,
        "nonfinite": "skip", "name": f"profile-{task.name}-{time.strftime('%Y%m%d-%H%M%S')}",
    }  # fmt: skip
    given = {name: value for name, value in flags.items() if value is not None}
    settings = resolve(given, env={}, is_call=True).settings
    summary = launch_run(TaskProgram(task=asked.task), settings, QuietObserver())
    assert summary is not None  # it is no dry run
    return Path(summary.run_dir)


def _conditions(asked: Question, profile: Profile) -> Conditions:
    """What was measured, and the stragglers that are asked for.

    Those that the profile was given are left out.
    """
    delays = parse_delays(asked.delay, asked.workers)
    return Conditions(
        delays=tuple(delay or NO_DELAY for delay in delays),
        slow=parse_slow(asked.slow, asked.workers),
        machine=profile.machine(asked.workers, asked.cores),
        seed=asked.seed,
    )


def _forecast(name: str, conditions: Conditions) -> Forecast:
    protocol = parse(name, conditions.num_workers)
    updates = max(_FEWEST_UPDATES, _FORECAST_PUSHES // protocol.num_pushes)
    start_s = time.perf_counter()
    counts = TimingRun(protocol, conditions).run(updates)
    return describe(protocol, conditions, counts, time.perf_counter() - start_s)


def _are_alike(losses: Sequence[float]) -> bool:
    if len(losses) < 2 or not all(map(math.isfinite, losses)):
        return False
    return abs(losses[1] - losses[0]) <= _ALIKE * abs(losses[0])


def _reach(
    asked: Question, best: Candidate, training: Training, conditions: Conditions, say: Say
) -> Target | None:
    """The advised protocol goes on in virtual time until the target accuracy."""
    if asked.target_accuracy is None:
        return None
    contender = Contender(best.forecast.protocol, training, conditions)
    if contender.craft.splits.test is None:
        raise ConfigError(f"{asked.task} has no test data: leave --target-accuracy out")
    lap_s, start_s = best.standing.virtual_s / _EVALUATIONS, time.perf_counter()
    most, until_s = 0.0, 0.0
    while time.perf_counter() - start_s < asked.race_s:
        until_s += lap_s
        contender.advance(until_s)
        accuracy, count = contender.craft.evaluate().get("acc", (0.0, 1.0))
        most = max(most, accuracy / count)
        say(f"{best.forecast.protocol}: accuracy {accuracy / count:.4f} after "
            f"{contender.virtual_s:.3g} virtual seconds")  # fmt: skip
        if most >= asked.target_accuracy:
            break
        lap_s *= 1.2
    return Target(
        accuracy=asked.target_accuracy,
        is_reached=most >= asked.target_accuracy,
        best_accuracy=most,
        virtual_s=contender.virtual_s,
    )
