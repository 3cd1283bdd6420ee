"""A summary as lines of plain text, with a small curve.

It is read in terminals, in logs and in pasted issues, so it has no control codes and needs no
more than 80 columns, or 40 where a terminal has no more. This module must not know traces or how
a number was found.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.stats import SlowWorker
from .summary import Point, SlowSummary, Summary, WorkerSummary

WIDTH = 60
HEIGHT = 9
LARGEST = 1e300
"""With either sign: what is beyond is drawn at the edge, since floats cannot span it."""
_AXIS = 8
_MUCH_WAITING = 0.25
"""Share of the others' time from which on they can be said to wait for a slow worker."""
_MOST_WORKERS = 16
"""Columns of the numbers left of the curve."""
_BESIDE = _AXIS + 7
"""Columns of all that stands beside the curve."""
_WHOLE_TABLE = 63
"""Columns of the workers' table with everything in it."""


def render_summary(summary: Summary, columns: int = 80) -> list[str]:
    """The whole report of a run; the last line has the chapter's form.

    Args:
        columns: of the terminal; from 40 on no line is longer, but for the names of files.
    """
    curve = _curve(summary, max(16, min(WIDTH, columns - _BESIDE)))
    lines = [*curve, *_figures(summary, columns), "", *_workers(summary, columns), ""]
    if summary.could_try:
        words = f"faster? --fast auto measures {', '.join(summary.could_try)} (at most 30 s, once)"
        lines += textwrap.wrap(words, columns, subsequent_indent="  ", break_on_hyphens=False)
    lines.append(f"files: {summary.run_dir}")
    lines.append(summary.chapter_line())
    return lines


