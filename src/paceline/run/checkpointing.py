"""Checkpoints from the controller's side: when one is taken, what it holds, which member copies.

    ask -> [ a border: the coordinator's state is taken ] + [ a member: "copied" ] -> disk -> answer

    border    after an update inside an epoch, which members or jobs find by themselves
    between   all members have arrived, and wait until the copy is made
    at_stop   the run ends here, or the script has no more epochs

A failure is reported in one line, and the run goes on. ``checkpoints/due.py`` decides where they
go. Above 300 lines because one draft passes through all of it, from the border to the answer. This
module must not know what a member remembers, nor how files are written.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoints.due import CheckpointPlaces, Due, parse_every
from ..checkpoints.folder import number_of
from ..checkpoints.resumption import COORDINATOR, RUN
from ..checkpoints.writer import Answer, WriteQueue
from ..core.jobs import makes_border
from ..events import Order
from ..protocols.base import SyncProtocol
from ..store.memory import Memory
from ..trace import FILE_NAME
from ..wire.messages import CheckpointsMoved, Copied, Snap
from .state import RunState

_HURRY_S = 0.3
_COPY_S = 1.5
"""Time in which no member that was asked to copy is ended."""
_RETRY_S = 5.0
"""After a failure: a full disk is not tried at every border."""


@dataclass(slots=True, kw_only=True)
class _Draft:
    """A checkpoint in progress."""

    number: int
    aside: Path
    is_last: bool = False
    files: dict[str, Any] = field(default_factory=dict)
    """The coordinator's state, once the border has come."""
    version: int = -1
    missing: set[int] = field(default_factory=set)
    """Members that have not written their own part yet."""
    copied: set[int] = field(default_factory=set)
    """Members that have; between peers one may report it before the border is known here."""
    is_pinned: bool = False
    asked_s: float = math.inf
    """When the member that pins was asked."""
    pinner: int = -1
    """The member that pins the version; -1: a job does, which another takes over if one dies."""
    due: Due | None = None
    """When one was due before this one was taken."""
    behind: int = -1
    """The epoch whose loop's end it stands for, without what scripts did since; else -1."""
    main: int = -1
    """The main member, until it has written what the script keeps; -1: nothing is awaited of it."""
    has_kept: bool = False
    """Whether that is written; between peers it may be reported before the border is known."""

    @property
    def is_whole(self) -> bool:
        return bool(self.files) and self.is_pinned and not self.missing and self.main < 0


