"""async: every push is an update at once; nobody ever waits.

    worker 0  --step--|--step----|--step--|        a line is an update by one worker's gradient:
    worker 1  --step-----------|--step--|          w_{j+1} = w_j - eta g(w_{tau(j)}), where tau(j)
    worker 2  --step-----|--step---------|         is the version that this worker pulled last

Updates come as fast as pushes do, E[X]/P apart; the price is staleness: j - tau(j) is P - 1 on
average, in versions.

Source: J. Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012 (Downpour SGD); as here:
S. Dutta, G. Joshi, S. Ghosh, P. Dube, P. Nagpurkar, "Slow and Stale Gradients Can Win the Race",
AISTATS 2018, section 2.
"""

from typing import Any

from ..events import Apply, Decision, Fact, Joined, Pushed, Release
from .base import Rhythm, SyncProtocol

_WHOLE = (1.0,)


class Async(SyncProtocol):
    """Apply every push; release its member."""

    name = "async"
    summary = "every push is an update at once; nobody waits, gradients may be stale"
    has_stale_pushes = True
    rhythm = Rhythm(waits=False, restarts=False)

    def react(self, fact: Fact) -> list[Decision]:
        if isinstance(fact, Pushed):
            return [Apply((fact.ticket,), _WHOLE), Release(fact.ticket.member)]
        if isinstance(fact, Joined):
            return [Release(fact.member)]
        return []  # nothing is gathered and nobody waits, so other facts change nothing

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        pass
