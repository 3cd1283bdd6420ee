"""Follow a run from outside, by its trace, while it is written.

    the run --> trace.jsonl --(only what is new)--> tally --> progress --> an observer

The run is not involved and never waits: the watcher reads once a second a file that is written
anyway, at low priority. It ends when no process works in the folder any more; the trace alone does
not tell, since a run may be resumed after its end. This module must not know terminals.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ConfigError
from ..events import Apply, Joined, Left
from ..run_dir import is_at_work
from ..trace import FILE_NAME, read_header
from ..trace.following import FollowedTrace
from ..trace.records import Ended, Evaluated, Header, Heard, Noted, Ordered, Record, Resumed
from .live import Observer, Progress, WorkerProgress
from .tally import Tally
from .trials import has_trials

_LAST = 20
"""Number of updates over which the loss is averaged."""


@dataclass(slots=True)
class WatchedRun:
    """The state of a run, from its trace so far.

    Attributes:
        tally: totals of the trace.
        has_ended: whether the trace ends with the run's end.
    """

    tally: Tally = field(default_factory=Tally)
    has_ended: bool = False
    _seats: dict[int, int] = field(default_factory=dict)
    _alive: dict[int, int] = field(default_factory=dict)
    """Worker -> its newest member, without workers that are gone."""
    _staleness: dict[int, int] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        """Add the next record. ConfigError: it contradicts earlier ones."""
        match record:
            case Heard(fact=Joined(member, _)):
                worker = member if record.worker is None else record.worker
                self._seats[member], self._alive[worker] = worker, member
            case Heard(fact=Left() as fact):
                worker = self._seats.get(fact.member, fact.member)
                if self._alive.get(worker) == fact.member:
                    del self._alive[worker]
            case Ordered(order=Apply(tickets=tickets)):
                for ticket in tickets:
                    worker = self._seats.get(ticket.member, ticket.member)
                    late = self.tally.version - ticket.version
                    self._staleness[worker] = self._staleness.get(worker, 0) + max(0, late)
            case Ended():
                self.has_ended = True
            case Resumed():
                self.has_ended = False
                self._alive.clear()
        self.tally.add(record)

    def tell(self, record: Record, observer: Observer) -> None:
        """Report a note or an evaluation; one inside an epoch is reported with its version."""
        if isinstance(record, Noted):
            observer.note(record.text)
        elif isinstance(record, Evaluated):
            epochs, here = self.tally.epochs, (record.epoch, record.version)
            is_at_end = bool(epochs) and here == (epochs[-1].epoch, epochs[-1].end_version)
            observer.evaluated(record.epoch, record.means(), None if is_at_end else record.version)

    def progress(self) -> Progress:
        """Return the progress as the run itself shows it."""
        tally, header = self.tally, self._header()
        trained_s, epochs = tally.trained_s, header.number("epochs")
        losses = [update.loss for update in tally.last_updates(_LAST)]
        return Progress(
            t=tally.last_s,
            epoch=tally.epochs[-1].epoch if tally.epochs else 0,
            epochs=epochs or None,
            version=tally.version,
            updates_total=header.number("updates_total") or None,
            samples=tally.samples,
            samples_per_s=tally.samples / trained_s if trained_s else 0.0,
            loss=sum(losses) / len(losses) if losses else math.nan,
            eta_s=_left_s(tally, header, trained_s),
            workers=tuple(
                self._worker_progress(worker, trained_s) for worker in sorted(tally.workers)
            ),
        )

    def _header(self) -> Header:
        """Return the header with the changes of later resumes."""
        first = self.tally.header
        fields = {} if first is None else dict(first.fields)
        for resume in self.tally.resumes:
            fields |= resume.changes
        return Header(fields=fields)

    def _worker_progress(self, worker: int, trained_s: float) -> WorkerProgress:
        is_between = bool(self.tally.epochs) and self.tally.epochs[-1].is_whole
        state = "between epochs" if is_between else "training"
        return WorkerProgress.of(
            self.tally.workers[worker],
            worker=worker,
            state=state if worker in self._alive else "gone",
            trained_s=trained_s,
            staleness=self._staleness.get(worker, 0),
        )


def _left_s(tally: Tally, header: Header, trained_s: float) -> float | None:
    """Seconds to the first of the run's limits; None: unknown."""
    ends_s = (_work_left_s(tally, header, trained_s), _time_left_s(tally, header))
    return min((end_s for end_s in ends_s if end_s is not None), default=None)


def _work_left_s(tally: Tally, header: Header, trained_s: float) -> float | None:
    """Seconds left by updates, or by samples if the trace has no number of updates."""
    done, total = tally.version, header.number("updates_total")
    if not total and header.text("order") not in ("numbers", "stream"):
        done, total = tally.samples, header.number("num_samples") * header.number("epochs")
    if not total or not done or not trained_s:
        return None
    return max(0.0, trained_s * (total - done) / done)


def _time_left_s(tally: Tally, header: Header) -> float | None:
    """Seconds left of ``--seconds``, which count from the start of the first epoch."""
    seconds = header.fields.get("seconds")
    if not isinstance(seconds, int | float) or not tally.epochs:
        return None
    return max(0.0, seconds - (tally.last_s - tally.first_s))


def watch(folder: Path, observer: Observer, pause: Callable[[], None]) -> bool:
    """Follow a run until no process works on it; return whether its trace has an end.

    Args:
        folder: the run's folder.
        observer: receives notes, evaluations and progress.
        pause: waits until the next reading.

    Raises:
        ConfigError: there is no run, or its trace is damaged.
    """
    if not folder.is_dir():
        raise ConfigError(f"no run found at {folder}; runs are in runs/, see: ls runs")
    run, reported = WatchedRun(), set[str]()
    with _opened(folder, pause) as trace:
        while True:
            # Checked first, so that the last lines are read.
            is_over = not (is_at_work(folder) or (not run.has_ended and _is_searched(folder)))
            for record in trace.new():
                if isinstance(record, Header):  # also if a resume rewrote the trace
                    run = WatchedRun()
                run.add(record)
                if isinstance(record, Noted | Evaluated) and (text := repr(record)) not in reported:
                    reported.add(text)
                    run.tell(record, observer)
            if run.tally.header is None:
                _refuse_search(folder)
            else:
                observer.progress(run.progress())
            if is_over:
                return run.has_ended
            pause()


def _is_searched(folder: Path) -> bool:
    """Whether this is a trial's folder, and a process works on its search, which has the lock."""
    return has_trials(folder.parent) and is_at_work(folder.parent)


def _refuse_search(folder: Path) -> None:
    """Raise ConfigError if the folder holds trials, each with its own trace."""
    if has_trials(folder):
        raise ConfigError(
            f"{folder} holds the trials of a script, each a run of its own: paceline watch "
            f"{folder}/NAME follows one of them, paceline report {folder} shows all"
        )


def _opened(folder: Path, pause: Callable[[], None]) -> FollowedTrace:
    """Open the trace; wait for it while a run is starting."""
    path = folder / FILE_NAME
    while not path.is_file() and (is_at_work(folder) or _is_searched(folder)):
        pause()
    try:
        return FollowedTrace(path)
    except OSError:
        read_header(path)  # raises with the reason and what to give instead
        raise ConfigError(f"{path} cannot be read") from None
