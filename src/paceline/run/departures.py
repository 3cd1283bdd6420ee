"""How members end: done, failed or gone; and which member is the main one then.

    Done         its script is over       Failed    its error, before its process ends
    ProcessLeft  its process is gone -> its work returns, the others go on; or the run ends with it

This module must not know processes, sockets, tensors or terminals.
"""

from collections.abc import Callable
from typing import Protocol

from ..engines.base import ProcessLeft
from ..errors import AllGone, ConfigError, ScriptLost, WorkerError
from ..wire.messages import BeMain, Done, Failed, LoopLeft, Whose
from .calls import Calls
from .epochs import EpochBorders
from .peers import Peers
from .roster import RosterEntry
from .state import RunState

_ERRORS: dict[Whose, type[WorkerError] | type[ConfigError]] = {
    Whose.WORKER: WorkerError,
    Whose.USER: ConfigError,
    Whose.ALL: AllGone,
}
"""The error to raise by whose fault a failure is; after ``AllGone`` no worker can go on."""


def _rank(entry: RosterEntry) -> tuple[bool, int]:
    """Sort key: the member with the lowest becomes the main one."""
    return not entry.has_joined, entry.seat


class Output(Protocol):
    """Shows what the main worker prints."""

    def show(self) -> None:
        """Show what is new."""

    def follow(self, seat: int) -> None:
        """From now on this worker is the main one."""


