"""What each member of a run is told before it begins: its seat, its threads, and its context.

    settings + program + protocol -> one MemberSpec a seat -> engine.start

This module must not know how a member comes to life.
"""

import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

from ..checkpoints.resumption import Resumption
from ..config import RunSettings
from ..context import Context
from ..engines.base import MemberSpec
from ..program import Program, ScriptProgram, TaskProgram, written
from ..protocols.base import SyncProtocol
from ..run.describe import choose_path
from ..system.cores import num_cores
from ..system.files import OpenFolder


def member_specs(
    program: Program,
    settings: RunSettings,
    protocol: SyncProtocol,
    place: OpenFolder,
    resumption: Resumption | None,
) -> Iterator[MemberSpec]:
    """What each member is told; members of a run that goes on have new numbers."""
    context = _context(program, settings, protocol, place)
    folder = place.path.resolve()
    first = 0
    if resumption is not None:
        first = resumption.first_member
        path = str(resumption.checkpoint.path.resolve())
        context = replace(
            context, resume=path, first_epoch=resumption.epoch, place=resumption.place
        )
    for seat in range(1 if settings.dry_run else settings.workers):
        yield MemberSpec(
            member=first + seat,
            seat=seat,
            num_seats=settings.workers,
            threads=settings.threads or max(1, num_cores() // settings.workers),
            log=str(folder / "logs" / f"worker-{seat}.log"),
            context=context.write(),
            search_path=tuple(str(Path(entry).resolve()) for entry in sys.path),
            environment=_ranks(program, seat, settings.workers),
        )


def _ranks(program: Program, seat: int, workers: int) -> dict[str, str]:
    """The variables by which scripts ask who they are."""
    if isinstance(program, ScriptProgram) and not program.has_ranks:
        return {}
    own = dict.fromkeys(("RANK", "LOCAL_RANK"), str(seat))
    return own | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(workers))


def _context(
    program: Program, settings: RunSettings, protocol: SyncProtocol, place: OpenFolder
) -> Context:
    """What ``connect`` finds in every member."""
    names = {one.name for one in fields(Context)} & {one.name for one in fields(RunSettings)}
    handed_on = Context(**{name: getattr(settings, name) for name in names})
    return replace(
        handed_on,
        name=program.name,
        program=written(program),
        parts=protocol.num_pushes,
        num_steps=protocol.num_steps,
        is_difference=protocol.update_rule == "mean",
        averages=protocol.num_pushes > 1 or (protocol.is_adaptive and settings.workers > 1),
        cancels=protocol.cancels,
        is_spmd=protocol.is_spmd,
        path=choose_path(settings, protocol),
        resume=None,
        run_dir=str(place.path.resolve()),
        run_identity=place.identity,
        checkpoints=settings.checkpoint_every != "never",
        source="the task's own" if isinstance(program, TaskProgram) else "the script's own",
    )
