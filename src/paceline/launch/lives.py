"""The folder that a run locks, the lives that it has there, and what members start with.

    found by --resume, or made -> locked -> [ files of a run that was cut off are set aside ]
        -> a life -> [ all workers lost: the newest checkpoint, the remaining faults -> a life ]

The folder is read once it is locked: until then another run may have continued there. A restart
does what `--resume` does, within one call. A member gets its seat, its threads and its context
before it starts: settings + program + protocol -> one MemberSpec per seat -> engine.start. Injected
faults that have happened do not happen again. A run that restarts repeatedly without progress
fails. This module must not know engines, or how a life is carried out.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path

from ..checkpoints.best import BEST, INDEX, is_of_kept
from ..checkpoints.due import parse_every
from ..checkpoints.folder import FOLDER
from ..checkpoints.resumption import Origin, Resumption, has_checkpoint, locate, read
from ..conditions.faults import FaultPlan
from ..config import RunSettings
from ..context import Context
from ..engines.base import THREADS, MemberSpec
from ..errors import AllGone, ConfigError
from ..program import Program, ScriptProgram, TaskProgram, written
from ..protocols.base import SyncProtocol
from ..report.logs import CLIENTS_RUNS
from ..report.trials import TrialSummary
from ..run.collective import path_of
from ..run_dir import RunFolder, make_folder, refuse_trials
from ..system.files import OpenFolder
from ..system.processors import num_cores
from ..trace import FILE_NAME, Trace, read_trace
from ..trace.records import Ended

WRITTEN = ("logs", FILE_NAME, "metrics.csv", "tensorboard", "wandb", *CLIENTS_RUNS, FOLDER)
"""Files and folders that a run may make before it has begun."""
_SET_ASIDE = (*WRITTEN, "summary.json", "curve.svg", "model.safetensors", INDEX, BEST)
"""Files and folders of a run that was cut off, beside the files of its kept models."""
_TRIES = 3
MOST_IN_VAIN = 3
"""Lives in a row that may end without a new version."""


def claim(settings: RunSettings, program_name: str, say: Callable[[str], None]) -> RunFolder:
    """The folder of the run, locked against all other runs.

    Args:
        say: called with notes: what was set aside, a lock or a link that cannot be made.

    Raises:
        ConfigError: another run is active there or has ended there, or the folder cannot be used.
    """
    for _ in range(_TRIES):
        path = locate(settings)
        if path is None:
            folder = make_folder(settings, program_name)
        else:
            folder = RunFolder(OpenFolder.open(path))
        try:
            for note in filter(None, (folder.hold(), folder.unlinked)):
                say(note)
            if settings.resume is None and has_checkpoint(folder.path):
                raise ConfigError(
                    f"{folder.path} already holds a run's checkpoints; name another folder, or go "
                    f"on with --resume {folder.path}"
                )
            folder.goes_on = path is not None or has_checkpoint(folder.path)
            if settings.resume is not None:
                refuse_trials(folder.path)
            if settings.resume is not None and not folder.goes_on:
                say(_set_aside(folder) or "no run to resume yet: starting a new one")
        except FileNotFoundError:
            folder.close()
        except BaseException:  # raised again: the folder is closed
            folder.close()
            raise
        else:
            return folder
    raise ConfigError(f"other runs keep removing {folder.path}; name another folder")


def _set_aside(folder: RunFolder) -> str:
    """Move away the files of a run that was cut off before its first checkpoint; return a note.

    ConfigError: the run has ended.
    """
    place = folder.place
    if not place.has(FILE_NAME):
        return ""
    if not _was_cut_off(folder):
        raise ConfigError(
            f"{folder.path} already holds a run, which has ended; name another folder, or read its "
            f"report: paceline report {folder.path}"
        )
    names = place.names()
    number = next(n for n in range(1, len(names) + 2) if f"cut-off-{n}" not in names)
    with closing(place.make_inner(f"cut-off-{number}", is_new=True)) as aside:
        kept = [name for name in names if is_of_kept(name)]
        # The trace last: if this is cut off, it marks the remaining files as a run's.
        for name in sorted((*_SET_ASIDE, *kept), key=lambda name: name == FILE_NAME):
            if name in names:
                place.rename(name, name, into=aside)
        return (
            f"the run in {folder.path} was cut off before its first checkpoint: it starts from the "
            f"beginning; its files are in {aside.path}"
        )


def _was_cut_off(folder: RunFolder) -> bool:
    """Whether the run did not end as intended."""
    try:
        *_, last = [None, *read_trace(folder.path / FILE_NAME)]
    except ConfigError:  # a damaged line: it did not end, or the trace cannot tell
        return True
    return not isinstance(last, Ended) or last.reason.startswith(("failed: ", "interrupted"))


class Lives:
    """The lives of one run.

    Attributes:
        settings: for the next life.
        origin: where the next life comes from.
        place: the folder of the run.
        within: the folder's identity, which changes if it was deleted and made again.
        has_begun: whether its workers ever began to train.
        trials: summaries of its script's trials.
    """

    def __init__(self, settings: RunSettings, origin: Origin, place: OpenFolder) -> None:
        self.settings = settings
        self.origin = origin
        self.place = place
        self.within = place.identity
        self.has_begun = origin.resumption is not None
        self.trials: list[TrialSummary] = []
        self._furthest = -1 if origin.resumption is None else origin.resumption.version
        self._num_in_vain = 0

    def lived(self, trace: Trace) -> None:
        """A life that wrote this trace is over."""
        self.has_begun |= trace.has_begun
        self.within = trace.within

    def go_on(self, error: AllGone, version: int, happened: Sequence[str]) -> str:
        """Prepare the next life, after one that reached ``version``; return a note.

        Raises:
            AllGone: too many lives ended without progress.
        """
        self._num_in_vain = 0 if version > self._furthest else self._num_in_vain + 1
        self._furthest = max(self._furthest, version)
        if self._num_in_vain >= MOST_IN_VAIN:
            raise AllGone(
                f"{error}\nthe run ended like this {self._num_in_vain} times without getting "
                f"beyond update {max(self._furthest, 0)}: it is not restarted"
            )
        settings = self.settings
        plan = FaultPlan.parse(settings.fault, settings.workers).without(happened)
        self.settings = replace(settings, fault=tuple(map(str, plan.faults)))
        folder = self.place.path
        resumption = read(folder) if has_checkpoint(folder) else None
        where = "from the start" if resumption is None else f"from update {resumption.version}"
        note = f"no worker is left ({error}): the run begins again {where}"
        self.origin = Origin(about=self.origin.about, resumption=resumption, note=note)
        return note


def ending(error: BaseException) -> str:
    """The reason of a run that ended early, for its trace."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    first = str(error).partition("\n")[0].rstrip(":") or type(error).__name__
    return f"failed: {first}"


