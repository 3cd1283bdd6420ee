"""The step time of one worker alone, from an earlier run that is otherwise the same.

    runs/one/trace.jsonl   1 worker, the same program, model, mini-batch and machine -> its step
    runs/four              4 workers start: the step goes into the header of their trace, so that
                           their report stays the same if runs/one is deleted

A run is used only if all fields of `ALIKE` agree; without such a run no efficiency is reported.
What is not in a header, such as how batches are loaded, is not compared. This module must not know
how runs are executed.
"""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..trace import FILE_NAME, read_header, read_trace
from ..trace.records import Header, Resumed
from .tally import Tally

ALIKE = (
    "program", "model", "source", "mini_batch_size", "accumulate", "machine", "device", "cores",
    "threads", "rounding",
)  # fmt: skip
"""Header fields that must agree: what a step computes, and on which machine."""
_ENGINES = ("local", "torchrun")
"""Engines whose workers are processes."""
_MOST_FOLDERS, _MOST_TRACES = 5_000, 200
"""Limits: folders to list, and traces to read (newest first)."""
_FEWEST_UPDATES, _MOST_UPDATES = 10, 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class OneWorker:
    """Seconds of a step of one worker alone, with the name and the day of its run."""

    step_s: float
    run: str
    day: str

    def header(self) -> dict[str, Any]:
        """Return the fields for a trace's header; `from_header` reads them."""
        return {
            "one_worker_step_s": self.step_s,
            "one_worker_run": self.run,
            "one_worker_day": self.day,
        }

    @classmethod
    def from_header(cls, header: Header) -> "OneWorker | None":
        """Read the fields of a header; None if they are missing."""
        step_s = header.fields.get("one_worker_step_s")
        if not isinstance(step_s, int | float) or step_s <= 0:
            return None
        return cls(
            step_s=float(step_s), run=header.text("one_worker_run"),
            day=header.text("one_worker_day"),
        )  # fmt: skip


def find_one_worker(folder: Path, header: Mapping[str, Any]) -> OneWorker | None:
    """Find the newest comparable run of one worker beside ``folder``; None: there is none.

    Args:
        folder: of the new run.
        header: fields of its trace's header.
    """
    if header.get("workers", 1) == 1 or header.get("engine") not in _ENGINES:
        return None
    for trace in _traces_beside(folder):
        with suppress(ConfigError, OSError):  # damaged, of another version, or gone
            candidate = read_header(trace)
            if _is_one_worker(candidate) and all(
                candidate.fields.get(name) == header.get(name) for name in ALIKE
            ):
                step_s = _step_s(trace, candidate)
                if step_s is not None:
                    day = time.strftime("%Y-%m-%d", time.localtime(trace.stat().st_mtime))
                    return OneWorker(step_s=step_s, run=trace.parent.name, day=day)
    return None


def _traces_beside(folder: Path) -> Iterator[Path]:
    """Return the traces in sibling folders, newest first."""
    traces = list[tuple[float, Path]]()
    with suppress(OSError), os.scandir(folder.parent) as entries:
        for entry in islice(entries, _MOST_FOLDERS):
            trace = Path(entry.path) / FILE_NAME
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False) and entry.name != folder.name:
                    traces.append((trace.stat().st_mtime, trace))
    return (trace for _, trace in islice(sorted(traces, reverse=True), _MOST_TRACES))


def _is_one_worker(header: Header) -> bool:
    """Whether the run has one worker without simulated delays."""
    is_alone = header.number("workers") == 1 and header.text("engine") in _ENGINES
    return is_alone and not header.texts("delay") and not header.texts("slow")


def _step_s(trace: Path, header: Header) -> float | None:
    """Seconds of a mini-batch after the warm-up; None if the run was too short."""
    tally = Tally()
    for record in read_trace(trace):
        if isinstance(record, Resumed):
            break  # a resumed run may have other settings
        tally.add(record)
        if tally.warm.updates >= _MOST_UPDATES:
            break
    if tally.warm.updates < _FEWEST_UPDATES or not tally.warm.samples:
        return None
    return header.number("mini_batch_size") * tally.warm.seconds / tally.warm.samples
