"""What a run is asked for: settings that a script can have, or ranks; the folder of its restarts.

    flags, file, environment -> of a script: refused by name where it has its own
                             -> of ranks: refused by name, or with a worker a rank
    restart -> where ranks meet, or runs/.job-ID -> the folder of the first start, what its run had

This module must not know how ranks are reached.
"""

import json
from contextlib import closing, suppress
from dataclasses import asdict, replace
from typing import Protocol

from ..checkpoints.resumption import adopt
from ..conditions.faults import FaultPlan, Kind
from ..config import Resolved, RunSettings
from ..engines.torchrun.world import RankOfWorld
from ..errors import ConfigError
from ..partition.names import divides, read_split
from ..program import Program, TaskProgram
from ..protocols import protocol_of
from ..run.collective import path_of
from ..run_dir import RUNS
from ..system.files import OpenFolder

_OF_RANK_0 = frozenset(("resume", "run_dir", "name", "json", "log", "keep", "checkpoint_every"))
"""Settings that no other rank reads."""
_NOT_HERE = ("respawn", "stall_after")
_OF_TASKS = {
    "lr": "give its optimizer the rate: torch.optim.SGD(model.parameters(), lr={})",
    "batch_size": "give its loader the batch that workers share: DataLoader(data, batch_size={})",
    "mini_batch_size": "give its loader one worker's batch, DataLoader(data, batch_size={}), and "
    'say pace.prepare(..., batch="per-worker")',
    "init": "let it make the model's weights itself",
}
"""Settings that the standard loop of tasks reads, and where a script has the same."""


def refuse_of_tasks(program: Program, resolved: Resolved) -> None:
    """Raise ConfigError where a script is given what it would not hear of.

    What a run had that goes on, and nobody gives now, is as it was.
    """
    if isinstance(program, TaskProgram):
        return
    for name, instead in _OF_TASKS.items():
        value, origin = getattr(resolved.settings, name), resolved.origins[name]
        if value is None or origin == "default":
            continue
        own = f"; a flag of its own stands behind its name: {program.path} {origin} {value}"
        raise ConfigError(
            f"{name} {value} ({origin}) is for tasks, a script has its own: leave it out, and "
            + instead.format(value)
            + (own if origin.startswith("--") else "")
        )


def settings_of_ranks(resolved: Resolved, rank: RankOfWorld) -> RunSettings:
    """The settings of a run with a worker a rank.

    Raises:
        ConfigError: one asks for what ranks cannot carry.
    """
    given, size = resolved.settings, rank.size
    if resolved.origins["workers"] != "default" and given.workers != size:
        raise ConfigError(
            f"workers {given.workers} ({resolved.origins['workers']}): there are {size} processes, "
            "and each is a worker; leave the setting out"
        )
    if given.engine not in ("local", "torchrun"):
        raise ConfigError(
            f"engine {given.engine!r} ({resolved.origins['engine']}): this process was begun as "
            "one of several; leave the setting out"
        )
    is_split(settings := replace(given, workers=size, engine="torchrun"))
    protocol = protocol_of(settings)
    instead = f"paceline launch --workers {size} --protocol {settings.protocol} SCRIPT"
    if not protocol.is_spmd:
        raise ConfigError(
            f"protocol {settings.protocol} decides after each push, which engine torchrun cannot "
            "carry: it carries full-sync, local-sgd:H and post-local-sgd:N,H. On one machine: "
            f"{instead}"
        )
    path_of(settings, protocol)
    if settings.path not in ("auto", "collective"):
        raise ConfigError(
            f"path {settings.path!r} is shared memory, which processes of torchrun have not: leave "
            f"the setting out. On one machine: {instead}"
        )
    for name in _NOT_HERE:
        if getattr(settings, name):
            raise ConfigError(
                f"{name} is not carried by engine torchrun, where a worker that is lost ends the "
                "run: torchrun --max-restarts N begins all again, from the newest checkpoint"
            )
    if settings.on_worker_error == "continue":
        raise ConfigError(
            "on_worker_error 'continue' is not carried by engine torchrun: all workers are needed "
            f"for each update. On one machine: {instead}"
        )
    _refuse_faults(settings)
    return replace(settings, fault=()) if rank.goes_on else settings


