"""Steps that all members make together: each runs the user's optimizer on averaged gradients.

    member 0   enter | mean | closure -> evaluated | mean | closure -> evaluated | mean | push
    member 1   enter | mean | closure -> evaluated | mean | closure -> evaluated | mean | push
    member 2   follow       . . .  it has no mini-batch of this version, and steps all the same

An optimizer that calls the model again inside a step (LBFGS, SAM) decides by the loss and the
gradients it gets back. Each evaluation ends with the mean of both over all members, the same bits
in each, so all decide alike, and each optimizer's state stays local. After the step all hold equal
parameters, which become the next version (averaging.py). Before each mean, members show their
stage; a member at another stage ends the run by name, so no mean mixes two different things. This
module must not know closures, optimizers or protocols.
"""

import math
from collections.abc import Callable, Sequence
from enum import IntEnum

from ..errors import AllGone, ConfigError
from ..replica.seeding import kept_random_state
from .base import Superseded, are_at_odds
from .member import MemberSide
from .rounds import DIED, Barrier, GivenUp, Line, check_settings


class Stage(IntEnum):
    """Where a member is when it arrives at a barrier."""

    LEFT_LOOP = -3
    """It left its loop and does not come back in this epoch."""
    LEFT = -2
    """The run stops."""
    FOLLOWS = -1
    """It has no mini-batch and follows the others."""
    PUSHES = 0
    ENTERS = 1
    """It begins a step with a closure."""
    STEPS = 2
    """It begins a step without one."""
    CLIPS = 3
    """It clips the mean of ``.grad``."""
    EVALUATED = 4
    """A closure has returned."""


_DOING = {
    Stage.LEFT_LOOP: "has left its loop",
    Stage.PUSHES: "is at the end of its step block",
    Stage.ENTERS: "begins a step with a closure",
    Stage.STEPS: "begins a step without a closure",
    Stage.CLIPS: "clips",
    Stage.EVALUATED: "has called its closure once more",
}
DIED_TOGETHER = (
    "a worker died inside a step that all workers make together (a closure), and the others cannot "
    "finish it: use --respawn to restart from the newest checkpoint"
)
_STAGES = 8
"""A step's stage and its optimizer's number are encoded in one number."""


