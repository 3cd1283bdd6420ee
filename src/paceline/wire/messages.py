"""Everything that members and the coordinator say to each other: a type a message, named fields.

    member -> coordinator      `FromMember`      wire/codec.py makes bytes of them and back
    coordinator -> member      `ToMember`        wire/channel.py carries these, in order

Who hears a message is found by its type: the coordinator's side has one table of handlers
(``run/controller.py``), a member's side is ``exchange/inbox.py`` and whoever asked. The table
in docs/messages.md is made from this file. Above 300 lines because it is that table. This module
must not know what a message leads to.
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
"""Of `Arrive` and `Rested`: a worker, or the main one, has called ``pace.publish``; else 0."""

OK, NOT_FINITE, FOUND_INF = 0, 1, 2
"""What was wrong with a push: nothing, a gradient was inf or nan, AMP's scaler found inf."""

# -- what several messages have in common ----------------------------------------------------------


class Clocks(NamedTuple):
    """Seconds since a member's last push.

    Attributes:
        add_s: of those of pushing: adding it to a sum.
        input_s: of those of computing: until its batches were there.
    """

    compute_s: float = 0.0
    wait_s: float = 0.0
    push_s: float = 0.0
    add_s: float = 0.0
    input_s: float = 0.0


class Told(NamedTuple):
    """What the coordinator is told of a push; its first fields are those of ``Pushed``.

    Attributes:
        stepped: which of several optimizers it is a step of, a bit each; 0: there is only one.
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
        """Whether its leases stay for one more step on them."""
        return bool(self.kept) and self.num_samples > 0 and not self.unused

    @property
    def is_owed(self) -> bool:
        """Whether it only closes leases that had stayed for a step which did not come."""
        return not (self.num_samples or self.kept or self.unused)


class Entry(NamedTuple):
    """A member's part in a round between peers; without a mini-batch ``num_samples`` is 0.

    Flat, since there is one a member and round: the clocks, and what it asks to be clipped to.
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
        """Peers add nothing to a sum."""
        return Clocks(self.compute_s, self.wait_s, self.push_s, 0.0, self.input_s)

    @property
    def clip(self) -> Clip:
        return Clip(self.max_norm, self.max_value)


class Row(NamedTuple):
    """One round between peers.

    Attributes:
        over_s: when it was over, by the machine's monotonic clock.
        entries: one a member, in member order.
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
    """At the loader, waiting for the epoch.

    Attributes:
        batch_ends: where batches of the user's own end; None: all are of one size.
        end: where the last of those ends, where this epoch is not as long as all others.
        digest: of the epoch's order, the same in all members.
        place: where the script is in ``pace.epochs``.
        published: whether the script has published weights since the last epoch.
        settings: a word of the optimizer's, the same in all members; 0: they may differ.
    """

    epoch: int
    batch_ends: tuple[int, ...] | None
    end: int | None
    digest: str
    place: ScriptPlace
    published: int = 0
    settings: int = 0


class Push(NamedTuple):
    """The work of this serial is done, and its gradient lies in the member's slot.

    Attributes:
        hyper: a word of the optimizer's settings, see ``settings_word``; 0: they may differ.
    """

    serial: int
    version: int
    told: Told
    clocks: Clocks
    hyper: int
    clip: Clip


class Extend(NamedTuple):
    """One mini-batch more for the work of this serial; the answer is ``Extended``."""

    serial: int


class GiveBack(NamedTuple):
    """The work of this serial returns undone."""

    serial: int


class LeaveEpoch(NamedTuple):
    """The loop was left before the epoch's end.

    Attributes:
        kept: ids of leases whose gradients ride on the next push.
        is_look: nothing was done with any of its batches.
    """

    kept: tuple[int, ...]
    is_look: bool


class LoopLeft(NamedTuple):
    """The loop over an epoch, or over all updates, is over here: what stands behind it comes."""

    version: int


class StepLeft(NamedTuple):
    """A superseded step was left, ``wasted_s`` after it had begun, at ``left_s``."""

    serial: int
    wasted_s: float
    left_s: float


class Rounds(NamedTuple):
    """Whole rounds between peers, the first of this number."""

    first: int
    rows: tuple[Row, ...]


class PeersLeft(NamedTuple):
    """The way between peers was left: this member's push, and those that it saw of all."""

    push: Entry | None
    pushes: tuple[Entry, ...]
    needs_store: bool


class Mended(NamedTuple):
    """The shares of dead members are put back."""


