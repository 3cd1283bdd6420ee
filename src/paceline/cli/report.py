"""``paceline report``: the summary of a run, computed again from its trace."""

import json as json_format
import shutil
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter


def register(app: App) -> None:
    """Put the verb into the application."""
    app.command(report)


def report(
    run: Path = Path("runs/latest"),
    /,
    *,
    json: Annotated[bool, Parameter(negative=(), help="One JSON object.")] = False,
) -> None:
    """Print the summary of a run again.

    Parameters
    ----------
    run
        The run's folder.
    """
    from ..report.summary import summarize
    from ..report.terminal import render_summary

    summary = summarize(run)
    if json:
        print(json_format.dumps(summary.to_json(), allow_nan=False))
        return
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 80
    print("\n".join(render_summary(summary, columns)))
