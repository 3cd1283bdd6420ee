"""What a short real run tells: how long steps take, and what the exchange beside them costs.

    grant ------ exchange ------ computing ---- ordered delay ---- push --> heard
            (message, update,                   (--delay: known,      (slot,
             pull)             compute           taken out)            message)

The exchange of a step is the time from its grant to its push being heard, less the computing and
the ordered delay: the messages both ways, the pull, and the coordinator's own time. The adding is
measured separately (``add_s``), since an update of one push adds nothing, and pushes at the same
time are added one after the other. Where an exchange began with a new version, writing that is in
it as well: what such steps take longer is ``apply_s``. A run between peers has no grants: its
exchange is what its workers say they spent on it.

All of it is measured with the cores as busy as they were in that run, so the best profile is of an
asynchronous run, where nobody is granted at the same time as others (paceline plan takes one of
k-batch-async). Of more workers than cores it is brought to what a core of one's own would take.

A step is one of as many threads as that run's workers had. Whoever is predicted from it computes
with as many, and holds as many cores: of 16, workers of 8 threads have places for two, the others
wait. That is near what a run with fewer threads each takes, where threads are worth what they are.
This module must not know what is predicted from it.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..conditions.delays import Delay
from ..conditions.distributions import Empirical
from ..conditions.machine import Drift, Machine, drift_of
from ..errors import ConfigError
from ..trace import FILE_NAME, read_trace
from ..trace.records import Header, Resumed
from .step_times import FEWEST_STEPS, StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The timing of one recorded run: of one task, one model and one mini-batch size.

    Attributes:
        batch_size: samples that its updates averaged (per local step); 0: it was not recorded.
        work_s: by worker, the seconds of computing each mini-batch on cores of its own, without
            warm-up and what ``delay`` and ``slow`` ordered.
        exchange_s: by worker, the seconds of each exchange beside them.
        add_s: what adding a push to the sum of its update takes; 0.0 where none was.
        apply_s: what writing a new version takes; 0.0 where it could not be told apart.
        pause_s: from the end of an epoch to the first work of the next, or, where there was only
            one epoch, to the end of its evaluation; 0.0: nothing was evaluated.
        delay, slow: as that run was given them.
        cores: that its workers shared; None: it was not recorded.
        threads: of each worker; 1 where they did not compute on cores of one machine.
        drift: how much the machine's speed changed meanwhile (`drift_of`).
    """

    run_dir: Path
    task: str
    mini_batch_size: int
    batch_size: int
    num_parameters: int
    work_s: Mapping[int, tuple[float, ...]]
    exchange_s: Mapping[int, tuple[float, ...]]
    add_s: float
    apply_s: float
    pause_s: float
    delay: tuple[str, ...]
    slow: tuple[str, ...]
    cores: int | None
    threads: int
    drift: Drift

    @property
    def num_steps(self) -> int:
        return sum(len(values_s) for values_s in self.work_s.values())

    @property
    def mean_step_s(self) -> float:
        """Seconds of computing a mini-batch."""
        return statistics.fmean(
            value_s for values_s in self.work_s.values() for value_s in values_s
        )

    @property
    def push_s(self) -> float:
        """Seconds beside it, from a grant to the next push."""
        return statistics.fmean(
            value_s for values_s in self.exchange_s.values() for value_s in values_s
        )

    def machine(self, num_workers: int, cores: int | None) -> Machine:
        """The machine for ``num_workers`` workers, ``cores`` of them computing at once (None: all).

        With as many workers as the run had each has its own times, otherwise all share all.

        Raises:
            ConfigError: these cores are other ones, and too few for a worker's threads.
        """
        if cores is not None and cores != self.cores and cores < self.threads:
            raise ConfigError(
                f"the workers of the profile {self.run_dir} had {self.threads} threads each, more "
                f"than --cores {cores}; name a run of --threads {cores}"
            )
        return Machine(
            text=f"as in {self.run_dir}", work=_delays(self.work_s, num_workers),
            exchange=_delays(self.exchange_s, num_workers),
            add_s=self.add_s, apply_s=self.apply_s, pause_s=self.pause_s, cores=cores,
            threads=self.threads, drift=self.drift, mini_batch_size=self.mini_batch_size,
            batch_size=self.batch_size,
        )  # fmt: skip

    def check(
        self, task: str, num_parameters: int, mini_batch_size: int, flag: str = "--profile"
    ) -> None:
        """Raises ConfigError where the profile is of something else; it says what differs."""
        pairs = {
            "task": (self.task, task),
            "parameters": (self.num_parameters, num_parameters),
            "mini-batch size": (self.mini_batch_size, mini_batch_size),
        }
        wrong = [f"{name} {a} there, {b} here" for name, (a, b) in pairs.items() if a != b]
        if wrong:
            remedy = "leave --profile out to take one now"
            if flag != "--profile":
                remedy = f"give {flag} a run of the same"
            if len(wrong) == 1 and self.mini_batch_size != mini_batch_size:
                remedy += f", or ask for --mini-batch-size {self.mini_batch_size}"
            raise ConfigError(
                f"the profile {self.run_dir} is of something else ({'; '.join(wrong)}); {remedy}"
            )


