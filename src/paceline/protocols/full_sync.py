"""full-sync: an update waits for one push from every worker.

    worker 0  --step--.........|--step----.....|      each line through all workers is an update:
    worker 1  --step-----------|--step--.......|      w <- w - eta * sum_i (m_i/m) g_i(w), with m_i
    worker 2  --step-----......|--step---------|      the samples of push i and m their sum

All gradients are of the newest version, so N workers compute what one would with the whole batch;
the price is that an update takes as long as its slowest step, E[X_{P:P}].

An update is made of its K = P named mini-batches: when a member dies or stalls, its mini-batch goes
to a member that is done, at the same version, and the update is the same as without the fault.

Source: L. G. Valiant, "A bridging model for parallel computation", Communications of the ACM 33(8),
1990 (bulk-synchronous parallel); as SGD: S. Dutta, G. Joshi, S. Ghosh, P. Dube, P. Nagpurkar,
"Slow and Stale Gradients Can Win the Race", AISTATS 2018, section 2. Changed: the hand-over.
"""

from ..events import Cancel, Decision, Exhausted
from .base import Gathering, Rhythm


class FullSync(Gathering):
    """Gather a push from every worker; apply; release everyone."""

    name = "full-sync"
    summary = "an update waits for every worker; exact, as slow as the slowest"
    copies_in_tail = False  # not needed: a stalled member is replaced
    is_spmd = True
    rhythm = Rhythm(waits=True, restarts=False)

    def __init__(self, num_workers: int, *values: int, num_steps: int = 1) -> None:
        super().__init__(num_workers, *values, num_pushes=num_workers, num_steps=num_steps)

    _after_push = Gathering._rest_and_fill
    _after_update = Gathering._fill

    def _after_joined(self, member: int) -> list[Decision]:
        return self._fill()  # beyond K members, this one idles: its push is for the next update

    def _after_stalled(self, member: int) -> list[Decision]:
        """Drop the member until it joins again as a new one, and reassign its mini-batch."""
        self._idle.discard(member)
        if member not in self._working:
            return []
        self._working.remove(member)
        return [Cancel(member), *self._fill()]

    def _after_exhausted(self, fact: Exhausted) -> list[Decision]:
        applied: list[Decision] = [self._apply()] if self._gathered else []
        return applied + self._fill()
