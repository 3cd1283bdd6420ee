"""The borders of epochs: members arrive, wait for each other, and enter together.

    Arrive -> all here? -> one order? -> a checkpoint, where due -> newcomers join -> OpenEpoch
    Rested -> all here? -> the last checkpoint -> Goodbye
    the run stops       -> the last checkpoint -> Stop

No member is told that the run is over before the last version is copied: if the member that copies
it dies, another can.

Leases are positions in the order that all members drew: if two members had different orders, some
samples would be used twice and others never, and the ledger could not know. So members arrive with
a digest of their order: all but newcomers must agree, and a newcomer that differs is sent away.
This module must not know processes, sockets, tensors or samplers. Above 300 lines, since what
members must agree on at a border is beside it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from ..core.batches import Ends
from ..errors import ConfigError
from ..passes import is_far
from ..wire.messages import (
    MAIN_PUBLISHED,
    Arrive,
    EndEpoch,
    Ending,
    Goodbye,
    OpenEpoch,
    Published,
    Rested,
    SentAway,
    Stop,
    WritePublished,
)
from .checkpointing import Checkpointing
from .peers import Peers
from .respawn import Newcomers
from .state import RunState

HAS_NO_MORE = "has no more"
"""What a member does whose script has no more epochs, or is over."""
_REMEDY = (
    "so some samples would be used twice and others never: the loader's sampler has its own "
    "random generator (random.Random(), np.random.default_rng()) or iterates over something "
    "unordered (a set, os.listdir); let it draw from the global generators of torch, random or "
    "numpy.random, which are seeded alike for every epoch, or seed its own in set_epoch(epoch)"
)


class Orders:
    """The sample orders of one run's epochs."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._opened = -1, ""

    def is_other(self, member: int, epoch: int, digest: str) -> bool:
        """Whether a newcomer drew another order than the open epoch's; if so, send it away."""
        if self._opened in ((epoch, digest), (-1, "")) or self._opened[0] != epoch:
            return False
        self._send_away(member)
        return True

    def compare(self, epoch: int, digests: Mapping[int, str]) -> bool:
        """Whether the epoch can open: all live members drew the same order.

        Raises:
            ConfigError: members that are no newcomers drew different orders.
        """
        run = self._run
        old = [number for number in run.live if number in run.coordinator_members] or run.live
        first = old[0]
        for number in old:
            if digests[number] != digests[first]:
                seats = (run.roster[first].seat, run.roster[number].seat)
                raise ConfigError(
                    f"workers {seats[0]} and {seats[1]} drew different orders for epoch "
                    f"{epoch + 1}, {_REMEDY}"
                )
        others = [number for number in run.live if digests[number] != digests[first]]
        for number in others:
            self._send_away(number)
        self._opened = epoch, digests[first]
        return not others

    def _send_away(self, member: int) -> None:
        run = self._run
        run.observer.note(
            f"worker {run.roster[member].seat} came back and drew another order of the samples "
            "than the others: its sampler has its own random generator; it is sent away"
        )
        run.dispatch.tell(member, SentAway())


