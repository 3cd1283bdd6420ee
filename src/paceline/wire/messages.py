"""All messages between members and the coordinator: one type each, with named fields.

    member -> coordinator      `FromMember`      wire/codec.py encodes and decodes them
    coordinator -> member      `ToMember`        wire/channel.py carries them, in order

The type of a message selects its receiver: the coordinator has one table of handlers
(``run/controller.py``), a member has ``exchange/inbox.py`` and the caller that waits. The table in
docs/messages.md is made from this file. Above 300 lines because it is that table. This module must
not know what a message leads to.
"""

from enum import StrEnum
from typing import NamedTuple, TypeAlias

from ..events import Grant, Lease
from ..passes import ScriptPlace
from ..stopping import StopRule
from ..store.clip import UNCLIPPED, Clip

Totals: TypeAlias = dict[str, tuple[float, float]]
"""Per metric: the sum over samples and the number of samples."""

OTHERS_PUBLISHED, MAIN_PUBLISHED = 1, 2
"""In `Arrive` and `Rested`: a worker, or the main one, called ``pace.publish``; else 0."""

OK, NOT_FINITE, FOUND_INF = 0, 1, 2
"""What was wrong with a push: nothing, a gradient was inf or nan, AMP's scaler found inf."""

# -- parts of several messages ---------------------------------------------------------------------


class Clocks(NamedTuple):
    """Seconds since a member's last push.

    Attributes:
        add_s: part of ``push_s``: adding it to a sum.
        input_s: part of ``compute_s``: waiting for its batches.
    """

    compute_s: float = 0.0
    wait_s: float = 0.0
    push_s: float = 0.0
    add_s: float = 0.0
    input_s: float = 0.0


class Told(NamedTuple):
    """What a push reports to the coordinator; its first fields are those of ``Pushed``.

    Attributes:
        stepped: which of several optimizers stepped, one bit each; 0: there is only one.
    """

    num_samples: int
    loss: float
    fault: int
    weight: float
    kept: tuple[int, ...] = ()
    unused: tuple[int, ...] = ()
    stepped: int = 0

    @property
    def steps_again(self) -> bool:
        """Whether its leases are kept for one more step on them."""
        return bool(self.kept) and self.num_samples > 0 and not self.unused

    @property
    def is_owed(self) -> bool:
        """Whether it only closes leases that were kept for a step that was never made."""
        return not (self.num_samples or self.kept or self.unused)


class Entry(NamedTuple):
    """A member's part in a round between peers; without a mini-batch ``num_samples`` is 0.

    Flat, since there is one per member and round: the clocks, and the clipping.
    """

    num_samples: int
    loss: float
    fault: int
    weight: float
    compute_s: float
    wait_s: float
    push_s: float
    input_s: float
    max_norm: float = UNCLIPPED.max_norm
    max_value: float = UNCLIPPED.max_value

    @property
    def told(self) -> Told:
        return Told(self.num_samples, self.loss, self.fault, self.weight)

    @property
    def clocks(self) -> Clocks:
        """Its clocks; peers add nothing to a sum."""
        return Clocks(self.compute_s, self.wait_s, self.push_s, 0.0, self.input_s)

    @property
    def clip(self) -> Clip:
        return Clip(self.max_norm, self.max_value)


class Row(NamedTuple):
    """One round between peers.

    Attributes:
        over_s: when it ended, by the machine's monotonic clock.
        entries: one per member, in member order.
        snapshot: number of the checkpoint that was taken after it; 0: none.
    """

    over_s: float
    entries: tuple[Entry, ...]
    snapshot: int = 0


# -- from a member ---------------------------------------------------------------------------------


class Describe(NamedTuple):
    """What ``prepare`` found, as JSON."""

    text: str


class Arrive(NamedTuple):
    """The member is at the loader and waits for the epoch.

    Attributes:
        batch_ends: where the user's own batches end; None: all have one size.
        end: where the last batch ends, if this epoch's length differs from the others'.
        digest: of the epoch's order, the same in all members.
        place: where the script is in ``pace.epochs``.
        published: whether the script published weights since the last epoch.
        settings: word of the optimizer's settings, the same in all members; 0: they may differ.
    """

    epoch: int
    batch_ends: tuple[int, ...] | None
    end: int | None
    digest: str
    place: ScriptPlace
    published: int = 0
    settings: int = 0


