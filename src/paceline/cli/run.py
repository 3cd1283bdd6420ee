"""``paceline train`` and ``paceline launch``: a task, or a script, by several workers."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Annotated

from cyclopts import Parameter

from ..config import RunSettings
from ..errors import Interrupted
from ..program import Program, ScriptProgram, TaskProgram
from ..system.signals import ended_by_signals
from .flags import NO_FLAGS, ConfigFile, RunFlags, settings_of


def train(task: str, /, *, flags: RunFlags = NO_FLAGS, config: ConfigFile = None) -> None:
    """Train a task with several workers, and report.

    Parameters
    ----------
    task
        softmax, mlp, lenet, alexnet, resnet18, resnet50, transformer, quadratic, or your own:
        package.module:task.
    """
    _run_program(TaskProgram(task=task), settings_of(flags, config))


def launch(
    script: Annotated[str | None, Parameter(show=True)] = None,
    /,
    *args: str,
    module: Annotated[
        bool, Parameter(name=("-m", "--module"), negative=(), help="SCRIPT is a module's name.")
    ] = False,
    flags: RunFlags = NO_FLAGS,
    config: ConfigFile = None,
) -> None:
    """Run a script with several workers: paceline launch --workers 4 train.py --its-own 3

    Parameters
    ----------
    script
        A Python file, or with -m a module. Flags of paceline stand before it.
    args
        The script's own arguments; they are left as they are.
    """
    from ..porting.porting import check_script

    program = ScriptProgram(path=script or "", args=args, is_module=module)
    settings = settings_of(flags, config)
    found = check_script(program)
    notes = found.notes
    if settings.workers > 1 and found.writes:
        notes = (*notes, found.writes)
    _run_program(replace(program, has_ranks=not found.has_group), settings, notes)


def _run_program(program: Program, settings: RunSettings, notes: Sequence[str] = ()) -> None:
    """Run to the end; with ``json`` the one object is the summary, or the plan of a dry run.

    Args:
        notes: what to say of the program before it begins.
    """
    from ..engines.local.client import begun_early

    is_local = settings.engine == "local"
    with ended_by_signals(lambda number: False), begun_early() if is_local else nullcontext():
        _run(program, settings, notes)


def _run(program: Program, settings: RunSettings, notes: Sequence[str]) -> None:
    from ..launch.launcher import launch_run
    from ..report.live import choose_observer

    observer = choose_observer(settings.json)
    for note in notes:
        observer.note(note)
    try:
        summary = launch_run(program, settings, observer)
    except Interrupted as end:
        if settings.json:
            print(json.dumps(end.summary.to_json(), allow_nan=False))
        raise
    finally:
        observer.close()
    if settings.json:
        shown = summary if summary is not None else observer.shown_plan
        assert shown is not None
        print(json.dumps(shown.to_json(), allow_nan=False))
