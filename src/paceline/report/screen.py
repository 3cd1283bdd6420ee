"""A run on a terminal: the plan, a live table of workers, a bar with the time left.

    epoch 3/10  update 512/2,350  loss 0.7312  8,912 samples/s  58.2 s left
    worker  state     pushes  samples/s  compute  wait  push  staleness
    0       training     512     4,456     91 %   6 %   3 %       0.50  ##################+.
    1       training     512     4,456     91 %   6 %   3 %       0.50  ##################+.
    ----------                                       22 % 58.2 s left

The engine's own thread draws, at most twice a second, so it costs the workers nearly nothing. This
module must not know engines.
"""

import sys
from collections.abc import Mapping
from typing import IO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..plan import Plan
from ..system.streams import Lasting
from .live import Progress, WorkerProgress, format_metrics, format_progress, tell_on_errors
from .summary import Summary
from .terminal import LEAST_INPUT, render_summary
from .text import format_duration

_EVERY_S = 0.5
_SHARES = 20
"""Columns of the bar that shows a worker's shares of time."""
_STYLES = {"training": "green", "gone": "red", "stalled": "yellow", "slow": "yellow"}


class ScreenObserver:
    """Draws a run on a terminal.

    Args:
        console: where to draw; standard output by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        out = self._out = Lasting(sys.stdout, tell_on_errors)
        self._console = Console(file=cast("IO[str]", out)) if console is None else console
        self.shown_plan: Plan | None = None
        self._live: Live | None = None
        self._next_s = 0.0
        self._unfinished = ""
        """Output of the script since its last line break."""

    @property
    def trouble(self) -> str:
        return self._out.trouble

    def plan(self, plan: Plan) -> None:
        self.shown_plan = plan
        self._next_s = 0.0  # relative to this run's start, which may be one of several
        grid = Table.grid(padding=(0, 2))
        for label, text in plan.rows():
            grid.add_row(Text(label, style="bold"), Text(text))
        for note in plan.notes:
            grid.add_row(Text("note", style="bold yellow"), Text(note))
        self._console.print(grid)
        for line in plan.parameter_lines():
            self._console.out(line, highlight=False)
        self._console.print()

    def note(self, text: str) -> None:
        self._console.print(Text(f"note: {text}", style="yellow"))

    def printed(self, text: str) -> None:
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        for line in lines:
            self._console.out(line, highlight=False)

    def progress(self, progress: Progress) -> None:
        if self._next_s - _EVERY_S <= progress.t < self._next_s:
            return  # an earlier time is that of a run which went back, as a watched one may
        self._next_s = progress.t + _EVERY_S
        if self._live is None:
            # No refresh thread: drawing happens here, between two events of the run.
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(draw(progress, self._console.width), refresh=True)

    def evaluated(
        self, epoch: int, metrics: Mapping[str, float], version: int | None = None
    ) -> None:
        self._console.out(format_metrics(epoch, metrics, version), highlight=False)

    def finished(self, summary: Summary) -> None:
        self.close()
        self._console.print()
        for line in render_summary(summary, self._console.width):
            self._console.out(line, highlight=False)

    def close(self) -> None:
        """Remove the table and release the terminal; may be called twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._unfinished:
            self._console.out(self._unfinished, highlight=False)
            self._unfinished = ""


_COLUMNS = {
    "worker": 6, "pushes": 7, "wait": 5, "samples/s": 9, "compute": 7, "input": 5, "push": 5,
    "staleness": 9, "state": 14, "shares": _SHARES,
}  # fmt: skip
"""Columns of the workers' table and their widths, the most important first."""
_ORDER = (
    "worker", "state", "pushes", "samples/s", "input", "compute", "wait", "push", "staleness",
    "shares",
)  # fmt: skip
_GAP = 2


def draw(progress: Progress, columns: int = 100) -> RenderableType:
    """Return the live part: progress, workers and bar, with the columns that fit."""
    room = columns + _GAP
    names = []
    has_input = any(worker.input_share >= LEAST_INPUT for worker in progress.workers)
    for name, width in _COLUMNS.items():
        if name == "input" and not has_input:
            continue
        room -= width + _GAP
        names += [name] if room >= 0 else []
    workers = Table(box=None, pad_edge=False, header_style="bold")
    for name in (name for name in _ORDER if name in names):
        is_text = name in ("worker", "state", "shares")
        workers.add_column(
            "" if name == "shares" else name, justify="left" if is_text else "right", no_wrap=True
        )
    for worker in progress.workers:
        cells = dict(zip(_ORDER, _cells(worker, has_input=has_input), strict=True))
        workers.add_row(*(cells[name] for name in _ORDER if name in names))
    bar = Table.grid(padding=(0, 1))
    share = progress.share_done
    left = "" if progress.eta_s is None else f"{format_duration(progress.eta_s)} left"
    line = ProgressBar(total=1.0, completed=share, width=max(8, min(48, columns - 24)))
    bar.add_row(line, f"{100 * share:.0f} %", left)
    return Group(Text(format_progress(progress)), workers, bar)


def _cells(worker: WorkerProgress, *, has_input: bool) -> list[RenderableType]:
    computing = worker.compute_share - worker.input_share if has_input else worker.compute_share
    times = worker.input_share, computing, worker.wait_share, worker.push_share
    shares = [f"{100 * share:.0f} %" for share in times]
    return [
        str(worker.worker),
        Text(worker.state, style=_STYLES.get(worker.state.split()[0], "")),
        f"{worker.pushes:,}",
        f"{worker.samples_per_s:,.0f}",
        *shares,
        f"{worker.mean_staleness:.2f}",
        _share_bar(worker),
    ]


def _share_bar(worker: WorkerProgress) -> Text:
    """Return a worker's shares of time as a bar that can be read without colours."""
    bar = Text()
    edges = [0.0]
    for share, sign, style in (
        (worker.input_share, ":", "magenta"),
        (worker.compute_share - worker.input_share, "#", "green"),
        (worker.push_share, "+", "cyan"),
        (worker.wait_share, ".", "yellow"),
    ):
        edges.append(edges[-1] + share)
        bar.append(sign * (round(edges[-1] * _SHARES) - round(edges[-2] * _SHARES)), style=style)
    return bar
