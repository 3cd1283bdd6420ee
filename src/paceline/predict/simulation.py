"""Predicts a run's times: simulates its protocol in virtual time, and compares with theory.

    settings -> conditions, protocol -> simulation/timing.py -> counts -> forecast, beside theory
                                     `-> simulation/engine.py, if a trace is wanted

Above 300 lines, since a run's conditions and its description are read together. This module must
not know terminals, nor how time is made to pass.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from .. import theory
from ..conditions.delays import NO_DELAY, Delay, parse_delays
from ..conditions.machine import Machine
from ..conditions.slowness import parse_slowness
from ..conditions.world import Conditions, parse_absences, parse_bytes, parse_link
from ..core.stats import Counts
from ..errors import ConfigError
from ..protocols import parse
from ..protocols.base import SyncProtocol
from ..protocols.staleness import StalenessRule
from ..protocols.streaming import AT_ONCE, Streaming
from ..report.forecast import Forecast, forecast_of
from ..simulation.engine import SimulatedRun, endless_ledger
from ..simulation.timing import TimingRun
from ..trace import FILE_NAME, Trace
from .profiles import Profile, of_the_first, read_profile

OnProgress = Callable[[int], None]
_NINE_OF_TEN = 1.645
"""Standard deviations on either side of the mean of a normal distribution."""
_OWN_ERROR = 0.095
"""Relative error that 9 of 10 predictions stay within if the machine keeps its speed while it is
measured: that of the model, and how a shared machine changes over minutes (results/likely.md)."""
_FEWEST_UPDATES, _PUSHES_OF_AN_END = 40, 20_000


class Watcher(Protocol):
    """Receives the progress of a run."""

    def progress(self, done: int) -> None:
        """Hear that ``done`` updates are made."""

    def evaluated(self, epoch: int, at_s: float, metrics: Mapping[str, float]) -> None:
        """Hear means over the test data, ``at_s`` seconds after the start of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Delays, links and absences of a simulated run, as written on the command line."""

    delay: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    away: tuple[str, ...] = ()
    link: str | None = None
    server: str | None = None
    num_bytes: str | None = None
    like: Path | None = None
    """A run whose measured times are used; ``delay`` and ``slow`` replace that run's own."""
    cores: int | None = None
    """Cores that the workers share, with ``like``; None: as many as that run had."""
    seed: int = 0

    def conditions(self, num_workers: int, update_bytes: float | None = None) -> Conditions:
        """Return the parsed conditions of a simulation.

        Args:
            update_bytes: size of a push of the model, if there is one; ``num_bytes`` takes
                precedence.

        Raises:
            ConfigError: a part is invalid, or a worker has no delay.
        """
        if num_workers < 1:
            raise ConfigError(f"workers must be >= 1, got {num_workers}")
        if self.num_bytes is not None and self.link is None and self.server is None:
            raise ConfigError("--bytes needs a link: add --link or --server")
        profile = None if self.like is None else read_profile(self.like)
        delay, slow_texts = self.delay, self.slow
        if profile is not None:
            delay = delay or of_the_first(profile.delay, num_workers)
            slow_texts = slow_texts or of_the_first(profile.slow, num_workers)
        slow, phases = parse_slowness(slow_texts, num_workers)
        push_bytes = update_bytes if self.num_bytes is None else parse_bytes(self.num_bytes)
        return Conditions(
            delays=_delays(delay, num_workers, has_machine=profile is not None),
            slow=slow,
            phases=phases,
            absences=parse_absences(self.away, num_workers),
            link=parse_link(self.link, self.server, push_bytes),
            machine=self._machine(profile, num_workers),
            seed=self.seed,
        )

    def _machine(self, profile: Profile | None, num_workers: int) -> Machine | None:
        if self.cores is not None and self.cores < 1:
            raise ConfigError(f"cores must be >= 1, got {self.cores}")
        if profile is None:
            if self.cores is not None:
                raise ConfigError("--cores needs measured times: add --like RUN")
            return None
        return profile.machine(num_workers, self.cores or profile.cores)


def _delays(texts: Sequence[str], num_workers: int, *, has_machine: bool) -> tuple[Delay, ...]:
    """Return each worker's delay; raise ConfigError if one has none and nothing was measured."""
    delays = parse_delays(texts, num_workers)
    missing = [worker for worker, delay in enumerate(delays) if delay is None]
    if missing and not has_machine:
        subject = "the workers have" if len(missing) == num_workers else f"worker {missing[0]} has"
        raise ConfigError(
            f"{subject} no time for a step: give one to all workers, as in --delay 10ms+exp:5ms"
        )
    return tuple(delay or NO_DELAY for delay in delays)


