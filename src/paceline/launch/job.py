"""Checks the settings of scripts and ranks; finds the folder in which a restarted job continues.

    flags, file, environment -> of a script: refused by name if only tasks read them
                             -> of ranks: refused by name, or with one worker per rank
    restart -> the ranks' store, or runs/.job-ID -> the folder and settings of the first start

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
from ..run.collective import path_of, refuse_if_split
from ..run_dir import RUNS
from ..system.files import OpenFolder

_RANK_0_ONLY = frozenset(("resume", "run_dir", "name", "json", "log", "keep", "checkpoint_every"))
"""Settings that only rank 0 reads."""
_UNSUPPORTED = ("respawn", "stall_after")
_TASK_SETTINGS = {
    "lr": "give its optimizer the rate: torch.optim.SGD(model.parameters(), lr={})",
    "batch_size": "give its loader the batch that workers share: DataLoader(data, batch_size={})",
    "mini_batch_size": "give its loader one worker's batch, DataLoader(data, batch_size={}), and "
    'say pace.prepare(..., batch="per-worker")',
    "init": "let it make the model's weights itself",
}
"""Settings that the standard loop of tasks reads -> how a script sets the same."""


def refuse_of_tasks(program: Program, resolved: Resolved) -> None:
    """Raise ConfigError if a script is given a setting that only tasks read.

    Settings that come from a resumed run are not refused.
    """
    if isinstance(program, TaskProgram):
        return
    for name, alternative in _TASK_SETTINGS.items():
        value, origin = getattr(resolved.settings, name), resolved.origins[name]
        if value is None or origin == "default":
            continue
        hint = f"; the script's own flags come after its name: {program.path} {origin} {value}"
        raise ConfigError(
            f"{name} {value} ({origin}) is for tasks, a script sets its own: leave it out, and "
            + alternative.format(value)
            + (hint if origin.startswith("--") else "")
        )


def settings_of_ranks(resolved: Resolved, rank: RankOfWorld) -> RunSettings:
    """The settings of a run with one worker per rank.

    Raises:
        ConfigError: a setting is not supported with ranks.
    """
    settings, size = resolved.settings, rank.size
    if resolved.origins["workers"] != "default" and settings.workers != size:
        raise ConfigError(
            f"workers {settings.workers} ({resolved.origins['workers']}): there are {size} "
            "processes, and each is a worker; leave the setting out"
        )
    if settings.engine not in ("local", "torchrun"):
        raise ConfigError(
            f"engine {settings.engine!r} ({resolved.origins['engine']}): this process was started "
            "as one of several; leave the setting out"
        )
    is_split(settings := replace(settings, workers=size, engine="torchrun"))
    protocol = protocol_of(settings)
    command = f"paceline launch --workers {size} --protocol {settings.protocol} SCRIPT"
    if not protocol.is_spmd:
        raise ConfigError(
            f"protocol {settings.protocol} decides after each push, which engine torchrun does not "
            "support: it supports full-sync, local-sgd:H and post-local-sgd:N,H. On one machine: "
            f"{command}"
        )
    path_of(settings, protocol)
    if settings.path not in ("auto", "collective"):
        raise ConfigError(
            f"path {settings.path!r} is the store, which processes of torchrun lack: leave the "
            f"setting out. On one machine: {command}"
        )
    for name in _UNSUPPORTED:
        if getattr(settings, name):
            raise ConfigError(
                f"{name} is not supported by engine torchrun, where a lost worker ends the run: "
                "torchrun --max-restarts N restarts all workers from the newest checkpoint"
            )
    if settings.on_worker_error == "continue":
        raise ConfigError(
            "on_worker_error 'continue' is not supported by engine torchrun: all workers are "
            f"needed for each update. On one machine: {command}"
        )
    _refuse_faults(settings)
    return replace(settings, fault=()) if rank.goes_on else settings


def is_split(settings: RunSettings) -> bool:
    """Whether the model is divided, so that its workers are ranks.

    Raises:
        ConfigError: it cannot be divided with these settings.
    """
    name = read_split(settings.split, settings.workers)
    if settings.workers == 1 and divides(settings.split):
        raise ConfigError(
            f"split {settings.split!r} divides a model among several workers, but there is one: "
            "add --workers 2"
        )
    if name is not None and settings.protocol.partition("+")[0] != "full-sync":
        raise ConfigError(
            f"split {settings.split!r} with protocol {settings.protocol} is not supported: workers "
            "that hold parts of one model step together; use --protocol full-sync, or --split data"
        )
    if name is not None and settings.dry_run:
        raise ConfigError(
            f"--dry-run with split {settings.split!r}: all workers measure where to cut the model; "
            f"paceline partition TASK -n {name.size} shows the cut, and paceline plan --memory "
            "what each split costs"
        )
    if name is not None:
        refuse_if_split(settings)
    return name is not None


def _refuse_faults(settings: RunSettings) -> None:
    for fault in FaultPlan.parse(settings.fault, settings.workers).faults:
        if fault.worker is None or fault.at_s is not None or fault.kind is Kind.DROP:
            raise ConfigError(
                f"fault {str(fault)!r} is not supported by engine torchrun, whose workers may be "
                "on other machines; 'kill worker 1 at update 100' is injected from within the "
                "worker"
            )


def settings_json(settings: RunSettings) -> str:
    """The settings that all ranks must share, as JSON."""
    values = {name: value for name, value in asdict(settings).items() if name not in _RANK_0_ONLY}
    return json.dumps(values)


class Keeper(Protocol):
    """Outlives the ranks of a job, and keeps a text for restarted ranks."""

    def keep(self, text: str) -> None:
        """Replace the text that is kept; "": keep nothing."""

    def kept(self) -> str:
        """Return the text that was kept last; "": none."""


class JobFile:
    """``runs/.job-ID``, for jobs whose store ends with the ranks.

    Two jobs with the same id at the same time, in the same folder, share one file.
    """

    def __init__(self, job: str) -> None:
        self._path = RUNS / f".job-{job}"

    def keep(self, text: str) -> None:
        """Write the text; "": remove the file. OSError: it cannot be written."""
        if not text:
            self._path.unlink(missing_ok=True)
            return
        self._path.parent.mkdir(exist_ok=True)
        with closing(OpenFolder.open(self._path.parent)) as folder:
            folder.replace(self._path.name, text.encode())

    def kept(self) -> str:
        with suppress(FileNotFoundError):
            return self._path.read_text()
        return ""


class JobFolder:
    """The folder of a job's run, in which its restarts continue.

    The keeper holds its path from when it is known until the end of the run.

    Args:
        keeper: of the job; None: a file, if the job can be restarted at all.

    Attributes:
        unknown_why: why a restart may not continue the run of its job; "" if it does.
    """

    def __init__(self, rank: RankOfWorld, keeper: Keeper | None = None) -> None:
        self._rank = rank
        self._keeper = keeper or (JobFile(rank.job) if rank.job else None)
        self.unknown_why = ""

    def restore(
        self, resolved: Resolved, settings: RunSettings, *, is_restarted: bool = False
    ) -> RunSettings:
        """Return the settings, on a restart with the folder and settings of the first start.

        Args:
            is_restarted: whether any machine has counted a restart. If the store has not, it is a
                new one: the machine that kept the one before is gone.
        """
        goes_on, folder = self._rank.goes_on or is_restarted, ""
        if not goes_on:
            self.forget()  # any text is of an earlier job with the same name
        elif self._keeper is not None:
            folder = self._keeper.kept()
        if folder:
            settings = replace(settings, resume="auto", run_dir=folder, name=None)
        elif goes_on and (settings.run_dir or settings.name):
            settings = replace(settings, resume="auto")
        elif is_restarted and not self._rank.goes_on and settings.resume is None:
            self.unknown_why = (
                "the job was restarted, and this store knows of no run: if there was one, its "
                "store is gone, and this run begins again; set PACELINE_RUN_DIR to the folder of "
                "the run, in which restarts continue"
            )
        origins = {**resolved.origins, **dict.fromkeys(("workers", "engine"), "the launcher")}
        if settings.fault != resolved.settings.fault:
            origins["fault"] = "the launcher"
        return adopt(Resolved(settings=settings, origins=origins))

    def began(self, folder: str) -> str:
        """Keep the folder of the run; return why restarts will not find it, "" if they will."""
        try:
            if self._keeper is not None:
                self._keeper.keep(folder)
        except OSError as error:
            return (
                f"a restart will not find this run, since {error.filename or RUNS} cannot be "
                f"written ({error.strerror}), and would start from the beginning; set "
                f"PACELINE_RUN_DIR={folder}, in which it will continue"
            )
        return ""

    def forget(self) -> None:
        """The run is over: keep nothing."""
        if self._keeper is not None:
            self._keeper.keep("")