class Push(NamedTuple):
    """The work of this serial is done, and its gradient is in the member's slot.

    Attributes:
        hyper: word of the optimizer's settings, see ``settings_word``; 0: they may differ.
    """

    serial: int
    version: int
    told: Told
    clocks: Clocks
    hyper: int
    clip: Clip


class Extend(NamedTuple):
    """Asks for one more mini-batch for the work of this serial; the answer is ``Extended``."""

    serial: int


class GiveBack(NamedTuple):
    """The work of this serial returns undone."""

    serial: int


class LeaveEpoch(NamedTuple):
    """The loop was left before the epoch's end.

    Attributes:
        kept: ids of leases whose gradients go with the next push.
        is_look: whether the script used none of the epoch's batches.
    """

    kept: tuple[int, ...]
    is_look: bool


class LoopLeft(NamedTuple):
    """This member heard that its epoch or the run is over; its loop's body may still run on."""

    version: int


class OutOfLoop(NamedTuple):
    """This member's script has left its loop over an epoch, and runs the code after it."""


class StepLeft(NamedTuple):
    """A superseded step was abandoned at ``left_s``, ``wasted_s`` after it began."""

    serial: int
    wasted_s: float
    left_s: float


class Rounds(NamedTuple):
    """Complete rounds between peers, starting with number ``first``."""

    first: int
    rows: tuple[Row, ...]


class PeersLeft(NamedTuple):
    """This member left its peers; its own push, and all members' pushes that it saw."""

    push: Entry | None
    pushes: tuple[Entry, ...]
    needs_store: bool


class Mended(NamedTuple):
    """The shares of dead members are restored."""


class Count(NamedTuple):
    """An evaluation of so many positions begins; the answers are ``Range`` and ``CountTotals``.

    Attributes:
        ends: where the user's own batches end; None: all are of ``batch_size``.
        digest: of the samples at the positions, the same in all members.
        weights: digest of the member's weights, if the script may have changed them; 0: they are
            a version's.
        ahead: ranges that the member gets besides the one it evaluates, to prefetch them.
    """

    num_samples: int
    batch_size: int
    ends: tuple[int, ...] | None
    digest: str
    weights: int = 0
    ahead: int = 0


class Counted(NamedTuple):
    """The range that begins at ``start`` is evaluated."""

    start: int
    totals: Totals


class EvaluatedAlone(NamedTuple):
    """The totals of this member's own evaluation, inside its loop, at the version it held."""

    version: int
    totals: Totals


class StopWhen(NamedTuple):
    """The run is to end by this rule; every member sends it."""

    rule: StopRule


class SumValues(NamedTuple):
    """Values to sum over all members; the answer is ``Summed``."""

    values: tuple[float, ...]


class AwaitsMain(NamedTuple):
    """Whether it waits for the main worker to go first through a block of ``pace.once()``."""

    is_waiting: bool


class LogValues(NamedTuple):
    """Values for the run's log of metrics."""

    values: dict[str, float]


class Note(NamedTuple):
    """A text that the run shows the user once."""

    text: str


class PushScaled(NamedTuple):
    """The staleness rule ``distance`` scaled this member's push by this factor."""

    serial: int
    version: int
    scale: float


class Copied(NamedTuple):
    """This member's part of a checkpoint is written; ``fault`` says what went wrong.

    Attributes:
        stood_s: seconds that all members waited, if a whole model was written meanwhile.
        is_main: whether it is the main member's, with what scripts keep.
    """

    number: int
    version: int
    is_pinned: bool
    fault: str
    stood_s: float = 0.0
    is_main: bool = False


class Rested(NamedTuple):
    """The script has no more epochs; the answer is ``Goodbye``.

    Attributes:
        published: as in `Arrive`.
        is_over: whether all of the script is over, so that others may train on without it.
    """

    epoch: int
    place: ScriptPlace
    published: int = 0
    is_over: bool = False


class Published(NamedTuple):
    """The weights that this member published are in the store."""


class FaultComes(NamedTuple):
    """A fault is injected into this member now."""

    text: str


class SettingsNow(NamedTuple):
    """The optimizer's settings as this epoch begins, for members that join later."""

    text: str


class StreamServed(NamedTuple):
    """This member reads the stream of this epoch and serves its mini-batches at this address.

    Attributes:
        address: for ``multiprocessing.connection``.
        key: authenticates the clients.
    """

    epoch: int
    address: str
    key: bytes


class StreamOver(NamedTuple):
    """The stream of this epoch has so many mini-batches."""

    epoch: int
    end: int


