"""adaptive-local: local-sgd whose H shrinks as the loss falls.

    worker 0  -step-step-step-|-step-step-|-step-|      few exchanges while there is much to
    worker 1  -step--step-step|-step-step-|-step-|      gain, and many when the drift between
    worker 2  -step-step-step-|-step--step|-step-|      the models keeps the loss up

    H_t = ceil(sqrt(F_t/F_0) H_0)

H_0 is the number in the name; F_t is the moving average of the training loss and F_0 its start. H
never grows again: a loss that rises is noise, or a learning rate that is too large.

Source: J. Wang, G. Joshi, "Adaptive Communication Strategies to Achieve the Best Error-Runtime
Trade-off in Local-Update SGD" (AdaComm), MLSys 2019, arXiv 1810.08313, section 4. Changed: H is
chosen after each average, from pushes, not at fixed intervals of time.
"""

import math
from typing import Any

from ..events import Decision, Fact, Pushed
from ..fields import count
from .adaptive import LossProgress
from .arguments import Argument
from .local_sgd import LocalSgd


class AdaptiveLocal(LocalSgd):
    """Like local-sgd, but choose the number of local steps after each average."""

    name = "adaptive-local"
    summary = "local-sgd whose H shrinks as the loss falls"
    arguments = (Argument(symbol="H", meaning="local steps at the start", minimum=1),)
    is_adaptive = watches_loss = True
    can_stream = False
    learned = ("num_steps", "progress")
    is_spmd = False  # H depends on all losses, which peers do not exchange

    def __init__(self, num_workers: int, num_steps: int) -> None:
        super().__init__(num_workers, num_steps)
        self._first_num_steps = num_steps
        self._progress = LossProgress(2 * num_workers)

    def react(self, fact: Fact) -> list[Decision]:
        if isinstance(fact, Pushed):
            self._progress.hear(fact.loss)
        return super().react(fact)

    def _after_update(self) -> list[Decision]:
        wanted = math.ceil(math.sqrt(self._progress.ratio) * self._first_num_steps)
        self.num_steps = min(self.num_steps, wanted)
        return super()._after_update()

    def state(self) -> dict[str, Any]:
        learned = {"num_steps": self.num_steps, "progress": self._progress.state()}
        return {**super().state(), **learned}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.num_steps = max(1, min(count(state["num_steps"]), self._first_num_steps))
        self._progress.load(state["progress"])
