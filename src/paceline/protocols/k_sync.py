"""k-sync: an update takes the first K pushes; the slower workers' work is cancelled.

    worker 0  --step--.......|--step----.|         P = 3, K = 2: the slowest of each update is
    worker 1  --step---------|--step--...|         superseded (x) and starts at the new version
    worker 2  --step---------x--step-----x         with the others

    w_{j+1} = w_j - (eta/K) sum_{l=1..K} g(w_j, xi_l)

All gradients are of the newest version, and an update takes E[X_{K:P}] instead of E[X_{P:P}]. With
P = K + b workers the b are backups: b stragglers cost nothing. K = P is full-sync.

Source: J. Chen, X. Pan, R. Monga, S. Bengio, R. Jozefowicz, "Revisiting Distributed Synchronous
SGD", ICLR 2016 workshop (backup workers); S. Dutta, G. Joshi, S. Ghosh, P. Dube, P. Nagpurkar,
"Slow and Stale Gradients Can Win the Race", AISTATS 2018, section 2. Changed: the mini-batches of
superseded work return to the epoch, unless the run drops them as the papers do.

k-batch-sync: an update takes the first K pushes at one version, whoever they are from.

    worker 0  --step--|--step----|--x--step--       P = 3, K = 4: a worker that pushed goes on with
    worker 1  --step-----------|----x--step--       another mini-batch at the same version, and
    worker 2  --step-------------|--x--step--       work in flight at the Kth push is cancelled

    w_{j+1} = w_j - (eta/K) sum_{l=1..K} g(w_j, xi_l)

All gradients are of the newest version and nobody idles, so a fast worker does more of an update
than a slow one; K may exceed P. Under exponential steps an update takes K E[X]/P.

Source: S. Dutta, G. Joshi, S. Ghosh, P. Dube, P. Nagpurkar, "Slow and Stale Gradients Can Win the
Race", AISTATS 2018, section 2. Changed: the mini-batches of superseded work return to the epoch,
unless the run drops them as the paper does.
"""

from ..events import Decision
from .arguments import Argument
from .base import Gathering, Rhythm


class KSync(Gathering):
    """Gather K pushes; apply; cancel the rest; release everyone."""

    name = "k-sync"
    summary = "an update takes the first K pushes and cancels the slower work"
    arguments = (
        Argument(
            symbol="K",
            meaning="pushes an update",
            minimum=1,
            is_at_most_workers=True,
            instead="k-batch-sync",
        ),
    )
    cancels = True
    rhythm = Rhythm(waits=True, restarts=True)

    _after_push = Gathering._rest_and_fill

    def _after_update(self) -> list[Decision]:
        return [*self._cancel_rest(), *self._release_idle()]


class KBatchSync(KSync):
    """Gather K pushes, release each member again at once; apply; cancel the rest; release all."""

    name = "k-batch-sync"
    summary = "like k-sync, but a fast worker may push more than once per update"
    arguments = (Argument(symbol="K", meaning="pushes an update", minimum=1),)
    rhythm = Rhythm(waits=False, restarts=True)

    _after_push = Gathering._go_on
