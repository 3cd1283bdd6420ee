"""A prepared scheduler whose steps several members take together.

    in step     the loop's index is the same in every member (full-sync): the original call in each,
                at its own place, whatever its rhythm; all members note the same in shared words
    by version  members step independently (k-sync, async; or one died, or joined): the member that
                executes an update first steps its own copy up to the update's version

The first needs only the calls themselves, so it equals plain PyTorch bit for bit, with
arguments, every k-th step, or a metric. The second works for one rhythm only, *each version*:
only then the state at a version is known without the calls. It is detected when the loop calls
once per own step, and lost (in step: for good) when an own step passes without a call. Any
other rhythm is refused by name where members are not in step.

    word     0 unknown | 1 another rhythm | else each version: steps = updates applied + ahead
    count    steps taken in the loop, for a member that had no mini-batch in an update

A member that took no part in an update takes, before it executes anything, the steps that the
others noted meanwhile, and skips its own late call of the same step.

With several optimizers in turn, each step a version, a scheduler is stepped only at versions of its
own optimizer. If each call so far was the only one after such a step, the number that a
checkpoint inside an epoch owes is known; for all other rhythms in step it is not,
since the loop's index restarts. This module must not know exchanges or who executes.
"""

import math
from collections.abc import Callable
from typing import Any, NoReturn

from ..errors import ConfigError, WorkerError
from ..store.versions import RhythmWords
from .place import LoopPlace
from .schedules import Schedule
from .unprepared import AnyScheduler

_UNKNOWN, _OTHER = 0, 1
_ZERO = 2**29
"""The word of the rhythm "each version" where nothing is ahead."""