class Count(NamedTuple):
    """An evaluation of so many positions begins; the answers are ``Range`` and ``CountTotals``.

    Attributes:
        ends: where batches of the user's own end; None: all are of ``batch_size``.
        digest: of what lies at the positions, the same in all members.
        weights: of the weights that the member holds, where the script may have changed them; 0:
            they are a version's.
        ahead: ranges that the member has beside the one that it evaluates, to fetch them meanwhile.
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
    """What this member came to by itself, inside its loop, at the version that it held."""

    version: int
    totals: Totals


class StopWhen(NamedTuple):
    """The run is to end by this rule; every member says it."""

    rule: StopRule


class SumValues(NamedTuple):
    """To be summed over all members; the answer is ``Summed``."""

    values: tuple[float, ...]


class LogValues(NamedTuple):
    """Into the run's log of metrics."""

    values: dict[str, float]


class Note(NamedTuple):
    """The run says it to the user, once."""

    text: str


class PushScaled(NamedTuple):
    """The staleness rule ``distance`` left so much of this member's push."""

    serial: int
    version: int
    scale: float


class Copied(NamedTuple):
    """This member's part of a checkpoint is written; ``fault`` says what went wrong.

    Attributes:
        stood_s: for which nobody could go on, where a whole model was written meanwhile.
    """

    number: int
    version: int
    is_pinned: bool
    fault: str
    stood_s: float = 0.0


class Rested(NamedTuple):
    """The script has no more epochs; the answer is ``Goodbye``.

    Attributes:
        published: as of `Arrive`.
    """

    epoch: int
    place: ScriptPlace
    published: int = 0


class Published(NamedTuple):
    """The weights that this member published are in the store."""


class FaultComes(NamedTuple):
    """What was ordered to go wrong goes wrong now."""

    text: str


class SettingsNow(NamedTuple):
    """The optimizer's settings as this epoch begins, for members that come later."""

    text: str


class StreamServed(NamedTuple):
    """This member reads the stream of this epoch, and gives its mini-batches there.

    Attributes:
        address: for ``multiprocessing.connection``.
        key: who knows it may ask.
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
    """The script asks for the end of the run."""


class AskAnew(NamedTuple):
    """Between two epochs: all are to begin anew, for this reason, and go on from a checkpoint."""

    text: str


class TrialBegins(NamedTuple):
    """The script enters this trial; the answer is ``OpenTrial``.

    Attributes:
        name: empty: it has none of its own.
    """

    name: str


class TrialFails(NamedTuple):
    """An exception of the script's leaves the trial, which ends in all members.

    Attributes:
        text: which, in words.
        kind: its class, as ``module:name``.
    """

    text: str
    kind: str


class TrialEnds(NamedTuple):
    """The script leaves the trial, and does nothing more for it; the answer is ``TrialOver``."""


class Done(NamedTuple):
    """The script is over."""


class Whose(StrEnum):
    """Whose a failure is: a worker's own, the user's, or one that nobody can go on after."""

    WORKER = "worker"
    USER = "you"
    ALL = "all"


class Failed(NamedTuple):
    """The script has failed; whose it is: its own ("worker"), the user's ("you"), or "all"."""

    text: str
    whose: Whose = Whose.WORKER


# -- from the coordinator --------------------------------------------------------------------------


class Laid(NamedTuple):
    """The store's memory is there.

    Attributes:
        num_steps: local steps a push, but in short rounds.
        is_difference: a push is a difference of parameters.
        nonfinite_is_error: a gradient that is not finite ends the run.
        first_epoch: the one that the member begins with.
        distance_limit: of the staleness rule; 0: there is none.
        version: of the parameters that stand.
        collective: what sums the gradients of peers, see ``Plan``.
        num_fragments: in which parameters are exchanged, one an update; 1: all at once.
        overlap_steps: local steps until what came of an exchange is merged.
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
    """All scripts are there: the trial begins.

    Attributes:
        context: what the script finds through ``connect`` in it, as JSON.
        is_main: whether this member prints and saves.
    """

    context: str
    is_main: bool


class TrialOver(NamedTuple):
    """All scripts have left the trial.

    Attributes:
        text, kind: of what has failed in it, as of `TrialFails`; empty: nothing has.
        is_main: whether this member prints and saves from here on.
    """

    text: str
    kind: str
    is_main: bool


class Adopt(NamedTuple):
    """To a newcomer: the optimizer's settings of the others."""

    text: str


class WritePublished(NamedTuple):
    """Put your weights into the store, as the script has changed them; all others wait."""


class SentAway(NamedTuple):
    """To a newcomer: it drew another order than the others, so it ends."""


