"""An exchange: one member's part of a run, the same verbs whatever carries the bytes.

    open_epoch -> [ grant -> compute -> push ] ... -> None at the end of the epoch

``push`` returns when the next grant arrived and the model holds the parameters it names, or when
the epoch or the run is over; ``extend`` asks for one more mini-batch, ``give_back`` returns the
work undone, ``leave_epoch`` ends the epoch for all. A single worker has none of these. Members:

    solo            one worker: the user's optimizer steps on the user's parameters
    through_store   by orders from the coordinator, or among peers: every protocol

Above 300 lines, since every verb has its docstring here. This module must not know processes,
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
    """The work in flight was abandoned; a BaseException, so ``except Exception`` lets it pass."""


class Stopped(BaseException):
    """The run ends now: raised in a member that still waits for something."""


class Perished(BaseException):
    """A member that shares its process with others was killed: its thread ends like a process."""


class End(IntEnum):
    """Why a member waits for the others that share its split model: all wait for the same."""

    PUSH = 0
    EPOCH = 1
    EVALUATION = 2
    SUM = 3
    OVER = 4


@dataclass(slots=True)
class Work:
    """What a member reports with a push.

    Attributes:
        num_samples: samples whose gradients are in it.
        weight: its share of an update relative to the other pushes; 0: there is no gradient.
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
    """Which of several optimizers stepped, one bit each; 0: there is only one."""


