"""Where the time of a step goes: parts that exclude one another, so that they sum to the step.

    time     0    1    2    3    4    5    6
    forward       |---------------|              2 to 3 is a wait inside of it: forward has 2
    wait               |----|                    wait has 1
    rest     |---|                |----|         what is in no part

A part that begins inside another stops the other's clock. This module must not know what the parts
are, nor read a clock of its own: the time is an argument.
"""

from collections import defaultdict


class PartsClock:
    """Seconds of each part, exclusively.

    Attributes:
        seconds: part -> seconds since the last `taken`.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since_s = 0.0

    @property
    def part(self) -> str:
        """That which is open innermost; empty: none."""
        return self._open[-1] if self._open else ""

    def begin(self, part: str, now_s: float) -> None:
        """A part begins, inside of what is open."""
        self._charge(now_s)
        self._open.append(part)

    def end(self, now_s: float) -> None:
        """The innermost part ends."""
        self._charge(now_s)
        if self._open:
            self._open.pop()

    def taken(self, now_s: float) -> dict[str, float]:
        """What was charged so far; it begins again at zero, and what is open goes on."""
        self._charge(now_s)
        found = dict(self.seconds)
        self.seconds.clear()
        return found

    def _charge(self, now_s: float) -> None:
        if self._open:
            self.seconds[self._open[-1]] += now_s - self._since_s
        self._since_s = now_s
