"""The prepared schedulers of a member, and the places at which its loop thinks of them.

    open -> opened -> [ begin_step, advance, end_step, the loop's calls ] ... -> end

Each steps as in plain PyTorch, in its own rhythm, found from its own calls. One worker, and members
whose optimizers step locally, call it as the script does, call for call. Only a step that follows
an update which Paceline skipped (``--nonfinite skip``, an overflow under ``pace.backward``) is not
counted, where it is taken once an update. What goes on between several members stands in
``shared_schedule.py``. The scheduler object stays the user's own: ``step`` is replaced on it,
``state_dict``, so that it gives what plain PyTorch gives, and ``load_state_dict``, which does
nothing where a run goes on and has not begun: it begins as it was saved. Above 300 lines because
the contract, its plain member and the list that a loop speaks to are read together. This module
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
"""On the object, so that torch would take them for parts of its state."""


class Schedule(abc.ABC):
    """One prepared scheduler.

    Args:
        scheduler: the user's.
        place: of the member's loop.
        tell: tells a member that comes later of it.
    """

    def __init__(self, scheduler: AnyScheduler, place: LoopPlace, tell: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._place = place
        self._tell = tell
        self._original: Callable[..., None] = scheduler.step
        self._original_state: Callable[[], dict[str, Any]] = scheduler.state_dict
        self._original_load: Callable[[dict[str, Any]], None] = scheduler.load_state_dict
        self._num_calls = 0
        """Since the last own step."""
        self._has_called = False
        self._is_before = False
        """Whether the loop steps it before its optimizer."""

    def replace(self) -> None:
        """Hear of its steps from now on."""
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
            return  # it counts updates, and says nothing of a step that nobody made
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
        """Whose rates it sets."""
        return self._scheduler.optimizer

    @abc.abstractmethod
    def _in_loop(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A call while the prepared loader is iterated."""

    @abc.abstractmethod
    def begin_step(self, version: int) -> None:
        """The loop steps its optimizer, with a gradient of ``version``; it may be called off."""

    def end_step(self) -> None:
        """The step is done."""
        self._num_calls = 0

    # -- what concerns one that several members step -------------------------------------------

    def opened(self) -> None:
        """An epoch begins."""
        return

    def advance(self, version: int) -> None:
        """Be what it is for the update from ``version``, before that is executed."""
        return

    def end(self) -> None:
        """The loop has no more."""
        return

    @property
    def cut(self) -> str:
        """Why nobody can go on from a checkpoint that is taken here; "": one can."""
        return ""

    @property
    def mark(self) -> tuple[Any, ...]:
        """What must be the same in members that push into one update in step."""
        return ()

    # -- what is kept ---------------------------------------------------------------------------

    @abc.abstractmethod
    def remember(self) -> dict[str, Any]:
        """The scheduler's own state, and its rhythm; the optimizer's rates are in its groups."""

    @abc.abstractmethod
    def go_on(self, state: dict[str, Any]) -> None:
        """Become what ``remember`` gave."""

    def state(self) -> dict[str, Any]:
        """Where it stands, for a member that comes later."""
        return self._state()

    def load(self, state: dict[str, Any]) -> None:
        """Stand where ``state()`` said."""
        self._original_load(state)