def is_split(settings: RunSettings) -> bool:
    """Whether the model is divided, so that its workers are ranks.

    Raises:
        ConfigError: it cannot be, or not so.
    """
    name = read_split(settings.split, settings.workers)
    if settings.workers == 1 and divides(settings.split):
        raise ConfigError(
            f"split {settings.split!r} divides a model among several workers, and there is one: "
            "add --workers 2"
        )
    if name is not None and settings.protocol.partition("+")[0] != "full-sync":
        raise ConfigError(
            f"split {settings.split!r} with protocol {settings.protocol} is not carried: workers "
            "that hold parts of one model step together; use --protocol full-sync, or --split data"
        )
    if name is not None and settings.dry_run:
        raise ConfigError(
            f"--dry-run with split {settings.split!r}: where a model is cut is measured by all "
            f"workers; paceline partition TASK -n {name.size} shows the cut, and paceline plan "
            "--memory what each split costs"
        )
    return name is not None


def _refuse_faults(settings: RunSettings) -> None:
    for one in FaultPlan.parse(settings.fault, settings.workers).faults:
        if one.worker is None or one.at_s is not None or one.kind is Kind.DROP:
            raise ConfigError(
                f"fault {str(one)!r} is not carried by engine torchrun, whose workers may be on "
                "other machines: 'kill worker 1 at update 100' comes from within"
            )


def said_of(settings: RunSettings) -> str:
    values = {name: value for name, value in asdict(settings).items() if name not in _OF_RANK_0}
    return json.dumps(values)


class Keeper(Protocol):
    """What outlives the ranks of one job, and keeps a text for those that are begun again."""

    def keep(self, text: str) -> None:
        """In the place of what it had; "": nothing."""

    def kept(self) -> str:
        """What it was given last; "": nothing."""


class JobFile:
    """``runs/.job-ID``: where ranks meet goes with them.

    Two jobs that are given one id at once, in one folder, have one file.
    """

    def __init__(self, job: str) -> None:
        self._path = RUNS / f".job-{job}"

    def keep(self, text: str) -> None:
        """OSError: it cannot be written, and says what it did."""
        if not text:
            self._path.unlink(missing_ok=True)
            return
        self._path.parent.mkdir(exist_ok=True)
        with closing(OpenFolder.open(self._path.parent)) as place:
            place.replace(self._path.name, text.encode())

    def kept(self) -> str:
        with suppress(FileNotFoundError):
            return self._path.read_text()
        return ""


class JobFolder:
    """Which folder a job's run has, so that its restarts go on there.

    It is kept from when it is known until the run has come to its end.

    Args:
        keeper: of the job; None: a file does it, where the job is begun again at all.
    """

    def __init__(self, rank: RankOfWorld, keeper: Keeper | None = None) -> None:
        self._rank = rank
        self._keeper = keeper or (JobFile(rank.job) if rank.job else None)

    def found(self, resolved: Resolved, settings: RunSettings) -> RunSettings:
        """The settings with the folder that the first start had, and with what its run had."""
        goes_on, folder = self._rank.goes_on, ""
        if not goes_on:
            self.forget()  # what is there is of another job, which had the same name
        elif self._keeper is not None:
            folder = self._keeper.kept()
        if folder:
            settings = replace(settings, resume="auto", run_dir=folder, name=None)
        elif goes_on and (settings.run_dir or settings.name):
            settings = replace(settings, resume="auto")
        origins = {**resolved.origins, **dict.fromkeys(("workers", "engine"), "the launcher")}
        if settings.fault != resolved.settings.fault:
            origins["fault"] = "the launcher"
        return adopt(Resolved(settings=settings, origins=origins))

    def began(self, folder: str) -> str:
        """The run lies there; why no restart will know that, empty: each will."""
        try:
            if self._keeper is not None:
                self._keeper.keep(folder)
        except OSError as error:
            return (
                f"a restart will not find this run, since {error.filename or RUNS} cannot be "
                f"written ({error.strerror}): it would begin anew; set PACELINE_RUN_DIR={folder}, "
                "which it goes on in"
            )
        return ""

    def forget(self) -> None:
        """It has come to its end."""
        if self._keeper is not None:
            self._keeper.keep("")