class Departures:
    """The ends of one run's members."""

    def __init__(
        self,
        run: RunState,
        borders: EpochBorders,
        peers: Peers,
        calls: Calls,
        output: Output,
        begin_again: Callable[[RosterEntry], int | None],
    ) -> None:
        self._run = run
        self._borders = borders
        self._peers = peers
        self._calls = calls
        self._output = output
        self._begin_again = begin_again
        self._words: dict[int, WorkerError | ConfigError] = {}
        """The errors of members that failed."""
        self._main: int | None = None
        """The main member, once it is not the first one."""
        self._lost_main: RosterEntry | None = None
        """The main worker, if it died after its loop."""
        self.goes_on = False
        """Whether the others go on when one is gone before any description: between trials."""

    def done(self, member: int, message: Done) -> None:
        """A member's script is over; the others go on and do the work that it held."""
        run = self._run
        entry = run.roster[member]
        entry.is_done, entry.is_over, entry.end = True, True, "its script ended"
        if run.is_open and not run.ending and (run.steps_together or not run.by_peers):
            self._refuse_to_lose(entry)
            run.observer.note(
                f"worker {entry.seat}'s script ended inside epoch {run.coordinator.epoch + 1}; the "
                "others go on without it"
            )
            run.hear_left(member)
        if run.has_begun and not run.engine.traits.has_store:  # this rank stays, but does nothing
            self._calls.left(member)
            self._borders.checkpointing.left(member)
            self._borders.go_on_if_waiting()
        self._borders.end_if_all_rested()

    def ended_trial(self, member: int) -> None:
        """A member's script has left the trial: for the trial it is gone."""
        run, entry = self._run, self._run.roster[member]
        is_needed = not (run.has_said_goodbye or run.ending)
        entry.is_done, entry.is_over, entry.end = True, True, "its part of the trial ended"
        if is_needed and run.is_open:
            self._refuse_to_lose(entry)
        entry.is_alive = False
        self._calls.left(member)
        self._borders.left(member)
        self._borders.has_no_rest(member)
        if run.has_begun:
            self._borders.checkpointing.left(member)
        others = [other for other in run.roster.live if not other.is_done]
        if others and not run.has_said_goodbye:
            if self.is_main(member):  # blocks of pace.once() wait for a main one
                self._main = min(others, key=_rank).number
                run.dispatch.tell(self._main, BeMain())
            self._left_at_end(member)
        self._borders.end_if_all_rested()

    def left_loop(self, member: int, message: LoopLeft) -> None:
        self._run.roster[member].left_loop_at = message.version
        self._calls.heard_end(member)

    def failed(self, member: int, message: Failed) -> None:
        run = self._run
        error = _ERRORS[message.whose](message.text)
        may_go_on = run.settings.on_worker_error == "continue" and message.whose is not Whose.ALL
        if not may_go_on or not (run.has_begun or self.goes_on):
            raise error
        self._words[member] = error  # its process ends now, and says so
        run.observer.note(message.text.replace("the other workers were ended; ", ""))

    def left(self, member: int, message: ProcessLeft) -> None:
        run = self._run
        entry = run.roster[member]
        if not entry.is_alive:
            return
        entry.is_alive, entry.end = False, message.reason
        if entry.is_starting:
            run.observer.note(
                f"worker {entry.seat} did not come back ({message.reason}); see its log"
            )
            return
        if not (run.has_begun or run.ending or entry.is_done):
            self._left_early(entry)
            return
        self._calls.left(member)
        was_resting = self._borders.has_no_rest(member)
        if run.has_begun:
            is_held = was_resting or run.is_open or self._borders.owes_stop
            if self.is_main(member) and not (entry.is_done or is_held):
                self._lost_main = entry
            self._refuse_to_go_on_without(entry)
            # Before another is the main one: that one may be busy from then on.
            self._borders.checkpointing.left(member)
            is_over = entry.is_done and (run.ending or run.has_said_goodbye)
            if self.is_main(member) and not is_over:
                self._choose_main()
        if entry.is_done or run.ending:
            entry.is_done = True
            self._left_at_end(member)
        elif not run.live:
            self._note_end(member)
            raise self._lost(entry)
        else:
            self._refuse_to_lose(entry)
            run.observer.note(f"worker {entry.seat} is gone ({message.reason}); the others go on")
            self._left_others(member)

    def refuse_lost_end(self) -> None:
        """Raise ScriptLost if the main worker died after all updates; the run is over.

        Another member became the main one, but may already have passed what only that one does.
        """
        entry = self._lost_main
        if entry is not None and entry.left_loop_at == self._run.coordinator.version:
            raise ScriptLost(
                f"worker {entry.seat} ended: {entry.end}, after the last update: what the script "
                "does there in the main worker, such as saving, may be missing; the run itself is "
                "complete, and its weights are in its folder"
            )

    def _left_at_end(self, member: int) -> None:
        """A member is gone after its script was over, or while the run ends."""
        run = self._run
        if run.ending or run.by_peers or member not in run.coordinator_members:
            self._note_end(member)
            if run.live:  # they may wait for the version at which they stop
                run.hand_on(member)
        else:  # the others may go on, and must hand no work to it
            run.hear_left(member)
        self._peers.take_over_if_all_interrupted()
        if run.has_begun:
            self._borders.go_on_if_waiting()

    def _left_others(self, member: int) -> None:
        """A member is gone in the middle of the run: its work returns."""
        run = self._run
        self._borders.left(member)
        if run.by_peers:
            run.dispatch.store.alarm()
            self._peers.take_over_if_all_interrupted()
        else:
            if member in run.coordinator_members:
                run.hear_left(member)
            self._borders.open_if_all_arrived()
            self._borders.end_if_all_rested()

    def _left_early(self, entry: RosterEntry) -> None:
        """A member is gone before the run has begun: another replaces it, or the run ends."""
        if self.goes_on and any(not other.is_done for other in self._run.roster.live):
            self._run.observer.note(f"worker {entry.seat} is gone ({entry.end}); the others go on")
            self.find_main()
            return
        number = self._begin_again(entry)
        if number is None:
            general = WorkerError(f"worker {entry.seat} ended: {entry.end}; see its log")
            raise self._words.get(entry.number, general)
        if self.is_main(entry.number):
            self._main = number

    def _lost(self, entry: RosterEntry) -> WorkerError | ConfigError:
        """Returns the error of a run in which no worker is left."""
        words = self._words.get(entry.number)
        if words is not None and not self._run.settings.respawn:
            return words
        text = str(words or f"worker {entry.seat} ended: {entry.end}; see its log")
        return AllGone(text) if self._run.settings.respawn else WorkerError(text)

    def _refuse_to_lose(self, entry: RosterEntry) -> None:
        """Raise AllGone if the others cannot take over its work."""
        if self._run.is_sticky:
            self._note_end(entry.number)
            raise AllGone(
                f"worker {entry.seat} ended: {entry.end}; prepare(sticky=True) gives its part of "
                "every batch to no other worker, since the state its script carried from batch to "
                "batch is lost: --respawn continues from the newest checkpoint, with a fresh state "
                "in all workers"
            )
        if self._run.steps_apart or self._run.steps_together:
            raise self._lost_in_step(entry)

    def _lost_in_step(self, entry: RosterEntry) -> AllGone:
        """Returns the error: others would push another optimizer's steps into the same update."""
        self._note_end(entry.number)
        if self._run.steps_together:
            return AllGone(
                f"worker {entry.seat} ended: {entry.end}; a step that may call the model several "
                "times (LBFGS, closures=True) is made by all workers together, so the others "
                "cannot go on: --respawn continues from the newest checkpoint"
            )
        return AllGone(
            f"worker {entry.seat} ended: {entry.end}; under {self._run.protocol} each step of one "
            "of several optimizers is an update of all workers, and the others cannot take over "
            "the rest of its steps on a mini-batch: --respawn continues from the newest "
            "checkpoint; --protocol k-sync:K, one update per block, goes on without it"
        )

    def _refuse_to_go_on_without(self, entry: RosterEntry) -> None:
        """Raise AllGone if the run cannot go on without it, or nobody can finish its update."""
        run = self._run
        if not (entry.is_done or run.engine.traits.has_store):
            self._note_end(entry.number)
            raise AllGone(
                f"worker {entry.seat} ended: {entry.end}, and engine {run.engine.traits.name} "
                "cannot go on without it: torchrun --max-restarts 3 restarts all workers from the "
                "newest checkpoint"
            )
        heirs = [other for other in run.roster.live if other.has_joined and not other.is_done]
        if run.live and not heirs and run.dispatch.holds_next_job(entry.number):
            self._note_end(entry.number)
            raise AllGone(
                f"worker {entry.seat} ended: {entry.end}, in the middle of an update, and no "
                "worker that came back had joined yet to finish it; see its log, and --resume"
            )

    def _note_end(self, member: int) -> None:
        """Record the end of a member, without consequences."""
        run = self._run
        if member in run.coordinator_members:
            run.trace.left(run.now_s(), member, run.roster[member].end)

    def find_main(self) -> None:
        """Choose another main worker if the main one is gone."""
        if not self._run.roster[self.main].is_alive:
            self._choose_main()

    @property
    def main(self) -> int:
        """The member that prints and saves."""
        return min(self._run.roster.members) if self._main is None else self._main

    def is_main(self, member: int) -> bool:
        """Whether this member prints and saves."""
        return member == self.main

    def _choose_main(self) -> None:
        """The main worker is gone: another one prints and saves from now on.

        It is the one on the lowest live seat among those that have joined, if any: a newcomer's
        script is not where the others are, and may wait for the main one. Also called when the
        main worker's script ended by itself and the others go on.
        """
        live = [entry for entry in self._run.roster.live if not entry.is_done]
        if live:
            main = min(live, key=_rank)
            self._main = main.number
            self._output.follow(main.seat)  # before it is told, so that all it then prints is shown
            self._run.dispatch.tell(main.number, BeMain())