class StreamState(NamedTuple):
    """The data set's own state before the mini-batch of this number, as JSON."""

    epoch: int
    number: int
    text: str


class AskStop(NamedTuple):
    """The script asks to end the run."""


class AskAnew(NamedTuple):
    """Asks, between two epochs and for this reason, that all restart from a checkpoint."""

    text: str


class TrialBegins(NamedTuple):
    """The script enters this trial; the answer is ``OpenTrial``.

    Attributes:
        name: of the trial; empty: it has none.
    """

    name: str


class TrialFails(NamedTuple):
    """An exception of the script left the trial, which ends in all members.

    Attributes:
        text: of the exception.
        kind: its class, as ``module:name``.
    """

    text: str
    kind: str


class TrialEnds(NamedTuple):
    """The script left the trial and does nothing more for it; the answer is ``TrialOver``."""


class Done(NamedTuple):
    """The script has ended."""


class Whose(StrEnum):
    """Whose failure it is: a worker's own, the user's, or one that no worker can survive."""

    WORKER = "worker"
    USER = "you"
    ALL = "all"


class Failed(NamedTuple):
    """The script failed; whose failure it is: its own ("worker"), the user's ("you"), or "all"."""

    text: str
    whose: Whose = Whose.WORKER


# -- from the coordinator --------------------------------------------------------------------------


class Laid(NamedTuple):
    """The store's memory is ready.

    Attributes:
        num_steps: local steps per push, except in short rounds.
        is_difference: whether a push is a difference of parameters.
        nonfinite_is_error: whether a gradient that is not finite ends the run.
        first_epoch: that the member begins with.
        distance_limit: of the staleness rule; 0: there is none.
        version: of the current parameters.
        collective: sums the gradients of peers, see ``Plan``.
        num_fragments: of the parameters, one exchanged per update; 1: all at once.
        overlap_steps: local steps until the result of an exchange is merged.
    """

    arena_bytes: int
    num_steps: int
    is_difference: bool
    nonfinite_is_error: bool
    first_epoch: int
    distance_limit: float
    version: int
    place: ScriptPlace
    collective: str
    num_fragments: int = 1
    overlap_steps: int = 0


class OpenTrial(NamedTuple):
    """All scripts arrived: the trial begins.

    Attributes:
        context: that ``connect`` returns to the script inside it, as JSON.
        is_main: whether this member prints and saves.
    """

    context: str
    is_main: bool


class TrialOver(NamedTuple):
    """All scripts left the trial.

    Attributes:
        text, kind: of its failure, as in `TrialFails`; empty: it did not fail.
        is_main: whether this member prints and saves from now on.
    """

    text: str
    kind: str
    is_main: bool


class Adopt(NamedTuple):
    """To a new member: the others' optimizer settings."""

    text: str


class WritePublished(NamedTuple):
    """Put your weights, as the script changed them, into the store; all others wait."""


class SentAway(NamedTuple):
    """To a new member, which ends: its order is not the others', or their scripts are over."""


class OpenEpoch(NamedTuple):
    """The epoch begins.

    Attributes:
        by_peers: whether it runs between peers; else through the store.
        updates_left: until the run's end; -1: no number was set.
        phase: barriers that members have passed.
        seats: of the members, in member order.
        began_for_s: seconds since the run's first epoch opened.
        position: in the epoch's order where a resumed run begins.
        first_id: of the first lease from that position on.
        is_published: whether weights were published since the last epoch; the store has them.
        num_short: rounds between peers that have one step, before all others.
        newest: number of the member that joined last; if it changed, peers meet again.
    """

    epoch: int
    by_peers: bool
    updates_left: int
    phase: int
    seats: tuple[int, ...]
    began_for_s: float
    position: int = 0
    first_id: int = 0
    is_published: bool = False
    num_short: int = 0
    newest: int = 0


class ReadStream(NamedTuple):
    """To one member: read the stream of this epoch for all; the answer is ``StreamServed``.

    Attributes:
        first: number of the first mini-batch that is still needed.
        done: later numbers that are not needed.
        number: of the mini-batch before which the data set had this state; 0 if it has no state.
        state: of the data set, as JSON; empty: it starts from the beginning.
    """

    epoch: int
    first: int
    done: tuple[int, ...]
    number: int
    state: str


class StreamAt(NamedTuple):
    """The member that reads the stream of this epoch serves its mini-batches at this address.

    Attributes:
        reader: number of that member.
    """

    reader: int
    epoch: int
    address: str
    key: bytes


