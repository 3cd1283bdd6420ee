"""Steps that all members make together: each runs the user's optimizer, on averaged gradients.

    member 0   enter | mean | closure -> evaluated | mean | closure -> evaluated | mean | push
    member 1   enter | mean | closure -> evaluated | mean | closure -> evaluated | mean | push
    member 2   follow       . . .  it has no mini-batch of this version, and steps all the same

What calls the model again inside a step (LBFGS, SAM) decides by the loss and the gradients that
come back. Each evaluation ends with the mean of both over all members, the same bits in each, so
all decide alike, and each optimizer's state stays where it is. When the step is over all hold equal
parameters, which become the next version (averaging.py). Before each mean members show where they
are; who is elsewhere than the others ends the run by name, so no mean is of two different things.
This module must not know closures, optimizers or protocols.
"""

import math
from collections.abc import Callable, Sequence
from enum import IntEnum

from ..errors import AllGone, ConfigError
from ..replica.seeding import kept_random_state
from .base import Superseded, are_at_odds
from .member import MemberSide
from .rounds import Barrier, GivenUp, Line, check_settings


class Stage(IntEnum):
    """Where a member is when it arrives at a barrier."""

    LEFT_LOOP = -3
    """It has left its loop; it does not come back in this epoch."""
    LEFT = -2
    """The run stops."""
    FOLLOWS = -1
    """It has no mini-batch, and does what the others do."""
    PUSHES = 0
    ENTERS = 1
    """It begins a step with a closure."""
    STEPS = 2
    """It begins a step without one."""
    CLIPS = 3
    """It clips the mean of what lies in ``.grad``."""
    EVALUATED = 4
    """A closure has come to its end."""


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
    "finish it: --respawn goes on from the newest checkpoint"
)
_STAGES = 8
"""A step's stage and the number of its optimizer make one number."""


class Lockstep:
    """One member's part in steps that all make together.

    Args:
        barrier: that of its rounds.
    """

    def __init__(self, member: MemberSide, barrier: Barrier) -> None:
        self._member, self._barrier = member, barrier
        self._last = Stage.FOLLOWS
        """Where the others were at the last mean."""
        self._was_short = False
        """Whether some member had no mini-batch of a version."""

    def average(
        self, stage: Stage, part: int = 0, *, weight: float, loss: float = math.nan
    ) -> float:
        """Every member's ``.grad`` becomes the mean of all; all call it, each at the same stage.

        Args:
            part: number of the optimizer that steps.
            weight: of this member's mini-batch; 0: it has none, or one that does not count.
            loss: of it.

        Returns:
            The mean loss.

        Raises:
            ConfigError: another one is elsewhere, its settings are others, or nothing counts.
            Superseded: another one has left since the run stops.
            AllGone: another one died.
        """
        averaging = self._member.averaging
        assert averaging is not None
        with kept_random_state():  # of members in one process each draws on where it was
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
                "step.weight is 0 in all workers, and their gradients have no mean; leave out the "
                "batch before the step block, or give it a weight"
            )
        weights = [line.weight / total for line in lines]
        self._last = stage_of(lines)[0]
        averaging.mean_gradients(weights)  # after its barrier lines are others
        return sum(w * line.loss for w, line in zip(weights, lines, strict=True) if w)

    # -- of a member that has no mini-batch -----------------------------------------------------

    def meet(self, show: Callable[[], None], *, has_part: bool) -> list[Line]:
        """The lines of all when they push; until then this member follows them where it has none.

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
        """Whether a round comes to its end where somebody is to leave: all have made its step.

        Each optimizer has gone on by it, and a checkpoint of the version before would not.
        """
        is_here = all(line.stage in (Stage.PUSHES, Stage.FOLLOWS) for line in lines)
        return self._member.copy.is_lockstep and is_here

    def _follow(self, lines: Sequence[Line]) -> None:
        """Others are in the midst of a step, and this member has waited for their push."""
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
        """Raise ConfigError where two members' optimizers have different settings."""
        shown = [int(line.hyper) for line in lines]  # also of those without a mini-batch
        self._was_short |= any(line.stage == Stage.FOLLOWS for line in lines)
        if not any(are_at_odds(shown[0], one) for one in shown):
            return
        if not self._was_short:
            check_settings(lines)
        raise ConfigError(
            "the optimizers of two workers have different settings (lr, ...) after a batch with "
            "fewer samples than there are workers: a scheduler that is stepped once a batch was "
            "stepped in some of them only; leave such a batch out (drop_last=True), or step the "
            "scheduler between epochs"
        )

    def evaluate(self) -> float:
        """In a step that it follows: the next evaluation of the others; the mean loss."""
        while True:
            loss = self.average(Stage.FOLLOWS, weight=0.0)
            if self._last is Stage.EVALUATED:
                return loss


def stage_of(lines: Sequence[Line]) -> tuple[Stage, int]:
    """Where those are who have a mini-batch, and the number of the optimizer that steps."""
    word = max(int(line.stage) for line in lines)
    return (Stage(word % _STAGES), word // _STAGES) if word > 0 else (Stage(word), 0)


def _refuse_elsewhere(lines: Sequence[Line]) -> None:
    """Raise unless all who have a mini-batch are at the same stage.

    Raises:
        ConfigError: they are not: two are named.
        Superseded: one has left since the run stops.
    """
    words = [int(line.stage) for line in lines]
    if Stage.LEFT in words:
        raise Superseded
    mine = [(word, seat) for seat, word in enumerate(words) if word != Stage.FOLLOWS]
    (first, seat), (last, other) = max(mine), min(mine)
    if first == last:
        return
    here, there = (_DOING[Stage(one % _STAGES if one > 0 else one)] for one in (first, last))
    if here == there:
        here, there = f"{here} of another optimizer", "does not"
    raise ConfigError(
        f"worker {seat} {here} where worker {other} {there}: steps with a closure are made by all "
        "workers together, so each must step and call its closure alike; what decides about it "
        "must be the same in all: the loss that optimizer.step(closure) returns, pace.sum(value)"
    )
