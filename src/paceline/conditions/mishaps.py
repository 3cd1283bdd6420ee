"""The faults of one live worker, step by step: what happens now, and how slow it is meanwhile.

    version, step, seconds -> the faults that are due

Kills and stops at a time of the clock are not among them: those come from outside, wherever the
worker is then. It must not know how a fault is carried out.
"""

from collections.abc import Sequence

from .faults import Fault, Kind

_FROM_OUTSIDE = (Kind.KILL, Kind.STOP)


class Mishaps:
    """What is still to come for one worker.

    Args:
        faults: of this worker, those that have happened already left out.
    """

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._left = [one for one in faults if one.at_s is None or one.kind not in _FROM_OUTSIDE]
        self._slow: list[tuple[float, float]] = []
        """Until when, and by which factor."""
        self._step = 0

    def __bool__(self) -> bool:
        return bool(self._left or self._slow)

    def due(self, version: int, now_s: float) -> list[Fault]:
        """What happens in the step that is being made, the next one of this worker.

        Args:
            version: of the parameters that it was made on.
            now_s: since the first epoch opened.
        """
        self._step += 1
        due = [one for one in self._left if self._is_due(one, version, now_s)]
        for one in due:
            self._left.remove(one)
            if one.kind is Kind.SLOW:
                self._slow.append((now_s + one.for_s, one.factor))
        return due

    def _is_due(self, fault: Fault, version: int, now_s: float) -> bool:
        if fault.update is not None:
            return version >= fault.update
        if fault.step is not None:
            return self._step >= fault.step
        return fault.at_s is not None and now_s >= fault.at_s

    def factor(self, now_s: float) -> float:
        """How many times longer a step takes that ends now; the slowest phase counts."""
        self._slow = [one for one in self._slow if one[0] > now_s]
        return max((factor for _, factor in self._slow), default=1.0)
