"""local-sgd: every worker takes H steps of its own; then the parameters are averaged.

    worker 0  -step-step-step-....|-step-step-      H = 3: steps between two lines are local, on a
    worker 1  -step--step--step---|-step--ste       copy of the parameters; a line is an average
    worker 2  -step-step--step-...|-step-step       over all workers

    w_i <- w;  H times: w_i <- w_i - eta g(w_i, xi);  w <- w + sum_i (m_i/m) (w_i - w)

One exchange every H steps instead of every step. A push is the difference w_i - w, weighted by its
samples, and the update rule is its mean, not the optimizer: that has run locally.

Source: S. U. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; H. B. McMahan
et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
Changed: weights by samples, and lost work is handed on, both as in full-sync.
"""

from .base import Argument, Rhythm
from .full_sync import FullSync


class LocalSgd(FullSync):
    """As full-sync, with H local steps a push; an update is the mean of the differences."""

    name = "local-sgd"
    summary = "H local steps on every worker, then the parameters are averaged"
    argument = Argument(symbol="H", meaning="local steps between two averages", minimum=1)
    update_rule = "mean"
    rhythm = Rhythm(waits=True, restarts=False)

    def __init__(self, num_workers: int, num_steps: int) -> None:
        super().__init__(num_workers, num_steps, num_steps=num_steps)
