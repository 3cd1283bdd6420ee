"""A summary as lines of plain text, with a small curve.

It is read in terminals, in logs and in pasted issues, so it has no control codes and needs no
more than 80 columns, or 40 where a terminal has no more. This module must not know traces or how
a number was found.
"""

import textwrap

from ..core.stats import SlowWorker
from ..plan import format_bytes
from .summary import SlowSummary, Summary, WorkerSummary
from .text import BESIDE, Series, format_duration, loss_range, or_dash, plot

WIDTH = 60
_MUCH_WAITING = 0.25
"""Share of the others' time from which on they can be said to wait for a slow worker."""
_MOST_WORKERS = 16
"""Of more, only those with fewest and most pushes are shown."""
LEAST_INPUT = 0.02
"""Of a worker's time: a smaller share until its batches are there is told as computing."""
_WHOLE_TABLE = 63
"""Columns of the workers' table with everything in it."""


def render_summary(summary: Summary, columns: int = 80) -> list[str]:
    """The whole report of a run; the last line has the chapter's form.

    Args:
        columns: of the terminal; from 40 on no line is longer, but for the names of files.
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
        ("ended", summary.ended or "its trace was cut off"),
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
    """Beside one worker alone; empty where its time is not known."""
    one = summary.scaling_efficiency
    if one is None:
        return ""
    step = format_duration(one.one_worker_step_s)
    return f"{one.value:.2f} of one worker's {step} a step (run of {one.one_worker_day})"


def _an_epoch(summary: Summary) -> str:
    seconds = summary.seconds_per_epoch
    if seconds is None:
        return "-"
    text = f"{seconds:.2f}" if seconds >= 1 else f"{seconds:.3g}"
    is_measured = any(epoch.is_whole for epoch in summary.epochs)
    return text if is_measured else f"{text} at this pace; none was finished"


def _rule(summary: Summary) -> str:
    """What the rule for stale gradients did; empty where there was none."""
    if summary.staleness_rule == "none" or summary.mean_scale is None:
        return ""
    if summary.staleness_rule.startswith("drop"):
        dropped = summary.discarded_pushes
        return f"{summary.staleness_rule}: {dropped:,} push{'es' * (dropped != 1)} dropped"
    return f"{summary.staleness_rule}: a push counted {summary.mean_scale:.3f} in the mean"


def _skipped(summary: Summary) -> str:
    """Updates that changed nothing; empty where none was."""
    count = summary.skipped_updates
    return f"{count:,} update{'s' * (count != 1)}: a gradient was not finite" if count else ""


def _unused(summary: Summary) -> str:
    """What was pushed or handed out and is in no update; empty where nothing was."""
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
    """Work that was left on the way, and what that saved; empty where none was."""
    work = summary.superseded
    if not work.count:
        return ""
    return (
        f"{work.count:,} step{'s' * (work.count != 1)}, {format_duration(work.wasted_s)} thrown "
        f"away, {format_duration(work.saved_s)} saved"
    )


def _compressed(summary: Summary) -> str:
    """What a worker sent; empty where gradients were whole."""
    one = summary.compressed
    if one is None:
        return ""
    sent, plain = format_bytes(one.sent_bytes), format_bytes(one.plain_bytes)
    return f"{one.compressor}: a worker sent {sent}, {plain} without"


def _slow(one: SlowSummary) -> str:
    times = one.usual_s, one.others_s, one.input_s, one.others_input_s
    slow = SlowWorker(one.worker, *times)
    return describe_slow(slow, one.others_wait_share)


def describe_slow(one: SlowWorker, others_wait_share: float) -> str:
    """Who is slow, by how much, whether by its input, and what it costs.

    The others wait, or it does less than they.
    """
    steps = f"{format_duration(one.usual_s)} a step, the others {format_duration(one.others_s)}"
    if others_wait_share >= _MUCH_WAITING:
        cost = f"the others wait {others_wait_share:.0%} of their time"
    else:
        cost = f"it does {1.0 / one.factor:.0%} of what one of the others does"
    if one.is_by_input:
        its, theirs = map(format_duration, (one.input_s, one.others_input_s))
        cost = f"its batches are there after {its}, those of the others after {theirs}; {cost}"
    return f"worker {one.worker} is slow: {steps} ({one.factor:.1f} times as long); {cost}"


def _workers(summary: Summary, columns: int) -> list[str]:
    if columns < _WHOLE_TABLE:
        return _few_columns(summary)
    has_lost = any(one.superseded_s for one in summary.per_worker)
    has_input = _tells_input(summary)
    head = f"{'worker':<8}{'pushes':>8}{'samples/s':>10}" + (f"{'input':>8}" if has_input else "")
    head += f"{'compute':>10}{'wait':>8}{'push':>8}"
    lines = [head + (f"{'abandoned':>11}" if has_lost else "")]
    trained_s = _trained_s(summary)
    shown = summary.per_worker
    if len(shown) > _MOST_WORKERS:  # of very many, those that did least and most
        ranked = sorted(shown, key=lambda one: one.pushes)
        shown = (*ranked[: _MOST_WORKERS // 2], *ranked[-_MOST_WORKERS // 2 :])
        lines[0] += f"   of {len(ranked):,}, those with fewest and most pushes"
    for one in shown:
        rate = f"{one.samples / trained_s:,.0f}" if trained_s else "-"
        input_s = one.input_s if has_input else 0.0
        shares = f"{_share(one, input_s):>8}" if has_input else ""
        shares += f"{_share(one, one.compute_s - input_s):>10}{_share(one, one.wait_s):>8}"
        shares += f"{_share(one, one.push_s):>8}"
        shares += f"{_share(one, one.superseded_s):>11}" if has_lost else ""
        lives = f"  ({one.members} lives)" if one.members > 1 else ""
        lines.append(f"{one.worker:<8}{one.pushes:>8,}{rate:>10}{shares}{lives}")
    return lines


def _few_columns(summary: Summary) -> list[str]:
    """The workers where the terminal is narrow."""
    has_input = _tells_input(summary)
    head = f"{'worker':<8}{'pushes':>8}" + (f"{'input':>6}" if has_input else "")
    lines = [f"{head}{'compute':>8}{'wait':>6}{'push':>6}"]
    for one in summary.per_worker:
        input_s = one.input_s if has_input else 0.0
        shares = f"{_share(one, input_s):>6}" if has_input else ""
        shares += f"{_share(one, one.compute_s - input_s):>8}{_share(one, one.wait_s):>6}"
        lines.append(f"{one.worker:<8}{one.pushes:>8,}{shares}{_share(one, one.push_s):>6}")
    return lines


def _tells_input(summary: Summary) -> bool:
    """Whether the time until batches are there stands beside that of computing."""
    return any(one.input_s >= LEAST_INPUT * one.total_s > 0.0 for one in summary.per_worker)


def _trained_s(summary: Summary) -> float:
    return (summary.time_per_update_s or 0.0) * summary.updates


def _share(one: WorkerSummary, seconds: float) -> str:
    return f"{100 * seconds / one.total_s:.0f} %" if one.total_s else "-"


def _curve(summary: Summary, width: int) -> list[str]:
    """Loss and accuracy against time as characters; nothing where there are fewer than 2 losses."""
    losses, accuracies = summary.losses, summary.accuracies
    if len(losses) < 2:
        return []
    low, high = loss_range(losses)
    loss = Series(points=losses, mark="*", low=low, high=high)
    accuracy = Series(points=accuracies, mark="o", low=0.0, high=1.0)
    right = (" 1.0", " 0.0") if accuracies else ("", "")
    legend = ["* training loss (left)", *(["o test accuracy (right)"] if accuracies else [])]
    return [*plot((loss, accuracy), width, legend, right), ""]
