"""A summary as lines of plain text, with a small curve.

People read it in terminals, logs and pasted issues, so it has no control codes and fits into 80
columns, or into 40 on a narrow terminal. This module must not know traces or how a number was
computed.
"""

import textwrap

from ..core.stats import SlowWorker
from ..plan import format_bytes
from .summary import SlowSummary, Summary, WorkerSummary
from .text import BESIDE, Series, format_duration, loss_range, or_dash, plot

WIDTH = 60
_MUCH_WAITING = 0.25
"""Share of the others' time from which on waiting is named as the cost of a slow worker..."""
_AS_MUCH_WORK = 0.75
"""... if it does as much of the work as they do; else they wait for something else."""
_MOST_WORKERS = 16
"""Longer tables show only the workers with the fewest and the most pushes."""
LEAST_INPUT = 0.02
"""Share of a worker's time: waiting for batches below it counts as computing."""
_WHOLE_TABLE = 63
"""Width of the full table of workers."""


def render_summary(summary: Summary, columns: int = 80) -> list[str]:
    """The whole report of a run; the last line has the chapter's form.

    Args:
        columns: width of the terminal; from 40 on no line is longer, except for file names.
    """
    curve = _curve(summary, max(16, min(WIDTH, columns - BESIDE)))
    lines = [*curve, *_figures(summary, columns), "", *_workers(summary, columns), ""]
    if summary.could_try:
        words = f"faster? --fast auto measures {', '.join(summary.could_try)} (at most 30 s, once)"
        lines += textwrap.wrap(words, columns, subsequent_indent="  ", break_on_hyphens=False)
    lines.append(f"files: {summary.run_dir}")
    lines.append(summary.chapter_line())
    return lines


def _figures(summary: Summary, columns: int) -> list[str]:
    stale = summary.staleness_versions
    rows = [
        ("test accuracy", or_dash(summary.test_accuracy, "{:.4f}".format)),
        (
            "training loss",
            f"{or_dash(summary.final_loss, '{:.4g}'.format)} over the last updates",
        ),
        (
            "updates",
            f"{summary.updates:,}, {or_dash(summary.time_per_update_s, format_duration)} each",
        ),
        (
            "samples",
            f"{summary.samples:,}, {or_dash(summary.samples_per_s, '{:,.0f}'.format)} a second",
        ),
        ("efficiency", _efficiency(summary)),
        ("seconds an epoch", _an_epoch(summary)),
        (
            "staleness",
            f"{stale.mean:.2f} versions in the mean, median {stale.p50}, 99 % within {stale.p99}, "
            f"at most {stale.max}",
        ),
        ("staleness rule", _rule(summary)),
        ("skipped", _skipped(summary)),
        ("not used", _unused(summary)),
        ("abandoned", _abandoned(summary)),
        ("compressed", _compressed(summary)),
        *(("slow", _slow(worker)) for worker in summary.slow_workers),
        ("time in all", format_duration(summary.total_s)),
        ("ended", summary.ended or "unknown: the trace was cut off"),
    ]
    width = max(len(label) for label, _ in rows)
    lines = [f"{label:<{width}}  {text}" for label, text in rows if text]
    indent = " " * (width + 2)
    return [
        part
        for line in lines
        for part in textwrap.wrap(line, columns, subsequent_indent=indent, break_on_hyphens=False)
    ]


def _efficiency(summary: Summary) -> str:
    """Efficiency against one worker alone; empty where its time is not known."""
    efficiency = summary.scaling_efficiency
    if efficiency is None:
        return ""
    step = format_duration(efficiency.one_worker_step_s)
    return (
        f"{efficiency.value:.2f} of one worker's {step} a step (run of {efficiency.one_worker_day})"
    )


def _an_epoch(summary: Summary) -> str:
    seconds = summary.seconds_per_epoch
    if seconds is None:
        return "-"
    text = f"{seconds:.2f}" if seconds >= 1 else f"{seconds:.3g}"
    is_measured = any(epoch.is_whole for epoch in summary.epochs)
    return text if is_measured else f"{text} at this pace (no epoch was finished)"


def _rule(summary: Summary) -> str:
    """What the staleness rule did; empty without one."""
    if summary.staleness_rule == "none" or summary.mean_scale is None:
        return ""
    if summary.staleness_rule.startswith("drop"):
        dropped = summary.discarded_pushes
        return f"{summary.staleness_rule}: {dropped:,} push{'es' * (dropped != 1)} dropped"
    return f"{summary.staleness_rule}: a push counted {summary.mean_scale:.3f} on average"


def _skipped(summary: Summary) -> str:
    """Updates that changed nothing; empty without any."""
    count = summary.skipped_updates
    return f"{count:,} update{'s' * (count != 1)}: a gradient was not finite" if count else ""


def _unused(summary: Summary) -> str:
    """Pushes and samples that are in no update; empty without any."""
    counts = (
        (summary.discarded_pushes, "push", "es", "discarded"),
        (summary.late_pushes, "push", "es", "late"),
        (summary.dropped_samples, "sample", "s", "dropped"),
    )
    return ", ".join(
        f"{count:,} {word}{plural * (count != 1)} {what}"
        for count, word, plural, what in counts
        if count
    )


def _abandoned(summary: Summary) -> str:
    """Cancelled steps and the time that this saved; empty without any."""
    work = summary.superseded
    if not work.count:
        return ""
    return (
        f"{work.count:,} step{'s' * (work.count != 1)}, {format_duration(work.wasted_s)} thrown "
        f"away, {format_duration(work.saved_s)} saved"
    )


