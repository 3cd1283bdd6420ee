"""The trials of one script (``pace.trial()``): what each came to, beside each other.

    RUN/trials.json      their names, in order; each is a run in RUN/NAME, whose trace has the rest

So ``paceline report RUN`` says tomorrow what was said at the end. This module must not know how a
trial is carried out.
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
    """One trial; ``failure`` says what its script failed with, empty: nothing did."""

    name: str
    failure: str
    summary: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialsSummary:
    """The trials of one run, in the order in which they were made."""

    run_dir: str
    trials: tuple[TrialSummary, ...]

    def to_json(self) -> dict[str, object]:
        """The documented fields: those of each trial's summary, with its name."""
        return {
            "run_dir": self.run_dir,
            "trials": [
                {"name": trial.name, "failure": trial.failure or None, **trial.summary.to_json()}
                for trial in self.trials
            ],
        }

    def render(self) -> list[str]:
        """A table of them, as lines of plain text."""
        rows = [_row(trial) for trial in self.trials]
        header = ("trial", "test accuracy", "loss", "updates", "time", "ended")
        return [*table(header, rows), f"files: {self.run_dir}"]


def _row(one: TrialSummary) -> Sequence[str]:
    summary = one.summary
    return (
        one.name,
        or_dash(summary.test_accuracy, "{:.4f}".format),
        or_dash(summary.final_loss, "{:.4g}".format),
        f"{summary.updates:,}",
        format_duration(summary.total_s),
        "failed" if one.failure else summary.ended or "not yet, or cut off",
    )


def write_trials(place: OpenFolder, trials: Sequence[TrialSummary]) -> None:
    """Write down which they are."""
    names = [{"name": trial.name, "failure": trial.failure} for trial in trials]
    place.replace(TRIALS, json.dumps({"trials": names}, indent=2).encode() + b"\n")


def has_trials(run_dir: Path) -> bool:
    """Whether a script has made trials in this folder. FileError: it may not be looked into."""
    try:
        return stat.S_ISREG((run_dir / TRIALS).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise FileError(error.errno, error.strerror, str(run_dir)) from None


def read_trials(run_dir: Path) -> TrialsSummary:
    """The trials of the run in this folder; last the one that it is in, or was cut off in.

    Raises:
        FileError: what was written of them may not be read.
        ConfigError: it is damaged, or a trial's trace is.
    """
    path = run_dir / TRIALS
    try:
        rows = json.loads(read_text(open_to_read(path), _MOST_BYTES))["trials"]
        found = [(str(row["name"]), str(row["failure"])) for row in rows]
        if odd := [name for name, _ in found if Path(name).name != name]:
            raise ValueError(f"{odd[0]!r:.100} is no name of a trial")
    except FileError:
        raise
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {error!s:.200}") from None
    found += [(name, "") for name in _unfinished(run_dir, {name for name, _ in found})]
    return TrialsSummary(
        run_dir=str(run_dir),
        trials=tuple(
            TrialSummary(name=name, failure=failure, summary=summarize(run_dir / name))
            for name, failure in found
        ),
    )


def _unfinished(run_dir: Path, finished: set[str]) -> list[str]:
    """The trial that has started and not ended, if there is one."""
    traces = sorted(run_dir.glob(f"*/{FILE_NAME}"))
    return [one.parent.name for one in traces if one.parent.name not in finished and has_begun(one)]
