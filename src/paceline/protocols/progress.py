"""What adaptive protocols follow: how far the training loss has fallen since the run began.

    F_0   the mean loss of the first pushes
    F_t   a moving average over about as many, which begins at F_0

Losses that are not finite, or not known (a simulation of time alone), change nothing. It must not
know what is decided from it.
"""

import math
from typing import Any

from ..fields import count, real


class LossProgress:
    """F_t/F_0 of a run.

    Args:
        num_pushes: how many the mean and the moving average reach over.
    """

    __slots__ = ("_first", "_mean", "_num_heard", "_num_pushes")

    def __init__(self, num_pushes: int) -> None:
        self._num_pushes = num_pushes
        self._num_heard = 0
        self._first = 0.0  # F_0, so far
        self._mean = 0.0  # F_t

    def hear(self, loss: float) -> None:
        """A push had this loss."""
        if not math.isfinite(loss):
            return
        self._num_heard += 1
        if self._num_heard <= self._num_pushes:
            self._first += (loss - self._first) / self._num_heard
            self._mean = self._first
        else:
            self._mean += (loss - self._mean) / self._num_pushes

    @property
    def ratio(self) -> float:
        """F_t/F_0, above 0 and at most 1: a loss that grows counts as none that fell."""
        if self._num_heard < self._num_pushes or self._first <= 0.0:
            return 1.0
        return min(1.0, max(_LEAST, self._mean / self._first))

    def state(self) -> list[float]:
        """All of it, as JSON can carry it."""
        return [self._num_heard, self._first, self._mean]

    def load(self, state: list[Any]) -> None:
        """Remember what `state()` said."""
        num_heard, first, mean = state
        self._num_heard, self._first, self._mean = count(num_heard), real(first), real(mean)


_LEAST = 1e-6
"""Below this a loss is as good as zero, or negative and no measure of what is left."""
