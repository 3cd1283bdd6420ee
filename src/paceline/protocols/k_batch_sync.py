"""k-batch-sync: an update takes the first K pushes at one version, whoever they are from.

    worker 0  --step--|--step----|--x--step--       P = 3, K = 4: who has pushed goes on with
    worker 1  --step-----------|----x--step--       another mini-batch at the same version, and
    worker 2  --step-------------|--x--step--       what is under way at the Kth push is called off

    w_{j+1} = w_j - (eta/K) sum_{l=1..K} g(w_j, xi_l)

All gradients are of the newest version and nobody idles, so a fast worker does more of an update
than a slow one; K may exceed P. Under exponential steps an update takes K E[X]/P.

Source: S. Dutta, G. Joshi, S. Ghosh, P. Dube, P. Nagpurkar, "Slow and Stale Gradients Can Win the
Race", AISTATS 2018, section 2. Changed: the mini-batches of superseded work return to the epoch,
unless the run drops them as the paper does.
"""

from ..events import Decision
from .base import Argument, Gathering, Rhythm


class KBatchSync(Gathering):
    """Gather K pushes, release each member again at once; apply; cancel the rest; release all."""

    name = "k-batch-sync"
    summary = "as k-sync, and a fast worker may push more than once an update"
    argument = Argument(symbol="K", meaning="pushes an update", minimum=1)
    cancels = True
    rhythm = Rhythm(waits=False, restarts=True)

    def __init__(self, num_workers: int, num_pushes: int) -> None:
        super().__init__(num_workers, num_pushes, num_pushes=num_pushes)

    _after_push = Gathering._go_on

    def _after_update(self) -> list[Decision]:
        return [*self._cancel_rest(), *self._release_idle()]
