"""k-async: an update takes the first K workers' pushes; the others go on undisturbed.

    worker 0  --step--...|--step------.|            P = 3, K = 2: a finished worker waits for the
    worker 1  --step-----|--step-------|            update of the first K; the slow one goes on, and
    worker 2  --step-----------......--|            its gradient joins a later update and is stale

    w_{j+1} = w_j - (eta/K) sum_{l=1..K} g(w_{tau(l,j)}, xi_l)

Staleness is P/K - 1 versions on average, whatever the distribution; an update takes at most
E[X_{K:P}] if steps are new-longer-than-used. K = 1 is async, K = P is full-sync.

Source: S. Gupta, W. Zhang, F. Wang, "Model Accuracy and Runtime Tradeoff in Distributed Deep
Learning", ICDM 2016 (n-softsync); as here: S. Dutta, G. Joshi, S. Ghosh, P. Dube, P. Nagpurkar,
"Slow and Stale Gradients Can Win the Race", AISTATS 2018, section 2. Changed: when fewer than K
members live, a finished one pushes again.

k-batch-async: every K pushes are an update; nobody ever waits and nothing is cancelled.

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

from .arguments import Argument
from .base import Gathering, Rhythm


class KAsync(Gathering):
    """Gather the pushes of K members; apply; release those."""

    name = "k-async"
    summary = "an update takes the first K workers; the slower go on and are stale"
    has_stale_pushes = True
    rhythm = Rhythm(waits=True, restarts=False)
    arguments = (
        Argument(
            symbol="K",
            meaning="pushes an update",
            minimum=1,
            is_at_most_workers=True,
            instead="k-batch-async",
        ),
    )

    _after_push = Gathering._rest_and_fill
    _after_update = Gathering._release_idle


class KBatchAsync(KAsync):
    """Gather K pushes, release each member again at once; apply."""

    name = "k-batch-async"
    summary = "every K pushes are an update; nobody waits, gradients may be stale"
    rhythm = Rhythm(waits=False, restarts=False)
    arguments = (Argument(symbol="K", meaning="pushes an update", minimum=1),)

    _after_push = Gathering._go_on