@dataclass(slots=True)
class Clock:
    """Where a member's seconds went since its last push."""

    compute_s: float = 0.0
    wait_s: float = 0.0
    push_s: float = 0.0
    add_s: float = 0.0
    """Part of ``push_s``: adding the last push to the sum of its update."""
    input_s: float = 0.0
    """Part of ``compute_s``: waiting for the batches of the work in flight."""
    begun_s: float = 0.0
    """When the work in flight began."""

    def begin(self) -> None:
        """The next work begins now."""
        self.begun_s, self.input_s = time.perf_counter(), 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What an epoch of the prepared loader is.

    Attributes:
        batch_size: global: samples an update averages (per local step).
        parts: mini-batches that a batch is cut into.
        is_sticky: whether each part always goes to the same worker.
    """

    num_samples: int
    batch_size: int
    parts: int
    keep_remainder: bool
    is_sticky: bool = False

    def batches(self, ends: Ends | None = None) -> Batches:
        batches = Batches(
            self.num_samples, self.batch_size, self.parts, keep_remainder=self.keep_remainder,
            ends=None if isinstance(ends, int) else ends, has_columns=self.is_sticky,
        )  # fmt: skip
        return batches.with_ends(ends) if isinstance(ends, int) else batches


def not_finite(
    seat: int, name: str, step: int, version: int, loss: float | None, *, can_skip: bool = True
) -> WorkerError:
    """Return the error for a gradient that is inf or nan.

    Args:
        loss: None if it was not recorded.
        can_skip: whether the run supports ``--nonfinite skip``, which is then advised.
    """
    loss_text = "" if loss is None else f", loss {loss:g}"
    return WorkerError(
        f"worker {seat}: the gradient of {name!r} is not finite at step {step} (version {version}"
        f"{loss_text}); {advice_not_finite(can_skip=can_skip)}"
    )


def advice_not_finite(*, can_skip: bool) -> str:
    """Return what to do about a gradient that is not finite."""
    if can_skip:
        return "lower the learning rate, clip the gradient, or skip such updates: --nonfinite skip"
    return "lower the learning rate or clip the gradient"


_STEPS_SHIFT, _MOST_STEPS = 32, 1 << 20


def settings_word(digest: int, num_steps: int = 0) -> int:
    """Return the word for a push's optimizer settings; never 0, which means they may differ.

    Args:
        digest: of the settings, 32 bits.
        num_steps: steps of the member's own optimizer so far, where each steps by itself.
    """
    return (1 + num_steps % _MOST_STEPS) << _STEPS_SHIFT | digest


def are_at_odds(word: int, other: int) -> bool:
    """Return whether two members have different settings after equally many own steps."""
    return word >> _STEPS_SHIFT == other >> _STEPS_SHIFT and word != other


def conflict(worker: int, other: int) -> ConfigError:
    """Return the error for two workers that pushed into one update with different settings."""
    return ConfigError(
        f"workers {worker} and {other} pushed into one update with different optimizer settings "
        "(lr, momentum, ...); change them in all workers at the same place, best between epochs, "
        "or prepare the scheduler: pace.prepare(model, optimizer, loader, scheduler); a metric "
        "that steps the scheduler must be the same in all: pace.evaluate(fn, loader)"
    )


@dataclass(slots=True)
class ScriptHooks:
    """Callbacks to the script's side, which fills them in before it attaches.

    Attributes:
        advance_schedule: bring schedulers to this version; returns whether members' rates may
            then differ.
        marks: state of prepared schedulers that must be equal in members of one update.
        between: word of the settings as an epoch begins; 0: they may differ between members.
        hear_settings: receives the settings word of a push.
        num_own_steps: steps in the whole run of an optimizer that steps here.
        adopt: take over the settings of a worker that is there already.
        order_digest: of the epoch's order that was drawn last; all members' are compared.
        take_loaded: the optimizer's state that the script loaded since ``prepare``.
        check_objects: check the script's objects, besides weights, that must not change.
        check_given: before an epoch, check all copies of weights that the script was given.
        write_into: take the checkpoint folder, and the identity of the folder that it is in.
        write_own: write this member's own state for the checkpoint of this number; the second
            argument is the epoch that it ends, or -1.
        write_kept: write what the script keeps, as the main member, with the same arguments.
        is_held: whether the state of the end of this epoch's loop is held, to be written.
        hear_stream: receives who reads the stream, where it is read, and what of it is done.
        write_layout: write the layout of the pinned block; of a split model, the whole block.
        compressed: compresses gradients and keeps the residual; None: sent whole.
        spread: this member's side of a split model; None: it has the whole model.
        follow: make the others' step of this optimizer, with a closure or without; None: no
            steps are made together.
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
    write_kept: Callable[[int, int], None] = lambda number, behind: None
    is_held: Callable[[int], bool] = lambda behind: False
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
    """Whether the step block's push is done: the rest of the block is not abandoned."""
    has_told_version: bool = False
    """Whether the script asked how far training is."""
    has_told_place: bool = False
    """Whether the script knows where to resume: from that, the run's end, or its own state."""
    is_cut_short: bool = False
    """Whether the script is in a pass over its loader that the run's end made empty."""
    last_norm: float = float("nan")
    """Norm of the averaged gradient of the update that used the last push; nan: not known."""

    @property
    def shared(self) -> "StoreExchange | None":
        """This exchange if there is a coordinator, for what only works with one; else None."""
        return None

    @property
    def alone(self) -> "SoloExchange | None":
        """This exchange if the worker is alone in its own process; else None."""
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
        """The step was abandoned: wait for the next grant."""

    @property
    def is_stopped(self) -> bool:
        return False

    @property
    def version(self) -> int:
        """Version of the parameters that the model holds."""
        return 0

    @property
    def serial(self) -> int:
        """Grows with every work that is granted or cancelled."""
        return 0

    def applied(self, version: int) -> int:
        """Return the updates up to ``version`` that were not skipped, which schedules count."""
        return version

    @property
    def scale(self) -> LossScale | None:
        """The loss scale of that version; None: each worker has its own."""
        return None

    def sleep(self, seconds: float) -> None:
        """Wait; raises Superseded when the work in flight is abandoned meanwhile."""
        time.sleep(seconds)

    begins: tuple[int, ScriptPlace] = (0, START)
    """The epoch to begin with, and the place in it: a worker may join a run in progress."""
    place: Callable[[], ScriptPlace]
    """Where the script is now; set by the worker."""

    @property
    def trained_s(self) -> float:
        """Seconds since the run's first epoch opened."""
        return 0.0

    def beat(self) -> None:
        """Give a sign of life while the member is busy with something other than a step."""
        return

    def inject(self, fault: Fault) -> None:
        """Inject this fault into this member now; a single worker ignores it."""
        return

    def rest(self, epoch: int, *, is_over: bool = False) -> None:
        """The script has no more epochs; the next one would be ``epoch``.

        Args:
            is_over: whether all of it is over, so that others may train on without it.
        """
        return

    def ask_to_stop(self) -> None:
        """End the whole run after the current step."""
        return

    def goes_on(self) -> bool:
        """Whether the script goes to its next epoch; False: the run was stopped before."""
        return not self.is_stopped

    def leave_epochs(self) -> None:
        """The script leaves its epochs early: wait for a stop that it asked for between epochs."""
        return

    def note_kept(self) -> None:
        """Note that the script keeps objects of its own in checkpoints."""
        return

    @abc.abstractmethod
    def census(self, num_samples: int, batch_size: int) -> "EvaluationRanges":
        """Start an evaluation that is shared among all members."""

    @abc.abstractmethod
    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sum over members; all must call it between epochs."""

    def once(self) -> AbstractContextManager[bool]:
        """Return a block that one member enters before all others; it yields True there."""
        return nullcontext(True)

    def log(self, values: dict[str, float]) -> None:
        """Record the user's values in the run's log."""
        return

    @abc.abstractmethod
    def stop_when(self, rule: StopRule) -> None:
        """End the run by this rule, applied to evaluations from now on."""

    @abc.abstractmethod
    def measured(self, totals: Totals) -> None:
        """Report the totals of this member's own evaluation."""
