"""What ``train`` and ``launch`` share: run a program under an observer, and print JSON."""

import json
from collections.abc import Sequence
from contextlib import nullcontext

from ..config import RunSettings
from ..errors import Interrupted
from ..program import Program
from ..system.signals import ended_by_signals


def run_program(program: Program, settings: RunSettings, notes: Sequence[str] = ()) -> None:
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
