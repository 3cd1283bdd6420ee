"""``paceline launch``: run the user's own script with several workers."""

from dataclasses import replace
from typing import Annotated

from cyclopts import App, Parameter

from ..porting.porting import check_script
from ..program import ScriptProgram
from .flags import NO_FLAGS, ConfigFile, RunFlags, settings_of
from .running import run_program


def register(app: App) -> None:
    """Put the verb into the application."""
    app.command(launch)


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
    program = ScriptProgram(path=script or "", args=args, is_module=module)
    settings = settings_of(flags, config)
    found = check_script(program)
    notes = found.notes
    if settings.workers > 1 and found.writes:
        notes = (*notes, found.writes)
    run_program(replace(program, has_ranks=not found.has_group), settings, notes)