class OpenEpoch(NamedTuple):
    """The epoch begins.

    Attributes:
        by_peers: between peers; else through the store.
        updates_left: until the run has all it was asked for; -1: nobody set a number.
        phase: barriers that members have passed.
        seats: of the members, in member order.
        began_for_s: seconds since the run's first epoch opened.
        position: in the epoch's order, where a run that goes on begins.
        first_id: of the first lease from there on.
        is_published: weights were published since the last one, and the store has them.
        num_short: rounds between peers that have one step, before all others.
        newest: number of the member that joined last: with it peers meet anew.
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
        done: numbers after it that are not.
        number: of the mini-batch before which the data set had this state; 0 where it has none.
        state: of the data set, as JSON; empty: it begins at its beginning.
    """

    epoch: int
    first: int
    done: tuple[int, ...]
    number: int
    state: str


class StreamAt(NamedTuple):
    """Who reads the stream of this epoch gives its mini-batches there.

    Attributes:
        reader: number of that member.
    """

    reader: int
    epoch: int
    address: str
    key: bytes


class StreamDone(NamedTuple):
    """To be told to who reads: updates have used all numbers below ``first``, and these."""

    epoch: int
    first: int
    others: tuple[int, ...]


class Add(NamedTuple):
    """Job: add what lies in this seat's slot to the sum.

    Attributes:
        scale: what the staleness rule leaves of it.
        is_first: the sum begins with it.
    """

    job: int
    seat: int
    weight: float
    scale: float
    is_first: bool


class Finish(NamedTuple):
    """Job: make this version of the sum, or of one seat's slot; ``seat`` -1: of the sum.

    Attributes:
        factors: of the gradients of each of several optimizers; none: all 1.
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
        overflow_version: the newest from which a push was computed that overflowed, or -1.
    """

    job: int
    version: int
    overflow_version: int


class Copy(NamedTuple):
    """Job: pin the version that the job before made, for the checkpoint of this number."""

    job: int
    number: int


class Snap(NamedTuple):
    """For a checkpoint while all others wait: write your part; the first one pins the version.

    Attributes:
        behind: it is of the end of this epoch's loop, not of what scripts have done since; else -1.
    """

    number: int
    version: int
    is_first: bool
    behind: int = -1


class CheckpointsMoved(NamedTuple):
    """Checkpoints go there from now on; ``within`` is the identity of the run's folder."""

    folder: str
    within: tuple[int, ...] | None


class Ending(NamedTuple):
    """``Stop`` comes when the end of the run is copied."""


class Goodbye(NamedTuple):
    """The last checkpoint is kept: the script may end."""


class Extended(NamedTuple):
    """One mini-batch more; None: there is none."""

    lease: Lease | None


class EndEpoch(NamedTuple):
    """The epoch is over at this version."""

    epoch: int
    version: int


class Mend(NamedTuple):
    """Put back the shares of dead members; the answer is ``Mended``."""


class Resume(NamedTuple):
    """Go on through the store, with the work of this serial."""

    serial: int


class BeMain(NamedTuple):
    """This member prints and saves from now on."""


class Range(NamedTuple):
    """Evaluate the positions ``[start, stop)``; ``start`` -1: there are no more.

    Attributes:
        ahead: the member's next ones, in order.
    """

    start: int = -1
    stop: int = -1
    ahead: tuple[tuple[int, int], ...] = ()


class CountTotals(NamedTuple):
    """What the whole evaluation came to."""

    totals: Totals


class Summed(NamedTuple):
    """The sums over all members."""

    values: tuple[float, ...]


class Stop(NamedTuple):
    """The run is over at this version, or, where it begins anew, this life of it."""

    version: int
    begins_anew: bool = False


FromMember: TypeAlias = (
    Describe | Arrive | Push | Extend | GiveBack | LeaveEpoch | LoopLeft | StepLeft | Rounds
    | PeersLeft | Mended | Count | Counted | SumValues | LogValues | Note | PushScaled | Copied
    | Rested | FaultComes | SettingsNow | AskStop | AskAnew | Done | Failed | EvaluatedAlone
    | StopWhen | StreamServed | StreamOver | StreamState | Published | TrialBegins | TrialFails
    | TrialEnds
)  # fmt: skip
Job: TypeAlias = Add | Finish | Skip | Copy
ToMember: TypeAlias = (
    Laid | Adopt | SentAway | OpenEpoch | Grant | Job | Snap | CheckpointsMoved | Ending | Goodbye
    | Extended | EndEpoch | Mend | Resume | BeMain | Range | CountTotals | Summed | Stop
    | ReadStream | StreamAt | StreamDone | WritePublished | OpenTrial | TrialOver
)  # fmt: skip
OfStream: TypeAlias = ReadStream | StreamAt | StreamDone
Message: TypeAlias = FromMember | ToMember