def format_duration(seconds: float) -> str:
    """Seconds in the two largest units that people use: ``340 ms``, ``7.4 s``, ``2 min 03 s``."""
    if 0 < seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if 0 < seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds else "0 s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _figures(summary: Summary, columns: int) -> list[str]:
    stale = summary.staleness_versions
    rows = [
        ("test accuracy", _or_dash(summary.test_accuracy, "{:.4f}")),
        ("training loss", f"{_or_dash(summary.final_loss, '{:.4g}')} over the last updates"),
        ("updates", f"{summary.updates:,}, {_duration(summary.time_per_update_s)} each"),
        ("samples", f"{summary.samples:,}, {_or_dash(summary.images_per_s, '{:,.0f}')} a second"),
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
        *(("slow", _slow(one)) for one in summary.slow_workers),
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


def _an_epoch(summary: Summary) -> str:
    seconds = summary.seconds_per_epoch
    if seconds is None:
        return "-"
    text = f"{seconds:.2f}" if seconds >= 1 else f"{seconds:.3g}"
    is_measured = any(one.is_whole for one in summary.epochs)
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


def _slow(one: SlowSummary) -> str:
    slow = SlowWorker(one.worker, one.usual_s, one.others_s)
    return describe_slow(slow, one.others_wait_share)


def describe_slow(one: SlowWorker, others_wait_share: float) -> str:
    """Who is slow, by how much, and what it costs: the others wait, or it does less than they."""
    steps = f"{format_duration(one.usual_s)} a step, the others {format_duration(one.others_s)}"
    if others_wait_share >= _MUCH_WAITING:
        cost = f"the others wait {others_wait_share:.0%} of their time"
    else:
        cost = f"it does {1.0 / one.factor:.0%} of what one of the others does"
    return f"worker {one.worker} is slow: {steps} ({one.factor:.1f} times as long); {cost}"


def _workers(summary: Summary, columns: int) -> list[str]:
    if columns < _WHOLE_TABLE:
        return _few_columns(summary)
    has_lost = any(one.superseded_s for one in summary.per_worker)
    head = f"{'worker':<8}{'pushes':>8}{'images/s':>10}{'compute':>10}{'wait':>8}{'push':>8}"
    lines = [head + (f"{'abandoned':>11}" if has_lost else "")]
    trained_s = _trained_s(summary)
    shown = summary.per_worker
    if len(shown) > _MOST_WORKERS:  # of very many, those that did least and most
        ranked = sorted(shown, key=lambda one: one.pushes)
        shown = (*ranked[: _MOST_WORKERS // 2], *ranked[-_MOST_WORKERS // 2 :])
        lines[0] += f"   of {len(ranked):,}, those with fewest and most pushes"
    for one in shown:
        rate = f"{one.samples / trained_s:,.0f}" if trained_s else "-"
        shares = f"{_share(one, one.compute_s):>10}{_share(one, one.wait_s):>8}"
        shares += f"{_share(one, one.push_s):>8}"
        shares += f"{_share(one, one.superseded_s):>11}" if has_lost else ""
        lives = f"  ({one.members} lives)" if one.members > 1 else ""
        lines.append(f"{one.worker:<8}{one.pushes:>8,}{rate:>10}{shares}{lives}")
    return lines


def _few_columns(summary: Summary) -> list[str]:
    """The workers where the terminal is narrow."""
    lines = [f"{'worker':<8}{'pushes':>8}{'compute':>8}{'wait':>6}{'push':>6}"]
    for one in summary.per_worker:
        shares = f"{_share(one, one.compute_s):>8}{_share(one, one.wait_s):>6}"
        lines.append(f"{one.worker:<8}{one.pushes:>8,}{shares}{_share(one, one.push_s):>6}")
    return lines


def _trained_s(summary: Summary) -> float:
    return (summary.time_per_update_s or 0.0) * summary.updates


def _share(one: WorkerSummary, seconds: float) -> str:
    return f"{100 * seconds / one.total_s:.0f} %" if one.total_s else "-"


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _duration(seconds: float | None) -> str:
    return "-" if seconds is None else format_duration(seconds)


# -- the curve ---------------------------------------------------------------------------------
#
#     2.31 |*                                        | 1.0
#          | **                          o           |        * training loss  (left)
#          |   ****                o                 |        o test accuracy  (right)
#     0.52 |       *********************             | 0.0
#           0 s                              74.0 s


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve of characters, on an axis of its own."""

    points: Sequence[Point]
    mark: str
    low: float
    high: float
    is_joined: bool = False
    """Whether the columns between two points are marked, too."""

    def row(self, value: float) -> int:
        """The line of the plot that a value lies on, from the top."""
        height = (value - self.low) / (self.high - self.low)
        return round((1 - min(1.0, max(0.0, height))) * (HEIGHT - 1))


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


def plot(
    series: Sequence[Series], width: int, legend: Sequence[str], right: tuple[str, str] = ("", "")
) -> list[str]:
    """Curves against time as characters, with their legend below.

    Args:
        series: the left axis is that of the first one.
        width: columns of the plot without what stands beside it.
        right: what stands at the top and at the bottom of the right axis.
    """
    stop_s = max(point.t for one in series for point in one.points)
    grid = [[" "] * width for _ in range(HEIGHT)]
    for one in series:
        before: tuple[int, float] | None = None
        for point in one.points:
            column = max(0, round(point.t / stop_s * (width - 1)) if stop_s > 0 else 0)
            grid[one.row(point.value)][column] = one.mark
            if before is not None and one.is_joined:
                start, value = before
                for i in range(start + 1, column):
                    share = (i - start) / (column - start)
                    grid[one.row(value + share * (point.value - value))][i] = one.mark
            before = column, point.value
    low, high = series[0].low, series[0].high
    lines = []
    # A loss that hardly moved still has two different ends.
    digits = next((n for n in range(3, 7) if f"{high:.{n}g}" != f"{low:.{n}g}"), 7)
    for row, cells in enumerate(grid):
        left = {0: f"{high:.{digits}g}", HEIGHT - 1: f"{low:.{digits}g}"}.get(row, "")
        beside = {0: right[0], HEIGHT - 1: right[1]}.get(row, "")
        lines.append(f"{left:>{_AXIS}} |{''.join(cells)}|{beside}")
    lines.append(f"{'':>{_AXIS}}  0 s{format_duration(stop_s):>{width - 3}}")
    rows = ["   ".join(legend)] if len("   ".join(legend)) <= width else legend
    return [*lines, *(f"{'':>{_AXIS}}  {row}" for row in rows)]


def loss_range(losses: Sequence[Point]) -> tuple[float, float]:
    """The least and the largest loss to draw; never an empty range."""
    values = [point.value for point in losses if abs(point.value) <= LARGEST]
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)
