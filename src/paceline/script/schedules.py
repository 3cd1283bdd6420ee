"""The prepared schedulers of a member, and the points at which its loop calls them.

    open -> opened -> [ begin_step, advance, end_step, the loop's calls ] ... -> end

Each steps as in plain PyTorch, in its own rhythm, which its calls show. With one worker, and in
members whose optimizers step locally, every call of the script is made. Only a step that follows
an update which Paceline skipped (``--nonfinite skip``, an overflow under ``pace.backward``) is not
counted, if it comes once per update. Schedules shared by several members are in
``shared_schedule.py``. The scheduler object stays the user's own: replaced on it are ``step``,
``state_dict``, to return what plain PyTorch returns, and ``load_state_dict``, which does nothing
in a resumed run that has not begun: that starts as it was saved. Above 300 lines because
the contract, its plain member and the list that a loop calls are read together. This module
must not know exchanges, the store or who executes.
"""

import abc
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..errors import ConfigError
from ..replica.replica import Hyper, digest_of, hyper_of
from .place import LoopPlace
from .unprepared import AnyScheduler, Keep, StraySchedulers

_REPLACED = ("step", "state_dict", "load_state_dict")
"""Set on the object, so torch would take them for parts of its state."""


class Schedule(abc.ABC):
    """One prepared scheduler.

    Args:
        scheduler: the user's scheduler.
        place: of the member's loop.
        tell: tells the scheduler's state to a member that joins later.
    """

    def __init__(self, scheduler: AnyScheduler, place: LoopPlace, tell: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._place = place
        self._tell = tell
        self._original: Callable[..., None] = scheduler.step
        self._original_state: Callable[[], dict[str, Any]] = scheduler.state_dict
        self._original_load: Callable[[dict[str, Any]], None] = scheduler.load_state_dict
        self._num_calls = 0
        """Calls since the last own step."""
        self._has_called = False
        self._is_before = False
        """Whether the loop steps it before its optimizer."""

    def replace(self) -> None:
        """Intercept its steps from now on."""
        self._scheduler.step = self._step  # type: ignore[method-assign]  # of this scheduler alone
        self._scheduler.state_dict = self._state  # type: ignore[method-assign]  # the same
        self._scheduler.load_state_dict = self._load  # type: ignore[method-assign]  # the same

    def _load(self, state_dict: dict[str, Any]) -> None:
        if not self._place.leaves_out():
            self._original_load(state_dict)

    def _step(self, *arguments: Any, **options: Any) -> None:
        place = self._place
        if place.is_stepping or not place.is_iterating:
            self.take(*arguments, **options)
            return
        if place.is_held() or place.was_called_off():
            return  # it counts updates, and this step was not made
        if place.waits(self.optimizer):
            place.deferred.append(functools.partial(self._step, *arguments, **options))
            return
        self._num_calls += 1
        self._is_before = place.num_steps == 0 or (self._is_before and self._num_calls == 1)
        self._in_loop(arguments, options)
        self._has_called = True

    def take(self, *arguments: Any, **options: Any) -> None:
        """The scheduler's own step."""
        place = self._place
        was_stepping, place.is_stepping = place.is_stepping, True
        try:
            self._original(*arguments, **options)
        finally:
            place.is_stepping = was_stepping

    def _state(self) -> dict[str, Any]:
        state = self._original_state()
        return {name: value for name, value in state.items() if name not in _REPLACED}

    @property
    def name(self) -> str:
        return type(self._scheduler).__name__

    @property
    def scheduler(self) -> AnyScheduler:
        """The user's object."""
        return self._scheduler

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer whose rates it sets."""
        return self._scheduler.optimizer

    @abc.abstractmethod
    def _in_loop(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A call while the prepared loader is iterated."""

    @abc.abstractmethod
    def begin_step(self, version: int) -> None:
        """Note that the loop steps its optimizer, at ``version``; the step may be called off."""

    def end_step(self) -> None:
        """Note that the step was made."""
        self._num_calls = 0

    # -- for schedules shared by several members ----------------------------------------------

    def opened(self) -> None:
        """Start an epoch."""
        return

    def advance(self, version: int) -> None:
        """Take the steps due before the update from ``version``, which is executed next."""
        return

    def end(self) -> None:
        """End the loop."""
        return

    @property
    def cut(self) -> str:
        """Why a checkpoint taken here cannot be resumed from; "": it can."""
        return ""

    @property
    def mark(self) -> tuple[Any, ...]:
        """What must be equal in members that push into one update in step."""
        return ()

    # -- what is kept ---------------------------------------------------------------------------

    @abc.abstractmethod
    def remember(self) -> dict[str, Any]:
        """The scheduler's own state, and its rhythm; the optimizer's rates are in its groups."""

    @abc.abstractmethod
    def go_on(self, state: dict[str, Any]) -> None:
        """Restore what ``remember`` returned."""

    def state(self) -> dict[str, Any]:
        """The state, for a member that joins later."""
        return self._state()

    def load(self, state: dict[str, Any]) -> None:
        """Restore what ``state()`` returned."""
        self._original_load(state)


class LocalSchedule(Schedule):
    """The scheduler of a worker whose optimizer steps here: plain calls.

    Args:
        is_one_of_several: whether other workers step theirs independently.
    """

    def __init__(
        self,
        scheduler: AnyScheduler,
        place: LoopPlace,
        tell: Callable[[], None],
        *,
        is_one_of_several: bool = False,
    ) -> None:
        super().__init__(scheduler, place, tell)
        self._is_one_of_several = is_one_of_several
        self._steps_since = 0
        self._is_each = False
        """Whether it was stepped once after the own step before the last."""

    def _in_loop(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if self._is_one_of_several and isinstance(self._scheduler, ReduceLROnPlateau):
            raise ConfigError(
                f"{self.name} is stepped inside the loop by a metric of this worker's own weights "
                "and samples, so the workers' rates would diverge; step it between epochs by a "
                "metric of all workers: pace.evaluate(fn, loader) or pace.sum(value)"
            )
        is_each = self._steps_since == 1 and self._num_calls == 1
        self._steps_since = 0
        is_bare = not arguments and not options
        if is_each and is_bare and self._place.was_skipped_for_the_script:
            return
        self.take(*arguments, **options)
        self._tell()

    def begin_step(self, version: int) -> None:
        self._is_each = self._num_calls == 1

    def end_step(self) -> None:
        self._steps_since += 1
        super().end_step()

    def remember(self) -> dict[str, Any]:
        """The state, and whether the call after an own step is owed at this checkpoint."""
        owes = self._place.is_iterating and self._is_each and not self._num_calls
        return {"own": self._state(), "owes": owes and not self._is_before}

    def go_on(self, state: dict[str, Any]) -> None:
        self._original_load(state["own"])
        if state["owes"]:
            self.take()


def _refuse_foreign(every: Sequence[Schedule], optimizers: Sequence[Optimizer]) -> None:
    """ConfigError: a scheduler belongs to none of several optimizers."""
    for schedule in every if len(optimizers) > 1 else ():
        if all(schedule.optimizer is not optimizer for optimizer in optimizers):
            raise ConfigError(
                f"{schedule.name} belongs to an optimizer that prepare() was not given"
            )


class Schedules:
    """The schedulers of one member.

    Args:
        every: one schedule for each scheduler given to ``prepare``.
        is_alone: whether this is plain PyTorch: one worker in its own process.
        skips: whether an update may be skipped without a scaler.
        accumulates: whether an update is made of several steps of the loop.
        tell: tells their states to a member that joins later.
    """

    def __init__(
        self,
        every: Sequence[Schedule],
        optimizers: Sequence[Optimizer],
        place: LoopPlace,
        tell: Callable[[], None],
        *,
        is_alone: bool,
        skips: bool,
        accumulates: bool = False,
    ) -> None:
        self._every = every
        self.place = place
        self._tell = tell
        self._is_alone = is_alone
        self._skips = skips
        self._optimizers = optimizers
        _refuse_foreign(every, optimizers)
        self._keep: Keep | None = None
        self.strays: list[AnyScheduler] = []
        """Schedulers that were not prepared, and existed when the first loop began."""
        self.take_strays: Callable[[Sequence[AnyScheduler]], None] = lambda strays: None
        """Gives them the states of another worker's, which was here before."""
        self._at_first: Hyper | None = None
        """The settings when the loop began."""
        self._is_by_hand = False
        """Whether they had changed when a loop ended."""
        self._word = 0
        """Digest of the settings of the last push in this pass; 0: there was none."""
        self.changed_in_the_loop: Callable[[], None] = lambda: None
        """Called when two pushes of a pass have different settings."""
        self._strays: list[StraySchedulers] = []
        if accumulates or not (is_alone or place.is_lockstep or place.is_local):
            known = [schedule.scheduler for schedule in every]
            self._strays = [StraySchedulers(optimizer, known) for optimizer in optimizers]
        self._is_replaced = False
        if accumulates or not is_alone:
            self._replace()

    def __iter__(self) -> Iterator[Schedule]:
        return iter(self._every)

    def _replace(self) -> None:
        self._is_replaced = True
        for schedule in self._every:
            schedule.replace()

    def open(self) -> None:
        """Prepare for an epoch that is about to open."""
        self.place.open()
        self._tell()

    def opened(self) -> None:
        """Start the loop."""
        self.place.opened()
        self._at_first, self._word = self._settings(), 0
        if (keep := self._keep) is not None:
            self._keep, known = None, [schedule.scheduler for schedule in self._every]
            for number, optimizer in enumerate(self._optimizers):
                self.strays += StraySchedulers(optimizer, known).keep(keep, number)
            self.take_strays(self.strays)
        for stray in self._strays:
            stray.open()
        for schedule in self._every:
            schedule.opened()

    def keep_strays(self, keep: Keep) -> None:
        """Keep schedulers that were not prepared, and exist when the first loop begins."""
        self._keep = keep

    def _of(self, optimizers: Sequence[Optimizer]) -> Sequence[Schedule]:
        """The schedules that set the rates of these; with one optimizer, all."""
        if len(self._optimizers) == 1:
            return self._every
        return [
            schedule
            for schedule in self._every
            if any(schedule.optimizer is optimizer for optimizer in optimizers)
        ]

    def begin_step(
        self,
        version: int,
        optimizers: Sequence[Optimizer] = (),
        *,
        found_inf: bool,
        has_scaled: bool,
    ) -> None:
        """Note that the loop steps these optimizers, or the only one; see ``LoopPlace``.

        Args:
            version: of the gradient.
        """
        self.check()
        if not self._every and self._is_alone:
            return
        if self._every:
            if not self._is_replaced and (self._skips or has_scaled):
                self._replace()  # one worker: not before something may be skipped
            for schedule in self._of(optimizers):
                schedule.begin_step(version)
        self.place.begin_step(version, found_inf=found_inf, has_scaled=has_scaled)

    def end_step(self, optimizers: Sequence[Optimizer] = ()) -> None:
        """Note that the step was made, and not called off."""
        if not self._every and self._is_alone:
            return
        for schedule in self._of(optimizers):
            schedule.end_step()
        self.place.end_step()
        deferred, self.place.deferred = self.place.deferred, []
        for call in deferred:
            call()

    def advance(self, version: int) -> bool:
        """Prepare for the update from ``version``; whether members' rates may differ then."""
        for schedule in self._every:
            schedule.advance(version)
        place = self.place
        is_shared = bool(self._every) and not place.is_local
        return place.has_left_out or (is_shared and not place.is_lockstep)

    def check(self) -> None:
        """Raise ConfigError where a scheduler that was not prepared has stepped in the loop."""
        for stray in self._strays:
            stray.check()

    def end(self) -> None:
        """End the loop."""
        self._is_by_hand |= self._at_first is not None and self._at_first != self._settings()
        for schedule in self._every:
            schedule.end()

    def marks(self) -> tuple[Any, ...]:
        """What must be equal in members that push into one update in step."""
        return () if self.place.is_local else tuple(schedule.mark for schedule in self._every)

    def between(self) -> int:
        """Digest of what must be equal in all members when an epoch begins; 0: it may differ.

        With schedulers, the states of those that go by a metric, prepared or not; without, all
        settings, unless the script sets them by hand inside its loop.
        """
        if self._every:
            states: list[tuple[Any, ...]] = [
                tuple(sorted(schedule.state().items()))
                for schedule in self._every
                if isinstance(schedule.scheduler, ReduceLROnPlateau)
            ]
            states += [
                (stray.best, stray.num_bad_epochs, stray.last_epoch)
                for stray in self.strays
                if isinstance(stray, ReduceLROnPlateau)
            ]
            return 1 + digest_of(tuple(states)) if states else 0
        return 0 if self._is_by_hand else 1 + digest_of(self._settings())

    def cut(self) -> str:
        """Why a checkpoint taken here cannot be resumed from; "": it can."""
        return next((reason for schedule in self._every if (reason := schedule.cut)), "")

    def hear(self, word: int) -> None:
        """Note the digest of the settings of a push."""
        before, self._word = self._word, word
        if before and before != word:
            self.changed_in_the_loop()

    def _settings(self) -> Hyper:
        return tuple(map(hyper_of, self._optimizers))

    @property
    def knows(self) -> bool:
        """Whether this member has the others' state, so that it can tell a newcomer."""
        return not self.place.is_lockstep or self.place.was_current or self.place.is_first