def member_specs(
    program: Program,
    settings: RunSettings,
    protocol: SyncProtocol,
    place: OpenFolder,
    resumption: Resumption | None,
) -> Iterator[MemberSpec]:
    """One spec per worker; members of a resumed run have new numbers."""
    context = context_of(program, settings, protocol, place)
    folder = place.path.resolve()
    search_path = tuple(str(Path(entry).resolve()) for entry in sys.path)
    exported = {name: os.environ[name] for name in THREADS if name in os.environ}
    first_member = 0
    if resumption is not None:
        first_member = resumption.first_member
        path = str(resumption.checkpoint.path.resolve())
        context = replace(
            context, resume=path, first_epoch=resumption.epoch, place=resumption.place
        )
    for seat in range(1 if settings.dry_run else settings.workers):
        yield MemberSpec(
            member=first_member + seat,
            seat=seat,
            num_seats=settings.workers,
            threads=settings.threads or _default_threads(settings.workers),
            log=str(folder / "logs" / f"worker-{seat}.log"),
            context=context.write(),
            search_path=search_path,
            is_path_first=isinstance(program, TaskProgram),
            environment=exported | _ranks(program, seat, settings.workers),
            preload=settings.preload,
        )


def _default_threads(workers: int) -> int:
    """Each worker's share of the cores, at most the user's OMP_NUM_THREADS."""
    share = max(1, num_cores() // workers)
    exported = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return min(share, int(exported)) if exported.isdecimal() and int(exported) else share


def _ranks(program: Program, seat: int, workers: int) -> dict[str, str]:
    """The environment variables from which scripts read their rank."""
    if isinstance(program, ScriptProgram) and not program.has_ranks:
        return {}
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK"), str(seat))
    return ranks | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(workers))


def context_of(
    program: Program, settings: RunSettings, protocol: SyncProtocol, place: OpenFolder
) -> Context:
    """The context that ``connect`` finds in every member."""
    names = {field.name for field in fields(Context)} & {
        field.name for field in fields(RunSettings)
    }
    context = Context(**{name: getattr(settings, name) for name in names})
    return replace(
        context,
        name=program.name,
        program=written(program),
        parts=protocol.num_pushes,
        num_steps=protocol.num_steps,
        is_difference=protocol.update_rule == "mean",
        outer=str(protocol.outer),
        fragments=protocol.streaming.num_fragments,
        overlap=protocol.streaming.overlap_steps,
        num_as_full_sync=protocol.num_as_full_sync,
        averages=protocol.num_pushes > 1 or (protocol.is_adaptive and settings.workers > 1),
        cancels=protocol.cancels,
        is_spmd=protocol.is_spmd,
        is_adaptive=protocol.is_adaptive,
        path=path_of(settings, protocol),
        resume=None,
        run_dir=str(place.path.resolve()),
        run_identity=place.identity[1:] if settings.engine == "torchrun" else place.identity,
        checkpoints=settings.checkpoint_every != "never",
        checkpoints_inside=parse_every(settings.checkpoint_every).unit in ("s", "updates"),
        source="the task's own" if isinstance(program, TaskProgram) else "the script's own",
    )
