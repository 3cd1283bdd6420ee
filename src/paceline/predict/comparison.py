"""Several protocols on one task, one after the other, under the same stragglers and seeds.

    contest -> (seed 0: each protocol), (seed 1: each protocol), ... -> summaries -> comparison
                live: launch/launcher.py      virtual time: rehearsal.py

The seeds are the outer loop, so a change of the machine affects all protocols, and an interrupted
contest can still compare its finished runs. A worker's mini-batch has the same size under every
protocol, unless a batch size is given: otherwise a step of an asynchronous protocol would have K
times the work. This module must not know terminals or pictures.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from ..conditions.delays import parse_delays
from ..conditions.slowness import parse_slowness
from ..config import RunSettings
from ..data.fetch import choose
from ..errors import ConfigError, Interrupted, LinkError, WorkerError
from ..protocols import parse
from ..report.compared import ComparedProtocol, Comparison, RunOutcome, outcome_of
from ..report.files import write_comparison
from ..report.live import Progress, QuietObserver
from ..report.summary import Summary
from ..run_dir import fresh_folder
from ..workloads import find_task
from .simulation import Watcher, World


class ComparisonWatcher(Watcher, Protocol):
    """Receives the progress of a contest and of each of its runs."""

    def began(self, protocol: str, seed: int) -> None:
        """A run starts."""

    def note(self, text: str) -> None:
        """A sentence that the user should read."""

    def ended(self, outcome: RunOutcome | str) -> None:
        """A run ended: its outcome, or why it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """The protocols to compare, and the settings of their runs.

    Args:
        settings: of every run; its protocol and seed are replaced.
        world: delays, links and absences; a live run uses only ``delay`` and ``slow``.
    """

    task: str
    protocols: tuple[str, ...]
    settings: RunSettings
    world: World
    repeats: int = 1
    is_simulated: bool = False
    evaluations: int = 1
    """Evaluations per epoch; more than one only in virtual time, where they take none."""

    def check(self) -> None:
        """Raise ConfigError for everything that can be checked before torch is imported."""
        if not self.protocols:
            raise ConfigError("nothing to compare: give --protocols full-sync,k-sync:3,async")
        for name in ("repeats", "evaluations"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)}")
        workers, world = self.settings.workers, self.world
        rule = self.settings.staleness
        protocols = [parse(text, workers, rule) for text in self.protocols]
        names, batch_size = list(map(str, protocols)), self.settings.batch_size
        repeated = [name for name in names if names.count(name) > 1]
        if repeated:
            raise ConfigError(f"{repeated[0]} is given twice: each protocol runs once a seed")
        for protocol in protocols:
            if batch_size is not None and batch_size < protocol.num_pushes:
                raise ConfigError(
                    f"an update of {protocol} has {protocol.num_pushes} pushes, more than "
                    f"--batch-size {batch_size} has samples; use at least {protocol.num_pushes}"
                )
        find_task(self.task)
        if self.is_simulated:
            world.conditions(workers, 1.0)
            if self.settings.device not in ("auto", "cpu"):
                raise ConfigError(
                    f"--device {self.settings.device} is for live runs; virtual time computes on "
                    "the CPU: leave out --device or --simulated"
                )
            return
        if self.evaluations > 1:
            raise ConfigError("--evaluations above 1 needs virtual time: add --simulated")
        parse_delays(world.delay, workers)
        parse_slowness(world.slow, workers)
        for name in ("away", "link", "server", "num_bytes", "like", "cores"):
            if getattr(world, name) not in (None, ()):
                flag = "bytes" if name == "num_bytes" else name
                raise ConfigError(f"--{flag} needs virtual time: add --simulated")


def compare(
    contest: Contest, watcher: ComparisonWatcher, run_dir: Path | None = None
) -> Comparison:
    """Run all protocols with all seeds, each in its own folder, and compare them.

    Args:
        run_dir: the folder of all runs; None: a new one, ``runs/compare-...``.

    Raises:
        ConfigError: a setting is invalid, or the first run refuses its settings.
        Interrupted: the user ended it after at least one run.
    """
    from ..engines.local.client import warm

    contest.check()
    if contest.is_simulated:
        from .rehearsal import refuse_target  # here: it imports torch

        refuse_target(contest.task, contest.settings)
    settings = _with_batch(contest, watcher)
    results = _Results(contest, settings, fresh_folder(f"compare-{contest.task}", run_dir))
    with warm():
        for seed in range(settings.seed, settings.seed + contest.repeats):
            for text in contest.protocols:
                watcher.began(text, seed)
                run_settings = replace(settings, protocol=text, seed=seed)
                try:
                    summary = _run(contest, run_settings, results.folder_of(text, seed), watcher)
                    outcome: RunOutcome | str = outcome_of(summary, seed, settings.target_accuracy)
                except (ConfigError, LinkError, WorkerError) as error:
                    if isinstance(error, ConfigError) and not results.has_any:
                        raise  # in the first run: all settings are wrong, not one protocol
                    outcome = str(error).partition("\n")[0].rstrip(":")
                except KeyboardInterrupt:
                    if not results.has_any:
                        raise KeyboardInterrupt from None  # the summary of one run is no comparison
                    raise Interrupted(results.compared(f"{text}, seed {seed}")) from None
                results.add(text, outcome)
                watcher.ended(outcome)
    return results.compared()


