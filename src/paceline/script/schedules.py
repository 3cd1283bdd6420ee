"""All prepared schedulers of a member, the places at which its loop thinks of them, their settings.

    open -> opened -> [ begin_step, advance, end_step, the loop's calls ] ... -> end

A worker that joins a run under way has the script's first learning rate: what the others' optimizer
and schedules are set to comes to it as text (`settings_text`, `adopt`), with the version at which
the epoch opened. Only plain numbers, words, and lists and dicts of them travel. This module must
not know exchanges or the store.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..errors import ConfigError
from .place import LoopPlace
from .schedule import LocalSchedule, Nesting, Schedule
from .shared_schedule import ScheduleWords, SharedSchedule
from .unprepared import StraySchedulers


class Schedules:
    """The schedulers of one member.

    Args:
        objects: what was given to ``prepare``; the schedulers among them are taken.
        optimizer: the one among them.
        words: what all members see of the scheduler of this number; None: a worker by itself.
        num_workers: that take part.
        most: so many schedulers can be prepared.
        skips: whether an update may be skipped without a scaler.
        tell: tells a member that comes later where they stand.
    """

    def __init__(
        self,
        objects: Sequence[Any],
        optimizer: Optimizer,
        place: LoopPlace,
        *,
        words: Callable[[int], ScheduleWords] | None,
        num_workers: int,
        most: int,
        skips: bool,
        tell: Callable[[], None],
    ) -> None:
        own = [one for one in objects if isinstance(one, LRScheduler | ReduceLROnPlateau)]
        if len(own) > most:
            raise ConfigError(
                f"prepare() takes at most {most} schedulers, got {len(own)}; step several by one: "
                "torch.optim.lr_scheduler.ChainedScheduler"
            )
        self.place = place
        self._own = own
        self._skips = skips
        nesting = Nesting()
        self._shared: list[SharedSchedule] = []
        self._every: list[Schedule] = []
        if words is None or place.is_local:
            self._every += [
                LocalSchedule(one, place, nesting, tell, is_one_of_several=num_workers > 1)
                for one in own
            ]
        else:
            self._shared += [
                SharedSchedule(one, place, nesting, words(number), tell)
                for number, one in enumerate(own)
            ]
            self._every += self._shared
        self._is_alone = words is None
        self._strays: StraySchedulers | None = None
        if not (own or self._is_alone or place.is_lockstep or place.is_local):
            self._strays = StraySchedulers(optimizer)
        self._is_replaced = False
        if not self._is_alone:
            self._replace()

    def __iter__(self) -> Iterator[Schedule]:
        return iter(self._every)

    def __bool__(self) -> bool:
        return bool(self._every)

    def _replace(self) -> None:
        self._is_replaced = True
        for one in self._every:
            one.replace()

    def open(self) -> None:
        """An epoch is about to open."""
        self.place.open()

    def opened(self) -> None:
        """The loop begins."""
        self.place.opened()
        if self._strays is not None:
            self._strays.open()
        for one in self._shared:
            one.opened()

    def begin_step(self, version: int, *, found_inf: bool, has_scaled: bool) -> None:
        """The loop steps its optimizer, with a gradient of ``version``; see ``LoopPlace``."""
        if not self._every and self._is_alone:
            return
        self.check()
        if self._every:
            if not self._is_replaced and (self._skips or has_scaled):
                self._replace()  # one worker: not before something may be skipped
            for one in self._every:
                one.begin_step(version)
        self.place.begin_step(version, found_inf=found_inf, has_scaled=has_scaled)

    def end_step(self) -> None:
        """That is done, and was not called off."""
        if not self._every and self._is_alone:
            return
        for one in self._every:
            one.end_step()
        self.place.end_step()

    def advance(self, version: int) -> bool:
        """Be ready for the update from ``version``; whether members' rates may differ by then."""
        for one in self._shared:
            one.advance(version)
        return self.place.has_left_out or (bool(self._shared) and not self.place.is_lockstep)

    def check(self) -> None:
        """Raise ConfigError where one that was not prepared has stepped in the loop."""
        if self._strays is not None:
            self._strays.check()

    def end(self) -> None:
        """The loop has no more."""
        for one in self._shared:
            one.end()

    def marks(self) -> tuple[Any, ...]:
        """What must be the same in members that push into one update in step."""
        return tuple(one.mark for one in self._shared)

    @property
    def knows(self) -> bool:
        """Whether this member stands where the others do, so that it can tell a newcomer."""
        return not self.place.is_lockstep or self.place.was_current or self.place.is_first


def settings_text(optimizer: Optimizer, schedules: Schedules) -> str:
    """The settings of all parameter groups, and where each schedule and the epoch stand."""
    place = schedules.place
    return json.dumps({
        "groups": [_plain(group) for group in optimizer.param_groups],
        "schedules": [_plain(one.state()) for one in schedules],
        "epoch": (place.epoch_version, place.epoch_applied),
    })  # fmt: skip


def adopt(text: str, optimizer: Optimizer, schedules: Schedules) -> None:
    """Take over what `settings_text` said, where there is the same setting."""
    values = json.loads(text)
    schedules.place.begin(*values["epoch"])
    for group, said in zip(optimizer.param_groups, values["groups"], strict=False):
        group.update({name: _like(group[name], said[name]) for name in said if name in group})
    for schedule, said in zip(schedules, values["schedules"], strict=False):
        schedule.load(_merged(schedule.state(), said))


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """What of it can be said, in a scheduler of schedulers what of each."""
    return {
        name: list(map(_plain, value)) if _are_dicts(value) else value
        for name, value in values.items()
        if name != "params" and (_is_plain(value) or _are_dicts(value))
    }


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, bool | int | float | str)


def _are_dicts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def _merged(before: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """``before``, and what was said in place of it; the rest was made by the script."""
    return before | {name: _like(before.get(name), value) for name, value in said.items()}


def _like(before: object, value: Any) -> object:
    """JSON has no tuples."""
    if isinstance(before, list) and _are_dicts(before) and _are_dicts(value):
        return [_merged(one, said) for one, said in zip(before, value, strict=True)]
    return tuple(value) if isinstance(before, tuple) and isinstance(value, list) else value
