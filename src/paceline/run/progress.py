"""What a run reports while it goes: notes to its user and its trace, figures to its observer.

    say -> observer (at once) + trace (as soon as it has begun)        record -> log of metrics
    pushes, updates, epochs -> rates, shares, time left -> observer, a few times a second

None of this decides how a run goes: output that cannot be written is reported once, and the run
goes on. This module must not know messages, the reasons of decisions or checkpoints, nor how a
report is shown.
"""

import math
from collections.abc import Callable

from ..config import RunSettings
from ..core.stats import ServiceTimes, SlowWorker
from ..events import Apply, EpochEnd
from ..plan import Plan
from ..report.live import Observer, Progress, WorkerProgress
from ..report.logs import MetricsLog
from ..report.terminal import describe_slow
from ..trace import Trace
from .roster import Roster, RosterEntry

_GOES_ON = "the run goes on"


class Notes:
    """The notes of one run.

    Args:
        log: of metrics, if one was asked for.
        now_s: returns the seconds since the run's start.
    """

    def __init__(
        self, observer: Observer, trace: Trace, log: MetricsLog | None, now_s: Callable[[], float]
    ) -> None:
        self._observer, self._trace, self._log = observer, trace, log
        self._now_s = now_s
        self._said: set[str] = set()
        self._unwritten: list[tuple[float, str]] | None = []
        """Notes from before the trace began; None: it has begun."""

    def begin(self) -> None:
        """The trace has begun."""
        unwritten, self._unwritten = self._unwritten or [], None
        for at_s, text in unwritten:
            self._trace.note(at_s, text)

    def say(self, text: str) -> None:
        """Tell the user, and write it into the trace as soon as there is one."""
        self._observer.note(text)
        if self._unwritten is None:
            self._trace.note(self._now_s(), text)
        else:
            self._unwritten.append((self._now_s(), text))

    def say_once(self, text: str) -> None:
        """Say it, unless it was said before."""
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def record(self, version: int, values: dict[str, float]) -> None:
        """Write into the run's own log of metrics, if one was asked for."""
        if self._log is None:
            return
        try:
            self._log.write(version, self._now_s(), values)
        except OSError as error:
            self.say_once(f"the log of metrics cannot be written ({error.strerror}): {_GOES_ON}")

    def look_at_output(self) -> None:
        """Report output that cannot be written."""
        trace, observer = self._trace, self._observer
        if trace.trouble:
            waits = "nothing is added to it any more" if trace.is_cut else "what is new waits"
            self.say_once(f"{trace.path} cannot be written ({trace.trouble}): {_GOES_ON}; {waits}")
        if observer.trouble:
            self.say_once(f"the run's output cannot be printed ({observer.trouble}): {_GOES_ON}")


_SHOW_S = 0.25
_FEWEST_UPDATES = 3
"""Updates after the first ones before a time left is shown: those include compiling."""