class _Results:
    """The outcomes of the runs so far."""

    def __init__(self, contest: Contest, settings: RunSettings, folder: Path) -> None:
        self._contest = contest
        self._settings = settings
        self._folder = folder
        self._outcomes: dict[str, list[RunOutcome | str]] = {text: [] for text in contest.protocols}

    @property
    def has_any(self) -> bool:
        return any(self._outcomes.values())

    def folder_of(self, protocol: str, seed: int) -> Path:
        """The folder of a run: one per protocol, and in it one per seed if there are several."""
        folder = self._folder / re.sub(r"[^A-Za-z0-9_.-]+", "-", protocol)
        return folder / f"seed-{seed}" if self._contest.repeats > 1 else folder

    def add(self, protocol: str, outcome: RunOutcome | str) -> None:
        """Add the outcome of a run, or why it failed."""
        self._outcomes[protocol].append(outcome)

    def compared(self, interrupted_in: str = "") -> Comparison:
        """Compare the outcomes so far, and write the files of the comparison."""
        contest, settings = self._contest, self._settings
        comparison = Comparison(
            task=contest.task,
            workers=settings.workers,
            conditions=_in_words(contest, settings),
            is_simulated=contest.is_simulated,
            target_accuracy=settings.target_accuracy,
            repeats=contest.repeats,
            contenders=tuple(
                ComparedProtocol(
                    protocol=text,
                    outcomes=tuple(run for run in runs if isinstance(run, RunOutcome)),
                    failures=tuple(run for run in runs if isinstance(run, str)),
                )
                for text, runs in self._outcomes.items()
            ),
            folder=str(self._folder),
            interrupted_in=interrupted_in,
        )
        write_comparison(comparison, self._folder)
        return comparison


def _with_batch(contest: Contest, watcher: ComparisonWatcher) -> RunSettings:
    """The settings; if no batch size is given, with the mini-batch size of full-sync."""
    settings = contest.settings
    if settings.batch_size is not None or settings.mini_batch_size is not None:
        return settings
    from ..workloads import load_task  # here: it imports torch

    chooser = partial(choose, fetch_missing=not contest.is_simulated, say=watcher.note)
    task = load_task(contest.task, settings.workers, settings.init, chooser)
    return replace(settings, mini_batch_size=max(1, task.batch_size // settings.workers))


def _in_words(contest: Contest, settings: RunSettings) -> str:
    """The conditions of all runs as text."""
    world = contest.world
    batch = f"mini-batches of {settings.mini_batch_size}"
    if settings.mini_batch_size is None:
        batch = f"{settings.batch_size} samples an update"
    parts = [
        *(f"slow {text}" for text in world.slow),
        *(f"delay {text}" for text in world.delay),
        *(f"away {text}" for text in world.away),
        *([f"link {world.link}"] if world.link else []),
        *([f"server {world.server}"] if world.server else []),
        *([f"bytes {world.num_bytes}"] if world.num_bytes else []),
        *([f"times as in {world.like}"] if world.like else []),
        *([f"{world.cores} cores"] if world.cores else []),
        *([f"staleness {settings.staleness}"] if settings.staleness != "none" else []),
        batch,
    ]
    return ", ".join(parts)


def _run(
    contest: Contest, settings: RunSettings, run_dir: Path, watcher: ComparisonWatcher
) -> Summary:
    if contest.is_simulated:
        from .rehearsal import rehearse  # here: it imports torch

        world = replace(contest.world, seed=settings.seed)
        rehearsed = rehearse(contest.task, settings, world, run_dir, watcher, contest.evaluations)
        return rehearsed.summary
    from ..launch.launcher import launch_run
    from ..program import TaskProgram

    live = replace(
        settings, run_dir=str(run_dir), delay=contest.world.delay, slow=contest.world.slow
    )
    summary = launch_run(TaskProgram(task=contest.task), live, _Listener(watcher))
    assert isinstance(summary, Summary)  # not a dry run
    return summary


class _Listener(QuietObserver):
    """Passes the progress of a live run to a watcher."""

    def __init__(self, watcher: ComparisonWatcher) -> None:
        super().__init__()
        self._watcher = watcher
        self._now_s = 0.0

    def note(self, text: str) -> None:
        self._watcher.note(text)

    def progress(self, progress: Progress) -> None:
        self._now_s = progress.t
        self._watcher.progress(progress.version)

    def evaluated(
        self, epoch: int, metrics: Mapping[str, float], version: int | None = None
    ) -> None:
        self._watcher.evaluated(epoch, self._now_s, metrics)
