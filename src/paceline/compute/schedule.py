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

    def advance(self, version: int) -> None:
        """Bring the learning rate to what it is at ``version``, if it is scheduled by version."""
        if not self._per_version(False):
            return
        while self._count < version:
            self._count += 1
            self._original()
