"""Time the parts of a step exclusively, so that they sum to the step.

    time     0    1    2    3    4    5    6
    forward       |---------------|              2 to 3 is a wait inside it: forward has 2
    wait               |----|                    wait has 1
    rest     |---|                |----|         in no part

A part that begins inside another stops the other's clock. This module must not know what the parts
are, nor read a clock of its own: the time is an argument.
"""

from collections import defaultdict


class PartsClock:
    """A clock for nested parts, each charged only while no part inside it is open.

    Attributes:
        seconds: seconds of each part since the last `taken`.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since_s = 0.0

    @property
    def part(self) -> str:
        """The innermost open part, or "" if none is open."""
        return self._open[-1] if self._open else ""

    def begin(self, part: str, now_s: float) -> None:
        """Begin a part inside the innermost open one."""
        self._charge(now_s)
        self._open.append(part)

    def end(self, now_s: float) -> None:
        """End the innermost open part."""
        self._charge(now_s)
        if self._open:
            self._open.pop()

    def taken(self, now_s: float) -> dict[str, float]:
        """Return the seconds of each part and reset them to zero; open parts stay open."""
        self._charge(now_s)
        seconds = dict(self.seconds)
        self.seconds.clear()
        return seconds

    def _charge(self, now_s: float) -> None:
        if self._open:
            self.seconds[self._open[-1]] += now_s - self._since_s
        self._since_s = now_s