def _compressed(summary: Summary) -> str:
    """Bytes that a worker sent; empty without compression."""
    compressed = summary.compressed
    if compressed is None:
        return ""
    sent, plain = format_bytes(compressed.sent_bytes), format_bytes(compressed.plain_bytes)
    return f"{compressed.compressor}: a worker sent {sent} instead of {plain}"


def _slow(summary: SlowSummary) -> str:
    times = summary.usual_s, summary.others_s, summary.input_s, summary.others_input_s
    slow_worker = SlowWorker(summary.worker, *times)
    return describe_slow(slow_worker, summary.others_wait_share, summary.work_share)


def describe_slow(slow: SlowWorker, others_wait_share: float, work_share: float) -> str:
    """Describe a slow worker: its step time, whether its input is slow, and what it costs.

    The cost is that the others wait for it, and so do no more than it does, or that it does less.

    Args:
        others_wait_share: the share of their time that the others waited.
        work_share: its pushes, as a share of the others' mean.
    """
    steps = f"{format_duration(slow.usual_s)} a step, the others {format_duration(slow.others_s)}"
    if others_wait_share >= _MUCH_WAITING and work_share >= _AS_MUCH_WORK:
        cost = f"the others wait {others_wait_share:.0%} of their time"
    else:
        cost = f"it does {1.0 / slow.factor:.0%} of the work of one of the others"
    if slow.is_by_input:
        own_input, others_input = map(format_duration, (slow.input_s, slow.others_input_s))
        cost = f"its batches arrive after {own_input}, the others' after {others_input}; {cost}"
    return f"worker {slow.worker} is slow: {steps} ({slow.factor:.1f} times as long); {cost}"


def _workers(summary: Summary, columns: int) -> list[str]:
    if columns < _WHOLE_TABLE:
        return _few_columns(summary)
    has_lost = any(worker.superseded_s for worker in summary.per_worker)
    has_input = _has_input(summary)
    head = f"{'worker':<8}{'pushes':>8}{'samples/s':>10}" + (f"{'input':>8}" if has_input else "")
    head += f"{'compute':>10}{'wait':>8}{'push':>8}"
    lines = [head + (f"{'abandoned':>11}" if has_lost else "")]
    trained_s = _trained_s(summary)
    workers, notes = _shown_workers(summary)
    for worker in workers:
        rate = f"{worker.samples / trained_s:,.0f}" if trained_s else "-"
        input_s = worker.input_s if has_input else 0.0
        shares = f"{_share(worker, input_s):>8}" if has_input else ""
        shares += (
            f"{_share(worker, worker.compute_s - input_s):>10}{_share(worker, worker.wait_s):>8}"
        )
        shares += f"{_share(worker, worker.push_s):>8}"
        shares += f"{_share(worker, worker.superseded_s):>11}" if has_lost else ""
        lives = f"  ({worker.members} lives)" if worker.members > 1 else ""
        lines.append(f"{worker.worker:<8}{worker.pushes:>8,}{rate:>10}{shares}{lives}")
    return [*lines, *notes]


def _shown_workers(summary: Summary) -> tuple[tuple[WorkerSummary, ...], list[str]]:
    """Return the workers that the table shows, and a line on which they are, if not all."""
    workers = summary.per_worker
    if len(workers) <= _MOST_WORKERS:
        return workers, []
    by_pushes = sorted(workers, key=lambda worker: worker.pushes)
    half = _MOST_WORKERS // 2
    note = f"(fewest and most pushes of {len(workers):,})"
    return (*by_pushes[:half], *by_pushes[-half:]), [note]


def _few_columns(summary: Summary) -> list[str]:
    """The table of workers for a narrow terminal."""
    has_input = _has_input(summary)
    head = f"{'worker':<7}{'pushes':>7}" + (f"{'input':>6}" if has_input else "")
    lines = [f"{head}{'compute':>8}{'wait':>6}{'push':>6}"]
    workers, notes = _shown_workers(summary)
    for worker in workers:
        input_s = worker.input_s if has_input else 0.0
        shares = f"{_share(worker, input_s):>6}" if has_input else ""
        shares += (
            f"{_share(worker, worker.compute_s - input_s):>8}{_share(worker, worker.wait_s):>6}"
        )
        lines.append(
            f"{worker.worker:<7}{worker.pushes:>7,}{shares}{_share(worker, worker.push_s):>6}"
        )
    return [*lines, *notes]


def _has_input(summary: Summary) -> bool:
    """Whether the table shows the wait for batches in a column of its own."""
    return any(
        worker.input_s >= LEAST_INPUT * worker.total_s > 0.0 for worker in summary.per_worker
    )


def _trained_s(summary: Summary) -> float:
    return (summary.time_per_update_s or 0.0) * summary.updates


def _share(worker: WorkerSummary, seconds: float) -> str:
    return f"{100 * seconds / worker.total_s:.0f} %" if worker.total_s else "-"


def _curve(summary: Summary, width: int) -> list[str]:
    """Plot loss and accuracy against time; no lines for fewer than 2 losses."""
    losses, accuracies = summary.losses, summary.accuracies
    if len(losses) < 2:
        return []
    low, high = loss_range(losses)
    loss = Series(points=losses, mark="*", low=low, high=high)
    accuracy = Series(points=accuracies, mark="o", low=0.0, high=1.0)
    right = (" 1.0", " 0.0") if accuracies else ("", "")
    legend = ["* training loss (left)", *(["o test accuracy (right)"] if accuracies else [])]
    return [*plot((loss, accuracy), width, legend, right), ""]
