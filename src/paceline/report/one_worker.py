"""What one worker alone needs for a step, where a run before this one has measured just that.

    runs/one/trace.jsonl   1 worker, the same program, model, mini-batch and machine -> its step
    runs/four              4 workers begin: the step goes into their trace's header, so that what
                           is reported of them today is reported tomorrow, too

A run counts only where all that `ALIKE` names is the same; where none does, nothing is reported.
What is not in a header, such as how batches are loaded, is not compared. This module must not know
how runs are carried out.
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
"""Fields of a trace's header that must be the same: what a step computes, and on what."""
_ENGINES = ("local", "torchrun")
"""Where each worker is a process of its own."""
_MOST_FOLDERS, _MOST_TRACES = 5_000, 200
"""How many traces to read, the newest first."""
_FEWEST_UPDATES, _MOST_UPDATES = 10, 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class OneWorker:
    """A step of one worker alone, seconds; the name of its run and the day."""

    step_s: float
    run: str
    day: str

    def header(self) -> dict[str, Any]:
        """As fields of a trace's header; `from_header` reads them."""
        return {
            "one_worker_step_s": self.step_s,
            "one_worker_run": self.run,
            "one_worker_day": self.day,
        }

    @classmethod
    def from_header(cls, header: Header) -> "OneWorker | None":
        """What the header says of it; None: nothing."""
        step_s = header.fields.get("one_worker_step_s")
        if not isinstance(step_s, int | float) or step_s <= 0:
            return None
        return cls(
            step_s=float(step_s), run=header.text("one_worker_run"),
            day=header.text("one_worker_day"),
        )  # fmt: skip


def find_one_worker(folder: Path, header: Mapping[str, Any]) -> OneWorker | None:
    """The newest run of one worker beside ``folder`` that is like the one with this header."""
    if header.get("workers", 1) == 1 or header.get("engine") not in _ENGINES:
        return None
    for trace in _traces_beside(folder):
        with suppress(ConfigError, OSError):  # damaged, of another version, or gone
            result = read_header(trace)
            if _is_one_worker(result) and all(
                result.fields.get(name) == header.get(name) for name in ALIKE
            ):
                step_s = _step_s(trace, result)
                if step_s is not None:
                    day = time.strftime("%Y-%m-%d", time.localtime(trace.stat().st_mtime))
                    return OneWorker(step_s=step_s, run=trace.parent.name, day=day)
    return None


def _traces_beside(folder: Path) -> Iterator[Path]:
    """Traces in folders beside this one, the newest first."""
    found = list[tuple[float, Path]]()
    with suppress(OSError), os.scandir(folder.parent) as entries:
        for entry in islice(entries, _MOST_FOLDERS):
            trace = Path(entry.path) / FILE_NAME
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False) and entry.name != folder.name:
                    found.append((trace.stat().st_mtime, trace))
    return (trace for _, trace in islice(sorted(found, reverse=True), _MOST_TRACES))


def _is_one_worker(header: Header) -> bool:
    """One worker that nobody slowed down."""
    is_alone = header.number("workers") == 1 and header.text("engine") in _ENGINES
    return is_alone and not header.texts("delay") and not header.texts("slow")


def _step_s(trace: Path, header: Header) -> float | None:
    """Seconds of a mini-batch, once that run was warm; None: it was too short to say."""
    tally = Tally()
    for record in read_trace(trace):
        if isinstance(record, Resumed):
            break  # it may have gone on as another run
        tally.add(record)
        if tally.warm.updates >= _MOST_UPDATES:
            break
    if tally.warm.updates < _FEWEST_UPDATES or not tally.warm.samples:
        return None
    return header.number("mini_batch_size") * tally.warm.seconds / tally.warm.samples
