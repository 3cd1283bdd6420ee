"""An exchange: one member's part of a run, the same verbs whatever carries the bytes.

    open_epoch -> [ grant -> compute -> push ] ... -> None at the end of the epoch

``push`` returns when the next grant is here and the model holds the parameters it names, or when
the epoch or the run is over; ``extend`` asks for one mini-batch more, ``give_back`` returns the
work undone, ``leave_epoch`` ends the epoch for all. One worker alone has none of these. Members:

    solo            one worker: the user's optimizer steps on the user's parameters
    through_store   order by order from the coordinator, or among peers: every protocol

Above 300 lines, since every verb has its sentence here. This module must not know processes,
sockets or the loop that uses it.
"""

import abc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeAlias

from ..conditions.faults import Fault
from ..core.batches import Batches, Ends
from ..errors import ConfigError, WorkerError
from ..passes import START, ScriptPlace
from ..stopping import StopRule
from ..store.clip import UNCLIPPED, Clip
from ..store.versions import LossScale
from ..wire.messages import OfStream, Totals

if TYPE_CHECKING:
    from torch import Tensor

    from ..spread.base import SpreadModel
    from .compressed import CompressedGradient
    from .evaluation import EvaluationRanges
    from .solo import SoloExchange
    from .through_store import StoreExchange

State: TypeAlias = Mapping["Tensor", Mapping[str, Any]]
"""What an optimizer keeps for each parameter."""


class Superseded(BaseException):
    """The work in flight was abandoned; a BaseException: ``except Exception`` lets it by."""


class Stopped(BaseException):
    """The run ends now: raised out of a member that still waits for something."""


class Perished(BaseException):
    """A member of one process among others was killed: its thread ends as a process would."""


class End(IntEnum):
    """Why a member waits for those with whom it shares a model: all wait for the same."""

    PUSH = 0
    EPOCH = 1
    EVALUATION = 2
    SUM = 3
    OVER = 4


@dataclass(slots=True)
class Work:
    """What a member reports with a push.

    Attributes:
        num_samples: whose gradients are in it.
        weight: its share of an update against the other pushes; 0: there is no gradient.
        kept, unused: ids of leases, see ``Pushed``.
    """

    num_samples: int = 0
    weight: float = 0.0
    kept: tuple[int, ...] = ()
    unused: tuple[int, ...] = ()
    loss: float = float("nan")
    found_inf: bool = False
    inv_scale: float = 1.0
    clip: Clip = UNCLIPPED
    """Of the averaged gradient."""
    stepped: int = 0
    """Which of several optimizers it is a step of, a bit each; 0: there is only one."""


