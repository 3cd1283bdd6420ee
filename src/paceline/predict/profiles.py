"""The profile of a short real run: the times of its steps, and of the exchanges beside them.

    grant ------ exchange ------ computing ---- ordered delay ---- push --> heard
            (message, update,                   (--delay: known,      (slot,
             pull)             compute           taken out)            message)

The exchange of a step is the time from its grant until its push is heard, minus the computing and
the ordered delay: the messages both ways, the pull, and the coordinator's own time. Adding is
measured separately (``add_s``), because an update of one push adds nothing, and simultaneous pushes
are added one after the other. An exchange that began with a new version includes writing it:
``apply_s`` is the extra time of those steps. A run between peers has no grants; its exchange is the
time that its workers report.

All times include the load on the cores in that run. The best profile is therefore of an
asynchronous run, where grants do not coincide (paceline plan takes one of k-batch-async). Times of
more workers than cores are converted to those on cores of their own.

A step uses as many threads as the run's workers had. A predicted worker computes with as many, and
occupies as many cores: on 16 cores two workers of 8 threads compute at once, and the others wait.
That is close to a run with fewer threads each, provided that threads scale well. This module must
not know what is predicted from it.
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
        batch_size: samples that an update averaged (per local step); 0: not recorded.
        work_s: by worker, the seconds of computing each mini-batch on cores of its own, without
            warm-up and without the orders of ``delay`` and ``slow``.
        exchange_s: by worker, the seconds of each exchange beside them.
        add_s: seconds of adding a push to the sum of its update; 0.0: none was added.
        apply_s: seconds of writing a new version; 0.0: it could not be separated.
        pause_s: seconds from the end of an epoch to the first work of the next, or, if there was
            only one epoch, to the end of its evaluation; 0.0: nothing was evaluated.
        delay, slow: the settings of that run.
        cores: cores that its workers shared; None: not recorded.
        threads: threads of each worker; 1 if they did not compute on cores of one machine.
        drift: how much the machine's speed changed during the run (`drift_of`).
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
        """Mean seconds of computing a mini-batch."""
        return statistics.fmean(
            value_s for values_s in self.work_s.values() for value_s in values_s
        )

    @property
    def push_s(self) -> float:
        """Mean seconds of an exchange: from a grant to the next push, without computing."""
        return statistics.fmean(
            value_s for values_s in self.exchange_s.values() for value_s in values_s
        )

    def machine(self, num_workers: int, cores: int | None) -> Machine:
        """The machine for ``num_workers`` workers that share ``cores`` (None: all compute at once).

        With as many workers as in the run, each has its own times; otherwise all share all times.

        Raises:
            ConfigError: ``cores`` differs from the run's and is below a worker's threads.
        """
        if cores is not None and cores != self.cores and cores < self.threads:
            raise ConfigError(
                f"the workers of the profile {self.run_dir} had {self.threads} threads each, more "
                f"than --cores {cores}; use a run with --threads {cores}"
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
        """Raise ConfigError, which names the differences, unless the profile is of this run.

        Args:
            flag: the option that named the profile.
        """
        pairs = {
            "task": (self.task, task),
            "parameters": (self.num_parameters, num_parameters),
            "mini-batch size": (self.mini_batch_size, mini_batch_size),
        }
        differences = [
            f"{name} {profiled} in the profile, {wanted} here"
            for name, (profiled, wanted) in pairs.items()
            if profiled != wanted
        ]
        if differences:
            remedy = "leave --profile out to measure one now"
            if flag != "--profile":
                remedy = f"give {flag} a matching run"
            if len(differences) == 1 and self.mini_batch_size != mini_batch_size:
                remedy += f", or use --mini-batch-size {self.mini_batch_size}"
            raise ConfigError(
                f"the profile {self.run_dir} does not match ({'; '.join(differences)}); {remedy}"
            )


def of_the_first(texts: Sequence[str], num_workers: int) -> tuple[str, ...]:
    """The texts of ``delay`` or ``slow`` that apply to the first ``num_workers`` workers.

    Example:
        >>> of_the_first(["exp:5ms", "1=exp:20ms", "3=exp:40ms"], 2)
        ('exp:5ms', '1=exp:20ms')
    """
    workers = [text.rpartition("=")[0].strip() for text in texts]
    return tuple(
        text
        for text, worker in zip(texts, workers, strict=True)
        if not worker.isdecimal() or int(worker) < num_workers
    )


def _delays(rows: Mapping[int, tuple[float, ...]], num_workers: int) -> tuple[Delay, ...]:
    """The measured times as delays: each worker's own, or all times for each worker."""
    samples_s = [rows[worker] for worker in sorted(rows)]
    if sorted(rows) != list(range(num_workers)):
        samples_s = [tuple(value_s for row in rows.values() for value_s in row)] * num_workers
    return tuple(Delay(text="measured", terms=(Empirical(values_s=row),)) for row in samples_s)


def read_profile(run_dir: Path) -> Profile:
    """Read the profile of a run from its trace.

    Raises:
        ConfigError: there is no trace, it is damaged or of another version, or has too few steps.
    """
    records = read_trace(run_dir / FILE_NAME)
    header = next((record for record in records if isinstance(record, Header)), None)
    if header is None:
        raise ConfigError(f"the trace in {run_dir} is empty: the run never started")
    times = StepTimes(header)
    for record in records:
        if isinstance(record, Resumed):
            break  # its workers' delays continue from a checkpoint that is not in this file
        times.add(record)
    if (num_steps := sum(map(len, times.work_s.values()))) < FEWEST_STEPS:
        raise ConfigError(
            f"{run_dir} has {num_steps} timed steps, at least {FEWEST_STEPS} are needed for a "
            "profile; use a longer run"
        )
    apply_s, cores = times.apply_s(), header.number("cores") or None
    factor, workers = 1.0 / times.sharing(cores), sorted(times.work_s)
    return Profile(
        run_dir=run_dir,
        task=header.text("task"),
        mini_batch_size=header.number("mini_batch_size"),
        batch_size=header.number("batch_size"),
        num_parameters=header.number("num_parameters"),
        work_s={
            worker: tuple(factor * step_s for step_s in times.work_s[worker]) for worker in workers
        },
        exchange_s={worker: times.exchange_s(worker, apply_s, factor) for worker in workers},
        add_s=statistics.fmean(times.add_s or [0.0]),
        apply_s=apply_s,
        pause_s=times.pause_s(),
        delay=header.texts("delay"), slow=header.texts("slow"),
        cores=cores, threads=times.threads, drift=drift_of(times.steps),
    )  # fmt: skip
