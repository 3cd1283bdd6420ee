"""What a minute of a real run tells: how long steps take, and what a push costs beside them.

    trace of a run -> Profile -> delays of any number of workers

A profile belongs to one task, one model and one mini-batch size; ``check`` refuses it for another.
This module must not know what is predicted from it.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .conditions.delays import Delay
from .conditions.distributions import Constant, Empirical
from .errors import ConfigError
from .events import Joined
from .records import Handed, Header, Heard
from .trace import FILE_NAME, read_trace

_WARM_UP_STEPS = 2
"""Left out at the start of each member: the first steps fill caches and allocate."""
_FEWEST_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The timing of one recorded run.

    Attributes:
        steps_s: by worker, the seconds of computing each mini-batch, warm-up left out.
        push_s: median seconds from the push to the new parameters, waiting for others left out.
    """

    run_dir: Path
    task: str
    mini_batch_size: int
    num_parameters: int
    steps_s: Mapping[int, tuple[float, ...]]
    push_s: float

    @property
    def num_steps(self) -> int:
        return sum(len(one) for one in self.steps_s.values())

    @property
    def mean_step_s(self) -> float:
        return statistics.fmean(value for one in self.steps_s.values() for value in one)

    def delays(self, num_workers: int, beside_s: float = 0.0) -> tuple[Delay, ...]:
        """The time of a step of each worker, drawn from what was measured, plus ``beside_s``.

        With as many workers as the run had each has its own times, otherwise all share all.
        """
        if sorted(self.steps_s) == list(range(num_workers)):
            rows = [self.steps_s[worker] for worker in range(num_workers)]
        else:
            rows = [tuple(value for one in self.steps_s.values() for value in one)] * num_workers
        beside = (Constant(mean_s=beside_s),) if beside_s else ()
        text = f"as in {self.run_dir}"
        return tuple(Delay(text=text, terms=(Empirical(values_s=row), *beside)) for row in rows)

    def check(self, task: str, num_parameters: int, mini_batch_size: int) -> None:
        """Raises ConfigError where the profile is of something else; it says what differs."""
        pairs = {
            "task": (self.task, task),
            "parameters": (self.num_parameters, num_parameters),
            "mini-batch size": (self.mini_batch_size, mini_batch_size),
        }
        wrong = [f"{name} {a} there, {b} here" for name, (a, b) in pairs.items() if a != b]
        if wrong:
            raise ConfigError(
                f"the profile {self.run_dir} is of something else ({'; '.join(wrong)}); "
                "leave --profile out to take one now"
                + (f", or ask for --mini-batch-size {self.mini_batch_size}" if len(wrong) == 1
                   and self.mini_batch_size != mini_batch_size else "")
            )  # fmt: skip


def read_profile(run_dir: Path) -> Profile:
    """The profile that a run's trace holds.

    Raises:
        ConfigError: there is no trace, it is damaged or of another version, or tells too little.
    """
    worker_of: dict[int, int] = {}
    steps: defaultdict[int, int] = defaultdict(int)
    steps_s: defaultdict[int, list[float]] = defaultdict(list)
    pushes_s: list[float] = []
    header: Mapping[str, object] = {}
    for record in read_trace(run_dir / FILE_NAME):
        match record:
            case Header():
                header = record.fields
            case Heard(fact=Joined(member, _), worker=int(worker)):
                worker_of[member] = worker
            case Handed():
                member = record.fact.ticket.member
                steps[member] += 1
                if steps[member] > _WARM_UP_STEPS and record.compute_s > 0.0:
                    steps_s[worker_of.get(member, member)].append(record.compute_s)
                    pushes_s.append(record.push_s)
    if len(pushes_s) < _FEWEST_STEPS:
        raise ConfigError(
            f"{run_dir} has {len(pushes_s)} timed steps, at least {_FEWEST_STEPS} are needed for a "
            "profile; take a longer run"
        )
    return Profile(
        run_dir=run_dir,
        task=str(header.get("task")),
        mini_batch_size=_whole(header.get("mini_batch_size")),
        num_parameters=_whole(header.get("num_parameters")),
        steps_s={worker: tuple(values) for worker, values in sorted(steps_s.items())},
        push_s=statistics.median(pushes_s),
    )


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0
