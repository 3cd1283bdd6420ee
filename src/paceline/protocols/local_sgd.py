"""local-sgd: every worker takes H local steps; then the parameters are averaged.

    worker 0  -step-step-step-....|-step-step-      H = 3: steps between two lines are local, on a
    worker 1  -step--step--step---|-step--ste       copy of the parameters; a line is an average
    worker 2  -step-step--step-...|-step-step       over all workers

    w_i <- w;  H times: w_i <- w_i - eta g(w_i, xi);  w <- w + sum_i (m_i/m) (w_i - w)

One exchange every H steps instead of every step. A push is the difference w_i - w, weighted by its
samples, and the update is the mean of these, not an optimizer step: the optimizer ran locally.

Source: S. U. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; H. B. McMahan
et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
Changed: weights by samples, and lost work is reassigned, both as in full-sync.

post-local-sgd: full-sync at first, then local-sgd.

    worker 0  -step-|-step-|-step-|-step-step-step-|      N = 3, H = 3: an average after every step
    worker 1  -step-|-step-|-step-|-step--step-step|      while the model changes fast, then after
    worker 2  -step-|-step-|-step-|-step-step--step|      every H of them

The first N updates are averages after one step of each worker, by its own optimizer. For SGD, with
momentum and weight decay or without, a step is linear in the gradient, so these are full-sync's
parameters exactly; each worker keeps the momentum of its own gradients, whose mean is full-sync's.
For an optimizer that is not linear (Adam), and where gradients are clipped, the mean of the steps
is not the step of the mean: there the first N updates are those of local-sgd:1. An outer optimizer
steps on these means, too.

Source: T. Lin, S. U. Stich, K. K. Patel, M. Jaggi, "Don't Use Large Mini-Batches, Use Local SGD",
ICLR 2020, section 3. Changed: momentum is not averaged where the local steps begin.
"""

from typing import Any, ClassVar

from ..events import Apply
from ..fields import count
from .arguments import Argument
from .base import Rhythm
from .full_sync import FullSync

_STEPS = Argument(symbol="H", meaning="local steps between two averages", minimum=1)


class LocalSgd(FullSync):
    """Like full-sync, with H local steps per push; an update is the mean of the differences."""

    name = "local-sgd"
    summary = "H local steps on every worker, then the parameters are averaged"
    arguments: ClassVar[tuple[Argument, ...]] = (_STEPS,)
    update_rule = "mean"
    can_stream = True
    rhythm = Rhythm(waits=True, restarts=False)

    def __init__(self, num_workers: int, num_steps: int) -> None:
        super().__init__(num_workers, num_steps, num_steps=num_steps)


class PostLocalSgd(LocalSgd):
    """Like local-sgd, with one step per push until N updates are made."""

    name = "post-local-sgd"
    summary = "an average after every step for N updates, then like local-sgd:H"
    arguments = (
        Argument(symbol="N", meaning="updates with one step of each worker", minimum=1),
        _STEPS,
    )
    is_adaptive = True
    can_stream = False  # its H changes
    learned = ("num_updates",)

    def __init__(self, num_workers: int, num_first: int, num_steps: int) -> None:
        FullSync.__init__(self, num_workers, num_first, num_steps, num_steps=1)
        self.num_as_full_sync, self._later_steps = num_first, num_steps
        self._num_updates = 0

    @property
    def num_short(self) -> int:
        return max(0, self.num_as_full_sync - self._num_updates)

    @property
    def long_steps(self) -> int:
        return self._later_steps

    def _apply(self) -> Apply:
        self._num_updates += 1
        self._choose()
        return super()._apply()

    def _choose(self) -> None:
        self.num_steps = 1 if self.num_short else self._later_steps

    def state(self) -> dict[str, Any]:
        return {**super().state(), "num_updates": self._num_updates}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._num_updates = count(state["num_updates"])
        self._choose()
