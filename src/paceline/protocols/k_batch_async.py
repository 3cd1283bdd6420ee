"""k-batch-async: every K pushes are an update; nobody ever waits and nothing is called off.

    worker 0  --step--:--step----|--step--          P = 3, K = 2: at every push (:) the worker pulls
    worker 1  --step-----------|-:step----          the newest version and goes on; every second
    worker 2  --step-----:--step------|---          push (|) is an update as well

    w_{j+1} = w_j - (eta/K) sum_{l=1..K} g(w_{tau(l,j)}, xi_l)

An update takes K E[X]/P for any distribution of steps (renewal theorem); staleness is (P - 1)/K
versions on average. K = 1 is async; K may exceed P.

Source: X. Lian, Y. Huang, Y. Li, J. Liu, "Asynchronous Parallel Stochastic Gradient for Nonconvex
Optimization", NIPS 2015; as here: S. Dutta, G. Joshi, S. Ghosh, P. Dube, P. Nagpurkar, "Slow and
Stale Gradients Can Win the Race", AISTATS 2018, section 2.
"""

from ..events import Decision
from .base import Argument, Gathering, Rhythm


class KBatchAsync(Gathering):
    """Gather K pushes, release each member again at once; apply."""

    name = "k-batch-async"
    summary = "every K pushes are an update; nobody waits, gradients may be stale"
    has_stale_pushes = True
    rhythm = Rhythm(waits=False, restarts=False)
    argument = Argument(symbol="K", meaning="pushes an update", minimum=1)

    def __init__(self, num_workers: int, num_pushes: int) -> None:
        super().__init__(num_workers, num_pushes, num_pushes=num_pushes)

    _after_push = Gathering._go_on

    def _after_update(self) -> list[Decision]:
        return self._release_idle()
