"""What a member of a run has, on every path: its work, its messages, its model.

    channel -> mail (inbox.py) -> jobs of the store, orders -> grant
    carrier -> control, store -> copy of the model (model_copy.py) -> checkpoints

The exchange (through_store.py) and the rounds between peers (peers.py) share it, and wait here for
the next grant. Above 300 lines, since all its parts are made here. This module must not know
protocols, nor the verbs.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from ..core.batches import Ends, PeerLeases
from ..events import Grant, Lease
from ..replica.replica import Replica
from ..store.control import Control
from ..store.layout import Layout
from ..store.memory import Memory
from ..store.parameter_store import SharedStore
from ..wire.channel import Channel
from ..wire.messages import (
    Copied,
    Describe,
    EndEpoch,
    Laid,
    LoopLeft,
    OpenEpoch,
    Published,
    PushScaled,
    Snap,
    Stop,
    ToMember,
    WritePublished,
)
from .averaging import Averaging
from .base import Clock, ScriptHooks, Shape, Stopped
from .inbox import POLL_S, Inbox, JobQueue
from .model_copy import ModelCopy
from .rounds import Barrier


class Carrier(Protocol):
    """One member's access to the words and bytes that all members have; chosen by the engine.

    `MemoryCarrier` uses memory that members share. Another carrier may keep a copy in each member
    and send every write to all; the exchange does not see the difference.

    Attributes:
        control: words that members see of each other: versions, jobs, cancellations.
        is_shared: whether all see what one member writes; else each writes shared results itself.
    """

    control: Control
    is_shared: bool
    is_split: bool = False
    """Whether each member has a part of the model, with a layout of its own."""

    def open_store(self, layout: Layout, num_bytes: int) -> SharedStore:
        """Return the parameters and the slots, as this member sees them.

        Args:
            num_bytes: their total size, from the coordinator.
        """

    def barrier(self, seat: int, clock: Clock) -> Barrier:
        """Return the barrier where peers meet, for the member on this seat."""


class MemoryCarrier:
    """Memory that all members see: on this machine, or in one process.

    Args:
        arena: the store's memory; the engine sizes it when the layout is known.
    """

    is_shared = True
    is_split = False

    def __init__(self, control: Control, arena: Memory) -> None:
        self.control = control
        self._arena = arena

    def open_store(self, layout: Layout, num_bytes: int) -> SharedStore:
        self._arena.renew()  # it may have grown since an earlier trial
        return SharedStore(layout, self._arena.tensor(), self.control)

    def barrier(self, seat: int, clock: Clock) -> Barrier:
        return Barrier(self.control, seat, clock)


class Snapshot:
    """A member's part in checkpoints: it pins a whole version, and writes its own state.

        pin (one member): the block -> the pinned block, which the writer reads; of a split model
            nobody has the whole: all parts -> the files
        own (that member; under local-sgd every one): schedulers, random states -> worker-K.json
        kept (the main member): what the script keeps -> main.json

    A full disk is reported to the coordinator and harms nothing else.

    Args:
        hooks: write this member's own state, and the layout of the pinned block.
    """

    def __init__(self, channel: Channel, hooks: ScriptHooks) -> None:
        self._channel, self._hooks = channel, hooks
        self.newest = 0
        """Number of the last checkpoint that this member took part in."""

    def begin(self, store: SharedStore) -> None:
        """The store is laid out."""
        self._store = store

    def take(
        self,
        number: int,
        version: int,
        block: Tensor,
        buffers: Tensor | None = None,
        *,
        behind: int = -1,
        is_main: bool = False,
    ) -> None:
        """Pin ``block``, which holds ``version`` and which nobody changes now, and report it."""
        if self._hooks.spread is None:
            self._store.pin(block, buffers)
        self._tell(number, version, behind, is_pinned=True, has_own=True, is_main=is_main)

    def add(
        self, number: int, version: int, *, behind: int = -1, has_own: bool, is_main: bool
    ) -> None:
        """Write this member's own state, what the script keeps, or both: another member pins the
        version."""
        self._tell(number, version, behind, is_pinned=False, has_own=has_own, is_main=is_main)

    def _tell(
        self, number: int, version: int, behind: int, *, is_pinned: bool, has_own: bool,
        is_main: bool,
    ) -> None:  # fmt: skip
        fault, start_s = "", time.monotonic()
        try:
            if has_own and self.newest < number:
                self.newest = number
                self._hooks.write_own(number, behind)
            if is_main:
                self._hooks.write_kept(number, behind)
            if is_pinned:
                self._hooks.write_layout(number)
        except OSError as error:
            fault = error.strerror or str(error)
        stood_s = 0.0 if self._hooks.spread is None else time.monotonic() - start_s
        self._channel.send(Copied(number, version, is_pinned, fault, stood_s, is_main))


class MemberSide:
    """One member's life in a run.

    Args:
        channel: to and from the coordinator.
        is_main: whether it prints and saves from the start.

    Attributes:
        hooks: callbacks to the script's side.
        averaging: makes the versions while peers run; None: the store does.
        grant: the work to do; None: the epoch is over.
        serial, step: of that work, -1 before any.
        is_between: whether this member is between two epochs.
        collective: sums the gradients of peers.
    """

    collective = ""

    def __init__(
        self, channel: Channel, carrier: Carrier, *, seat: int, number: int, is_main: bool
    ) -> None:
        self.channel, self._carrier = channel, carrier
        self.control = control = carrier.control
        self.seat, self.number = seat, number
        self.num_workers, self._beats = control.num_seats, control.beats[seat]
        self.are_words_shared = carrier.is_shared
        self.writes_version = seat == 0 or not carrier.is_shared
        """Whether this member writes the peers' version; of members that share words, one does."""
        self.clock, self.hooks = Clock(), ScriptHooks()
        self.snapshots = Snapshot(channel, self.hooks)
        self.jobs = JobQueue(control, seat, self.hooks, self._pin, self.clock)
        self.mail = Inbox(
            channel, self.jobs, self.clock, self._copy_out, self.hooks, is_main=is_main
        )
        self.barrier = carrier.barrier(seat, self.clock)
        self.averaging: Averaging | None = None
        self.grant: Grant | None = None
        self.serial = self.step = -1
        self.epoch = 0
        self.batch_ends: Ends | None = None
        self.num_steps = 1
        self.is_between = self.has_copy = self.drops_next = False
        self._reported_until = 0  # position in the epoch up to which ``news`` returned leases
        self._last_position = 0
        """Position in the epoch where its last update begins."""
        self._saved: Mapping[str, Any] = {}

    def describe(
        self,
        replica: Replica,
        rule: Optimizer,
        shape: Shape,
        description: dict[str, object],
        check: Callable[[], None],
    ) -> Laid:
        """Describe the model, wait for the store's memory, and take a copy of the model.

        Args:
            check: called now and then while gradients are computed.
        """
        self.shape = shape
        self.channel.send(Describe(json.dumps(description)))
        layout = self.mail.expect(Laid)
        self.store = store = self._carrier.open_store(replica.layout, layout.arena_bytes)
        self.copy = ModelCopy(self.seat, replica, rule, store, layout, self.hooks, check)
        self.has_copy, self.num_steps, self.collective = True, layout.num_steps, layout.collective
        self.jobs.begin(store, self.copy.updaters, rule)
        if limit := layout.distance_limit:
            self.jobs.scale_own = lambda number: self._scale_own(number, limit)
        self.snapshots.begin(store)
        return layout

    def live_alone(self, version: int) -> None:
        """Hold the newest version, at least this one, in memory of its own.

        A newcomer may be told of an epoch's end before its last update is made; from an earlier
        version its script would begin another pass, for which nobody waits.
        """

        def is_there() -> bool:
            self.beat()  # whoever makes the version is watched instead
            return self.control.wait_for_version(version, POLL_S)

        self.mail.settle(is_there)
        self.copy.live_alone()

    def _scale_own(self, number: int, limit: float) -> float:
        """Return the factor that distance leaves of this member's last push, and report it.

        Args:
            number: of the pass over the pushes.
        """
        if self.serial < 0:  # the push of an earlier member on this seat
            return self.store.scale_once(number, lambda: 0.0)
        self.hooks.advance_schedule(self.store.version)
        scale = self.store.scale_once(number, lambda: self.copy.allowed_scale(limit))
        self.channel.hold(PushScaled(self.serial, self.version, scale))
        return scale

    @property
    def version(self) -> int:
        return self.copy.version if self.has_copy else 0

    def beat(self) -> None:
        """Give a sign of life: this member makes progress."""
        control, index = self.control, self._beats
        control[index] += 1

    def begin_epoch(self, epoch: int, batch_ends: Ends | None) -> None:
        self.is_between = False
        self.epoch, self.batch_ends, self._reported_until = epoch, batch_ends, 0

    def opened(self, opened: OpenEpoch) -> None:
        """An epoch opened, and its version was pulled."""
        saved, self._saved = self._saved, {}
        self.copy.own.go_on(saved)
        if self.copy.own.are_by_parts:
            self._last_position = self.leases_of_peers(opened).last_position

    def leases_of_peers(self, opened: OpenEpoch) -> PeerLeases:
        """Return the leases of an epoch among peers."""
        return PeerLeases(
            self.shape.batches(self.batch_ends), self.num_workers, self.num_steps,
            opened.num_short, epoch=self.epoch, position=opened.position,
            first_id=opened.first_id,
        )  # fmt: skip

    def remember(self) -> Mapping[str, Any]:
        """See ``OwnChanges.remember``."""
        return self.copy.own.remember()

    def go_on_with(self, saved: Mapping[str, Any]) -> None:
        """Restore in the first epoch what ``remember`` returned."""
        self._saved = saved

    def news(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        """Return those of this epoch that were not returned before."""
        news = [
            lease
            for lease in leases
            if lease.start >= self._reported_until and lease.epoch == self.epoch
        ]
        if news:
            self._reported_until = news[-1].stop
        return news

    def is_dropped(self) -> bool:
        """Return whether the next push is to be lost."""
        is_dropped, self.drops_next = self.drops_next, False
        return is_dropped

    def settings(self) -> int:
        """Return ``settings_word``; 0: they may differ, since members are at different versions."""
        if self.hooks.advance_schedule(self.version):
            return 0
        word = self.copy.settings(self.hooks.marks(), self.hooks.num_own_steps())
        self.hooks.hear_settings(word)
        return word

    # -- messages ---------------------------------------------------------------------------------

    def await_grant(self) -> None:
        """Wait for the next grant, or the end of the epoch or the run, and pull its version."""
        message = self.mail.next()
        if isinstance(message, Grant):
            self._reach(message.ticket.version)
            self.serial = self.step = message.ticket.serial
            self._pull(message.ticket.version)
            is_last = any(lease.start >= self._last_position for lease in message.leases)
            self.copy.own.turn_to(self.version, is_last=is_last)
            self.grant = message
        else:
            self.end_at(message)
        self.clock.begin()
        self.beat()

    def end_at(self, message: ToMember) -> None:
        """The epoch or the run is over, at the version in this message."""
        if not isinstance(message, EndEpoch | Stop):
            raise Stopped
        self._reach(message.version)
        if self.averaging is None:
            self.copy.pull_whole(message.version)
        else:
            self.averaging.pull(message.version)
        self.copy.unedited.end_epoch(self.copy.home)
        self.grant = None
        self.is_between = True
        self.channel.send(LoopLeft(message.version))

    def _reach(self, version: int) -> None:
        self.mail.settle(lambda: self.control.wait_for_version(version, POLL_S))

    def _pull(self, version: int) -> None:
        if self.averaging is None:
            self.copy.pull(version)
        else:
            self.averaging.pull(version)

    # -- checkpoints ----------------------------------------------------------------------------

    def standing(self) -> tuple[Tensor, Tensor | None]:
        """Return a block with the newest version, and its buffers if the block lacks them."""
        if self.averaging is not None:
            return self.averaging.standing()
        return self.store.blocks[self.store.current], None

    def _pin(self, number: int) -> None:
        """Pin the newest version; as a job of the store, so no update changes a block meanwhile."""
        self.snapshots.take(number, self.store.version, self.store.blocks[self.store.current])

    def _copy_out(self, message: Snap | WritePublished) -> None:
        """Copy a version out: all others wait or stop, so it is the newest, or will be."""
        if isinstance(message, WritePublished):
            self.copy.publish()
            self.channel.send(Published())
            return
        number, version, is_first, behind, is_main, has_own = message
        if is_first:
            self._reach(version)
            self.snapshots.take(number, version, *self.standing(), behind=behind, is_main=is_main)
            return
        if has_own:
            self.standing()  # finishes what is in flight; the rest is this member's own
        self.snapshots.add(number, version, behind=behind, has_own=has_own, is_main=is_main)