class LocalSchedule(Schedule):
    """The scheduler of a worker whose optimizer steps here: plain calls.

    Args:
        is_one_of_several: whether others step theirs by themselves, too.
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
                f"{self.name} is stepped inside the loop, by a metric of this worker's own weights "
                "and samples, and the workers' rates would part; step it between epochs by what is "
                "the same in all: pace.evaluate(fn, loader) or pace.sum(value)"
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
        """A checkpoint may be taken before the call that follows an own step: it is owed."""
        owes = self._place.is_iterating and self._is_each and not self._num_calls
        return {"own": self._state(), "owes": owes and not self._is_before}

    def go_on(self, state: dict[str, Any]) -> None:
        self._original_load(state["own"])
        if state["owes"]:
            self.take()


class Schedules:
    """The schedulers of one member.

    Args:
        every: of those that were given to ``prepare``.
        is_alone: whether this is plain PyTorch: one worker in its own process.
        skips: whether an update may be skipped without a scaler.
        accumulates: whether an update is made of several steps of the loop.
        tell: tells a member that comes later where they stand.
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
        for one in every if len(optimizers) > 1 else ():
            if all(one.optimizer is not mine for mine in optimizers):
                raise ConfigError(f"{one.name} is of an optimizer that prepare() was not given")
        self._keep: Keep | None = None
        self.strays: list[AnyScheduler] = []
        """That were not prepared, and were there when the first loop began."""
        self.take_strays: Callable[[Sequence[AnyScheduler]], None] = lambda strays: None
        """Lets them stand where another worker's stand, which was here before."""
        self._at_first: Hyper | None = None
        """The settings as the loop began."""
        self._is_by_hand = False
        """Whether they were others in the end."""
        self._word = 0
        """Of the settings that the last push of this pass went with; 0: there was none."""
        self.changed_in_the_loop: Callable[[], None] = lambda: None
        """Called where two pushes of a pass went with different ones."""
        self._strays: list[StraySchedulers] = []
        if accumulates or not (every or is_alone or place.is_lockstep or place.is_local):
            known = [one.scheduler for one in every]
            self._strays = [StraySchedulers(one, known) for one in optimizers]
        self._is_replaced = False
        if accumulates or not is_alone:
            self._replace()

    def __iter__(self) -> Iterator[Schedule]:
        return iter(self._every)

    def _replace(self) -> None:
        self._is_replaced = True
        for one in self._every:
            one.replace()

    def open(self) -> None:
        """An epoch is about to open."""
        self.place.open()
        self._tell()

    def opened(self) -> None:
        """The loop begins."""
        self.place.opened()
        self._at_first, self._word = self._settings(), 0
        if (keep := self._keep) is not None:
            self._keep, known = None, [one.scheduler for one in self._every]
            for number, optimizer in enumerate(self._optimizers):
                self.strays += StraySchedulers(optimizer, known).keep(keep, number)
            self.take_strays(self.strays)
        for stray in self._strays:
            stray.open()
        for one in self._every:
            one.opened()

    def keep_strays(self, keep: Keep) -> None:
        """Those that were not prepared, and are there when the first loop begins."""
        self._keep = keep

    def _of(self, optimizers: Sequence[Optimizer]) -> Sequence[Schedule]:
        """Those that set the rates of these; the only optimizer's may be any."""
        if len(self._optimizers) == 1:
            return self._every
        return [one for one in self._every if any(one.optimizer is mine for mine in optimizers)]

    def begin_step(
        self,
        version: int,
        optimizers: Sequence[Optimizer] = (),
        *,
        found_inf: bool,
        has_scaled: bool,
    ) -> None:
        """The loop steps these of several optimizers, or the only one; see ``LoopPlace``.

        Args:
            version: of the gradient.
        """
        self.check()
        if not self._every and self._is_alone:
            return
        if self._every:
            if not self._is_replaced and (self._skips or has_scaled):
                self._replace()  # one worker: not before something may be skipped
            for one in self._of(optimizers):
                one.begin_step(version)
        self.place.begin_step(version, found_inf=found_inf, has_scaled=has_scaled)

    def end_step(self, optimizers: Sequence[Optimizer] = ()) -> None:
        """That is done, and was not called off."""
        if not self._every and self._is_alone:
            return
        for one in self._of(optimizers):
            one.end_step()
        self.place.end_step()
        deferred, self.place.deferred = self.place.deferred, []
        for call in deferred:
            call()

    def advance(self, version: int) -> bool:
        """Be ready for the update from ``version``; whether members' rates may differ by then."""
        for one in self._every:
            one.advance(version)
        place = self.place
        is_shared = bool(self._every) and not place.is_local
        return place.has_left_out or (is_shared and not place.is_lockstep)

    def check(self) -> None:
        """Raise ConfigError where one that was not prepared has stepped in the loop."""
        for stray in self._strays:
            stray.check()

    def end(self) -> None:
        """The loop has no more."""
        self._is_by_hand |= self._at_first is not None and self._at_first != self._settings()
        for one in self._every:
            one.end()

    def marks(self) -> tuple[Any, ...]:
        """What must be the same in members that push into one update in step."""
        return () if self.place.is_local else tuple(one.mark for one in self._every)

    def between(self) -> int:
        """A word of what must be the same in all members as an epoch begins; 0: they may differ.

        Of schedulers where those stand that go by a metric; without any, all settings, unless the
        script sets them by hand inside its loop.
        """
        if self._every:
            states = [
                tuple(sorted(one.state().items()))
                for one in self._every
                if isinstance(one.scheduler, ReduceLROnPlateau)
            ]
            return 1 + digest_of(tuple(states)) if states else 0
        return 0 if self._is_by_hand else 1 + digest_of(self._settings())

    def cut(self) -> str:
        """Why nobody can go on from a checkpoint that is taken here; "": one can."""
        return next((why for one in self._every if (why := one.cut)), "")

    def hear(self, word: int) -> None:
        """A push goes with the settings of this word."""
        before, self._word = self._word, word
        if before and before != word:
            self.changed_in_the_loop()

    def _settings(self) -> Hyper:
        return tuple(map(hyper_of, self._optimizers))

    @property
    def knows(self) -> bool:
        """Whether this member stands where the others do, so that it can tell a newcomer."""
        return not self.place.is_lockstep or self.place.was_current or self.place.is_first
