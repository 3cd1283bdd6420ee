"""The end that a user asks for, which comes within ten seconds; or that a metric asks for.

     0 s   asked: stop at the next step border, with a checkpoint
     1 s   peers that are busy with the script's own code leave the others in the midst of it
     2 s   what still computes a step is called off
     3 s   who holds the others up is ended: they mend what it had begun, and keep the last version;
           those who waited for it have a second before they are looked at again
     7 s   who is still there is named, and the run is over; the rest is the engine's to end

Who saves or evaluates by itself after the stop has until then: a batch system kills everybody a
little later. Among ranks nobody calls a step off or mends for another: all have 20 s, since those
who began them, torchrun and Slurm, kill after 30. This module must not know messages, processes or
signals.
"""

import math
from collections.abc import Callable, Iterable, Mapping

from ..config import RunSettings, flag_of
from ..core.stats import accuracy_among
from ..report.live import Observer
from ..stopping import StopRule, StopRules
from ..trace.records import Evaluated
from .peers import Peers
from .state import RunState

_HURRY_S, _CALL_OFF_S, _WAY_S, _END_S = 1.0, 2.0, 3.0, 7.0
_RANKS_END_S = 20.0
_MEND_S = 1.0
"""For who waited for a worker that was ended: to mend what that had begun, and go on."""
_MOST_NAMED = 3
"""To ask somebody where it is takes a moment."""


class Shutdown:
    """The hours of one run's end.

    Args:
        holds_up: whether others cannot do what they have to before this member does something.

    Attributes:
        is_over: nobody is waited for any more.
    """

    def __init__(self, run: RunState, peers: Peers, holds_up: Callable[[int], bool]) -> None:
        self._run = run
        self._peers = peers
        self._holds_up = holds_up
        self._stopped_s = self._asked_s = math.inf
        self._ended: set[int] = set()
        self._last_ended_s = -math.inf
        self.is_over = False

    def stopped(self, now_s: float) -> None:
        """The run stops at the next step border, for whatever reason."""
        self._stopped_s = now_s

    def asked(self, now_s: float) -> None:
        """A user wants the end; may be told again."""
        self._asked_s = min(self._asked_s, now_s)

    @property
    def is_asked(self) -> bool:
        """Whether a user wants the end: who is late is ended then."""
        return self._asked_s < math.inf

    def tick(self, now_s: float) -> None:
        """Do what is due."""
        run, late_s = self._run, now_s - self._asked_s
        if run.engine.processes is None:
            if not run.engine.traits.has_store:  # else threads of this process: nobody ends those
                self._end_if_late(late_s, _RANKS_END_S)
            return
        if now_s - self._stopped_s > _CALL_OFF_S:
            if self._peers.by_peers:
                run.dispatch.call_off(run.live)
            elif run.owes_stop:
                run.send_stop()
        if self._peers.by_peers and late_s > _HURRY_S:
            for member in run.live:
                run.processes.hurry(member)
        if late_s > _WAY_S:
            self._clear_the_way(now_s)
        self._end_if_late(late_s, _END_S)

    def _clear_the_way(self, now_s: float) -> None:
        run = self._run
        if now_s - self._last_ended_s < _MEND_S:
            return
        for one in run.roster.live:
            if not one.is_done and one.number not in self._ended and self._holds_up(one.number):
                self._ended.add(one.number)
                self._last_ended_s = now_s
                late_s = now_s - self._asked_s
                where = run.processes.whereabouts(one.number)
                run.notes.say(
                    f"worker {one.seat} does not stop for {late_s:.1f} s: {where}; it is ended"
                )
                run.processes.end(one.number)

    def _end_if_late(self, late_s: float, end_s: float) -> None:
        if late_s > end_s and not self.is_over:
            self.is_over = True
            self._name_the_late(late_s)

    def _name_the_late(self, late_s: float) -> None:
        run = self._run
        late = [one for one in run.roster.live if not one.is_done]
        for one in late[:_MOST_NAMED]:
            where = ""
            if run.engine.processes is not None:
                where = f": {run.processes.whereabouts(one.number)}"
            run.notes.say(
                f"worker {one.seat} has not come to its end {late_s:.1f} s after the stop{where}; "
                "it is ended"
            )
        if len(late) > _MOST_NAMED:
            run.notes.say(f"{len(late) - _MOST_NAMED} more workers are ended")


class EarlyStop:
    """What of one run depends on a metric: by its settings, or by its script."""

    def __init__(self, settings: RunSettings, observer: Observer) -> None:
        self._target = settings.target_accuracy
        self._keeps_best = settings.keep_best
        self._is_dry = settings.dry_run
        self._observer = observer
        self._seen: dict[tuple[str, ...], bool] = {}
        """What evaluations measured, and whether an accuracy was among it; until that is judged."""
        self._is_judged = False
        self._rules = StopRules()

    def add(self, rule: StopRule, heard: Iterable[Evaluated]) -> None:
        """The script asks for this end.

        Args:
            heard: evaluations before, of a run that goes on.
        """
        self._rules.add(rule, (one.means() for one in heard))

    def look(self, metrics: Mapping[str, float], stop: Callable[[str], None]) -> None:
        """An evaluation came to these means."""
        name = accuracy_among(metrics)
        names = tuple(sorted(metrics))
        if names in self._seen:
            self._judge_names()  # an epoch has all kinds of evaluations by the second of one
        self._seen[names] = name is not None
        if self._target is not None and name is not None and metrics[name] >= self._target:
            stop(f"accuracy {metrics[name]:.4f} reached {self._target:g}")
        elif reason := self._rules.hear(metrics):
            stop(reason)

    def close(self) -> None:
        """The run is over: what was asked for and could not be is said."""
        for name in self._rules.unmeasured():
            self._observer.note(
                f"pace.stop_when({name!r}) did nothing: no pace.evaluate measured that"
            )
        self._judge_names()
        if not self._seen and not self._is_dry:
            for flag in self._flags(needs_accuracy=False):
                self._observer.note(f"{flag} did nothing: pace.evaluate(fn, loader) was not called")

    def _judge_names(self) -> None:
        if self._is_judged or not self._seen or any(self._seen.values()):
            return
        self._is_judged = True
        metrics = {one for names in self._seen for one in names}
        measured = ", ".join(map(repr, sorted(metrics))) or "nothing"
        for flag in self._flags(needs_accuracy="loss" in metrics):
            self._observer.note(
                f"{flag} does nothing: pace.evaluate measures {measured}, and none of it is called "
                "acc or accuracy, or alone ends so; let fn return {'acc': (right, count)}"
            )

    def _flags(self, *, needs_accuracy: bool) -> list[str]:
        """What was asked for; the best parameters are also told by a loss."""
        asked = [("target_accuracy", self._target is not None)]
        asked += [] if needs_accuracy else [("keep_best", self._keeps_best)]
        return [flag_of(name) for name, is_asked in asked if is_asked]
