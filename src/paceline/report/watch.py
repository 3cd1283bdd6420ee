"""A run that is under way, seen from outside: what its trace says, as it is written.

    the run --> trace.jsonl --(only what is new)--> tally --> progress --> an observer

The run is asked nothing and never waits: the watcher reads a file that is written anyway, once
a second, and lets whoever else wants to compute go first. It ends when nobody is at work in the
folder any more: the trace alone does not tell, since a run may go on behind an end. This module
must not know terminals.
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
"""Updates that the loss is a mean of."""


@dataclass(slots=True)
class WatchedRun:
    """What is known of a run by now.

    Attributes:
        has_ended: whether its trace says so.
    """

    tally: Tally = field(default_factory=Tally)
    has_ended: bool = False
    _seats: dict[int, int] = field(default_factory=dict)
    _alive: dict[int, int] = field(default_factory=dict)
    """Worker -> the member that is its newest life; without those that are gone."""
    _behind: dict[int, int] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        """One record, in the trace's order. ConfigError: it contradicts those before."""
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
                    self._behind[worker] = self._behind.get(worker, 0) + max(0, late)
            case Ended():
                self.has_ended = True
            case Resumed():
                self.has_ended = False
                self._alive.clear()
        self.tally.add(record)

    def tell(self, record: Record, observer: Observer) -> None:
        """Of a note or an evaluation; one that is not at an epoch's end is its version's."""
        if isinstance(record, Noted):
            observer.note(record.text)
        elif isinstance(record, Evaluated):
            epochs, here = self.tally.epochs, (record.epoch, record.version)
            is_at_end = bool(epochs) and here == (epochs[-1].epoch, epochs[-1].end_version)
            observer.evaluated(record.epoch, record.means(), None if is_at_end else record.version)

    def progress(self) -> Progress:
        """As the run itself would show it."""
        tally, header = self.tally, self._header()
        trained_s, epochs = tally.trained_s, header.number("epochs")
        losses = [update.loss for update in tally.updates[-_LAST:]]
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
            workers=tuple(self._one(worker, trained_s) for worker in sorted(tally.workers)),
        )

    def _header(self) -> Header:
        """The first line, with what was changed where the run went on."""
        first = self.tally.header
        fields = {} if first is None else dict(first.fields)
        for resume in self.tally.resumes:
            fields |= resume.changes
        return Header(fields=fields)

    def _one(self, worker: int, trained_s: float) -> WorkerProgress:
        one = self.tally.workers[worker]
        total_s = one.compute_s + one.wait_s + one.push_s + one.superseded_s
        share = 1.0 / total_s if total_s else 0.0
        is_between = bool(self.tally.epochs) and self.tally.epochs[-1].is_whole
        state = "between epochs" if is_between else "training"
        return WorkerProgress(
            worker=worker,
            state=state if worker in self._alive else "gone",
            pushes=one.pushes,
            samples_per_s=one.samples / trained_s if trained_s else 0.0,
            compute_share=one.compute_s * share,
            input_share=one.input_s * share,
            wait_share=one.wait_s * share,
            push_share=one.push_s * share,
            mean_staleness=self._behind.get(worker, 0) / one.pushes if one.pushes else 0.0,
        )


def _left_s(tally: Tally, header: Header, trained_s: float) -> float | None:
    """Seconds to whichever end comes first; None: nobody can say."""
    ends_s = (_work_left_s(tally, header, trained_s), _time_left_s(tally, header))
    return min((end_s for end_s in ends_s if end_s is not None), default=None)


def _work_left_s(tally: Tally, header: Header, trained_s: float) -> float | None:
    """By the updates of the whole run; of a trace without their number by its samples."""
    done, total = tally.version, header.number("updates_total")
    if not total and header.text("order") not in ("numbers", "stream"):
        done, total = tally.samples, header.number("num_samples") * header.number("epochs")
    if not total or not done or not trained_s:
        return None
    return max(0.0, trained_s * (total - done) / done)


def _time_left_s(tally: Tally, header: Header) -> float | None:
    """Of ``--seconds``, which count from the first epoch's begin."""
    seconds = header.fields.get("seconds")
    if not isinstance(seconds, int | float) or not tally.epochs:
        return None
    return max(0.0, seconds - (tally.last_s - tally.first_s))


def watch(folder: Path, observer: Observer, pause: Callable[[], None]) -> bool:
    """Follow a run to its end; whether it came to one.

    Args:
        folder: of the run.
        observer: receives what happens.
        pause: returns when it is time for the next look.

    Raises:
        ConfigError: there is no run, or its trace is damaged.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no run at {folder}; runs lie under runs/, see: ls runs")
    run, told = WatchedRun(), set[str]()
    with _opened(folder, pause) as trace:
        while True:
            is_left = not is_at_work(folder)  # asked first: what it wrote last is then there
            for record in trace.new():
                if isinstance(record, Header):  # of a run that goes on from an earlier line, too
                    run = WatchedRun()
                run.add(record)
                if isinstance(record, Noted | Evaluated) and (words := repr(record)) not in told:
                    told.add(words)
                    run.tell(record, observer)
            if run.tally.header is None:
                _refuse_search(folder)
            else:
                observer.progress(run.progress())
            if is_left:
                return run.has_ended
            pause()


def _refuse_search(folder: Path) -> None:
    """Raise ConfigError where each trial of a script has a trace of its own."""
    if has_trials(folder):
        raise ConfigError(
            f"{folder} holds the trials of a script, each a run of its own: paceline watch "
            f"{folder}/NAME follows one of them, paceline report {folder} shows all"
        )


def _opened(folder: Path, pause: Callable[[], None]) -> FollowedTrace:
    """The trace of a run that may be about to begin."""
    path = folder / FILE_NAME
    while not path.is_file() and is_at_work(folder):
        pause()
    try:
        return FollowedTrace(path)
    except OSError:
        read_header(path)  # says why it cannot be read, and what to name instead
        raise ConfigError(f"{path} cannot be read") from None