class Publishing:
    """Weights that scripts published since the last epoch: the main worker's go to the store.

    All others wait meanwhile, and hold the result of the last update.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._writer: int | None = None
        self._is_written = self._has_lost_main = False

    def is_settled(self, arrivals: Mapping[int, Arrive | Rested]) -> bool:
        """Whether the store has them, or there are none; all live members sent one of these.

        Raises:
            ConfigError: other workers have published, but not the main one.
        """
        published = {
            number: arrival.published for number, arrival in arrivals.items() if arrival.published
        }
        if self._is_written or not published:
            return True
        if self._writer not in published:
            self._writer = self._choose(published)
            self._run.dispatch.tell(self._writer, WritePublished())
        return False

    def _choose(self, published: Mapping[int, int]) -> int:
        """The main worker; if it died meanwhile, another one that has published."""
        roster = self._run.roster
        ranked = sorted(published, key=lambda member: (-published[member], roster[member].seat))
        if published[ranked[0]] == MAIN_PUBLISHED or self._has_lost_main:
            return ranked[0]
        raise ConfigError(
            f"worker {roster[ranked[0]].seat} called pace.publish() between two epochs, but the "
            "main worker, whose weights all workers get, did not: call it in all workers, or in "
            "the main one (if pace.is_main:)"
        )

    def written(self, member: int) -> None:
        """This member has written them to the store."""
        self._is_written |= member == self._writer

    def left(self, arrival: Arrive | Rested | None) -> None:
        """The member that sent this is gone."""
        self._has_lost_main |= arrival is not None and arrival.published == MAIN_PUBLISHED

    def end(self) -> bool:
        """An epoch opens, or none will: returns whether weights were published until now."""
        was_written = self._is_written
        self._writer, self._is_written, self._has_lost_main = None, False, False
        return was_written


class EpochBorders:
    """The members that wait at the border of an epoch.

    Args:
        stop: ends the run at the next step border, with this reason.

    Attributes:
        checkpointing: the run's checkpoints; set when it begins.
        owes_stop: whether members wait to be told that the run is over.
    """

    checkpointing: Checkpointing

    def __init__(
        self, run: RunState, peers: Peers, newcomers: Newcomers, stop: Callable[[str], None]
    ) -> None:
        self._run = run
        self._peers = peers
        self._newcomers = newcomers
        self._stop = stop
        self._orders = Orders(run)
        self._publishing = Publishing(run)
        self._arrived: dict[int, Arrive] = {}
        self._rested: dict[int, Rested] = {}
        self.owes_stop = self._is_at_next = False

    def __contains__(self, member: int) -> bool:
        return member in self._arrived or member in self._rested

    def end_here(self) -> None:
        """The run stops: no epoch opens, and members are told once the last version is copied."""
        self.checkpointing.at_stop()
        self.owes_stop, self._is_at_next = True, False
        self._note_scripts_at_next(self._arrived)
        if self.checkpointing.is_waited_for:
            self._run.tell_all(Ending())
        self.go_on_if_waiting()

    def _note_scripts_at_next(self, members: Iterable[int]) -> None:
        """These members came to the next epoch before they heard of the stop."""
        roster = self._run.roster
        self._is_at_next |= any(roster[number].has_joined for number in members)

    def left(self, member: int) -> None:
        """A member is gone: the others do not wait for it."""
        self._publishing.left(self._arrived.pop(member, None))

    def has_no_rest(self, member: int) -> bool:
        """A member is gone and needs no goodbye; returns whether it waited for one."""
        rested = self._rested.pop(member, None)
        self._publishing.left(rested)
        return rested is not None

    def published(self, member: int, _: Published) -> None:
        """The store has what this member published."""
        self._publishing.written(member)
        self.go_on_if_waiting()

    def arrive(self, member: int, message: Arrive) -> None:
        run, entry = self._run, self._run.roster[member]
        if run.ending:
            # Its script joins the others in what follows the epoch that it came for.
            entry.has_arrived |= entry.first_epoch <= run.coordinator.epoch
            self._note_scripts_at_next([member])
            if not self.owes_stop:
                run.dispatch.tell(member, Stop(run.coordinator.version, run.begins_anew))
            return
        if not entry.has_arrived:
            if self._orders.is_other(member, message.epoch, message.digest):
                return
            if self._newcomers.arrived(member, message.epoch):
                return
        if run.is_open:
            raise self.left_early(member)
        self._arrived[member] = message
        self.open_if_all_arrived()

    def open_if_all_arrived(self) -> None:
        run = self._run
        first = self._agreed()
        if first is None:
            return
        epoch = first.epoch
        run.come_to(epoch, first.place)
        if run.has_all_updates:  # a resumed run with nothing left to do
            self._stop(f"{run.settings.updates} updates are done")
            return
        if not self._publishing.is_settled(self._arrived):
            return
        self.checkpointing.between(epoch)
        if self.checkpointing.is_waited_for:
            return
        self._arrived.clear()
        self._say_who_is_over()
        self._newcomers.join_all()
        if not run.has_opened:
            run.has_opened, run.began_s = True, run.now_s()
        if epoch == run.coordinator.epoch and not run.coordinator.is_cut_off:
            self._close_again(epoch)
        else:
            ends = first.end if first.batch_ends is None else first.batch_ends
            self._open(epoch, ends)

    def _agreed(self) -> Arrive | None:
        """What all members arrived with; None: some are missing, or one was sent away.

        Raises:
            ConfigError: they are at different epochs, or values of ``pace.epochs``, have different
                settings, or drew different orders.
        """
        live = self._run.live
        if not live or any(number not in self._arrived for number in live):
            return None
        epochs = {self._arrived[number].epoch for number in live}
        if len(epochs) > 1:
            raise ConfigError(f"workers are at different epochs {sorted(epochs)}")
        first = self._arrived[live[0]]
        known = self._run.coordinator_members or live  # newcomers get them when all are here
        self._refuse_other_places([number for number in live if number in known])
        words = {number: word for number in known if (word := self._arrived[number].settings)}
        if len(set(words.values())) > 1:
            number, *rest = words
            other = next(member for member in rest if words[member] != words[number])
            raise _other_settings(*(self._run.roster[member].seat for member in (number, other)))
        digests = {number: self._arrived[number].digest for number in live}
        return first if self._orders.compare(first.epoch, digests) else None

    def _refuse_other_places(self, known: Sequence[int]) -> None:
        """Raise ConfigError if two scripts begin this pass at different values of ``pace.epochs``.

        A worker that left its passes of one value early would train with others that have not, on
        what each has made for another value, and nobody could tell from the number of the pass.
        """
        places = [(self._run.roster[number].seat, self._arrived[number].place) for number in known]
        for seat, place in places:
            first_seat, first = places[0]
            if place.position != first.position and min(place.position, first.position) >= 0:
                raise ConfigError(
                    f"worker {first_seat} begins a pass over the loader in epoch "
                    f"{first.position + 1} of pace.epochs() and worker {seat} in epoch "
                    f"{place.position + 1}: all workers must make equally many passes in each; "
                    "where a value decides (if kl > limit: break), take one that is the same in "
                    "all: pace.evaluate(fn, loader), or pace.sum(value); to look at a batch write "
                    "next(iter(loader.plain))"
                )

    def _open(self, epoch: int, batch_ends: Ends | None) -> None:
        """Open an epoch: between peers if all can do the whole of it, else through the store."""
        run, live = self._run, self._run.live
        position = run.coordinator.frontier() if run.coordinator.is_cut_off else 0
        was_look = run.coordinator.has_used_nothing
        if not (was_look or run.coordinator.is_cut_off):
            run.trained_in = run.coordinator.epoch
        run.is_open = True
        run.watch.opened(run.now_s(), epoch, self._until(batch_ends, position))
        orders = run.coordinator.open_epoch(run.now_s(), batch_ends)
        is_border = position is not None and run.coordinator.begins_at(position)
        is_whole = is_border and len(live) == run.plan.workers
        has_store = run.engine.traits.has_store
        was_needed, run.needs_store = run.needs_store, False
        is_needed = was_needed and (run.coordinator.has_riding or not was_look)
        needs_store = is_needed and not run.steps_together and has_store
        if not (is_whole or has_store):
            raise ConfigError(
                "the checkpoint is from the middle of a batch, which engine "
                f"{run.engine.traits.name} cannot finish: continue to the end of that epoch with "
                f"paceline launch --resume {run.trace.path.parent}"
            )
        by_peers = run.plan.path != "store" and is_whole and not needs_store
        run.go_by(run.plan.path if by_peers else "store")
        seats = tuple(run.roster[number].seat for number in live)
        first_id = run.coordinator.first_lease_id(position or 0) if by_peers else 0
        phase = run.dispatch.store.calm()
        run.streams.open(epoch)
        run.opened = opened = OpenEpoch(
            epoch, by_peers, run.updates_left, phase, seats, run.began_for_s,
            position or 0, first_id, self._publishing.end(), run.protocol.num_short, max(live),
        )  # fmt: skip
        run.tell_all(opened)
        if by_peers:
            self._peers.begin()
            run.note(orders, run.now_s())
        else:
            run.carry_out(orders, None, None)

    def _until(self, end: Ends | None, position: int | None) -> int | None:
        """The version that ends this pass, if the script counts updates; None: not known."""
        run = self._run
        if run.plan.updates_per_epoch is not None or position is None or not isinstance(end, int):
            return None
        if is_far(end):
            return None
        per_update = run.plan.pushes_per_update * run.protocol.num_steps
        return run.coordinator.version + -(-(end - position) // per_update)

    def _say_who_is_over(self) -> None:
        """Note a worker whose script is over while the others train on."""
        over = [entry.seat for entry in self._run.roster.members.values() if entry.is_over]
        if over:
            self._run.notes.say_once(
                f"worker {over[0]}'s script is over, and others train on: what it saved is not the "
                "final state of the run; so that all loops end together, write: "
                "for epoch in pace.epochs(n): for batch in loader"
            )

    def _close_again(self, epoch: int) -> None:
        """Open and end an epoch whose last update the checkpoint holds: its loop has no steps."""
        version = self._run.coordinator.version
        run = self._run
        phase = run.dispatch.store.calm()
        run.tell_all(OpenEpoch(epoch, False, -1, phase, (), run.began_for_s))
        run.tell_all(EndEpoch(epoch, version))

    def left_early(self, member: int) -> ConfigError:
        seat, epoch = self._run.roster[member].seat, self._run.coordinator.epoch + 1
        return ConfigError(
            f"worker {seat} began another epoch before epoch {epoch} was over for the others: loop "
            "over the prepared loader in the same way in all workers"
        )

    def go_on_if_waiting(self) -> None:
        """A version was pinned, or a member is gone: let the members that waited for it go on."""
        if self.checkpointing.is_waited_for:
            return
        if self.owes_stop:
            self.owes_stop = False
            self._arrived.clear()
            self._publishing.end()
            version, begins_anew = self._run.coordinator.version, self._run.begins_anew
            self._run.tell_all(Stop(version, begins_anew, self._is_at_next))
        if self._arrived:
            self.open_if_all_arrived()
        if self._rested:
            self.end_if_all_rested()

    def rest(self, member: int, message: Rested) -> None:
        if not self._run.has_begun:  # epochs of a script that prepared nothing
            self._run.dispatch.tell(member, Goodbye())
            return
        self._rested[member] = message
        self._run.roster[member].is_over |= message.is_over
        self.end_if_all_rested()

    def part_from_those_over(self) -> bool:
        """All wait, but not for the same thing: let those go whose scripts are over.

        A newcomer alone does not train on: the others' scripts have ended with what there is.

        Returns:
            Whether the others can go on.
        """
        run = self._run
        over = [number for number, rested in self._rested.items() if rested.is_over]
        if not (over and run.engine.traits.has_store):
            return False
        others = [number for number in run.live if number not in self._rested]
        are_late = [not run.roster[number].has_joined for number in others]
        if all(are_late) and all(number in self._arrived for number in others):
            for number in others:
                run.observer.note(
                    f"worker {run.roster[number].seat} came back when the scripts of the others "
                    "were over; it is sent away"
                )
                self.left(number)
                run.dispatch.tell(number, SentAway())
            return True
        for number in over:
            self._publishing.left(self._rested.pop(number))
            run.dispatch.tell(number, Goodbye())
        return True

    def waiting(self) -> dict[int, str]:
        """Members that wait here for all others -> what each is doing."""
        begin = dict.fromkeys(self._arrived, "begins another epoch")
        return begin | dict.fromkeys(self._rested, HAS_NO_MORE)

    def end_if_all_rested(self) -> None:
        """No script has more epochs: keep the end, so that more epochs can be added later."""
        run = self._run
        live = [entry.number for entry in run.roster.live if not entry.is_done]
        if not live or any(number not in self._rested for number in live):
            return
        if not run.ending and not self._publishing.is_settled(self._rested):
            return
        if run.coordinator.is_between_epochs and not run.ending:  # else it was kept at the stop
            last = max(self._rested.values())
            run.come_to(last.epoch, last.place)
            self.checkpointing.at_stop()
        if not self.checkpointing.is_waited_for:
            self._rested.clear()
            run.has_said_goodbye = True
            for number in live:
                run.dispatch.tell(number, Goodbye())


def _other_settings(worker: int, other: int) -> ConfigError:
    return ConfigError(
        f"workers {worker} and {other} begin an epoch with different optimizer settings (lr, "
        "momentum, the state of ReduceLROnPlateau), and each would keep its own; set them from "
        "values that are the same in all workers: pace.evaluate(fn, loader), or pace.sum(value)"
    )