class ProgressMeter:
    """The run's current figures."""

    def __init__(
        self, plan: Plan, settings: RunSettings, roster: Roster, observer: Observer
    ) -> None:
        self._plan = plan
        self._settings = settings
        self._roster = roster
        self._observer = observer
        self._next_s = 0.0
        self._epoch = 0
        self._updates_total = plan.updates_total
        self._version = 0
        self._trained_s = 0.0
        self._before_s = 0.0
        self._first_version = 0
        self._since_s = 0.0
        self._is_training = False
        self._begun: tuple[int, float] | None = None
        """Updates and seconds of training at the first check after an update."""
        self.opened_s = 0.0
        """When the first epoch began."""
        self.loss = math.nan
        self.service = ServiceTimes()
        self._slow: dict[int, SlowWorker] = {}

    def go_on(self, version: int, opened_s: float, trained_s: float) -> None:
        """The run goes on from here; rates are those from now on."""
        self._version = self._first_version = version
        self.opened_s, self._before_s = opened_s, trained_s

    def trained_s(self, now_s: float) -> float:
        """Seconds of training, the whole run's."""
        return self._before_s + self._trained_s + self._since_opened_s(now_s)

    def _since_opened_s(self, now_s: float) -> float:
        return now_s - self._since_s if self._is_training else 0.0

    def opened(self, now_s: float, epoch: int, until: int | None = None) -> None:
        """An epoch opened.

        Args:
            until: the version that ends it, where the run has no other end that is known.
        """
        if self._plan.updates_total is None:
            self._updates_total = until
        if not self.opened_s:
            self.opened_s = now_s
        self._epoch = epoch
        self._since_s = now_s
        self._is_training = True

    def ended(self, now_s: float, order: EpochEnd) -> None:
        self._trained_s += now_s - self._since_s
        self._is_training = False
        self._version = order.version

    def applied(self, order: Apply, version: int) -> None:
        self._version = version
        roster = self._roster
        before = version - 1
        for ticket in order.tickets:
            roster[ticket.member].staleness_versions += before - ticket.version

    def evaluated(self, epoch: int, metrics: dict[str, float], version: int | None) -> None:
        self._observer.evaluated(epoch, metrics, version)

    def show(self, now_s: float) -> None:
        """Report to the observer, a few times a second at most."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + _SHOW_S
        self._name_the_slow()
        trained_s = self._trained_s + self._since_opened_s(now_s)
        samples = sum(entry.samples for entry in self._roster.members.values())
        eta_s = self._eta_s(now_s, trained_s)
        self._observer.progress(
            Progress(
                t=now_s,
                epoch=self._epoch,
                epochs=self._plan.epochs,
                version=self._version,
                updates_total=self._updates_total,
                samples=samples,
                samples_per_s=samples / trained_s if trained_s else 0.0,
                loss=self.loss,
                eta_s=eta_s,
                workers=tuple(self._worker_progress(entry, trained_s) for entry in self._workers()),
            )
        )

    def _eta_s(self, now_s: float, trained_s: float) -> float | None:
        """Seconds left, by the updates after the first ones; None: not known yet."""
        eta_s = None
        total, made = self._updates_total, self._version - self._first_version
        if made and self._begun is None:
            self._begun = (made, trained_s)  # one-time work was done until here
        if total and self._begun is not None and made - self._begun[0] >= _FEWEST_UPDATES:
            each_s = (trained_s - self._begun[1]) / (made - self._begun[0])
            eta_s = max(0.0, (total - self._version) * each_s)
        if self._settings.seconds is not None:
            left_s = max(0.0, self._settings.seconds - (now_s - self.opened_s))
            eta_s = left_s if eta_s is None else min(eta_s, left_s)
        return eta_s

    def _name_the_slow(self) -> None:
        """Report workers that became slow, and their measured cost for the others."""
        slow = {slowness.worker: slowness for slowness in self.service.slow()}
        for worker, slowness in slow.items():
            if worker not in self._slow:
                self._observer.note(describe_slow(slowness, *self._cost(worker)))
        self._slow = slow

    def _cost(self, worker: int) -> tuple[float, float]:
        """Until now: the share of the others' time that they waited, and this worker's pushes as a
        share of the others' mean."""
        own = self._roster.worker(worker)
        others = [entry for entry in self._workers() if entry.seat != worker]
        waited_s, pushes = sum(one.wait_s for one in others), sum(one.pushes for one in others)
        total_s = waited_s + sum(one.compute_s + one.push_s + one.superseded_s for one in others)
        return (
            waited_s / total_s if total_s else 0.0,
            own.pushes * len(others) / pushes if pushes else 1.0,
        )

    def _workers(self) -> list[RosterEntry]:
        """Each worker, with the counts of all its lives."""
        seats = {entry.seat for entry in self._roster.members.values()}
        return [self._roster.worker(seat) for seat in sorted(seats)]

    def _worker_progress(self, entry: RosterEntry, trained_s: float) -> WorkerProgress:
        state = "training" if entry.is_alive and self._is_training else "between epochs"
        if entry.seat in self._slow and self._is_training:
            state = f"slow {self._slow[entry.seat].factor:.1f}x"
        return WorkerProgress.of(
            entry,
            worker=entry.seat,
            state=state if entry.is_alive else "gone",
            trained_s=trained_s,
            staleness=entry.staleness_versions,
        )