class Lockstep:
    """One member's part in steps that all members make together.

    Args:
        barrier: of its rounds.
    """

    def __init__(self, member: MemberSide, barrier: Barrier) -> None:
        self._member, self._barrier = member, barrier
        self._last = Stage.FOLLOWS
        """The others' stage at the last mean."""
        self._was_short = False
        """Whether some member ever had no mini-batch of a version."""

    def average(
        self, stage: Stage, part: int = 0, *, weight: float, loss: float = math.nan
    ) -> float:
        """Average ``.grad`` over all members; all call it at the same stage.

        Args:
            part: number of the optimizer that steps.
            weight: of this member's mini-batch; 0: it has none, or one that does not count.
            loss: of the mini-batch.

        Returns:
            The mean loss.

        Raises:
            ConfigError: another member is at another stage or has other settings, or no mini-batch
                counts.
            Superseded: another member left since the run stops.
            AllGone: another member died.
        """
        averaging = self._member.averaging
        assert averaging is not None
        with kept_random_state():  # members in one process each continue their own random stream
            try:
                if weight:
                    averaging.show_gradients()
                word = _STAGES * part + stage if stage > Stage.PUSHES else stage
                self._show(float(word), weight, loss)
                self._barrier.wait()
                return self._come_to_mean(self._barrier.lines())
            except GivenUp:
                raise AllGone(DIED_TOGETHER) from None

    def _show(self, word: float, weight: float, loss: float) -> None:
        self._barrier.show(Line(
            num_samples=0.0, weight=weight, loss=loss, fault=0.0, compute_s=0.0, wait_s=0.0,
            push_s=0.0, input_s=0.0, squared_norm=0.0, max_norm=math.inf, max_value=math.inf,
            hyper=self._member.settings(), bad_version=-1.0, leaves=0.0, snapshot=0.0, stage=word,
        ))  # fmt: skip

    def _come_to_mean(self, lines: Sequence[Line]) -> float:
        _refuse_elsewhere(lines)
        self._check_settings(lines)
        averaging = self._member.averaging
        assert averaging is not None
        total = sum(line.weight for line in lines)
        if not total > 0.0:
            raise ConfigError(
                "step.weight is 0 in all workers, so their gradients have no mean; leave out the "
                "batch before the step block, or give it a weight"
            )
        weights = [line.weight / total for line in lines]
        self._last = stage_of(lines)[0]
        averaging.mean_gradients(weights)  # after its barrier the lines may change
        return sum(w * line.loss for w, line in zip(weights, lines, strict=True) if w)

    # -- for a member without a mini-batch --------------------------------------------------------

    def meet(self, show: Callable[[], None], *, has_part: bool) -> list[Line]:
        """Return the lines of all when they push; until then a member without a part follows them.

        Args:
            show: shows this member's line.
        """
        while True:
            show()
            self._barrier.wait()
            lines = self._barrier.lines()
            if all(line.stage <= Stage.PUSHES for line in lines):
                return lines
            if not has_part and any(line.stage == Stage.LEFT for line in lines):
                return lines  # the run stops
            if has_part:
                _refuse_elsewhere(lines)
            self._follow(lines)

    def can_finish(self, lines: Sequence[Line]) -> bool:
        """Return whether to finish a round though a member wants to leave: all made its steps.

        Each optimizer's state includes them, so a checkpoint of the version before is wrong. Local
        steps can also be exchanged through the store, which goes on without a member that died.
        """
        copy = self._member.copy
        is_here = all(line.stage in (Stage.PUSHES, Stage.FOLLOWS) for line in lines)
        has_lost = any(line.leaves == DIED for line in lines)
        return is_here and (copy.is_lockstep or (copy.is_difference and not has_lost))

    def _follow(self, lines: Sequence[Line]) -> None:
        """Join a step that the others are in while this member waited for their push."""
        hooks = self._member.hooks
        assert hooks.follow is not None
        with kept_random_state():
            try:
                self._come_to_mean(lines)
            except GivenUp:
                raise AllGone(DIED_TOGETHER) from None
        stage, part = stage_of(lines)
        if stage in (Stage.ENTERS, Stage.STEPS):
            try:
                hooks.follow(part, stage is Stage.ENTERS)
            except Superseded:  # the run stops
                raise GivenUp from None

    def _check_settings(self, lines: Sequence[Line]) -> None:
        """Raise ConfigError if two members' optimizers have different settings."""
        words = [int(line.hyper) for line in lines]  # also of those without a mini-batch
        self._was_short |= any(line.stage == Stage.FOLLOWS for line in lines)
        if not any(are_at_odds(words[0], word) for word in words):
            return
        if not self._was_short:
            check_settings(lines)
        raise ConfigError(
            "the optimizers of two workers have different settings (lr, ...) after a batch with "
            "fewer samples than there are workers: a scheduler that is stepped once a batch was "
            "stepped in only some of them; leave such a batch out (drop_last=True), or step the "
            "scheduler between epochs"
        )

    def evaluate(self) -> float:
        """In a step that this member follows, join the others' next evaluation.

        Returns:
            The mean loss.
        """
        while True:
            loss = self.average(Stage.FOLLOWS, weight=0.0)
            if self._last is Stage.EVALUATED:
                return loss


def stage_of(lines: Sequence[Line]) -> tuple[Stage, int]:
    """Return the stage of the members with a mini-batch, and the number of their optimizer."""
    word = max(int(line.stage) for line in lines)
    return (Stage(word % _STAGES), word // _STAGES) if word > 0 else (Stage(word), 0)


def _refuse_elsewhere(lines: Sequence[Line]) -> None:
    """Raise unless all members with a mini-batch are at the same stage.

    Raises:
        ConfigError: they are not; two of them are named.
        Superseded: one left since the run stops.
    """
    words = [int(line.stage) for line in lines]
    if Stage.LEFT in words:
        raise Superseded
    active = [(word, seat) for seat, word in enumerate(words) if word != Stage.FOLLOWS]
    (first, seat), (last, other) = max(active), min(active)
    if first == last:
        return
    here, there = (_DOING[Stage(word % _STAGES if word > 0 else word)] for word in (first, last))
    if here == there:
        here, there = f"{here} of another optimizer", "does not"
    raise ConfigError(
        f"worker {seat} {here} where worker {other} {there}: all workers make steps with a closure "
        "together, so each must step and call its closure alike; decide by values that are the "
        "same in all: the loss that optimizer.step(closure) returns, pace.sum(value)"
    )
