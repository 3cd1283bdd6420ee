"""All that a run is put through, as one value: who takes how long, who is away, what bytes cost.

    3=10s..60s      worker 3 is away from second 10 to second 60
    3=..10s         it starts 10 seconds late
    3=60s..         it leaves for good

Who returns is a new member of the run at the old seat. It must not know protocols: given a worker
and a start it answers with an end.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ..errors import ConfigError
from .delays import Delay, parse_seconds, parse_worker
from .links import Link
from .machine import Cores, Machine, ServerQueue
from .slowness import PhasePace, Phases

Finisher = Callable[[float], float]
"""When a step is done that begins at this time; each call draws the next step of one worker."""


_SHORTEST_S, _LONGEST_S = 1e-12, 1e12
"""Of a mean step: beyond, sums of times lose what one step adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """``worker`` is not there from ``from_s`` until ``until_s`` (inf: for good)."""

    worker: int
    from_s: float
    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What the workers of one run are put through.

    Args:
        delays: the time X of a step, by worker; with a machine, what it takes beside the machine's.
        slow: how many times longer a worker takes, always.
        phases: slow phases that come and go, by worker.
        absences: who is away when.
        link: what a push and a pull cost; None: nothing.
        machine: what computing and exchange take; None: nothing beside the delays.
        seed: of all draws. Worker w draws its steps from ``Random(f"{seed}/{w}")``, as it does in
            a live run, so both see the same stragglers: ticket n of w has its n-th draw.
    """

    delays: tuple[Delay, ...]
    slow: dict[int, float] = field(default_factory=dict)
    phases: dict[int, Phases] = field(default_factory=dict)
    absences: tuple[Absence, ...] = ()
    link: Link | None = None
    machine: Machine | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for worker, delay in enumerate(self.delays):
            mean_s = self.mean_step_s(worker)
            if mean_s and not _SHORTEST_S <= mean_s <= _LONGEST_S:
                raise ConfigError(
                    f"a step of worker {worker} takes {mean_s:.3g} s in the mean ({delay.text}): "
                    f"wanted is from {_SHORTEST_S:g} to {_LONGEST_S:g} s"
                )
            if not mean_s:
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
        is_steady = not (self.slow or self.phases or self.absences or self.link or self.machine)
        return is_steady and len(set(self.delays)) == 1

    @property
    def is_plain(self) -> bool:
        """Whether steps take what was drawn, all are there, and no two end at one moment."""
        is_steady = not (self.phases or self.absences or self.link or self.machine)
        return is_steady and all(delay.has_density for delay in set(self.delays))

    def mean_step_s(self, worker: int) -> float:
        """E[X] of a worker in the long run, its factor and its phases included."""
        mean_s, machine = self.delays[worker].mean_s, self.machine
        if machine is not None:
            mean_s += machine.work[worker].mean_s
        mean_s *= self.slow.get(worker, 1.0)
        if worker in self.phases:
            mean_s /= self.phases[worker].pace
        return mean_s if machine is None else mean_s + machine.exchange[worker].mean_s

    def finisher(self, worker: int) -> Finisher:
        """A fresh sequence of this worker's steps, where there is no machine."""
        draw = self._drawer(worker)
        if worker not in self.slow and worker not in self.phases:
            return lambda start_s: start_s + draw()
        stretch = self._stretcher(worker)
        return lambda start_s: stretch(start_s, draw())

    def step_drawer(self, worker: int) -> Callable[[], float]:
        """The same sequence as times that steps take, where conditions are plain."""
        draw, factor = self._drawer(worker), self.slow.get(worker, 1.0)
        return draw if factor == 1.0 else lambda: draw() * factor

    def server_queues(self) -> list[ServerQueue] | None:
        """Where each worker computes: fresh sequences of all they do; None without a machine."""
        machine = self.machine
        if machine is None:
            return None
        found = []
        for worker in range(self.num_workers):
            # A stream of its own, so that the ordered delays are those of a live run.
            rng = random.Random(f"{self.seed}/{worker}/machine")
            draws = (
                machine.exchange[worker].drawer(rng),
                machine.work[worker].drawer(rng),
                self._drawer(worker),
            )
            found.append(ServerQueue(draws, self._stretcher(worker)))
        return found

    def cores(self) -> Cores | None:
        """The cores that workers share; None: each has its own."""
        num_cores = None if self.machine is None else self.machine.cores
        return None if num_cores is None or num_cores >= self.num_workers else Cores(num_cores)

    def _drawer(self, worker: int) -> Callable[[], float]:
        return self.delays[worker].drawer(random.Random(f"{self.seed}/{worker}"))

    def _stretcher(self, worker: int) -> Callable[[float, float], float]:
        """When something is done that begins then and takes so long where nothing is slow."""
        factor = self.slow.get(worker, 1.0)
        if worker in self.phases:
            rng = random.Random(f"{self.seed}/{worker}/phases")
            pace = PhasePace(self.phases[worker], rng)
            return lambda start_s, seconds: pace.finish_s(start_s, seconds * factor)
        return lambda start_s, seconds: start_s + seconds * factor


def parse_absences(values: Sequence[str], num_workers: int) -> tuple[Absence, ...]:
    """Who is away when, in the order of the workers and of time.

    Raises:
        ConfigError: not of this form, for no worker of the run, or two of one worker overlap.

    Example:
        >>> parse_absences(["1=5s..8s"], num_workers=2)
        (Absence(worker=1, from_s=5.0, until_s=8.0),)
    """
    found = [_absence(value, num_workers) for value in values]
    found.sort(key=lambda one: (one.worker, one.from_s))
    for before, after in pairwise(found):
        if before.worker == after.worker and before.until_s >= after.from_s:
            raise ConfigError(
                f"away: worker {before.worker} is away from {before.from_s:g}s to "
                f"{before.until_s:g}s and again from {after.from_s:g}s; leave time between them"
            )
    return tuple(found)


def _absence(value: str, num_workers: int) -> Absence:
    head, _, span = value.replace(" ", "").partition("=")
    first, dots, last = span.partition("..")
    if not dots or not (first or last):
        raise ConfigError(
            f"away must read WORKER=FROM..UNTIL, got {value!r}; 3=10s..60s, 3=..10s (starts late) "
            "or 3=60s.. (for good)"
        )
    absence = Absence(
        worker=parse_worker(head, value, "away", num_workers),
        from_s=parse_seconds(first, value, "away") if first else 0.0,
        until_s=parse_seconds(last, value, "away") if last else math.inf,
    )
    if absence.from_s >= absence.until_s:
        raise ConfigError(f"away {value!r}: it ends before it begins; write the earlier time first")
    return absence
