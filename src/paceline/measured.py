"""What a run measured, as something that can be drawn from again: each worker's time of a step.

So a run that was made can be simulated under another protocol, K or number of workers. It must
not know what is made of the times.
"""

from collections import defaultdict
from pathlib import Path

from .conditions.delays import Delay
from .conditions.distributions import Empirical
from .errors import ConfigError
from .events import Joined
from .records import Handed, Heard
from .trace import FILE_NAME, read_trace

_WARM_UP_STEPS = 2
"""Left out at the start of each member: the first steps fill caches and allocate."""
_FEWEST_STEPS = 10


def measured_delays(run_dir: Path, num_workers: int) -> tuple[Delay, ...]:
    """The time of a step of each worker, drawn from what a run's trace tells.

    With as many workers as the run had each has its own times, otherwise all share all of them.

    Raises:
        ConfigError: there is no trace, it is damaged, or it tells too little.
    """
    by_worker = _times_s(run_dir / FILE_NAME)
    every = [value for values in by_worker.values() for value in values]
    if len(every) < _FEWEST_STEPS:
        raise ConfigError(
            f"{run_dir} has {len(every)} timed steps, at least {_FEWEST_STEPS} are needed to draw "
            "from; take a longer run"
        )
    if sorted(by_worker) == list(range(num_workers)):
        return tuple(_delay(run_dir, by_worker[worker]) for worker in range(num_workers))
    return (_delay(run_dir, every),) * num_workers


def _times_s(path: Path) -> dict[int, list[float]]:
    worker_of: dict[int, int] = {}
    steps: defaultdict[int, int] = defaultdict(int)
    found: defaultdict[int, list[float]] = defaultdict(list)
    for record in read_trace(path):
        match record:
            case Heard(fact=Joined(member, _), worker=int(worker)):
                worker_of[member] = worker
            case Handed():
                member = record.fact.ticket.member
                steps[member] += 1
                if steps[member] > _WARM_UP_STEPS and record.compute_s > 0.0:
                    found[worker_of.get(member, member)].append(record.compute_s)
    return found


def _delay(run_dir: Path, values: list[float]) -> Delay:
    return Delay(text=f"as in {run_dir}", terms=(Empirical(values_s=tuple(values)),))
