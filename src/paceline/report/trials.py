"""The results of the trials of one script (``pace.trial()``), side by side.

    RUN/trials.json      names and failures, in order; trial NAME is a run in RUN/NAME

So ``paceline report RUN`` always prints what was printed at the end. This module must not know how
a trial is run.
"""

import json
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, FileError
from ..run_dir import TRIALS
from ..system.files import OpenFolder, open_to_read, read_text
from ..trace import FILE_NAME, has_begun
from .summary import Summary, summarize
from .text import format_duration, or_dash, table

_MOST_BYTES = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSummary:
    """One trial; ``failure`` is its script's error, or empty."""

    name: str
    failure: str
    summary: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialsSummary:
    """The trials of one run, in the order of their start."""

    run_dir: str
    trials: tuple[TrialSummary, ...]

    def to_json(self) -> dict[str, object]:
        """The documented fields: each trial's summary, with its name and failure."""
        return {
            "run_dir": self.run_dir,
            "trials": [
                {"name": trial.name, "failure": trial.failure or None, **trial.summary.to_json()}
                for trial in self.trials
            ],
        }

    def render(self) -> list[str]:
        """Return a table of the trials as lines of plain text."""
        rows = [_row(trial) for trial in self.trials]
        header = ("trial", "test accuracy", "loss", "updates", "time", "ended")
        return [*table(header, rows), f"files: {self.run_dir}"]


def _row(trial: TrialSummary) -> Sequence[str]:
    summary = trial.summary
    return (
        trial.name,
        or_dash(summary.test_accuracy, "{:.4f}".format),
        or_dash(summary.final_loss, "{:.4g}".format),
        f"{summary.updates:,}",
        format_duration(summary.total_s),
        "failed" if trial.failure else summary.ended or "not yet, or cut off",
    )


def write_trials(place: OpenFolder, trials: Sequence[TrialSummary]) -> None:
    """Write the names and failures of the trials."""
    rows = [{"name": trial.name, "failure": trial.failure} for trial in trials]
    place.replace(TRIALS, json.dumps({"trials": rows}, indent=2).encode() + b"\n")


def has_trials(run_dir: Path) -> bool:
    """Whether a script has made trials in this folder. FileError: the folder cannot be read."""
    try:
        return stat.S_ISREG((run_dir / TRIALS).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise FileError(error.errno, error.strerror, str(run_dir)) from None


def read_trials(run_dir: Path) -> TrialsSummary:
    """Read the trials of a run; one that has not ended, or was cut off, comes last.

    Raises:
        FileError: the file of trials cannot be read.
        ConfigError: the file or a trial's trace is damaged.
    """
    path = run_dir / TRIALS
    try:
        rows = json.loads(read_text(open_to_read(path), _MOST_BYTES))["trials"]
        names = [(str(row["name"]), str(row["failure"])) for row in rows]
        if bad_names := [name for name, _ in names if Path(name).name != name]:
            raise ValueError(f"{bad_names[0]!r:.100} is not a trial's name")
    except FileError:
        raise
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {error!s:.200}") from None
    names += [(name, "") for name in _unfinished(run_dir, {name for name, _ in names})]
    return TrialsSummary(
        run_dir=str(run_dir),
        trials=tuple(
            TrialSummary(name=name, failure=failure, summary=summarize(run_dir / name))
            for name, failure in names
        ),
    )


def _unfinished(run_dir: Path, finished: set[str]) -> list[str]:
    """Return trials with a trace that are not in ``finished``: at most one in an intact run."""
    traces = sorted(run_dir.glob(f"*/{FILE_NAME}"))
    return [
        trace.parent.name
        for trace in traces
        if trace.parent.name not in finished and has_begun(trace)
    ]