def forecast(
    protocol_text: str,
    num_workers: int,
    world: World,
    num_updates: int,
    *,
    staleness: str = "none",
    outer: str = "none",
    streaming: Streaming = AT_ONCE,
    run_dir: Path | None = None,
    on_progress: OnProgress = lambda done: None,
) -> Forecast:
    """Simulate the timing of one protocol, and return its forecast.

    Args:
        run_dir: where to write the trace that a live run would; None: keep only counts, which is
            faster.

    Raises:
        ConfigError: the protocol, the world or the number of updates is invalid.
    """
    if num_updates < 1:
        raise ConfigError(f"updates must be >= 1, got {num_updates}")
    conditions = world.conditions(num_workers)
    protocol = parse(protocol_text, num_workers, staleness, outer, streaming)
    start_s = time.perf_counter()
    if run_dir is None:
        counts = TimingRun(protocol, conditions).run(num_updates, on_progress)
    else:
        counts = _traced(protocol, conditions, num_updates, run_dir, on_progress)
    note = _batch_note(protocol, conditions.machine)
    if protocol.watches_loss:
        note = (
            f"{protocol} keeps its initial setting: without training there is no loss; name a task"
        )
    return describe(protocol, conditions, counts, time.perf_counter() - start_s, note)


def _batch_note(protocol: SyncProtocol, machine: Machine | None) -> str:
    """Return a note if updates have another batch size than in the measured run; else empty."""
    if machine is None or not machine.mini_batch_size or not machine.batch_size:
        return ""
    num_pushes, size, run_size = protocol.num_pushes, machine.mini_batch_size, machine.batch_size
    needed_size = -(-run_size // num_pushes)
    if needed_size == size:
        return ""
    return (
        f"a step takes {size:,} samples, {machine.text}, so an update averages "
        f"{num_pushes * size:,} samples instead of that run's {run_size:,}; for {run_size:,} give "
        f"--like a run with mini-batches of {needed_size:,}"
    )


def _overlap_note(protocol: SyncProtocol, conditions: Conditions) -> str:
    """Return a note if an overlap of exchanges with local steps changes no time; else empty."""
    overlap_steps = protocol.streaming.overlap_steps
    if not overlap_steps or conditions.link is not None:
        return ""
    reason = "without --link an exchange takes no time"
    if conditions.machine is not None:
        reason = "exchanges take as long as in the measured run"
    return f"an overlap of {overlap_steps} steps changes no time: {reason}"


def _traced(
    protocol: SyncProtocol,
    conditions: Conditions,
    num_updates: int,
    run_dir: Path,
    on_progress: OnProgress,
) -> Counts:
    """Simulate with a trace, and return the counts."""
    trace = open_trace(run_dir)
    try:
        trace.header(
            task="timing", source="no data: only time", protocol=str(protocol),
            staleness=str(protocol.staleness), outer=str(protocol.outer),
            workers=conditions.num_workers, engine="simulated", path="virtual time",
            batch_size=protocol.num_pushes, mini_batch_size=1,
            pushes_per_update=protocol.num_pushes, num_samples=0, seed=conditions.seed,
            device="virtual", learning_rates=[], num_parameters=0, update_bytes=0, epochs=None,
        )  # fmt: skip
        ledger = endless_ledger(protocol)
        run = SimulatedRun(protocol, ledger, conditions, trace=trace)
        counts = run.run(num_updates, on_progress)
        run.close()
    finally:
        trace.close()
    return counts


def open_trace(run_dir: Path) -> Trace:
    """Return a trace in this folder, which is made if there is none.

    Raises:
        ConfigError: the folder holds a run, or cannot be made.
    """
    if (run_dir / FILE_NAME).exists():
        raise ConfigError(f"{run_dir} already holds a run; name another --run-dir")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder {run_dir} cannot be made: {error.strerror}") from None
    return Trace(run_dir / FILE_NAME)


def describe(
    protocol: SyncProtocol, conditions: Conditions, counts: Counts, wall_s: float, note: str = ""
) -> Forecast:
    """Return the forecast from the counts of a simulation, beside theory."""
    theory_s, source = expected_update_s(protocol, conditions)
    num_pushes, rule = protocol.num_pushes, protocol.staleness
    machine, staleness = conditions.machine, None
    size = (machine.mini_batch_size if machine else 0) or None
    if not conditions.absences and not rule.drops:
        staleness = theory.staleness_versions(protocol.name, conditions.num_workers, num_pushes)
    return forecast_of(
        counts.staleness,
        (counts.times_s[-1], counts.mean_update_s(), counts.error_update_s()),
        (counts.used_s, counts.wasted_s, counts.there_s),
        protocol=str(protocol),
        workers=conditions.num_workers,
        delay=in_words(conditions),
        seed=conditions.seed,
        updates=counts.updates,
        pushes=counts.pushes,
        time_likely_s=likely_update_s(protocol, conditions, counts),
        machine_drift=None if machine is None else machine.drift.relative,
        mini_batch_size=size,
        samples_per_update=size and num_pushes * size,
        theory_time_s=theory_s,
        theory_time_source=source,
        theory_staleness_versions=staleness,
        cancelled=counts.cancelled,
        discarded=counts.discarded,
        staleness_rule=str(rule),
        mean_scale=_mean_scale(rule, counts),
        note=protocol.idle_note() or note or _overlap_note(protocol, conditions),
        lost=counts.lost,
        wall_s=wall_s,
    )


def likely_update_s(
    protocol: SyncProtocol, conditions: Conditions, counts: Counts
) -> tuple[float, float] | None:
    """Return the range of an update's time in 9 of 10 live runs; None without a machine.

    The simulation is repeated for a faster and a slower machine, by as much as its speed changes
    between runs if it drifts as during the measurement; ``--delay`` stays the same. The standard
    error of the mean over as many updates is added in quadrature.
    """
    machine = conditions.machine
    if machine is None or counts.updates < _FEWEST_UPDATES:
        return None
    mean_s, error_s = counts.mean_update_s(), counts.error_update_s()
    drift = machine.drift.error(counts.times_s[-1])
    speed_error = math.hypot(_NINE_OF_TEN * drift, _OWN_ERROR)
    draw_error = _NINE_OF_TEN * math.sqrt(2.0) * error_s / mean_s
    updates = min(counts.updates, max(_FEWEST_UPDATES, _PUSHES_OF_AN_END // protocol.num_pushes))

    def simulated_s(factor: float) -> float:
        fresh = parse(str(protocol), conditions.num_workers)
        stretched = replace(conditions, machine=machine.stretched(factor))
        return TimingRun(fresh, stretched).run(updates).mean_update_s()

    usual_s, ends_s = simulated_s(1.0), []
    for sign in (-1.0, 1.0):
        log_ratio = math.log(simulated_s(math.exp(sign * speed_error)) / usual_s)
        ends_s.append(mean_s * math.exp(sign * math.hypot(log_ratio, draw_error)))
    return ends_s[0], ends_s[1]


def in_words(conditions: Conditions) -> str:
    """Return the time of a step in words."""
    texts = list(dict.fromkeys(delay.text for delay in conditions.delays))
    more = f" and {len(texts) - 4} more" if len(texts) > 4 else ""
    delay = texts[0] if len(texts) == 1 else f"one of {', '.join(texts[:4])}{more}"
    machine = conditions.machine
    if machine is None:
        return delay
    cores = "" if machine.cores is None else f" on {machine.cores} cores"
    if machine.threads > 1:
        cores += f", {machine.threads} threads a worker"
    extra = "" if texts == [NO_DELAY.text] else f" and {delay}"
    return f"{machine.text}{cores}{extra}"


def _mean_scale(rule: StalenessRule, counts: Counts) -> float | None:
    """Return the mean factor of a push under the rule; None if it depends on the gradients."""
    if rule.distance_limit or not counts.pushes:
        return None
    return sum(rule.scale(lag) * count for lag, count in counts.staleness.items()) / counts.pushes


def expected_update_s(protocol: SyncProtocol, conditions: Conditions) -> tuple[float | None, str]:
    """Return the time of an update by theory, and its source or why there is none."""
    name, num_workers = protocol.name, conditions.num_workers
    if protocol.staleness.drops:
        return None, "none where stale pushes are dropped"
    if conditions.absences or conditions.link is not None:
        return None, "none for workers that come and go, or bytes that cost time"
    if conditions.machine is not None:
        return None, "none for measured times: they differ, and workers may share cores"
    if not conditions.is_alike:
        if name not in ("async", "k-batch-async"):
            return None, "none for workers that differ"
        means_s = [conditions.mean_step_s(worker) for worker in range(num_workers)]
        return theory.evenly_s(means_s, protocol.num_pushes), "renewal theorem, workers differ"
    delay = _repeated(conditions.delays[0], protocol.num_steps)
    equivalent = "full-sync" if name == "local-sgd" else name
    expected_s = theory.update_s(equivalent, delay, num_workers, protocol.num_pushes)
    if expected_s is not None:
        is_closed = theory.is_closed_form(equivalent, delay, num_workers, protocol.num_pushes)
        return expected_s, "closed form" if is_closed else "integral"
    return None, "none: no closed form is known"


def _repeated(delay: Delay, num_steps: int) -> Delay:
    """Return the time of several steps in a row."""
    return Delay(text=f"{num_steps} times {delay.text}", terms=delay.terms * num_steps)
