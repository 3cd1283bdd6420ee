"""Where a script's loop stands: in its epochs, and in the steps of one.

    pace.epochs(...)   numbers from 0, or those of a range or list of its own (`values_of`)

    open            step 1          step 2           the loop's own calls after step 1, and before
     | epoch_version | next_version  |               step 2, belong to the version that step 1 made

Between members that take their steps together (full-sync) a loop's index is the same in all; a
member is *in step* while the number of its steps is that of the versions since the epoch opened.
This module must not know what a scheduler is, runs, nor where an interrupted one goes on.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from ..errors import ConfigError
from ..exchange.base import Exchange
from ..fields import whole


def values_of(epochs: Any, num_asked: int | None) -> Sequence[int]:
    """The values of all epochs, in order.

    Args:
        epochs: how many, or the values: a range, or a list, tuple or array of whole numbers.
        num_asked: how many to use instead; a range can be extended, a list cannot.

    Raises:
        ConfigError: it is none of these, or a list has fewer values than ``num_asked``.
    """
    if isinstance(epochs, range):
        if num_asked is None:
            return epochs
        return range(epochs.start, epochs.start + num_asked * epochs.step, epochs.step)
    listed = _listed(epochs)
    if listed is None:
        num_epochs = whole(epochs)
        if num_epochs is None:
            raise _wrong(f"{epochs!r:.60}")
        return range(num_epochs if num_asked is None else num_asked)
    if num_asked is not None and num_asked > len(listed):
        raise ConfigError(
            f"{num_asked} epochs were asked for (--epochs), but the list given to pace.epochs() "
            f"has {len(listed)} values; give it a range(), which can be extended"
        )
    return listed[:num_asked]


def _listed(epochs: Any) -> list[int] | None:
    """The values of a list or another sequence; None: it is none."""
    if isinstance(epochs, str | bytes | Mapping) or not hasattr(epochs, "__getitem__"):
        return None
    try:
        items = [epochs[i] for i in range(len(epochs))]
    except TypeError:  # a tensor or array of one number, which has no length
        return None
    values = []
    for item in items:
        value = whole(item)
        if value is None:
            raise _wrong(f"{item!r:.60} in it")
        values.append(value)
    return values


def _wrong(value: str) -> ConfigError:
    return ConfigError(
        "pace.epochs() takes a number of epochs, a range or a list of whole numbers "
        f"(pace.epochs(range(1, 11))), got {value}"
    )


class LoopPlace:
    """The place of one member.

    Args:
        is_lockstep: whether members take their steps together, one an update.
        is_local: whether the user's optimizer steps here, and skips by itself.
        is_newcomer: whether this member joins a run under way.

    Attributes:
        epoch_version: the version at which the epoch opened.
        epoch_applied: updates until then that were not skipped.
        next_version: the version that the last own step made; before it, that of the epoch.
        own_version: the version that the last own step, taken in step, was pushed at.
        num_steps: own steps in this epoch.
        num_run_steps: own steps in the whole run.
        has_left_out: whether a step of an optimizer that steps here was skipped.
        was_called_off: whether the newest step was already another worker's when it was made.
        is_held: whether the last step was set aside for a later update.
        waits: whether the last step of this optimizer is made when the block ends.
        deferred: calls of its schedulers meanwhile, which belong after that step.
        was_current: whether this member took part in the last update before the epoch opened.
        is_stepping: whether a scheduler steps now, perhaps with others inside it.
        leaves_out: whether what the script loads now is ignored, since the run is resumed.
        say_cut: says that a checkpoint inside an epoch cannot be resumed from, and why.
    """

    def __init__(
        self,
        exchange: Exchange,
        is_iterating: Callable[[], bool],
        *,
        is_lockstep: bool,
        is_local: bool,
        is_newcomer: bool = False,
    ) -> None:
        self._exchange = exchange
        self._is_iterating = is_iterating
        self.seat = exchange.seat
        self.is_lockstep = is_lockstep
        self.is_local = is_local
        self.epoch_version = self.epoch_applied = self.next_version = 0
        self.own_version = -1
        self.num_steps = self.num_run_steps = 0
        self.has_left_out = False
        self.is_held: Callable[[], bool] = lambda: False
        self.was_called_off: Callable[[], bool] = lambda: False
        self.waits: Callable[[Optimizer], bool] = lambda optimizer: False
        self.deferred: list[Callable[[], None]] = []
        self.leaves_out: Callable[[], bool] = lambda: False
        self.say_cut: Callable[[str], None] = lambda why: None
        self.was_current = self.is_stepping = False
        self._has_stepped = self.is_under_way = False
        self.is_first = not is_newcomer
        """Whether this member knows of no step yet."""
        self._num_skipped = self._next_skipped = 0
        self._has_own_scaler = self._found_inf = False
        self._pushed = 0

    @property
    def is_iterating(self) -> bool:
        return self._is_iterating()

    @property
    def version(self) -> int:
        """The version of the parameters that the model holds."""
        return self._exchange.version

    @property
    def serial(self) -> int:
        """The number of the work that was granted last."""
        return self._exchange.serial

    @property
    def has_made_newest(self) -> bool:
        """Whether the current step, which has not returned yet, made the newest version."""
        return self.is_under_way and self._newest == self._pushed + 1

    @property
    def is_at_newest(self) -> bool:
        """Whether a step of this member made the newest version."""
        return self.has_made_newest or self._newest == self.next_version

    @property
    def _newest(self) -> int:
        member = self._exchange.shared
        return self._exchange.version if member is None else member.store.version

    def applied(self, version: int) -> int:
        """Updates until ``version`` that were not skipped."""
        return self._exchange.applied(version)

    # -- the epoch ------------------------------------------------------------------------------

    def open(self) -> None:
        """Prepare for an epoch; this member holds the version that it begins with."""
        version = self.version
        self.was_current = self._has_stepped and self.next_version == version
        self.num_steps = 0
        self.own_version = -1
        self.begin(version, self.applied(version))

    def begin(self, version: int, applied: int) -> None:
        """Set the version at which the epoch opened; also called in a member that joins."""
        self.epoch_version = self.next_version = version
        self.epoch_applied = applied

    def opened(self) -> None:
        """Start this member's loop in the open epoch; a member that joins starts later."""
        self.next_version = self.version

    # -- the steps ------------------------------------------------------------------------------

    @property
    def is_in_step(self) -> bool:
        return (
            self.is_lockstep
            and self.num_steps == self.next_version - self.epoch_version
            and self.version >= self.next_version
        )

    def begin_step(self, version: int, *, found_inf: bool, has_scaled: bool) -> None:
        """Note that the loop steps, with a gradient of this version; it may be called off.

        Args:
            found_inf: whether a scaler found that the gradient has overflowed.
            has_scaled: whether ``pace.backward`` scales the losses, not a scaler of the user's.
        """
        self.is_under_way = True
        self.own_version = version if self.is_in_step else -1
        self._pushed = version
        self._found_inf = found_inf
        self._has_own_scaler = not has_scaled and (found_inf or self._exchange.scale is not None)
        self._next_skipped = version - self.applied(version)

    def end_step(self) -> None:
        """Note that the step was made."""
        self.is_under_way = False
        self.num_steps += 1
        self.num_run_steps += 1
        self.has_left_out = self.has_left_out or (self.is_local and self._found_inf)
        self.next_version = self._pushed + 1
        self._num_skipped = self._next_skipped
        self.is_first, self._has_stepped = False, True

    def remember(self) -> list[int]:
        """What a resumed run continues to count."""
        return [self.num_run_steps, int(self.has_left_out)]

    def go_on(self, state: list[int]) -> None:
        """Restore what ``remember`` returned."""
        self.num_run_steps, self.has_left_out = state[0], bool(state[1])

    @property
    def was_skipped(self) -> bool:
        """Whether the update of the last step changed nothing."""
        if self.is_local:
            return self._found_inf
        version = self.next_version if self.is_lockstep else self.version
        return version - self.applied(version) > self._num_skipped

    @property
    def was_skipped_for_the_script(self) -> bool:
        """Whether it was skipped, but not by a scaler of the user's, so the script cannot know."""
        return not self._has_own_scaler and self.was_skipped