class Checkpointing:
    """The checkpoints of one run.

    Args:
        about: the program, as ``resumption`` compares it.
        identity: what must be equal on a resume: the model's layout, the data's size.
        pinned: where in the engine's memory a version is pinned: start and end, in bytes.
        num_bytes: of the tensors in a checkpoint.
        main: returns the main member.
        make_queue: makes the queue of checkpoints to write, from the engine's memory.
    """

    def __init__(
        self,
        run: RunState,
        protocol: SyncProtocol,
        about: Mapping[str, Any],
        identity: Mapping[str, Any],
        pinned: tuple[int, int],
        num_bytes: int,
        main: Callable[[], int],
        make_queue: Callable[[Memory], WriteQueue] = WriteQueue,
    ) -> None:
        settings = run.settings
        every = parse_every(settings.checkpoint_every)
        self.is_on = not every.is_never
        self._run = run
        self._protocol, self._main = protocol, main
        self._saved = {"about": dict(about), "identity": dict(identity), "token": run.token}
        self._places = CheckpointPlaces(run.trace, settings.keep)
        self._told: dict[int, tuple[object, ...]] = {}
        """Member -> where it writes, if that is not the folder that the run began with."""
        self._first = self._place
        self._queue = make_queue(run.dispatch.store.memory)
        self._pinned, self._num_bytes = pinned, num_bytes
        self._due = Due(every, run.now_s(), run.coordinator.version, run.script_epoch)
        self._draft: _Draft | None = None
        self._stood_s = 0.0
        """How long the run waited for the last one."""
        has_one = run.resumption is not None
        self._last_place = (run.coordinator.version, run.script_epoch) if has_one else (-1, -1)
        """Version and epoch of the last one."""
        self._retry_at_s = 0.0
        self._lost_at = (-1, -1)
        """Where the last one could not be written: it is not tried for ever."""
        if run.resumption is not None:
            try:
                self._places.folder.rewind(run.resumption.checkpoint.number)
            except OSError as error:
                self._say_failed(error.strerror or str(error))

    @property
    def unsaved(self) -> str:
        """Why the end of the run is not in its folder, and what is; empty: it is there."""
        return self._places.unsaved

    @property
    def is_waited_for(self) -> bool:
        """Whether members must wait: a version is being pinned between epochs."""
        return self._draft is not None and bool(self._draft.files)

    # -- when -----------------------------------------------------------------------------------

    def tick(self, *, is_asked: bool) -> None:
        """Ask for one at the next border if it is due; handle the result of the last.

        Args:
            is_asked: whether the user asked for the end.
        """
        self._hear_queue()
        self._hurry(is_asked=is_asked)
        run = self._run
        if not self.is_on or self._draft is not None or self._queue.is_busy or run.ending:
            return
        now_s = run.now_s()
        if run.is_open and self._due.by_step(now_s, run.coordinator.version):
            self._draft = self._begin(now_s)
            if self._draft is not None:
                main = self._draft.main = self._main() if run.dispatch.store.keeps else -1
                seat = run.roster[main].seat if main >= 0 else -1
                run.dispatch.ask_copy(self._draft.number, 1 + seat)

    def _hurry(self, *, is_asked: bool) -> None:
        """Hurry a member that is to copy the end, and may be busy with its script's own code.

        What the script keeps may be half changed in the middle of its own code: the main member
        writes it when it comes by itself, unless it is held from a loop's end. If the user asked
        for the end, it is not waited for long.
        """
        run, draft = self._run, self._draft
        if draft is None or not draft.is_last or run.engine.processes is None:
            return
        waited_s = run.now_s() - draft.asked_s
        if waited_s > _HURRY_S:
            for member in run.live:
                if self._blocks(member) or (member == draft.main and draft.behind >= 0):
                    run.processes.hurry(member)
        if is_asked and waited_s > _COPY_S and draft.main >= 0:
            seat = run.roster[draft.main].seat
            run.notes.say(
                f"worker {seat} was late, so the last checkpoint has what another worker keeps "
                "(pace.keep)"
            )
            draft.main = -1
            self._hand_in_if_whole()

    def at_orders(self, orders: list[Order]) -> None:
        """Through the store: these orders, which are not sent yet, make the border."""
        if self._draft is None or self._draft.files or self._run.is_mid_batch:
            return
        if makes_border(orders):
            self._capture(self._draft)
            # These orders hold the job; peers, if they come next, would pin another version.
            self._run.dispatch.store.withdraw_copy()

    def at_round(self, number: int) -> None:
        """Between peers: they took checkpoint ``number`` after this round.

        The member on seat 0 pinned the version, or died before it could.
        """
        draft, run = self._draft, self._run
        if draft is None or draft.number != number or draft.files:
            return
        run.dispatch.withdraw_copy()  # or a job would pin another version if the store comes next
        draft.pinner = run.roster.on_seat(0).number
        if draft.is_pinned or run.roster[draft.pinner].is_alive:
            self._capture(draft)
        else:
            self._drop()

    def between(self, epoch: int) -> None:
        """All members have arrived at ``epoch``; they wait if one is due."""
        run = self._run
        if self.is_on and self._due.by_epoch(run.now_s(), run.coordinator.version, epoch):
            self._snap(is_last=False)

    def at_stop(self) -> None:
        """The run ends here: all work has returned, and all members wait."""
        if self._run.is_mid_batch:
            self._drop()
            self._lose("the run ended between two steps on one mini-batch")
            return
        is_lost = self._lost_at == (self._run.coordinator.version, self._run.script_epoch)
        if not is_lost and (self._draft is None or not self._draft.is_last):
            self._snap(is_last=True)

    # -- who ------------------------------------------------------------------------------------

    def copied(self, member: int, message: Copied) -> None:
        draft = self._draft
        number, version, is_pinned, fault, stood_s, is_main = message
        if draft is None or draft.number != number:
            return
        if fault:
            self._fail(fault)
            return
        draft.missing.discard(member)
        draft.copied.add(member)
        draft.is_pinned |= is_pinned
        draft.has_kept |= is_main
        if draft.files and is_main:
            draft.main = -1
        if is_pinned:
            self._stood_s = stood_s
        if is_pinned and draft.files and version != draft.version:
            self._fail(f"a worker pinned version {version}")
        else:
            self._hand_in_if_whole()

    def left(self, member: int) -> None:
        """A member is gone, perhaps without having pinned or written its part."""
        draft = self._draft
        if draft is not None and draft.main == member and not draft.is_last:
            self._drop()  # another is the main one now, whose objects the next one has
            self._due = draft.due or self._due
            return
        if draft is None or not draft.files:
            return
        draft.missing.discard(member)
        if draft.main == member:
            draft.main = -1
        if draft.pinner == member and not draft.is_pinned:
            self._drop()
            if draft.is_last:
                self._snap(is_last=True)
        else:
            self._hand_in_if_whole()

    def wait_for(self, member: int) -> bool:
        """Whether a checkpoint, and the members that wait for it, need this member."""
        draft = self._draft
        if draft is None or not draft.files:
            return False
        return member == draft.main or self._blocks(member)

    def _blocks(self, member: int) -> bool:
        """Whether a checkpoint cannot be without what this member has not done yet."""
        draft = self._draft
        if draft is None or not draft.files:
            return False
        return member in draft.missing or (draft.pinner == member and not draft.is_pinned)

    def is_late(self, member: int) -> bool:
        """Whether it has had time for its part, and another member could copy."""
        run, draft = self._run, self._draft
        if draft is None or not self._blocks(member):
            return False
        others = [
            entry for entry in run.roster.live if not entry.is_done and entry.number != member
        ]
        is_due = draft.asked_s == math.inf or run.now_s() - draft.asked_s > _COPY_S
        return bool(others) and is_due

    def close(self, *, is_cut_off: bool = False) -> None:
        """The run is over: write the last one, and leave nothing behind.

        Args:
            is_cut_off: whether members were not waited for any more.
        """
        if self._draft is not None:
            self._drop()
        place = (self._run.coordinator.version, self._run.script_epoch)
        if is_cut_off and self.is_on and place != self._last_place:
            self._places.lost = self._places.lost or "no worker came to copy it"
        self._queue.close()
        self._hear_queue()

    # -- what -----------------------------------------------------------------------------------

    def _snap(self, *, is_last: bool) -> None:
        """All members wait: let one of them pin the current version."""
        run = self._run
        run.dispatch.withdraw_copy()
        draft, self._draft = self._draft, None
        if draft is not None:
            self._places.folder.drop(draft.aside)
            self._last_place = (-1, -1)
        if is_last:  # one that is still being written may fail, and there is no later chance
            self._queue.finish()
            self._hear_queue()
        live = [entry.number for entry in run.roster.live if not entry.is_done]
        place = (run.coordinator.version, run.script_epoch)
        if not self.is_on or not live or place == self._last_place:
            return
        if not (run.engine.traits.has_store or run.roster[live[0]].seat == 0):
            if is_last:  # it is written from rank 0's memory, and another's is not seen there
                self._lose("the script of rank 0, which was to copy it, is over")
            return
        self._queue.finish()  # it reads the pinned bytes, which the next one will overwrite
        self._draft = self._begin_last() if is_last else self._begin(run.now_s())
        if self._draft is not None:
            joined = [number for number in live if run.roster[number].has_joined]
            self._capture(self._draft, first=run.liveliest(joined or live))

    def _begin(self, now_s: float) -> _Draft | None:
        if now_s < self._retry_at_s:
            return None
        try:
            return self._draft_in(self._places.begin(), is_last=False)
        except OSError as error:
            self._say_failed(error.strerror or str(error))
            return None

    def _begin_last(self) -> _Draft | None:
        """Begin the last one where there is space: there is no time for a second attempt."""
        aside = self._places.begin_last(self._num_bytes)
        return None if aside is None else self._draft_in(aside, is_last=True)

    def _draft_in(self, aside: Path, *, is_last: bool) -> _Draft:
        self._tell_place()
        return _Draft(number=number_of(aside), aside=aside, is_last=is_last)

    @property
    def _place(self) -> CheckpointsMoved:
        folder = self._places.folder
        within = None if folder.within is None else tuple(folder.within[-1:])  # on any machine
        return CheckpointsMoved(str(folder.folder), within)

    def _tell_place(self) -> None:
        """Tell members where to write their parts, if a deleted folder was made again."""
        place = self._place
        for number in self._run.live:
            if self._told.get(number, self._first) != place:
                self._told[number] = place
                self._run.dispatch.tell(number, place)

    def _capture(self, draft: _Draft, first: int | None = None) -> None:
        """Take the run's state at this border, and tell members that have a part of their own.

        Args:
            first: the member that pins the version; None: it is already known.
        """
        run = self._run
        version, now_s = run.coordinator.version, run.now_s()
        try:
            traced = self._places.keep_trace()
        except OSError as error:
            self._fail(str(error))
            return
        draft.version = version
        draft.files = {
            COORDINATOR: run.coordinator.resting_state(),
            RUN: {
                **self._saved,
                "version": version,
                "epoch": run.script_epoch,
                "place": list(run.place),
                "stream": run.streams.remember(),
                "elapsed_s": now_s,
                "opened_s": run.watch.opened_s,
                "trained_s": run.watch.trained_s(now_s),
                "trace_bytes": traced,
                "update_rule": run.update_rule,
                "settings": dataclasses.asdict(run.settings),
            },
        }
        draft.due = copy.copy(self._due)
        self._due.taken(now_s, version, run.script_epoch)
        self._last_place = (version, run.script_epoch)
        are_told = first is not None or not run.by_peers
        if first is not None:
            draft.pinner, draft.asked_s = first, now_s
        if run.update_rule == "mean" or run.plan.compression:  # each has something of its own
            draft.missing = self._with_parts() - draft.copied
        draft.main = self._awaited_main(draft)
        self._tell_place()
        if are_told:
            self._tell_members(draft, first)
        self._hand_in_if_whole()

    def _with_parts(self) -> set[int]:
        """Return the members that can write a part of their own; one that has not joined still has
        its first settings, so its seat uses another's."""
        live = self._run.roster.live
        return {entry.number for entry in live if not entry.is_done and entry.has_joined}

    def _awaited_main(self, draft: _Draft) -> int:
        """Return the main member if what the script keeps is still to be written; else -1.

        Between peers it is the one that was told when the checkpoint was asked for.
        """
        run, main = self._run, draft.main
        if not run.by_peers:
            main = self._main() if run.dispatch.store.keeps else -1
        return main if main in self._with_parts() and not draft.has_kept else -1

    def _tell_members(self, draft: _Draft, first: int | None) -> None:
        """Tell the members that have a part in it; ``first`` pins the version, if none has."""
        run = self._run
        is_behind = not run.is_open and run.script_epoch == run.coordinator.epoch
        draft.behind = run.script_epoch if is_behind else -1
        others = draft.missing | {draft.main} - {-1}
        for number in (*(others - {first}), *(() if first is None else (first,))):
            run.dispatch.tell(number, Snap(
                draft.number, draft.version, number == first, draft.behind,
                is_main=number == draft.main, has_own=number in draft.missing or number == first,
            ))  # fmt: skip

    def _hand_in_if_whole(self) -> None:
        draft = self._draft
        if draft is None or not draft.is_whole:
            return
        self._draft, folder = None, self._places.folder
        request = {
            "aside": str(draft.aside),
            "folder": str(folder.folder),
            "keep": self._run.settings.keep,
            "files": draft.files,
            "sync": [str(folder.folder.parent / FILE_NAME)],
            "within": folder.within,
        }
        self._queue.hand_in(request, is_last=draft.is_last)
        answers = self._hear_queue()
        if draft.is_last and "failed" in answers[-1]:
            self._lose(answers[-1]["failed"])

    # -- what became of it ----------------------------------------------------------------------

    def _hear_queue(self) -> list[Answer]:
        answers = self._queue.answers()
        for answer in answers:
            if "failed" in answer:
                self._say_failed(answer["failed"])
            else:
                self._due.wrote(answer["took_s"] + self._stood_s)
        if answers and self._draft is None and not self._queue.is_busy:
            self._run.dispatch.store.memory.release(*self._pinned)
        return answers

    def _fail(self, reason: str) -> None:
        self._drop(reason)
        self._say_failed(reason)

    def _drop(self, reason: str = "the worker that was to copy it is gone") -> None:
        draft, self._draft = self._draft, None
        self._last_place = (-1, -1)
        if draft is not None:
            self._run.dispatch.withdraw_copy()
            self._places.folder.drop(draft.aside)
            if draft.is_last:
                self._lose(reason)

    def _lose(self, reason: str) -> None:
        """The last one could not be saved."""
        self._lost_at = (self._run.coordinator.version, self._run.script_epoch)
        self._places.lost = self._places.lost or reason
        self._places.leave_elsewhere()

    def _say_failed(self, reason: str) -> None:
        run = self._run
        self._retry_at_s = run.now_s() + _RETRY_S
        self._last_place = (-1, -1)
        folder = self._places.folder
        older = "the run goes on with the last one" if not folder.is_empty else "the run goes on"
        run.notes.say_once(
            f"a checkpoint could not be written to {folder.folder}: {reason}; {older}"
        )
