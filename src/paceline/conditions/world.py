"""All that a run is put through, as one value: who takes how long, who is away, what bytes cost.

It must not know protocols: given a worker and a start it answers with an end.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import ConfigError
from .absences import Absence
from .delays import Delay
from .links import Link
from .phases import Pace, Phases

Finisher = Callable[[float], float]
"""When a step is done that begins at this time; each call draws the next step of one worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What the workers of one run are put through.

    Args:
        delays: the time X of a step, by worker.
        slow: how many times longer a worker takes, always.
        phases: slow phases that come and go, by worker.
        absences: who is away when.
        link: what a push and a pull cost; None: nothing.
        seed: of all draws. Worker w draws its steps from ``Random(f"{seed}/{w}")``, as it does in
            a live run, so both see the same stragglers.
    """

    delays: tuple[Delay, ...]
    slow: dict[int, float] = field(default_factory=dict)
    phases: dict[int, Phases] = field(default_factory=dict)
    absences: tuple[Absence, ...] = ()
    link: Link | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for worker, delay in enumerate(self.delays):
            if not delay.mean_s:
                raise ConfigError(
                    f"a step of worker {worker} takes no time ({delay.text}): nothing would ever "
                    "come first; give it a delay, as in --delay exp:20ms"
                )

    @property
    def num_workers(self) -> int:
        return len(self.delays)

    @property
    def is_alike(self) -> bool:
        """Whether all workers are alike, there all the time, and bytes cost nothing."""
        is_steady = not (self.slow or self.phases or self.absences or self.link)
        return is_steady and len(set(self.delays)) == 1

    def mean_step_s(self, worker: int) -> float:
        """E[X] of a worker in the long run, its factor and its phases included."""
        mean_s = self.delays[worker].mean_s * self.slow.get(worker, 1.0)
        return mean_s / self.phases[worker].pace if worker in self.phases else mean_s

    def finisher(self, worker: int) -> Finisher:
        """A fresh sequence of this worker's steps."""
        draw = self.delays[worker].drawer(random.Random(f"{self.seed}/{worker}"))
        factor = self.slow.get(worker, 1.0)
        if worker in self.phases:
            rng = random.Random(f"{self.seed}/{worker}/phases")
            pace = Pace(self.phases[worker], rng)
            return lambda start_s: pace.finish_s(start_s, draw() * factor)
        if factor != 1.0:
            return lambda start_s: start_s + draw() * factor
        return lambda start_s: start_s + draw()
