"""The numbers of a run, computed from its trace alone.

So ``paceline report RUN`` always prints the same numbers as the run itself did, and live and
simulated runs share this code. Above 300 lines because every field is described where it is
defined. This module must not know terminals, pictures or engines.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ..core.stats import SlowWorker, accuracy_among
from ..errors import ConfigError
from ..trace import FILE_NAME, read_trace
from ..trace.records import Evaluated, Header
from .one_worker import ALIKE, OneWorker
from .tally import Tally
from .text import Point

_MOST_DEVICES = 64
"""Longer lists of devices show only the first and the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """Versions between the parameters a gradient was computed at and those it was applied to."""

    mean: float
    p50: int
    p99: int
    max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SupersededWork:
    """Cancelled steps: their count, the seconds spent on them, and the seconds cancelling saved."""

    count: int
    wasted_s: float
    saved_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedBytes:
    """Bytes a worker sent over all updates with ``--compress``, and would have sent without."""

    compressor: str
    plain_bytes: int
    sent_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSummary:
    """How one worker spent its time, over all its lives."""

    worker: int
    members: int
    """Lives: 1 unless it died and was replaced."""
    pushes: int
    samples: int
    compute_s: float
    wait_s: float
    push_s: float
    input_s: float
    """The part of ``compute_s`` spent waiting for batches."""
    superseded_s: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.wait_s + self.push_s + self.superseded_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowSummary:
    """A worker that was slow over the run, and what it cost the others."""

    worker: int
    usual_s: float
    """Its median step time."""
    others_s: float
    """The median step time of the other workers."""
    input_s: float
    """The part of ``usual_s`` spent waiting for batches."""
    others_input_s: float
    """The part of ``others_s`` spent waiting for batches."""
    others_wait_share: float
    """The share of their time that the other workers waited."""
    work_share: float
    """Its pushes, as a share of the others' mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingEfficiency:
    """Time for a mini-batch with one worker alone, divided by the time per worker in this run."""

    value: float
    """1: each worker trains as many samples a second as one worker alone."""
    one_worker_step_s: float
    one_worker_run: str
    one_worker_day: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSummary:
    """One epoch, complete or under way."""

    epoch: int
    """From 1."""
    t: float
    """Seconds from the first step to the epoch's end."""
    seconds: float
    """Training time, without evaluation."""
    updates: int
    is_whole: bool
    """Whether it was finished."""
    loss: float | None
    """Training loss: mean over the samples of its updates."""
    test_accuracy: float | None
    test_loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The summary of one run; ``docs/json.md`` describes every field."""

    task: str
    protocol: str
    workers: int
    engine: str
    path: str
    devices: tuple[str, ...]
    updates: int
    samples: int
    time_per_update_s: float | None
    samples_per_s: float | None
    scaling_efficiency: ScalingEfficiency | None
    """None: no comparable run with one worker was found."""
    seconds_per_epoch: float | None
    staleness_versions: Staleness
    skipped_updates: int
    staleness_rule: str
    mean_scale: float | None
    """Mean factor that the staleness rule applied to a push; None: no pushes."""
    discarded_pushes: int
    late_pushes: int
    superseded: SupersededWork
    compressed: CompressedBytes | None
    """None: gradients were sent uncompressed, or not at all."""
    dropped_samples: int
    test_accuracy: float | None
    final_loss: float | None
    total_s: float
    per_worker: tuple[WorkerSummary, ...]
    slow_workers: tuple[SlowSummary, ...]
    epochs: tuple[EpochSummary, ...]
    ended: str
    """Why the run ended; empty where its trace was cut off."""
    run_dir: str
    could_try: tuple[str, ...] = ()
    """What ``--fast auto`` would measure; empty where it was used."""
    losses: tuple[Point, ...] = ()
    """Training loss over time, at most a few hundred points; not in the JSON."""
    accuracies: tuple[Point, ...] = ()
    """Test accuracy over time; not in the JSON."""
    test_losses: tuple[Point, ...] = ()
    """Test loss over time; not in the JSON."""

    @property
    def images_per_s(self) -> float | None:
        """The earlier name of ``samples_per_s``."""
        return self.samples_per_s

    def to_json(self) -> dict[str, object]:
        """The documented fields, in order; null where a value is missing or not finite."""
        fields: dict[str, object] = {**asdict(self), "images_per_s": self.images_per_s}
        del fields["losses"], fields["accuracies"], fields["test_losses"]
        return {name: _finite(value) for name, value in fields.items()}

    def chapter_line(self) -> str:
        """The last line, in the chapter's form: ``test acc: 0.83, 7.4 sec/epoch on ['cpu:0']``."""
        accuracy = "-" if self.test_accuracy is None else f"{self.test_accuracy:.2f}"
        seconds = "-" if self.seconds_per_epoch is None else f"{self.seconds_per_epoch:.1f}"
        devices = [*self.devices]
        if len(devices) > _MOST_DEVICES:
            devices[1:-1] = [f"{len(devices) - 2:,} more"]
        return f"test acc: {accuracy}, {seconds} sec/epoch on {devices}"


