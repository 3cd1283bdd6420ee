"""Learning-rate schedules that count versions, not one worker's steps.

Called while the prepared loader is being iterated, ``scheduler.step()`` means "once a version":
the schedule is brought to the version that an update starts from by whoever executes it. Called
between epochs it means "once an epoch", in every member alike. The scheduler object stays the
user's own. This module must not know the store or who executes.
"""

from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

AnyScheduler = LRScheduler | ReduceLROnPlateau


class Schedule:
    """One prepared scheduler.

    Args:
        scheduler: the user's; its ``step`` is replaced on the object.
        is_iterating: whether the prepared loader is being iterated now.
        version: the version that the model holds now.
        per_version: reads or sets the run's word that says that some member schedules by version.
    """

    def __init__(
        self,
        scheduler: AnyScheduler,
        *,
        is_iterating: Callable[[], bool],
        version: Callable[[], int],
        per_version: Callable[[bool], bool],
    ) -> None:
        self._scheduler = scheduler
        self._original: Callable[..., None] = scheduler.step
        self._count = 0
        self._is_iterating = is_iterating
        self._version = version
        self._per_version = per_version
        scheduler.step = self._step  # type: ignore[method-assign]

    def _step(self, *arguments: Any, **options: Any) -> None:
        if self._is_iterating() and not arguments and not options:
            self._per_version(True)
            self.advance(self._version())
        else:
            self._original(*arguments, **options)

    def remember(self) -> dict[str, Any]:
        """The scheduler's own state, and how far it was brought."""
        own = {
            name: value for name, value in self._scheduler.state_dict().items() if name != "step"
        }
        return {"own": own, "count": self._count, "by_version": self._per_version(False)}

    def go_on(self, state: dict[str, Any]) -> None:
        """Become what ``remember`` gave; the optimizer's rates come back with its groups."""
        self._scheduler.load_state_dict(state["own"])
        self._count = state["count"]
        if state["by_version"]:
            self._per_version(True)

    def advance(self, version: int) -> None:
        """Bring the learning rate to what it is at ``version``, if it is scheduled by version."""
        if not self._per_version(False):
            return
        while self._count < version:
            self._count += 1
            self._original()

    def state(self) -> dict[str, Any]:
        """Where it stands."""
        return {**self._scheduler.state_dict(), "paceline_count": self._count}

    def load(self, state: dict[str, Any]) -> None:
        """Stand where `state()` said."""
        self._count = state.pop("paceline_count", self._count)
        self._scheduler.load_state_dict(state)