class StreamDone(NamedTuple):
    """For the stream's reader: updates used all numbers below ``first``, and ``others``."""

    epoch: int
    first: int
    others: tuple[int, ...]


class Add(NamedTuple):
    """Job: add this seat's slot to the sum.

    Attributes:
        scale: factor of the staleness rule.
        is_first: whether the sum begins with it.
    """

    job: int
    seat: int
    weight: float
    scale: float
    is_first: bool


class Finish(NamedTuple):
    """Job: make this version from the sum (``seat`` -1) or from one seat's slot.

    Attributes:
        factors: of the gradients of each of several optimizers; empty: all 1.
    """

    job: int
    version: int
    seat: int
    scale: float
    clip: Clip
    factors: tuple[float, ...] = ()


class Skip(NamedTuple):
    """Job: make this version equal to the one before.

    Attributes:
        overflow_version: the newest version that an overflowed push was computed from, or -1.
    """

    job: int
    version: int
    overflow_version: int


class Copy(NamedTuple):
    """Job: pin the version that the previous job made, for the checkpoint of this number."""

    job: int
    number: int


class Snap(NamedTuple):
    """Write your part of a checkpoint while all others wait; the first member pins the version.

    Attributes:
        behind: epoch whose loop's end it stands for, without what scripts did since; else -1.
        is_main: whether what the script keeps is written: it is the main member's.
        has_own: whether this member has a part of its own besides.
    """

    number: int
    version: int
    is_first: bool
    behind: int = -1
    is_main: bool = False
    has_own: bool = True


class CheckpointsMoved(NamedTuple):
    """Write checkpoints to this folder from now on; ``within`` identifies the run's folder."""

    folder: str
    within: tuple[int, ...] | None


class Ending(NamedTuple):
    """``Stop`` follows once the end of the run is copied."""


class Goodbye(NamedTuple):
    """The last checkpoint is saved: the script may end."""


class Extended(NamedTuple):
    """One more mini-batch; None: there is none."""

    lease: Lease | None


class EndEpoch(NamedTuple):
    """The epoch is over at this version."""

    epoch: int
    version: int


class Mend(NamedTuple):
    """Restore the shares of dead members; the answer is ``Mended``."""


class Resume(NamedTuple):
    """Go on through the store, with the work of this serial."""

    serial: int


class BeMain(NamedTuple):
    """This member prints and saves from now on."""


class Range(NamedTuple):
    """Evaluate the positions ``[start, stop)``; ``start`` -1: there are no more.

    Attributes:
        ahead: the member's next ranges, in order.
    """

    start: int = -1
    stop: int = -1
    ahead: tuple[tuple[int, int], ...] = ()


class CountTotals(NamedTuple):
    """The totals of the whole evaluation."""

    totals: Totals


class Summed(NamedTuple):
    """The sums over all members."""

    values: tuple[float, ...]


class Stop(NamedTuple):
    """The run ends at this version, or, if ``begins_anew``, restarts.

    Attributes:
        is_at_next: whether it comes between epochs, with a script at the next one already: all go
            through that, without batches, so that they stay at one place.
    """

    version: int
    begins_anew: bool = False
    is_at_next: bool = False


FromMember: TypeAlias = (
    Describe | Arrive | Push | Extend | GiveBack | LeaveEpoch | LoopLeft | OutOfLoop | StepLeft
    | Rounds | PeersLeft | Mended | Count | Counted | SumValues | LogValues | Note | PushScaled
    | Copied | Rested | FaultComes | SettingsNow | AskStop | AskAnew | Done | Failed
    | EvaluatedAlone | StopWhen | StreamServed | StreamOver | StreamState | Published | TrialBegins
    | TrialFails | TrialEnds | AwaitsMain
)  # fmt: skip
Job: TypeAlias = Add | Finish | Skip | Copy
ToMember: TypeAlias = (
    Laid | Adopt | SentAway | OpenEpoch | Grant | Job | Snap | CheckpointsMoved | Ending | Goodbye
    | Extended | EndEpoch | Mend | Resume | BeMain | Range | CountTotals | Summed | Stop
    | ReadStream | StreamAt | StreamDone | WritePublished | OpenTrial | TrialOver
)  # fmt: skip
OfStream: TypeAlias = ReadStream | StreamAt | StreamDone
Message: TypeAlias = FromMember | ToMember