def _finite(value: object) -> object:
    """Return the value with non-finite numbers (the loss of a diverged run) replaced by None."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summarize(run_dir: Path) -> Summary:
    """Compute the summary of the run in ``run_dir`` from its trace.

    Raises:
        ConfigError: there is no trace, it is damaged, or it is empty.
    """
    path = run_dir / FILE_NAME
    if not run_dir.is_dir():
        raise ConfigError(f"no run found at {run_dir}; runs are in runs/, see: ls runs")
    tally = Tally()
    for record in read_trace(path):
        tally.add(record)
    if tally.header is None:
        raise ConfigError(f"the trace {path} is empty: the run ended before it had a plan")
    return _summary(tally, run_dir)


def _summary(tally: Tally, run_dir: Path) -> Summary:
    header = tally.header
    assert header is not None
    workers = header.number("workers", len(tally.workers))
    trained_s, samples = tally.trained_s, tally.samples
    accuracies = _evaluations(tally, _accuracy)
    return Summary(
        task=header.text("task"),
        protocol=header.text("protocol"),
        workers=workers,
        engine=header.text("engine"),
        path=header.text("path"),
        devices=header.texts("devices") or _devices(header.text("device", "cpu"), workers),
        updates=tally.version,
        samples=samples,
        time_per_update_s=_ratio(trained_s, tally.version),
        samples_per_s=_ratio(samples, trained_s),
        scaling_efficiency=_efficiency(tally, workers),
        seconds_per_epoch=_seconds_per_epoch(tally),
        staleness_versions=staleness_of(tally.staleness),
        skipped_updates=tally.skipped,
        staleness_rule=header.text("staleness", "none"),
        mean_scale=tally.scales.mean,
        discarded_pushes=tally.discarded,
        late_pushes=tally.late,
        superseded=SupersededWork(
            count=tally.superseded, wasted_s=tally.wasted_s, saved_s=tally.saved_s
        ),
        compressed=_compressed(tally),
        dropped_samples=tally.dropped_samples,
        test_accuracy=accuracies[-1].value if accuracies else None,
        final_loss=_final_loss(tally),
        total_s=tally.last_s,
        per_worker=_per_worker(tally),
        slow_workers=tuple(_slow(tally, slow) for slow in tally.service.slow()),
        epochs=_epochs(tally),
        ended=tally.ended,
        run_dir=str(run_dir),
        could_try=header.texts("could_try"),
        losses=_thin(tally),
        accuracies=accuracies,
        test_losses=_evaluations(tally, lambda evaluation: evaluation.mean("loss")),
    )


def _compressed(tally: Tally) -> CompressedBytes | None:
    """Add up bytes per header: a resumed run may use another compressor, or none."""
    assert tally.header is not None
    fields = tally.header.fields
    lives = [(0, tally.header)]
    lives += [
        (resume.version, Header(fields={**fields, **resume.changes})) for resume in tally.resumes
    ]
    ends = [*(begin for begin, _ in lives[1:]), tally.version]
    names, plain_bytes, sent_bytes = list[str](), 0, 0
    for (begin, header), end in zip(lives, ends, strict=True):
        name = header.text("compress", "none")
        if name != "none" and end > begin:
            names += [name] if name not in names else []
            num_whole = sum(begin < epoch.end_version <= end for epoch in tally.epochs)
            # An update sends one fragment; the end of an epoch sends all of them.
            count = end - begin + (header.number("fragments", 1) - 1) * num_whole
            plain_bytes += count * header.number("plain_bytes")
            sent_bytes += count * header.number("sent_bytes")
    if not plain_bytes:
        return None
    return CompressedBytes(
        compressor=", ".join(names), plain_bytes=plain_bytes, sent_bytes=sent_bytes
    )


def _accuracy(evaluation: Evaluated) -> float | None:
    name = accuracy_among(evaluation.totals)
    return None if name is None else evaluation.mean(name)


def _evaluations(tally: Tally, metric: Callable[[Evaluated], float | None]) -> tuple[Point, ...]:
    """Return a metric of the test data over time, without evaluations that lack it."""
    return tuple(
        Point(t=evaluation.t_s - tally.first_s, value=value)
        for evaluation in tally.evaluations
        if (value := metric(evaluation)) is not None
    )


def _devices(device: str, workers: int) -> tuple[str, ...]:
    """Return one device per worker, numbered where the header names only a kind."""
    if ":" in device:
        return (device,) * workers
    return tuple(f"{device}:{worker}" for worker in range(workers))


def _ratio(value: float, divisor: float) -> float | None:
    return value / divisor if divisor else None


def _efficiency(tally: Tally, workers: int) -> ScalingEfficiency | None:
    """Compare with the one-worker step time in the header; both without the warm-up updates."""
    assert tally.header is not None
    alone = OneWorker.from_header(tally.header)
    if alone is None or not tally.warm.samples:
        return None
    if any(resume.workers != workers or resume.changes.keys() & ALIKE for resume in tally.resumes):
        return None  # its time mixes different kinds of run
    mini_batch_s = tally.header.number("mini_batch_size") * tally.warm.seconds / tally.warm.samples
    return ScalingEfficiency(
        value=alone.step_s / (workers * mini_batch_s),
        one_worker_step_s=alone.step_s, one_worker_run=alone.run, one_worker_day=alone.day,
    )  # fmt: skip


def _seconds_per_epoch(tally: Tally) -> float | None:
    """Mean over the whole epochs; where none is whole, an estimate from the samples so far."""
    whole = [epoch.seconds for epoch in tally.epochs if epoch.is_whole]
    if whole:
        return sum(whole) / len(whole)
    assert tally.header is not None
    num_samples = tally.header.number("num_samples")
    is_known = tally.header.text("order", "") not in ("numbers", "stream")
    if not tally.samples or not num_samples or not is_known:
        return None
    return tally.trained_s * num_samples / tally.samples


def staleness_of(counts: Mapping[int, int]) -> Staleness:
    """Return the mean and percentiles of a histogram: lag in versions -> number of pushes."""
    total = sum(counts.values())
    if not total:
        return Staleness(mean=0.0, p50=0, p99=0, max=0)
    mean = sum(value * count for value, count in counts.items()) / total
    return Staleness(
        mean=mean,
        p50=_percentile(counts, 0.50),
        p99=_percentile(counts, 0.99),
        max=max(counts),
    )


def _percentile(counts: Mapping[int, int], share: float) -> int:
    """Return the smallest value that at least this share of the counts does not exceed."""
    needed = math.ceil(share * sum(counts.values()))
    num_counted = 0
    for value in sorted(counts):
        num_counted += counts[value]
        if num_counted >= needed:
            return value
    return max(counts)


def _final_loss(tally: Tally) -> float | None:
    """Mean training loss over the last tenth of the updates: one update alone is too noisy.

    None: no loss of these is known, or finite.
    """
    last = tally.last_updates(max(1, tally.version // 10))
    num_samples = sum(update.num_samples for update in last)
    return _ratio(sum(update.loss * update.num_samples for update in last), num_samples)


def _per_worker(tally: Tally) -> tuple[WorkerSummary, ...]:
    return tuple(
        WorkerSummary(worker=worker, **asdict(worker_tally))
        for worker, worker_tally in sorted(tally.workers.items())
    )


def _slow(tally: Tally, slow: SlowWorker) -> SlowSummary:
    others = [other for worker, other in tally.workers.items() if worker != slow.worker]
    waited_s, pushes = sum(other.wait_s for other in others), sum(other.pushes for other in others)
    total_s = waited_s + sum(
        other.compute_s + other.push_s + other.superseded_s for other in others
    )
    return SlowSummary(
        worker=slow.worker,
        usual_s=slow.usual_s,
        others_s=slow.others_s,
        input_s=slow.input_s,
        others_input_s=slow.others_input_s,
        others_wait_share=waited_s / total_s if total_s else 0.0,
        work_share=tally.workers[slow.worker].pushes * len(others) / pushes if pushes else 1.0,
    )


def _epochs(tally: Tally) -> tuple[EpochSummary, ...]:
    accuracies, losses = (
        _last(tally, _accuracy),
        _last(tally, lambda evaluation: evaluation.mean("loss")),
    )
    return tuple(
        EpochSummary(
            epoch=epoch.epoch + 1,
            t=epoch.stop_s - tally.first_s,
            seconds=epoch.seconds,
            updates=epoch.updates,
            is_whole=epoch.is_whole,
            loss=_ratio(epoch.loss_sum, epoch.loss_samples),
            test_accuracy=accuracies.get(epoch.epoch),
            test_loss=losses.get(epoch.epoch),
        )
        for epoch in tally.epochs
    )


def _last(tally: Tally, metric: Callable[[Evaluated], float | None]) -> dict[int, float]:
    """Return the metric of each epoch's last evaluation that has it; others may lack it."""
    return {
        evaluation.epoch: value
        for evaluation in tally.evaluations
        if (value := metric(evaluation)) is not None
    }


def _thin(tally: Tally, most: int = 240) -> tuple[Point, ...]:
    """Average neighbouring updates' losses, down to at most ``most`` points."""
    updates = tally.updates
    size = max(1, math.ceil(len(updates) / most))
    points = []
    for i in range(0, len(updates), size):
        bucket = updates[i : i + size]
        num_samples = sum(update.num_samples for update in bucket)
        loss = sum(update.loss * update.num_samples for update in bucket) / num_samples
        points.append(Point(t=bucket[-1].t_s - tally.first_s, value=loss))
    return tuple(points)