def of_the_first(ordered: Sequence[str], num_workers: int) -> tuple[str, ...]:
    """What a run was given as ``delay`` or ``slow``, without that of workers there are not.

    Example:
        >>> of_the_first(["exp:5ms", "1=exp:20ms", "3=exp:40ms"], 2)
        ('exp:5ms', '1=exp:20ms')
    """
    heads = [text.rpartition("=")[0].strip() for text in ordered]
    return tuple(
        text
        for text, head in zip(ordered, heads, strict=True)
        if not head.isdecimal() or int(head) < num_workers
    )


def _delays(rows: Mapping[int, tuple[float, ...]], num_workers: int) -> tuple[Delay, ...]:
    chosen = [rows[worker] for worker in sorted(rows)]
    if sorted(rows) != list(range(num_workers)):
        chosen = [tuple(value for row in rows.values() for value in row)] * num_workers
    return tuple(Delay(text="measured", terms=(Empirical(values_s=row),)) for row in chosen)


def read_profile(run_dir: Path) -> Profile:
    """The profile that a run's trace holds.

    Raises:
        ConfigError: there is no trace, it is damaged or of another version, or tells too little.
    """
    records = read_trace(run_dir / FILE_NAME)
    header = next((one for one in records if isinstance(one, Header)), None)
    if header is None:
        raise ConfigError(f"the trace in {run_dir} is empty: the run never started")
    result = StepTimes(header)
    for record in records:
        if isinstance(record, Resumed):
            break  # its workers' delays go on from a checkpoint, which this file does not hold
        result.hear(record)
    if (num_steps := sum(map(len, result.work_s.values()))) < FEWEST_STEPS:
        raise ConfigError(
            f"{run_dir} has {num_steps} timed steps, at least {FEWEST_STEPS} are needed for a "
            "profile; take a longer run"
        )
    apply_s, cores = result.apply_s(), header.number("cores") or None
    alone, workers = 1.0 / result.sharing(cores), sorted(result.work_s)
    return Profile(
        run_dir=run_dir,
        task=header.text("task"),
        mini_batch_size=header.number("mini_batch_size"),
        batch_size=header.number("batch_size"),
        num_parameters=header.number("num_parameters"),
        work_s={
            worker: tuple(alone * step_s for step_s in result.work_s[worker]) for worker in workers
        },
        exchange_s={worker: result.exchange_s(worker, apply_s, alone) for worker in workers},
        add_s=statistics.fmean(result.added_s or [0.0]),
        apply_s=apply_s,
        pause_s=result.pause_s(),
        delay=header.texts("delay"), slow=header.texts("slow"),
        cores=cores, threads=result.threads, drift=drift_of(result.steps),
    )  # fmt: skip