class SharedSchedule(Schedule):
    """One prepared scheduler of a member among several.

    Args:
        words: its state in shared memory, which all members see.
        is_apart: whether updates are steps of several optimizers in turn, so that their number
            is not that of this optimizer's steps.
    """

    def __init__(
        self,
        scheduler: AnyScheduler,
        place: LoopPlace,
        tell: Callable[[], None],
        words: RhythmWords,
        *,
        is_apart: bool = False,
    ) -> None:
        super().__init__(scheduler, place, tell)
        self._words = words
        if is_apart:
            words.rhythm = _OTHER
        self._is_each_own = is_apart
        """Whether each call, as far as this member knows, was the only one after an own step."""
        self._has_stepped = self._is_under_way = self._has_said = False
        """Whether its optimizer has stepped; whether it does now; whether ``cut`` was reported."""
        self._count = 0
        """Steps taken in the loop, whichever member called for them."""
        self._index = 0
        """Steps that this member's own loop has reached."""
        self._given: tuple[Any, ...] = ()
        """Arguments of the calls since the last own step."""
        self._called_at = -1
        self._is_active = self._was_active = False
        """Whether the loop has stepped it in this epoch, and in the one before."""

    def _load(self, state_dict: dict[str, Any]) -> None:
        if self._place.is_iterating:
            raise ConfigError(
                f"{self.name}.load_state_dict() was called while the prepared loader is iterated, "
                "where several workers step it; call it before the loop or between epochs"
            )
        super()._load(state_dict)

    # -- a call in the loop ---------------------------------------------------------------------

    def _in_loop(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        values = tuple(value for value in (*arguments, *options.values()) if value is not None)
        self._given = values if self._num_calls == 1 else self._given + values
        self._is_active = True
        if self._place.is_in_step:
            self._call_in_step(values, arguments, options)
        else:
            self._call_by_version(values)
        self._called_at = self._place.serial

    def _call_in_step(
        self, values: tuple[Any, ...], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        place, words = self._place, self._words
        is_each = not values and self._num_calls == 1 and words.rhythm != _OTHER
        if is_each and place.was_skipped_for_the_script:
            return
        self._index += 1
        if self._index > self._count:  # else it was taken with the others, without a mini-batch
            self.take(*arguments, **options)
            self._count = self._index
            if self._count > words.count:  # a late call comes after the others' next one
                words.argument = _number(values)
                words.count = self._count
        if not is_each:
            words.rhythm = _OTHER
            self._is_each_own = self._is_each_own and not values and self._num_calls == 1
            if not (self._is_each_own or self._has_said):
                self._has_said = True
                place.say_cut(self._why_cut)
            self._tell()
        elif place.version == place.next_version:
            self._set_each(self._count - place.applied(place.next_version))

    def _call_by_version(self, values: tuple[Any, ...]) -> None:
        place, rhythm = self._place, self._words.rhythm
        if values:
            self._refuse("with an argument")
        if self._num_calls > 1 and self._called_at == place.serial and not self._is_before:
            self._refuse("more than once after one optimizer.step()")
        if rhythm == _OTHER or (rhythm == _UNKNOWN and place.num_steps > 1):
            self._refuse("not after every optimizer.step()")
        if rhythm == _UNKNOWN:
            self._set_each(self._count - place.epoch_applied + self._is_before)
        self._bring(self._wanted(place.version))

    def _set_each(self, ahead: int) -> None:
        """Set the rhythm "each version", with ``ahead`` more steps than applied updates."""
        self._words.rhythm = _ZERO + 2 * ahead + self._is_before

    def _refuse(self, how: str) -> NoReturn:
        place = self._place
        event = f"worker {place.seat} steps {self.name} {how} inside the loop"
        if not place.is_lockstep:
            raise ConfigError(
                f"{event}; workers that do not step together count updates: call its step() once "
                "after every optimizer.step(), with a LambdaLR that counts in fours (lambda n: "
                "0.9 ** (n // 4)), or between epochs; full-sync supports any rhythm"
            )
        raise WorkerError(
            f"{event}, and is no longer in step with the others: a worker died or joined, or a "
            "batch was too small for all of them; resume from a checkpoint of an epoch's end "
            "(--resume), or call its step() once after every optimizer.step(), or between epochs"
        )

    # -- own steps and updates ------------------------------------------------------------------

    def begin_step(self, version: int) -> None:
        place, words = self._place, self._words
        self._is_each_own = self._is_each_own and self._num_calls == self._has_stepped
        self._is_under_way = True
        is_missed = self._has_called and not self._num_calls and words.rhythm > _OTHER
        if is_missed and not place.was_skipped:  # a script with a scaler may leave that call out
            if not place.is_in_step:
                self._refuse("not after every optimizer.step()")
            words.rhythm = _OTHER
        if not self._num_calls:
            self._given = ()
        if words.rhythm > _OTHER and not place.is_in_step:
            self._bring(self._wanted(version))
        self._index = self._count

    def end_step(self) -> None:
        self._has_stepped, self._is_under_way = True, False
        super().end_step()

    def advance(self, version: int) -> None:
        rhythm = self._words.rhythm
        if rhythm > _OTHER:
            self._bring(self._wanted(version))
        elif rhythm == _OTHER and self._place.own_version != version:
            self._bring(self._words.count)

    def _wanted(self, version: int) -> int:
        """Steps due before the update from ``version``, in the rhythm "each version"."""
        return self._place.applied(version) + (self._words.rhythm - _ZERO) // 2

    def _bring(self, count: int) -> None:
        """Take the missing steps, up to ``count``."""
        if self._count >= count:
            return
        argument = self._words.argument if self._words.rhythm == _OTHER else math.nan
        if math.isnan(argument):
            while self._count < count:
                self._count += 1
                self.take()
            return
        if count - self._count > 1 or math.isinf(argument):
            self._refuse("with arguments that this worker does not have")
        self._count += 1
        self.take(int(argument) if argument.is_integer() else argument)

    def opened(self) -> None:
        """Start an epoch; a member that took no part in the last update catches up."""
        self._was_active, self._is_active = self._is_active, False
        self._index, self._given = self._count, ()
        if not (self._place.is_lockstep and self._place.was_current):
            self._index = self._bring_between(self._words.end)

    def end(self) -> None:
        """End the loop; every worker shows the same rate from now on."""
        place = self._place
        if place.is_lockstep and place.next_version == place.version:
            self._words.end = self._count
        else:
            self._bring_between(self._count)

    def _bring_between(self, known: int) -> int:
        """Take the steps due between the last call of one epoch and the first of the next.

        Args:
            known: steps taken by then, if it is not stepped each version.

        Returns:
            The steps taken by then: fewer than were taken, where a checkpoint came in between.
        """
        word = self._words.rhythm
        count = self._wanted(self._place.version) - (word & 1) if word > _OTHER else known
        self._bring(count)
        return min(count, self._count) if word > _OTHER else self._count

    @property
    def mark(self) -> tuple[Any, ...]:
        return (self._count, *map(_as_text, self._given))

    # -- what is kept ---------------------------------------------------------------------------

    @property
    def _is_by_index(self) -> bool:
        """Whether its state follows from calls that the loop has made in its own rhythm."""
        is_active = self._is_active or self._was_active
        return self._words.rhythm == _OTHER and is_active and self._place.is_iterating

    @property
    def _owes(self) -> bool:
        """Whether the call after the step that made this version is still to come."""
        is_done = self._has_stepped and not self._num_calls
        return is_done or (self._is_under_way and self._place.has_made_newest)

    @property
    def cut(self) -> str:
        is_known = self._is_each_own and self._place.is_at_newest
        return self._why_cut if self._is_by_index and not is_known else ""

    @property
    def _why_cut(self) -> str:
        return (
            f"{self.name} is stepped in a rhythm of its own inside the loop, whose index restarts "
            "when the run is resumed in the middle of an epoch: resume from a checkpoint of an "
            "epoch's end (--checkpoint-every '1 epoch'), or step it once after every "
            "optimizer.step()"
        )

    def remember(self) -> dict[str, Any]:
        is_cut, owes = bool(self.cut), self._is_by_index and self._owes
        rhythm, count = self._words.rhythm, self._count
        own = self._state()
        return {"own": own, "count": count, "rhythm": rhythm, "is_cut": is_cut, "owes": owes}

    def go_on(self, state: dict[str, Any]) -> None:
        if state["is_cut"]:
            raise ConfigError(self._why_cut)
        self._original_load(state["own"])
        count = state["count"]
        if state.get("owes"):
            count += 1
            self.take()
        self._count = self._index = count
        words = self._words
        words.rhythm, words.count, words.end = state["rhythm"], count, count

    def state(self) -> dict[str, Any]:
        return {**self._state(), "paceline_count": self._count}

    def load(self, state: dict[str, Any]) -> None:
        self._count = self._index = state.pop("paceline_count", self._count)
        self._original_load(state)


def _as_text(value: Any) -> str:
    """An argument in a form that members can compare."""
    number = _number((value,))
    return f"{number:.10g}" if math.isfinite(number) else repr(value)


def _number(values: tuple[Any, ...]) -> float:
    """The only argument as a number; nan: there is none, inf: it is not one number."""
    if not values:
        return math.nan
    try:
        number = float(values[0])
    except (TypeError, ValueError, RuntimeError):
        return math.inf
    return number if len(values) == 1 and math.isfinite(number) else math.inf
