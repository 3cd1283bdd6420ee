"""How members end: done, failed or gone; and who is the main one then.

    Done         its script is over       Failed    its last words, before its process ends
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
"""Whose a member's failure is: its own, the user's, or none that anybody can go on after."""


def _rank(one: RosterEntry) -> tuple[bool, int]:
    """The lowest of them is the next main one."""
    return not one.has_joined, one.seat


class Output(Protocol):
    """What the main worker prints."""

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
        """Last words of members that failed."""
        self._main: int | None = None
        """Once it has moved."""
        self._lost_main: RosterEntry | None = None
        """The main worker that died behind a loop."""
        self.goes_on = False
        """Whether others go on where one is gone before anything was described: between trials."""

    def done(self, member: int, message: Done) -> None:
        """Its script is over; the others go on, and do what it held."""
        run = self._run
        one = run.roster[member]
        one.is_done, one.is_over, one.end = True, True, "its script ended"
        if run.is_open and not run.ending and (run.steps_together or not run.by_peers):
            self._refuse_to_lose(one)
            run.observer.note(
                f"worker {one.seat}'s script ended inside epoch {run.coordinator.epoch + 1}; the "
                "others go on without it"
            )
            run.hear_left(member)
        self._borders.end_if_all_rested()

    def ended_trial(self, member: int) -> None:
        """Its script has left the trial, and does nothing more for it: as if it were gone."""
        run, one = self._run, self._run.roster[member]
        is_needed = not (run.has_said_goodbye or run.ending)
        one.is_done, one.is_over, one.end = True, True, "its part of the trial ended"
        if is_needed and run.is_open:
            self._refuse_to_lose(one)
        one.is_alive = False
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
        self._calls.left_loop(member)

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
        one = run.roster[member]
        if not one.is_alive:
            return
        one.is_alive, one.end = False, message.reason
        if one.is_starting:
            run.observer.note(
                f"worker {one.seat} did not come back ({message.reason}); see its log"
            )
            return
        if not (run.has_begun or run.ending or one.is_done):
            self._left_early(one)
            return
        self._calls.left(member)
        was_resting = self._borders.has_no_rest(member)
        if run.has_begun:
            is_held = was_resting or run.is_open or self._borders.owes_stop
            if self.is_main(member) and not (one.is_done or is_held):
                self._lost_main = one
            self._refuse_to_go_on_without(one)
            # Before another is the main one: that one may be busy from then on.
            self._borders.checkpointing.left(member)
            is_over = one.is_done and (run.ending or run.has_said_goodbye)
            if self.is_main(member) and not is_over:
                self._choose_main()
        if one.is_done or run.ending:
            one.is_done = True
            self._left_at_end(member)
        elif not run.live:
            self._note_end(member)
            raise self._lost(one)
        else:
            self._refuse_to_lose(one)
            run.observer.note(f"worker {one.seat} is gone ({message.reason}); the others go on")
            self._left_others(member)

    def refuse_lost_end(self) -> None:
        """The run is over; raise ScriptLost where the main worker's script died behind all updates.

        Another one was the main one then, but may have been past what only that one does.
        """
        one = self._lost_main
        if one is not None and one.left_loop_at == self._run.coordinator.version:
            raise ScriptLost(
                f"worker {one.seat} ended: {one.end}, behind the last update: what the script "
                "does there in the main worker, such as saving, may not have been done; the run "
                "itself came to its end, and its weights are in its folder"
            )

    def _left_at_end(self, member: int) -> None:
        """It is gone after its script was over, or while the run ends."""
        run = self._run
        if run.ending or run.by_peers or member not in run.coordinator_members:
            self._note_end(member)
            if run.live:  # they may wait for the version that they stop at
                run.hand_on(member)
        else:  # others may go on, and none of their work may be given to it
            run.hear_left(member)
        self._peers.take_over_if_all_interrupted()
        if run.has_begun:
            self._borders.go_on_if_waiting()

    def _left_others(self, member: int) -> None:
        """It is gone in the midst of the run: its work returns."""
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

    def _left_early(self, one: RosterEntry) -> None:
        """It is gone before the run has begun: another one begins, or nothing does."""
        if self.goes_on and any(not other.is_done for other in self._run.roster.live):
            self._run.observer.note(f"worker {one.seat} is gone ({one.end}); the others go on")
            self.find_main()
            return
        number = self._begin_again(one)
        if number is None:
            general = WorkerError(f"worker {one.seat} ended: {one.end}; see its log")
            raise self._words.get(one.number, general)
        if self.is_main(one.number):
            self._main = number

    def _lost(self, one: RosterEntry) -> WorkerError | ConfigError:
        """Nobody is left: how the last one ended."""
        words = self._words.get(one.number)
        if words is not None and not self._run.settings.respawn:
            return words
        text = str(words or f"worker {one.seat} ended: {one.end}; see its log")
        return AllGone(text) if self._run.settings.respawn else WorkerError(text)

    def _refuse_to_lose(self, one: RosterEntry) -> None:
        """Raise AllGone where the others cannot take over what it had."""
        if self._run.is_sticky:
            self._note_end(one.number)
            raise AllGone(
                f"worker {one.seat} ended: {one.end}; prepare(sticky=True) gives its part of every "
                "batch to nobody else, since what its script carried from batch to batch is lost: "
                "--respawn goes on from the newest checkpoint, where all begin with a fresh state"
            )
        if self._run.steps_apart or self._run.steps_together:
            raise self._lost_in_step(one)

    def _lost_in_step(self, one: RosterEntry) -> AllGone:
        """Others would push steps of another optimizer into the update that it is missing from."""
        self._note_end(one.number)
        if self._run.steps_together:
            return AllGone(
                f"worker {one.seat} ended: {one.end}; a step that may call the model several times "
                "(LBFGS, closures=True) is made by all workers together, and the others cannot go "
                "on without one: --respawn goes on from the newest checkpoint"
            )
        return AllGone(
            f"worker {one.seat} ended: {one.end}; under {self._run.protocol} each step of one of "
            "several optimizers is an update of all workers, and the others cannot take over the "
            "rest of its steps on a mini-batch: --respawn goes on from the newest checkpoint; "
            "--protocol k-sync:K, one update a block, goes on without it"
        )

    def _refuse_to_go_on_without(self, one: RosterEntry) -> None:
        """Raise AllGone where it had begun an update and those who are left never joined."""
        run = self._run
        if not (one.is_done or run.engine.traits.has_store):
            self._note_end(one.number)
            raise AllGone(
                f"worker {one.seat} ended: {one.end}, and engine {run.engine.traits.name} cannot "
                "go on without it: torchrun --max-restarts 3 begins all again, from the newest "
                "checkpoint"
            )
        heirs = [other for other in run.roster.live if other.has_joined and not other.is_done]
        if run.live and not heirs and run.dispatch.holds_next_job(one.number):
            self._note_end(one.number)
            raise AllGone(
                f"worker {one.seat} ended: {one.end}, in the middle of an update, and whoever came "
                "back had not joined yet to go on with it; see its log, and --resume"
            )

    def _note_end(self, member: int) -> None:
        """The end of a member from which nothing follows any more."""
        run = self._run
        if member in run.coordinator_members:
            run.trace.left(run.now_s(), member, run.roster[member].end)

    def find_main(self) -> None:
        """Where the main worker is gone: another one is."""
        main = min(self._run.roster.members) if self._main is None else self._main
        if not self._run.roster[main].is_alive:
            self._choose_main()

    def is_main(self, member: int) -> bool:
        """Whether this member prints and saves."""
        return member == (min(self._run.roster.members) if self._main is None else self._main)

    def _choose_main(self) -> None:
        """The main worker is gone: another one prints and saves from now on.

        The one on the lowest live seat, of those that take part already, if there are any: a
        newcomer's script does not come by where the others are, and may wait for it. Also where
        its script came to an end of its own, and those of the others go on.
        """
        live = [one for one in self._run.roster.live if not one.is_done]
        if live:
            main = min(live, key=_rank)
            self._main = main.number
            self._output.follow(main.seat)  # before it is told: what it prints then is shown
            self._run.dispatch.tell(main.number, BeMain())