@dataclass(slots=True)
class Clock:
    """Where a member's seconds went since its last push."""

    compute_s: float = 0.0
    wait_s: float = 0.0
    push_s: float = 0.0
    add_s: float = 0.0
    """Of those of pushing: adding the last push to the sum of its update."""
    input_s: float = 0.0
    """Of those of computing: until the batches of the work in flight were there."""
    begun_s: float = 0.0
    """When the work in flight began."""

    def begin(self) -> None:
        """Other work begins now."""
        self.begun_s, self.input_s = time.perf_counter(), 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What an epoch of the prepared loader is.

    Attributes:
        batch_size: global: samples an update averages (per local step).
        parts: mini-batches that a batch is cut into; ``is_sticky``: each is always one worker's.
    """

    num_samples: int
    batch_size: int
    parts: int
    keep_remainder: bool
    is_sticky: bool = False

    def batches(self, ends: Ends | None = None) -> Batches:
        found = Batches(
            self.num_samples, self.batch_size, self.parts, keep_remainder=self.keep_remainder,
            ends=None if isinstance(ends, int) else ends, has_columns=self.is_sticky,
        )  # fmt: skip
        return found.with_ends(ends) if isinstance(ends, int) else found


def not_finite(seat: int, name: str, step: int, version: int, loss: float | None) -> WorkerError:
    """The error for a gradient that is inf or nan; ``loss`` is None where nobody recorded it."""
    said = "" if loss is None else f", loss {loss:g}"
    return WorkerError(
        f"worker {seat}: the gradient of {name!r} is not finite at step {step} (version {version}"
        f"{said}); lower the learning rate, clip the gradient, or go on without such updates: "
        "--nonfinite skip"
    )


_STEPS_SHIFT, _MOST_STEPS = 32, 1 << 20


def settings_word(digest: int, num_steps: int = 0) -> int:
    """What a push tells of its optimizer's settings; 0, which this never is: they may differ.

    Args:
        digest: of 32 bits.
        num_steps: of its own optimizer that the member had taken, where each steps by itself.
    """
    return (1 + num_steps % _MOST_STEPS) << _STEPS_SHIFT | digest


def are_at_odds(word: int, other: int) -> bool:
    """Whether two came to other settings by as many steps of their own."""
    return word >> _STEPS_SHIFT == other >> _STEPS_SHIFT and word != other


def conflict(worker: int, other: int) -> ConfigError:
    """Two workers pushed into one update with different optimizer settings."""
    return ConfigError(
        f"workers {worker} and {other} pushed into one update with different optimizer settings "
        "(lr, momentum, ...); change them in all workers at the same place, best between epochs, "
        "or prepare the scheduler: pace.prepare(model, optimizer, loader, scheduler); a metric "
        "that it is stepped with must be the same in all: pace.evaluate(fn, loader)"
    )


@dataclass(slots=True)
class ScriptHooks:
    """What an exchange asks of the script's side, which fills it in before it attaches.

    Attributes:
        advance_schedule: bring schedulers to this version; whether members' rates may differ then.
        marks: what of prepared schedulers must be the same in members that push into one update.
        between: a word of the settings as an epoch begins; 0: members' may differ.
        hear_settings: the word of those that a push goes with.
        num_own_steps: of an optimizer that steps here, in the whole run.
        adopt: take over the settings of a worker that is there already.
        order_digest: of the epoch's order that was drawn last; all members' are compared.
        take_loaded: the optimizer's state that the script has loaded since ``prepare``.
        check_objects: look at what of the script's objects must stay as it was, beside weights.
        check_given: before an epoch, look at all copies of weights that the script was given.
        write_into: take the folder of checkpoints, and the identity of the one that it is in.
        write_own: write what this member remembers, for the checkpoint of this number; the epoch
            at whose end that stands, or -1.
        hear_stream: who reads the stream, where it is given, and what of it is done with.
        write_layout: write what lies where in the pinned block; of a split model, all of it.
        compressed: sends gradients in fewer bytes, and has what was not sent; None: sent whole.
        spread: this member's side of a model that several compute together; None: it has all of it.
        follow: make all others' step, of this optimizer, with a closure or without; None: none is.
    """

    advance_schedule: Callable[[int], bool] = lambda version: False
    marks: Callable[[], object] = lambda: None
    between: Callable[[], int] = lambda: 0
    hear_settings: Callable[[int], None] = lambda word: None
    num_own_steps: Callable[[], int] = lambda: 0
    adopt: Callable[[str], None] = lambda text: None
    order_digest: Callable[[], str] = lambda: ""
    take_loaded: Callable[[], State | None] = lambda: None
    check_objects: Callable[[], None] = lambda: None
    check_given: Callable[[], None] = lambda: None
    write_into: Callable[[str, Sequence[int] | None], None] = lambda folder, identity: None
    write_own: Callable[[int, int], None] = lambda number, behind: None
    write_layout: Callable[[int], None] = lambda number: None
    hear_stream: Callable[[OfStream], None] = lambda message: None
    compressed: "CompressedGradient | None" = None
    spread: "SpreadModel | None" = None
    follow: Callable[[int, bool], None] | None = None


class Exchange(abc.ABC):
    """One member's part of a run."""

    seat: int = 0
    num_workers: int = 1
    num_steps: int = 1
    """Local steps a push (local-sgd's H)."""
    is_in_step: bool = False
    """Whether the script is inside a step block: only there may ``check`` raise."""
    has_pushed: bool = False
    """Whether what a step block was for is handed in: the rest of it is no work to be left."""
    has_told_version: bool = False
    """Whether the script has asked how far training is."""
    has_told_place: bool = False
    """Whether it knows where it goes on: by that, by the run's end, or by what it keeps."""
    is_cut_short: bool = False
    """Whether the script is in a pass over its loader that the end of the run left empty."""
    last_norm: float = float("nan")
    """Norm of the averaged gradient of the update that used the last push; nan: not known."""

    @property
    def shared(self) -> "StoreExchange | None":
        """This one, where there is a coordinator: what only then can be done is asked of it."""
        return None

    @property
    def alone(self) -> "SoloExchange | None":
        """This one, where a worker is alone in its own process."""
        return None

    @property
    def is_main(self) -> bool:
        """Whether this member prints and saves."""
        return True

    def check(self) -> None:
        """Raise ``Superseded`` when the work in flight is abandoned."""
        return

    @abc.abstractmethod
    def superseded(self) -> None:
        """The step was left: wait for the next grant."""

    @property
    def is_stopped(self) -> bool:
        return False

    @property
    def version(self) -> int:
        """Version of the parameters that the model holds."""
        return 0

    @property
    def serial(self) -> int:
        """Grows with every work that is granted, and with every one that is called off."""
        return 0

    def applied(self, version: int) -> int:
        """Updates up to ``version`` that were not skipped: what schedules count."""
        return version

    @property
    def scale(self) -> LossScale | None:
        """The loss scale of that version; None: each worker's own."""
        return None

    def sleep(self, seconds: float) -> None:
        """Do nothing for so long; Superseded when the work in flight is abandoned meanwhile."""
        time.sleep(seconds)

    begins: tuple[int, ScriptPlace] = (0, START)
    """The epoch to begin with, and where the script is there: a worker may join a run under way."""
    place: Callable[[], ScriptPlace]
    """Where the script is now; set by the worker."""

    @property
    def trained_s(self) -> float:
        """Seconds since the run's first epoch opened."""
        return 0.0

    def beat(self) -> None:
        """A sign of life, where a member is busy with something that is no step."""
        return

    def inject(self, fault: Fault) -> None:
        """Let this fault happen now, to this member; nothing goes wrong for one worker alone."""
        return

    def rest(self, epoch: int) -> None:
        """The script has no more epochs; the next one would be ``epoch``."""
        return

    def ask_to_stop(self) -> None:
        """End the whole run at the next step border."""
        return

    def leave_epochs(self) -> None:
        """The script leaves its epochs early: the end that it asked for between two comes first."""
        return

    @abc.abstractmethod
    def census(self, num_samples: int, batch_size: int) -> "EvaluationRanges":
        """Share out an evaluation among all members."""

    @abc.abstractmethod
    def sum(self, values: Sequence[float]) -> list[float]:
        """The sum over members; all must call it between epochs."""

    def once(self) -> AbstractContextManager[bool]:
        """A block that one member goes through before all others; True for that one."""
        return nullcontext(True)

    def log(self, values: dict[str, float]) -> None:
        """Record values of the user's for the run's log."""
        return

    @abc.abstractmethod
    def stop_when(self, rule: StopRule) -> None:
        """End the run by this rule, of what is evaluated from now on."""

    @abc.abstractmethod
    def measured(self, totals: Totals) -> None:
        """This member has evaluated by itself."""
