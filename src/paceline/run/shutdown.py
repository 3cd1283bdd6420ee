"""A stop that the user asks for, which takes at most ten seconds; or one that a metric asks for.

     0 s   asked: stop at the next step border, with a checkpoint
     1 s   peers that run the script's own code leave the others in the middle of it
     2 s   steps that are still computing are cancelled
     3 s   workers that block the others are ended; the others repair what those had begun, keep the
           last version, and have a second for it before they are checked again
     7 s   workers that are still there are named, and the run is over; the engine ends them

A worker that saves or evaluates by itself after the stop has until then: a batch system kills all
processes a little later. Ranks cannot cancel a step or repair for another: all have 20 s, since
torchrun and Slurm, which started them, kill after 30. Asking a worker where it is takes a moment,
so only a few are asked, however many block a stop. This module must not know messages, processes
or signals.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..config import RunSettings, flag_of
from ..core.stats import accuracy_among
from ..report.live import Observer
from ..stopping import StopRule, StopRules
from ..trace.records import Evaluated
from .peers import Peers
from .roster import RosterEntry
from .state import RunState

_HURRY_S, _CALL_OFF_S, _WAY_S, _END_S = 1.0, 2.0, 3.0, 7.0
_RANKS_END_S = 20.0
_MEND_S = 1.0
"""For workers that waited for one that was ended: to repair what it had begun, and go on."""
_MOST_NAMED = 3
"""Workers that are named at once."""
_MOST_ASKED = 6
"""Workers that are asked where they are, in the whole stop: each may take 0.6 s to answer."""


class Shutdown:
    """The timing of one run's stop.

    Args:
        holds_up: whether others cannot proceed before this member does something.

    Attributes:
        is_over: whether no member is waited for any more.
    """

    def __init__(self, run: RunState, peers: Peers, holds_up: Callable[[int], bool]) -> None:
        self._run = run
        self._peers = peers
        self._holds_up = holds_up
        self._stopped_s = self._asked_s = math.inf
        self._ended: set[int] = set()
        self._last_ended_s = -math.inf
        self._num_asked = 0
        self.is_over = False

    def stopped(self, now_s: float) -> None:
        """The run stops at the next step border, for whatever reason."""
        self._stopped_s = now_s

    def asked(self, now_s: float) -> None:
        """The user asks for the end; may be called again."""
        self._asked_s = min(self._asked_s, now_s)

    @property
    def is_asked(self) -> bool:
        """Whether the user asked for the end, so that late workers are ended."""
        return self._asked_s < math.inf

    def tick(self, now_s: float) -> None:
        """Do what is due."""
        run, late_s = self._run, now_s - self._asked_s
        if run.engine.processes is None:
            if not run.engine.traits.has_store:  # else threads of this process: nobody can end one
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
            self._end_blocking(now_s)
        self._end_if_late(late_s, _END_S)

    def _end_blocking(self, now_s: float) -> None:
        """End the members that block others."""
        if now_s - self._last_ended_s < _MEND_S:
            return
        blocking = [
            entry
            for entry in self._run.roster.live
            if not entry.is_done
            and entry.number not in self._ended
            and self._holds_up(entry.number)
        ]
        if not blocking:
            return
        self._last_ended_s = now_s
        self._name(blocking, f"has not stopped after {now_s - self._asked_s:.1f} s")
        for entry in blocking:
            self._ended.add(entry.number)
            self._run.processes.end(entry.number)

    def _end_if_late(self, late_s: float, end_s: float) -> None:
        if late_s > end_s and not self.is_over:
            self.is_over = True
            late = [entry for entry in self._run.roster.live if not entry.is_done]
            self._name(late, f"has not come to its end {late_s:.1f} s after the stop")

    def _name(self, late: Sequence[RosterEntry], complaint: str) -> None:
        """Say who is ended for being late, of a few with where they are."""
        run = self._run
        for entry in late[:_MOST_NAMED]:
            where = ""
            if run.engine.processes is not None and self._num_asked < _MOST_ASKED:
                self._num_asked += 1
                where = f": {run.processes.whereabouts(entry.number)}"
            run.notes.say(f"worker {entry.seat} {complaint}{where}; it is ended")
        if len(late) > _MOST_NAMED:
            run.notes.say(f"{len(late) - _MOST_NAMED} more workers are ended")


class EarlyStop:
    """The end of a run by a metric: by its settings, or by its script."""

    def __init__(self, settings: RunSettings, observer: Observer) -> None:
        self._target = settings.target_accuracy
        self._keeps_best = settings.keep_best
        self._is_dry = settings.dry_run
        self._observer = observer
        self._measured: dict[tuple[str, ...], bool] = {}
        """Names that evaluations measured -> whether an accuracy is among them."""
        self._is_judged = False
        self._rules = StopRules()

    def add(self, rule: StopRule, heard: Iterable[Evaluated]) -> None:
        """Add a rule of the script's.

        Args:
            heard: earlier evaluations, in a resumed run.
        """
        self._rules.add(rule, (evaluation.means() for evaluation in heard))

    def look(self, metrics: Mapping[str, float], stop: Callable[[str], None]) -> None:
        """Stop if an evaluation with these means meets the target or a rule."""
        name = accuracy_among(metrics)
        names = tuple(sorted(metrics))
        if names in self._measured:
            self._judge_names()  # when one kind comes again, the epoch has had all kinds
        self._measured[names] = name is not None
        if self._target is not None and name is not None and metrics[name] >= self._target:
            stop(f"accuracy {metrics[name]:.4f} reached {self._target:g}")
        elif reason := self._rules.hear(metrics):
            stop(reason)

    def close(self) -> None:
        """The run is over: name the settings and rules that had no effect."""
        for name in self._rules.unmeasured():
            self._observer.note(
                f"pace.stop_when({name!r}) did nothing: no pace.evaluate measured that"
            )
        self._judge_names()
        if not self._measured and not self._is_dry:
            for flag in self._flags(needs_accuracy=False):
                self._observer.note(
                    f"{flag} had no effect: pace.evaluate(fn, loader) was not called"
                )

    def _judge_names(self) -> None:
        if self._is_judged or not self._measured or any(self._measured.values()):
            return
        self._is_judged = True
        metrics = {name for names in self._measured for name in names}
        measured = ", ".join(map(repr, sorted(metrics))) or "nothing"
        for flag in self._flags(needs_accuracy="loss" in metrics):
            self._observer.note(
                f"{flag} has no effect: pace.evaluate measures {measured}, and none of these is "
                "named acc or accuracy, or is the only one that ends so; let fn return "
                "{'acc': (right, count)}"
            )

    def _flags(self, *, needs_accuracy: bool) -> list[str]:
        """The flags that are set; ``keep_best`` can also go by a loss."""
        settings = [("target_accuracy", self._target is not None)]
        settings += [] if needs_accuracy else [("keep_best", self._keeps_best)]
        return [flag_of(name) for name, is_set in settings if is_set]
